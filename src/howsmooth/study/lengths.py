"""How the constants of a model grow with the length of its input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, final

from torch import nn

from howsmooth.models import Model
from howsmooth.progress import Progress
from howsmooth.results import axes_for, html_table
from howsmooth.study.charts import ALL, Band, Column, Drawing, Lines, Option, Pick, Section, Table
from howsmooth.study.fit import Break, GrowthFit, fit_growth
from howsmooth.study.jobs import Cells, Measured, run_here, to_frame
from howsmooth.study.layers import LayerRow, layer_jobs
from howsmooth.study.question import Question, Steps, mean
from howsmooth.study.scope import ScopeOptions, Setting, fitting_lengths, setting_of, with_scope

if TYPE_CHECKING:
    import pandas

    from howsmooth.results import Axes
    from howsmooth.study.answers import Level, ReportData

_MANY = 8  # layers, above which exponents have a chart of their own


@final
@dataclass(frozen=True)
class Growth:
    """Constants by layer and length, and the power law of each layer.

    Attributes:
        rows: One per layer, length and sample.
        failures: Why tasks gave nothing.
        fits: By layer, `L ≈ scale · n^exponent` with intervals, residuals and breaks.
    """

    rows: tuple[LayerRow, ...]
    failures: tuple[str, ...] = ()

    @cached_property
    def fits(self) -> dict[int, GrowthFit]:
        """By layer, where two lengths or more have a positive constant."""
        by_layer = {}
        for layer in self.layers:
            own = [row for row in self.rows if row.layer == layer and row.value > 0]
            if len({row.n for row in own}) >= 2:
                by_layer[layer] = fit_growth([r.n for r in own], [r.value for r in own], [r.sample for r in own])
        return by_layer

    @property
    def layers(self) -> list[int]:
        """The layers that were measured."""
        return sorted({row.layer for row in self.rows})

    def to_frame(self) -> "pandas.DataFrame":
        """The rows, with the exponent of their layer beside them."""
        return to_frame([row.to_dict() | fit_columns(self.fits.get(row.layer)) for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "fits": {str(layer): fit.to_dict() for layer, fit in self.fits.items()},
            "failures": list(self.failures),
        }

    def table(self) -> list[Cells]:
        """One line per layer."""
        lines = []
        for layer in self.layers:
            rows, fit = [row for row in self.rows if row.layer == layer], self.fits.get(layer)
            lengths = sorted({row.n for row in rows})
            line: Cells = {"layer": layer}
            line |= {f"n={n}": f"{mean([row.value for row in rows if row.n == n]):.3g}" for n in lengths}
            line["R"] = f"{mean([row.radius for row in rows]):.3g}"
            line["exponent"] = "–" if fit is None else _with_interval(fit)
            line["breaks"] = "" if fit is None else "; ".join(_in_words(b) for b in fit.breaks)
            lines.append(line)
        return lines

    def __str__(self) -> str:
        breaks = {layer: "".join(f", {_in_words(b)}" for b in fit.breaks) for layer, fit in self.fits.items()}
        return "\n".join(f"layer {layer}: L ~ n^{_with_interval(fit)}{breaks[layer]}" for layer, fit in self.fits.items())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table("growth with the number of tokens", self.table())

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Mean constants against the number of tokens on logarithmic scales, a line for each layer."""
        ax = axes_for(ax, yscale="log", xlabel="tokens", ylabel="local Lipschitz constant")
        ax.set_xscale("log", base=2)  # ticks at 8, 16, 32, …
        ax.xaxis.set_major_formatter("{x:.0f}")
        for layer, fit in self.fits.items():
            ax.plot(fit.lengths, fit.means, "o-", label=f"layer {layer}: n^{fit.exponent.value:.2f}")
        if self.fits:
            ax.legend()
        return ax


@with_scope()
def growth(
    model: Model | nn.Module | str | Path,
    text: str | Sequence[int] | None = None,
    *,
    progress: Progress | bool | None = None,
    **scope: Unpack[ScopeOptions],
) -> Growth:
    """`L` against the number of tokens, layer by layer, with the fitted exponent, its interval, residuals and breaks.

    Args:
        model: Loaded, or what `load` takes.
        text: The text itself or token ids; Alice in Wonderland by default.
        lengths: By default those of 8 … 512 that the model and the text allow.
        samples: Windows of the text at each length.
        layers: All by default.
        map: As in `Model.measure`.
        tol: As in `howsmooth.lipschitz`.
        certify: As in `howsmooth.lipschitz`.
        seed: Places the samples.
        progress: A bar where a person watches; False for none.

    Returns:
        All rows, and a fit for every layer. It draws itself: `growth(...).plot()`.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> _ = torch.manual_seed(0)
    >>> shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> tiny = BertModel(BertConfig(**shape, intermediate_size=16, max_position_embeddings=32))
    >>> grown = growth(tiny, [i % 37 for i in range(60)], samples=2)
    >>> sorted({row.n for row in grown.rows}), list(grown.fits)
    ([8, 16, 32], [0])
    """
    reader, setting = setting_of(model, text, scope)
    return growth_of(run_here(reader, layer_jobs(setting), progress))


def growth_of(measured: Measured) -> Growth:
    """The growth in what a study measured."""
    order = sorted(measured.of(LayerRow), key=lambda row: (row.layer, row.n, row.sample))
    return Growth(tuple(order), measured.failures)


def fit_columns(fit: GrowthFit | None) -> Cells:
    """The exponent of a row's layer, as columns."""
    if fit is None:
        return {"exponent": None, "exponent_low": None, "exponent_high": None}
    return {"exponent": fit.exponent.value, "exponent_low": fit.exponent.low, "exponent_high": fit.exponent.high}


def _with_interval(fit: GrowthFit) -> str:
    sure = "" if fit.exponent.low is None else f" [{fit.exponent.low:.2f}, {fit.exponent.high:.2f}]"
    return f"{fit.exponent.value:.2f}{sure}"


def _in_words(b: Break) -> str:
    if b.kind == "jump":
        return f"jump ×{b.change.value:.2f} from {b.before} to {b.after}"
    return f"bend by {b.change.value:+.2f} at {b.before}"


def tasks(setting: Setting) -> Steps:
    """Every layer, length and sample."""
    yield layer_jobs(setting)


def sentence(rows: list[LayerRow], data: "ReportData") -> str:
    """Where intervals come from."""
    methods = {f.method for f in data.fits.values()}
    if "samples" in methods:
        return "Intervals come from resampling the samples."
    if "residuals" in methods:
        return "Intervals come from resampling the residuals, since fewer than five samples were measured."
    return "Too few lengths were measured for intervals."


def figure(rows: list[LayerRow], data: "ReportData") -> list[Drawing]:
    """L against n with the fits, what they leave over, and the size of the tokens; exponents by layer where layers are many."""
    points = [_point(level, data.fits.get(level.layer)) for level in data.summary]
    wanted = (
        Option("mean", "L, the constant", "L"),
        Option("residual", "L / fit", "L / fit"),
        Option("radius", "R, the tokens", "R"),
    )
    shown = [option for option in wanted if any((point.get(option.value) or 0) > 0 for point in points)]
    if len(data.lengths) < 2 or not shown:
        return []
    chart = Lines(
        name="growth",
        title="{y} against n",
        unit="log scales; shaded: range over samples",
        source="growth",
        rows=points,
        x="n",
        x_label="n, tokens",
        y="mean",
        y_label="{y}",
        series="layer",
        low="low",
        high="high",
        legend="legend",
        fits=(("fitted", "plain"), ("fitted_apart", "apart")),
        band=("fit_low", "fit_high"),
        breaks=tuple(_band(layer, b) for layer, fit in data.fits.items() for b in fit.breaks),
        broken=("mean", "residual"),
        guides=(0.25, 0.5),
        tip=("layer {layer}, n = {n}", "L = {mean} ({low} to {high} over {samples})", "{residual} × the fit", "R = {radius}"),
    )
    layer = Pick(
        "growth-layer", "Layer", "layer", (Option(ALL, "all"), *(Option(k, f"layer {k}") for k in data.layers)), data.focus
    )
    drawn = [Drawing((chart,), (layer, Pick("quantity", "Show", "y", tuple(shown), shown[0].value)))]
    for file, columns in {"growth": ("mean", "residual"), "radius": ("radius",)}.items():
        if options := tuple(option for option in shown if option.value in columns):
            panels = Pick("quantity", "Show", "y", options, options[0].value, panels=True)
            drawn.append(Drawing((chart,), (replace(layer, first=ALL), panels), file=file, on_page=False))
    if not data.fits:
        return drawn
    lines = [_fit_cells(layer, fit) for layer, fit in data.fits.items()]
    if len(lines) > _MANY:
        exponents = Lines(
            name="exponents",
            title="Exponent of every layer",
            unit="shaded: 95 % interval",
            source="fits",
            rows=lines,
            y_label="exponent",
            curves=(("exponent", "exponent", "point"),),
            low="exponent_low",
            high="exponent_high",
            linear=True,
            tip=("layer {layer}", "L ~ n^{exponent}", "{exponent_low} to {exponent_high}"),
        )
        drawn.append(Drawing((exponents,), file="exponents"))
    columns = (
        Column("layer", "layer"),
        Column("exponent a", "exponent", "L ≈ c·n^a, least squares on logarithms"),
        Column("95 % interval", "interval"),
        Column("scatter", "scatter", "typical distance from the line"),
        Column("breaks", "breaks", text=True),
        Column("a with breaks apart", "exponent_apart"),
        Column("steepest step", "steepest"),
    )
    return [*drawn, Drawing((Table(name="fits", title="Fits", source="fits", rows=lines, columns=columns, most=16),))]


def _point(level: "Level", fit: GrowthFit | None) -> Cells:
    """A layer at one length, with its fit there."""
    cells: Cells = vars(level) | {"legend": f"layer {level.layer}"}
    if fit is None or level.n not in fit.lengths:
        return cells
    k, (exponent, low, high) = fit.lengths.index(level.n), vars(fit.exponent).values()
    cells["legend"] += f": n^{exponent:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")
    cells |= {
        "fitted": fit.fitted[k],
        "fitted_apart": fit.fitted_apart[k] if fit.breaks else None,
        "residual": fit.residuals[k],
    }
    if low is not None and high is not None:  # lines through the middle, at both ends of the slope
        away = math.log(level.n) - sum(map(math.log, fit.lengths)) / len(fit.lengths)
        cells |= {
            name: fit.fitted[k] * math.exp((end - exponent) * away) for name, end in (("fit_low", low), ("fit_high", high))
        }
    return cells


def _band(layer: int, b: Break) -> Band:
    """A break as the chart marks it."""
    text = (
        f"×{b.change.value:.3g} from {b.before} to {b.after}"
        if b.kind == "jump"
        else f"exponent {b.change.value:+.2f} at {b.before}"
    )
    return Band(layer, b.before, b.after, b.kind == "jump", text)


def _fit_cells(layer: int, fit: GrowthFit) -> Cells:
    """A line of the table of fits."""
    a, step = fit.exponent, fit.steepest
    return {
        "layer": layer,
        "exponent": round(a.value, 3),
        "exponent_low": a.low,
        "exponent_high": a.high,
        "interval": None if a.low is None else f"{a.low:.2f} to {a.high:.2f}",
        "scatter": f"± {100 * math.expm1(fit.scatter):.0f} %",
        "breaks": "; ".join(_in_words(b) for b in fit.breaks) or None,
        "exponent_apart": round(fit.exponent_apart.value, 3) if fit.breaks else None,
        "steepest": f"×{step.ratio:.2f} from {step.before} to {step.after}",
    }


GROWTH = Question(
    name="growth",
    row=LayerRow,
    tasks=tasks,
    title="L, geometric mean over samples, and its growth L ~ n^exponent",
    table=lambda measured: growth_of(measured).table(),
    words=("breaks",),
    lengths=fitting_lengths,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="growth",
        name="Growth",
        title="How it grows with the length",
        place=20,
        text="Straight lines here are power laws L ~ n<sup>a</sup>. Over the layer in front lie its fit (dashed, with the 95 % "
        "interval of its slope shaded) and the same fit with its breaks allowed for (solid). Dotted: n<sup>¼</sup> and "
        "n<sup>½</sup>. $sentence A break is reported when a plain power law would show one as clear in at most one curve out "
        "of a hundred.",
    ),
)
