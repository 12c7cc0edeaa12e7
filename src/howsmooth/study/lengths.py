"""How the constants of a model grow with the length of its input."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import nn

from howsmooth.models import MapName, Model
from howsmooth.run import Progress
from howsmooth.study.fit import GrowthFit, fit_growth
from howsmooth.study.jobs import Measured, Row, run_here, to_frame
from howsmooth.study.layers import Question, Setting, layer_jobs, sample_count, settle
from howsmooth.study.reader import Reader

if TYPE_CHECKING:
    import pandas

# Powers of two, and more between them about 128: position embeddings are often tuned up to a power of two only.
LENGTHS = (8, 16, 32, 64, 96, 128, 136, 192, 256, 512)


@final
@dataclass(frozen=True)
class Growth:
    """Constants by layer and length, and the power law of each layer.

    rows: one per layer, length and sample.  `fits`: by layer, `L ≈ scale · n^exponent` with intervals, residuals and breaks.
    """

    rows: tuple[Row, ...]
    failures: tuple[str, ...] = ()

    @cached_property
    def fits(self) -> dict[int, GrowthFit]:
        """By layer, where two lengths or more have a positive constant."""
        by_layer = {}
        for layer in sorted({row["layer"] for row in self.rows}):
            own = [row for row in self.rows if row["layer"] == layer and row["value"] > 0]
            if len({row["n"] for row in own}) >= 2:
                by_layer[layer] = fit_growth(*([row[name] for row in own] for name in ("n", "value", "sample")))
        return by_layer

    def to_frame(self) -> "pandas.DataFrame":
        """The rows, with the exponent of their layer beside them."""
        return to_frame([row | fit_columns(self.fits.get(row["layer"])) for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": list(self.rows),
            "fits": {str(layer): fit.to_dict() for layer, fit in self.fits.items()},
            "failures": list(self.failures),
        }

    def table(self) -> list[dict[str, Any]]:
        """One line per layer."""
        lines = []
        for layer in sorted({row["layer"] for row in self.rows}):
            rows, fit = [row for row in self.rows if row["layer"] == layer], self.fits.get(layer)
            line: dict[str, Any] = {"layer": layer}
            for n in sorted({row["n"] for row in rows}):
                line[f"n={n}"] = f"{_mean([row['value'] for row in rows if row['n'] == n]):.3g}"
            line["R"] = f"{_mean([row['radius'] for row in rows]):.3g}"
            line["exponent"] = "–" if fit is None else _with_interval(fit)
            line["breaks"] = "" if fit is None else "; ".join(_break(b) for b in fit.breaks)
            lines.append(line)
        return lines

    def __str__(self) -> str:
        breaks = {layer: "".join(f", {_break(b)}" for b in fit.breaks) for layer, fit in self.fits.items()}
        return "\n".join(f"layer {layer}: L ~ n^{_with_interval(fit)}{breaks[layer]}" for layer, fit in self.fits.items())

    __repr__ = __str__


def growth(
    model: Model | nn.Module | str | Path,
    text: str | Sequence[int] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    samples: int = 8,
    layers: Sequence[int] | None = None,
    map: MapName = "attention",
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Growth:
    """`L` against the number of tokens, layer by layer, with the fitted exponent, its interval, residuals and breaks.

    model: loaded, or what `load` takes.  text: the text itself or token ids; Alice in Wonderland by default.
    lengths: by default those of 8 … 512 that the model and the text allow.  samples: windows of the text at each length.
    layers: all by default.  map: as in `Model.measure`.  tol, certify: as in `howsmooth.lipschitz`.  seed: places the samples.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> _ = torch.manual_seed(0)
    >>> shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> tiny = BertModel(BertConfig(**shape, intermediate_size=16, max_position_embeddings=32))
    >>> grown = growth(tiny, [i % 37 for i in range(60)], samples=2)
    >>> sorted({row["n"] for row in grown.rows}), list(grown.fits)
    ([8, 16, 32], [0])
    """
    reader, setting = asked(model, text, lengths, samples, layers, map=map, tol=tol, certify=certify, seed=seed)
    return of(run_here(reader, layer_jobs(setting), progress))


def asked(
    model: Model | nn.Module | str | Path,
    text: str | Sequence[int] | None,
    lengths: Sequence[int] | None,
    samples: int,
    layers: Sequence[int] | None,
    usual: Callable[[Reader, int], tuple[int, ...]] | None = None,
    **options: Any,
) -> tuple[Reader, Setting]:
    """A model and a text, and a question of them that can be answered, its lengths and layers filled in.

    usual: the lengths for so many samples where none are named, `fitting_lengths` by default.
    """
    samples = sample_count(samples)
    question = Question(LENGTHS if lengths is None else lengths, samples, layers, **options)  # pyright: ignore  makes tuples
    reader = Reader.of(model, text)
    fits = question if lengths is not None else replace(question, lengths=(usual or fitting_lengths)(reader, samples))
    return reader, settle(reader, fits)


def of(measured: Measured) -> Growth:
    """The growth in what a study measured."""
    order = sorted(measured.of("layer"), key=lambda row: (row["layer"], row["n"], row["sample"]))
    return Growth(tuple(order), measured.failures)


def fit_columns(fit: GrowthFit | None) -> dict[str, float | None]:
    """The exponent of a row's layer, as columns."""
    if fit is None:
        return {"exponent": None, "exponent_low": None, "exponent_high": None}
    return {"exponent": fit.exponent.value, "exponent_low": fit.exponent.low, "exponent_high": fit.exponent.high}


def fitting_lengths(reader: Reader, samples: int) -> tuple[int, ...]:
    """The usual lengths that the model has positions for and the text has tokens for; at least the shortest."""
    extra = len(reader.text.prefix) + len(reader.text.suffix)
    config = getattr(reader.model.module, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else math.inf
    most = min(limit, len(reader.text) + extra - samples + 1)
    return tuple(n for n in LENGTHS if extra < n <= most) or LENGTHS[:1]


def _mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if min(values) > 0 else 0.0


def _with_interval(fit: GrowthFit) -> str:
    sure = "" if fit.exponent.low is None else f" [{fit.exponent.low:.2f}, {fit.exponent.high:.2f}]"
    return f"{fit.exponent.value:.2f}{sure}"


def _break(b: Any) -> str:
    if b.kind == "jump":
        return f"jump ×{b.change.value:.2f} from {b.before} to {b.after}"
    return f"bend by {b.change.value:+.2f} at {b.before}"
