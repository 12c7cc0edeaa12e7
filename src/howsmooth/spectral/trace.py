"""The Frobenius norm of a Jacobian by Gaussian probes, as the mean gain of a random change, with an interval.

For a matrix `A` with `‖A‖₂ ≤ σ` and independent standard Gaussian vectors `g_1 … g_m`, put `S = Σ|A g_s|²/m`,
`t = log(2/δ)` and `a = σ√(t/m)`. Laurent & Massart (2000, Lemma 1) bound both tails of `S`, a weighted sum of χ² variables. By
them `√max(0, S − a²) − a ≤ ‖A‖_F ≤ a + √(S + a²)` with probability `1 − δ`. Proof: docs/explanation/theory.md, Proposition 2.9.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.results import OneNumber, axes_for, html_table, plain_text
from howsmooth.settings import number, whole
from howsmooth.spectral.dense import decomposed, rounding_of
from howsmooth.spectral.estimate import Estimate
from howsmooth.spectral.operator import Operator, drawn, stream, unit_rows

if TYPE_CHECKING:
    from howsmooth.results import Axes

_BLOCK_BYTES = 2**28  # of probes that are multiplied together


@final
@dataclass(frozen=True)
class Gain(OneNumber):
    """The mean gain `‖J‖_F/√N` of a Jacobian: how much a random change of all `N` entries of the input grows.

    Attributes:
        value: The root mean square of `|J g|/√N` over Gaussian `g`.
        lower: The gain is at least this, with probability `confidence`; None where no certified upper end of the largest
            singular value was at hand.
        upper: The gain is at most this, in the same way.
        confidence: Over the probes and the solver's start, 1.0 where the Jacobian was decomposed.
        stable_rank: `‖J‖_F²/‖J‖₂²`, how many directions as strong as the worst one would have this gain.
        effective_rank: The exponential of the entropy of the shares `σ_i²/Σσ_j²`, where the whole spectrum is at hand.
        probes: How many products with Gaussian vectors it took, 0 where the Jacobian was decomposed.
    """

    value: float
    lower: float | None
    upper: float | None
    confidence: float | None
    stable_rank: float
    effective_rank: float | None
    probes: int

    @property
    def note(self) -> str:
        """What the interval rests on, and which argument changes it."""
        if self.probes == 0:
            return "The Jacobian was formed and decomposed, so both ends are exact to rounding."
        if self.upper is None:
            return "No upper end of the largest singular value was at hand, so there is no interval; certify=0.1 asks for one."
        return f"The interval comes from {self.probes} random probes and the certified constant; more probes narrow it."

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and a sentence, ready for JSON."""
        return {**asdict(self), "note": self.note}

    def __str__(self) -> str:
        ends = "" if self.lower is None or self.upper is None else f" in [{self.lower:.6g}, {self.upper:.6g}]"
        sure = (
            "" if self.confidence is None else ", certain" if self.confidence == 1 else f", probability {self.confidence:.9g}"
        )
        return f"{self.value:.6g}{ends} (stable rank {self.stable_rank:.4g}{sure}, {self.probes} probes)"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table("mean gain", [self.to_dict()])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The gain with its interval, as a point with a bar."""
        ax = axes_for(ax, title=plain_text(str(self)), ylabel="mean gain", xticks=[])
        drawn_point = ax.plot([0], [self.value], "o")
        if self.lower is not None and self.upper is not None:
            ax.vlines([0], [self.lower], [self.upper], colors=drawn_point[0].get_color())
        return ax


@final
@dataclass(frozen=True)
class GaussianProbes:
    """How a gain is to be estimated.  count: Gaussian probes.  confidence: of its interval."""

    count: int = 16
    confidence: float = 0.95

    def __post_init__(self):
        count = whole(self.count, "a whole number of probes ≥ 1", "the default is 16", least=1)
        confidence = number(self.confidence, "0 < confidence < 1", "the default is 0.95", above=0, below=1)
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "confidence", confidence)


@torch.no_grad()
def probed_gains(
    operator: Operator,
    tops: Sequence[Estimate],
    directions: Float[Tensor, "batch *in"],
    probes: GaussianProbes,
    apart: Sequence[float],
) -> tuple[Gain, ...]:
    """The gain of every map of a batch, beside its largest singular value.

    The worst direction is taken out of the probes, and its own stretch is added exactly, so that a single large singular value
    does not make the answer random. It is fixed before the probes are drawn.

    tops: the constants.  directions: of theirs, as the operator takes them.  apart: how far the operator is from the map that
    is meant, in Frobenius norm.
    """
    unit = unit_rows(directions.to(operator.device, operator.dtype).flatten(1))
    sizes = torch.tensor([top.value for top in tops], dtype=torch.float64)
    sizes = torch.where(sizes > 0, sizes, 1.0)
    streams = [stream(top.seed, "gain", operator.device) for top in tops]
    room = max(1, _BLOCK_BYTES // (max(operator.in_size, operator.out_size) * operator.batch * 8))
    lengths = []  # by probe and item, in units of the largest singular value
    for first in range(0, probes.count, room):
        count = min(room, probes.count - first)
        g = torch.stack([drawn((count, operator.in_size), random) for random in streams], 1).to(unit)
        g = g - (g * unit).sum(-1, keepdim=True) * unit
        image = operator.jvp(g.unflatten(2, operator.in_shape)).flatten(2)
        lengths.append(torch.linalg.vector_norm(image, dim=-1).double().cpu() / sizes)
    rest = torch.cat(lengths).square().mean(0)
    if not bool(rest.isfinite().all()):
        raise NoConvergenceError("expected finite products with the Jacobian, got NaN or infinity; rescale the map")
    return tuple(_from_probes(top, s, probes, operator, off) for top, s, off in zip(tops, rest.tolist(), apart, strict=True))


def _from_probes(top: Estimate, rest: float, probes: GaussianProbes, operator: Operator, apart: float) -> Gain:
    """One map's gain.  rest: the mean of `|J g|²` for probes without the worst direction, in units of the constant's square."""
    if probes.confidence >= top.confidence:
        raise BadInputError(
            f"expected a confidence below {top.confidence:.9g}, got {probes.confidence:.9g}; the constant that the interval "
            "rests on is no surer, lower delta in solver=GolubKahan(delta=…)"
        )
    unit, root = top.value or 1.0, math.sqrt(operator.in_size)
    own = top.value / unit
    total = math.hypot(own, math.sqrt(rest))
    stable = total**2 if top.value > 0 else 0.0
    if not math.isfinite(top.upper):
        return Gain(unit * total / root, None, None, None, stable, None, probes.count)
    t = math.log(2 / (top.confidence - probes.confidence))  # what the constant may miss is taken from the risk
    largest = top.upper / unit
    a = largest * math.sqrt(t / probes.count)
    low = max(0.0, math.sqrt(max(0.0, rest - a * a)) - a)
    high = min(math.hypot(own, a + math.sqrt(rest + a * a)), math.sqrt(min(operator.in_size, operator.out_size)) * largest)
    off = operator.noise * math.hypot(total, a) + apart / unit
    lower = min(total, max(top.lower / unit, math.hypot(top.lower / unit, low) - off))
    scale = unit / root
    upper = max(total, high + off)
    return Gain(scale * total, scale * lower, scale * upper, probes.confidence, stable, None, probes.count)


def dense_gains(operator: Operator) -> tuple[Gain, ...]:
    """The gain of every map of a batch from its whole spectrum, exact to rounding."""
    _, sigma, _ = decomposed(operator)
    found = []
    for s, error in zip(sigma, rounding_of(operator, sigma).tolist(), strict=True):
        squares, root = s.square(), math.sqrt(operator.in_size)
        total, off = float(s.norm()), math.sqrt(len(s)) * error
        stable, effective = 0.0, 0.0
        if total > 0:
            share = squares / squares.sum()
            stable, effective = float(squares.sum() / squares[0]), float(torch.special.entr(share).sum().exp())
        value = total / root
        found.append(Gain(value, max(0.0, total - off) / root, (total + off) / root, 1.0, stable, effective, 0))
    return tuple(found)
