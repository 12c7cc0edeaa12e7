"""Points gathered into curves and curves fitted: of the constant, and of what the paper's public scripts print beside it.

With `y, t = torch.func.jvp(f, (x,), (u,))`, `y = f(x)` and `t = J u`. The scripts go on with element 0, `y`; power iteration
needs element 1. docs/explanation/scripts.md says in two lines what either gives.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from statistics import fmean
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.maps import Map
from howsmooth.paper.subjects import LONGEST_WINDOW, short_names
from howsmooth.report import COLOURS, MARKERS, plain_numbers
from howsmooth.spectral import Estimate
from howsmooth.study import EstimateRow, GrowthFit, Row, fit_growth, grouped, rare

L_COLOUR, SCRIPTS_COLOUR = COLOURS[:2]

# exponents drawn on the paper's plots, by our curve of the same layer
PRINTED: dict[tuple[str, str, int, str], float] = {
    ("bert-base-uncased", "unmasked", 0, "attention"): 0.24,
    ("bert-base-uncased", "masked", 6, "attention"): 0.25,
    ("gpt2", "masked", 0, "attention"): 0.26,
    ("gpt2", "masked", 6, "attention"): 0.51,
    ("random:gpt2", "masked", 0, "attention"): 0.25,
    ("random:gpt2", "masked", 6, "attention"): 0.25,
}
PRINTED_ADVERSARIAL = 0.5
EIGENVECTOR = "eigenvector tokens"


def power_iteration(
    f: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"], *, element: Literal[0, 1], steps: int = 10, seed: int = 0
) -> list[float]:
    """What is printed after each step: `√|Jᵀ w|` with `w` an element of what `torch.func.jvp` returns, then `u ← Jᵀw/|Jᵀw|`.

    element: 0 as in the scripts, where the answer is `√|Jᵀ f(x)|` from the first step on; 1 for power iteration on `JᵀJ`, which
    tends to `‖J‖₂`.

    >>> f = lambda x: 2 * x + 1
    >>> x = torch.tensor([[3.0, 4.0]])
    >>> [round(v, 6) for v in power_iteration(f, x, element=1, steps=2)]  # ‖J‖ = 2
    [2.0, 2.0]
    >>> [round(v * v, 5) for v in power_iteration(f, x, element=0, steps=2)]  # |Jᵀ f(x)| = 2 |(7, 9)|
    [22.80351, 22.80351]
    """
    x = x.detach()
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    u = u / u.norm()
    printed = []
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # the one that has forward mode
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on first use of forward mode
        for _ in range(steps):
            w = torch.func.jvp(f, (x,), (u,))[element]
            (back,) = torch.func.vjp(f, x)[1](w)
            size = back.norm()
            printed.append(float(size.detach().sqrt()))
            u = (back / size).detach()
    return printed


@torch.no_grad()
def scripts_value(f: Map, x: Float[Tensor, "n d"]) -> float:
    """`√|Jᵀ f(x)|`, the fixed point of that iteration with element 0, from one product."""
    x = f.prepare(x)
    output, jacobian = f.linearize(x[None])
    return float(jacobian.vjp(output[None])[0, 0].double().norm().sqrt())


@final
@dataclass(frozen=True, kw_only=True)
class PointRow(EstimateRow):
    """A point of a curve: `L` at one length and sample, what the paper's scripts print there, and the tokens' size, `radius`.

    study: `real`, `random`, `trap` or `adversarial`.  configuration, bound_B7: of adversarial tokens.
    """

    kind = "point"
    study: str
    model: str = field()
    masking: str
    map: str = field()
    value: float
    upper: float = field()
    radius: float = field()
    scripts: float
    configuration: str | None = rare()
    bound_B7: float | None = rare()

    @classmethod
    def solved(cls, estimate: Estimate, **about: Any) -> "PointRow":
        """A row from an estimate and its other columns."""
        solved = {
            name: getattr(estimate, name) for name in ("value", "lower", "upper", "confidence", "status", "steps", "seed")
        }
        return cls.of(solved | about)


@final
@dataclass(frozen=True)
class Exponents:
    """What is fitted to one curve up to n = 98, with 95 % intervals: the exponent of `L`, and of what the scripts print.

    tail: over the upper half of these lengths, where what is small at first no longer bends the curve.  longer: to the longest,
    where that is longer than the paper's.  printed: the one drawn on the paper's plot of this curve, where there is one.
    """

    study: str
    subject: str
    masking: str
    layer: int
    map: str
    shortest: int
    longest: int
    samples: int
    exponent: float
    low: float | None
    high: float | None
    tail: float | None
    scripts: float
    scripts_low: float | None
    scripts_high: float | None
    longer: float | None
    printed: float | None

    @classmethod
    def of(cls, curve: "Curve", fit: GrowthFit, scripts: GrowthFit) -> "Exponents":
        half = [(n, mean) for n, mean in zip(fit.lengths, fit.means, strict=True) if 2 * n >= fit.lengths[-1]]
        tail = fit_growth(*zip(*half, strict=True)).exponent.value if len(half) > 1 else None
        e, s, longer = fit.exponent, scripts.exponent, None if curve.long_fit is None else curve.long_fit.exponent.value
        adversarial = PRINTED_ADVERSARIAL if curve.map == EIGENVECTOR else None
        drawn = PRINTED.get((PurePath(curve.subject).name, curve.masking, curve.layer, curve.map))
        measured = {"shortest": fit.lengths[0], "longest": curve.lengths[-1], "samples": fit.samples}
        exponent = {"exponent": e.value, "low": e.low, "high": e.high, "tail": tail, "longer": longer}
        beside = {"scripts": s.value, "scripts_low": s.low, "scripts_high": s.high}
        printed = adversarial if curve.study == "adversarial" else drawn
        return cls(**curve.key, **measured, **exponent, **beside, printed=printed)


@final
@dataclass(frozen=True)
class Curve:
    """One layer of one subject against the length, points in the order of lengths and samples. short: its name in legends."""

    study: str
    subject: str
    masking: str
    layer: int
    map: str
    points: tuple[PointRow, ...]
    short: str

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from others, as columns of a table."""
        return {name: value for name, value in vars(self).items() if name in ("study", "subject", "masking", "layer", "map")}

    @property
    def label(self) -> str:
        """What a legend calls it."""
        return self.subject if self.subject.startswith("one head") else f"{self.short}, {self.masking}, layer {self.layer}"

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({p.n for p in self.points})

    def at(self, n: int) -> list[PointRow]:
        """The samples of one length."""
        return [p for p in self.points if p.n == n]

    def radius(self, n: int) -> float:
        """R, the mean over samples."""
        return fmean(p.radius for p in self.at(n))

    @cached_property
    def fit(self) -> GrowthFit | None:
        """Of `L`, over the paper's lengths."""
        return self._fitted("value", LONGEST_WINDOW)

    @cached_property
    def scripts_fit(self) -> GrowthFit | None:
        """Of what the scripts print."""
        return self._fitted("scripts", LONGEST_WINDOW)

    @cached_property
    def long_fit(self) -> GrowthFit | None:
        """Of `L` over all lengths, where some are longer than the paper's."""
        return self._fitted("value", self.lengths[-1]) if self.lengths[-1] > LONGEST_WINDOW else None

    def _fitted(self, column: Literal["value", "scripts"], longest: int) -> GrowthFit | None:
        points = [p for p in self.points if p.n <= longest and getattr(p, column) > 0]
        if len({p.n for p in points}) < 2:
            return None
        return fit_growth([p.n for p in points], [getattr(p, column) for p in points], [p.sample for p in points])

    def table(self) -> list[dict[str, Any]]:
        """A row for each length: geometric means over samples and extremes, of L and of the scripts' number, and R."""
        rows = []
        for n in self.lengths:
            points = self.at(n)
            values = [p.value for p in points]
            measured = {"n": n, "samples": len(points), "L": _mean(values), "L_min": min(values), "L_max": max(values)}
            beside = {"L_upper": max(p.upper for p in points), "scripts": _mean([p.scripts for p in points])}
            rows.append(self.key | measured | beside | {"R": self.radius(n)})
        return [{k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.prod(v ** (1 / len(values)) for v in values)


def exponents(rows: Iterable[Row]) -> list[Exponents]:
    """Of every curve on which both numbers have two lengths or more."""
    return [Exponents.of(c, c.fit, c.scripts_fit) for c in curves_of(rows) if c.fit is not None and c.scripts_fit is not None]


def curves_of(rows: Iterable[Row], *studies: str) -> list[Curve]:
    """Points by layer, in order of appearance; other rows are left out. studies: those of these alone."""
    there = [r for r in rows if isinstance(r, PointRow)]
    groups = grouped(there, lambda r: (r.study, r.model, r.masking, r.layer, r.map))
    short = short_names(key[1] for key in groups)
    order = [(key, tuple(sorted(points, key=lambda p: (p.n, p.sample)))) for key, points in groups.items()]
    return [Curve(*key, points, short[key[1]]) for key, points in order if not studies or key[0] in studies]


def look(i: int) -> tuple[str, str]:
    """The colour and marker of curve number i."""
    return COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]


def power(fit: GrowthFit, sure: bool = True) -> str:
    """A fitted power of n as a legend has it, with its interval where that is told. sure: tell it."""
    e = fit.exponent
    ends = "" if e.low is None or e.high is None or not sure else f" [{_two(e.low)}, {_two(e.high)}]"
    return f"$n^{{{_two(e.value)}}}${ends}"


def _two(value: float) -> str:
    """Two digits, without a minus before nought."""
    return f"{round(value, 2) + 0.0:.2f}"


def guides(axes: Any, group: Sequence[Curve], powers: Any = ((0.25, "1/4", ":"), (0.5, "1/2", "-."))) -> None:
    """Lines of these slopes below the curves."""
    lengths = sorted({n for c in group for n in c.lengths})
    start = min(p.value for c in group for p in c.points if p.value > 0) * 0.8
    for exponent, name, style in powers:
        ends = [start, start * (lengths[-1] / lengths[0]) ** exponent]
        axes.plot([lengths[0], lengths[-1]], ends, style, color="0.5", lw=0.9, label=f"$n^{{{name}}}$")


def log_axes(axes: Any, label: str = "") -> None:
    """Logarithmic axes, in plain numbers."""
    axes.set(xscale="log", yscale="log", ylabel=label)
    plain_numbers(axes.yaxis)


def length_ticks(axes: Any, lengths: Iterable[int]) -> None:
    """Round lengths on the axis of n."""
    lengths = sorted(lengths)
    ticks = [n for n in (2, 5, 10, 20, 50, 100, 200, 500) if lengths[0] <= n <= 1.1 * lengths[-1]]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.xaxis.minorticks_off()
