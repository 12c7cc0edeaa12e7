"""The paper's adversarial tokens, built from an eigenvector of one head's `A`: how `L` of a whole layer grows with them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.paper.curves import EIGENVECTOR, PointRow, curves_of, guides, length_ticks, log_axes, look, power, scripts_value
from howsmooth.paper.drawing import Drawn, new_figure
from howsmooth.paper.protocol import Experiment, Protocol
from howsmooth.paper.subjects import LONGEST_WINDOW, RANDOM, Masking, length_of, subject
from howsmooth.search import Ball, Configuration, Configured, eigenvector_configuration, worst_configuration
from howsmooth.study import Job, Question, Row, Steps, fit_growth, task
from howsmooth.theory import constants_of, sqrt_bound
from howsmooth.verbs import lipschitz

TOKEN_COUNTS = (8, 16, 32, 64, 128, 256, 512)
ONE_HEAD = "one head, A = −I"
_LARGEST_LOG = 700.0  # of a number that float64 holds, rounded down


@final
@dataclass(frozen=True, eq=False)
class TokenGrowth:
    """One configuration at growing lengths.

    rows: measured, one per length.  log_bounds: logarithms of the upper bound B7 beside them.  exponent: the slope of `log L`
    in `log n`.
    """

    configuration: Configuration
    rows: tuple[Configured, ...]
    log_bounds: tuple[float, ...]
    exponent: float

    @property
    def bounds(self) -> list[float]:
        """B7 beside every row, at most a number of float64."""
        return [math.exp(min(log, _LARGEST_LOG)) for log in self.log_bounds]

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() | {"log_B7": log} for row, log in zip(self.rows, self.log_bounds, strict=True)]
        return {"configuration": str(self.configuration), "exponent": self.exponent, "rows": rows}


def grow(
    attn: Attention, radius: float, lengths: Sequence[int] = TOKEN_COUNTS, *, head: int | None = None, seed: int = 0
) -> TokenGrowth:
    """The paper's eigenvector tokens of one head at every length, the whole layer measured.

    head: whose matrix builds the tokens; by default the head that gives the largest `L` at the longest length. √n is expected
    while every head's logits keep the two places apart, `2R²|⟨A_h u, u⟩| > log n` (docs/explanation/worst-inputs.md §1).

    >>> growth = grow(Attention.from_matrices(-torch.eye(1), torch.eye(1)), 3.0)
    >>> abs(growth.exponent - 0.5) < 0.02
    True
    """
    space, lengths = Ball(radius), _growing(lengths)
    heads = range(attn.heads) if head is None else [head]
    candidates = [c for c in (eigenvector_configuration(attn, space, head=h) for h in heads) if c is not None]
    if not candidates:
        raise BadInputError("expected a head with a real eigenvalue, got none; use worst_configuration, which needs none")

    def measured(c: Configuration, n: int) -> Configured:
        x = c.place(n).to(torch.promote_types(attn.dtype, torch.float32))
        return Configured(n, space.reach, c, x, lipschitz(attn, x, seed=seed))

    longest = max((measured(c, lengths[-1]) for c in candidates), key=lambda row: row.estimate.value)
    rows = [*(measured(longest.configuration, n) for n in lengths[:-1]), longest]
    layer = constants_of(attn)
    logs = [b.log_value if b.log_value is not None else math.inf for b in (sqrt_bound(layer, n, radius) for n in lengths)]
    exponent = fit_growth(lengths, [row.estimate.value for row in rows]).exponent.value
    return TokenGrowth(longest.configuration, tuple(rows), tuple(logs), exponent)


def scan(attn: Attention, radii: Sequence[float], lengths: Sequence[int] = TOKEN_COUNTS, *, seed: int = 0) -> list[Configured]:
    """The worst configuration of any family and head, at every radius and length."""
    return [worst_configuration(attn, n, radius, seed=seed) for radius in radii for n in _growing(lengths)]


def _growing(lengths: Sequence[int]) -> list[int]:
    whole = [n for n in lengths if isinstance(n, int) and not isinstance(n, bool) and n >= 2]
    if not whole or len(whole) != len(lengths) or sorted(set(whole)) != whole:
        raise BadInputError(f"expected growing whole lengths of at least 2, got {list(lengths)}; as in 8, 16, 32")
    return whole


@task
def eigenvector_tokens(reading: dict[str, Any], layer: int, lengths: list[int]) -> Iterator[PointRow]:
    """The paper's eigenvector tokens at every length, the whole layer measured; R is that of the text at this layer."""
    attn, radius = _layer(layer, **reading)
    growth = grow(attn, radius, lengths, seed=reading["seed"])
    for row, log in zip(growth.rows, growth.log_bounds, strict=True):
        bound = math.exp(log) if log < _LARGEST_LOG else None
        yield _point(reading, layer, EIGENVECTOR, attn, radius, row, bound_B7=bound)


@task
def worst_tokens(reading: dict[str, Any], layer: int, n: int) -> Iterator[PointRow]:
    """The worst of all the package's configurations in the same ball."""
    attn, radius = _layer(layer, **reading)
    worst = worst_configuration(attn, n, radius, seed=reading["seed"])
    yield _point(reading, layer, "worst configuration", attn, radius, worst)


def _point(
    reading: dict[str, Any], layer: int, tokens: str, attn: Attention, radius: float, row: Configured, **more: Any
) -> PointRow:
    place = {"study": "adversarial", "model": reading["name"], "masking": reading["masking"], "layer": layer, "map": tokens}
    about = {"n": row.n, "scripts": scripts_value(attn, row.tokens), "radius": radius, "configuration": str(row.configuration)}
    return PointRow.solved(row.estimate, **place, **about, **more)


def _layer(layer: int, name: str, masking: Masking, seed: int, **text: Any) -> tuple[Attention, float]:
    """A layer's weights and the radius of the text there; or one head, where the theory is exact."""
    if name == ONE_HEAD:
        eye = torch.eye(2, dtype=torch.float64)
        return Attention.from_matrices(-eye, eye, causal=masking == "masked"), 3.0
    whole = subject(name, masking, seed, **text)
    return whole.attention(layer), length_of(whole.capture(min(LONGEST_WINDOW, whole.longest), 0, seed).tokens(layer))


def tasks(protocol: Protocol) -> Steps:
    """One head, the first two layers of every pretrained model, and the random models."""
    maskings = ("unmasked", "masked")
    cases: list[tuple[str, str, int]] = [(ONE_HEAD, m, 0) for m in maskings]
    for name, about in protocol.described():
        cases += [(name, m, k) for m in about.maskings for k in protocol.layers_of(about.layers, few=True) if about.plain]
    cases += [(name, m, 0) for name, m in zip(RANDOM, maskings, strict=True)]
    places = [{"reading": protocol.reading(name, masking), "layer": layer} for name, masking, layer in cases]
    jobs = [Job(eigenvector_tokens, place | {"lengths": list(protocol.adversarial)}) for place in places]
    for place, (name, masking, _) in zip(places, cases, strict=True):
        if masking == "unmasked" and name not in RANDOM:
            jobs += [Job(worst_tokens, place | {"n": n}) for n in protocol.worst]
    yield jobs


def figure_of(rows: Sequence[Row]) -> Drawn:
    """Eigenvector tokens with their exponents, and the worst configuration of any kind beside them."""
    lines = curves_of(rows, "adversarial")
    if not lines:
        return None
    figure, axes = new_figure(6.4, 3.6)
    labels = [c.label + (", masked" if c.subject == ONE_HEAD and c.masking == "masked" else "") for c in lines]
    for c, label in zip(lines, labels, strict=True):
        colour, marker = look(list(dict.fromkeys(labels)).index(label))
        if c.map == EIGENVECTOR:
            said = label if c.fit is None else f"{label}: {power(c.fit, sure=False)}"
            style: dict[str, Any] = {"ls": "-", "lw": 1, "ms": 2.6, "label": said}
        else:
            style = {"ls": "none", "fillstyle": "none", "ms": 5, "label": f"{label}: worst configuration"}
        axes.plot([p.n for p in c.points], [p.value for p in c.points], marker=marker, color=colour, **style)
    guides(axes, lines, powers=((0.5, "1/2", "-."),))
    log_axes(axes, "L")
    axes.set_xlabel("tokens n")
    length_ticks(axes, {n for c in lines for n in c.lengths})
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title("Adversarial tokens", loc="left")
    return figure


ADVERSARIAL = Experiment(
    Question(name="adversarial", row=PointRow, tasks=tasks, title="Adversarial tokens"),
    "Tokens built from an eigenvector of one head's A, the whole layer measured; hollow marks are the worst configuration "
    "of any kind in the same ball.",
    figure_of,
)
