"""Within which radius can a prediction not change, and where does it change? One upper bound, one lower."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.settings import Per

_HALVINGS = 7  # of the interval that a radius is looked for in, in its logarithm
_NEAR = 0.999  # where nothing bends, the radius is that of an attack to rounding
_LEAST = 1e-12  # radii below this part of an attack's are not tried
_RIVALS = 5  # other answers that an attack goes for
_STEPS = 20  # of an attack on each
_OVER = 1.02  # how far past a boundary a step goes


@final
@dataclass(frozen=True, eq=False)
class Radius:
    """How far an input can move before an answer changes.

    Attributes:
        certified: No change up to this length changes the answer.
        attacked: The length of one that does, infinite where none was found.
        point: The input it leads to.
        first_order: What the gradient alone would promise.
        per: Whether lengths are those of every token's move or of all together.
        label: The answer.
        margin: By how much it leads.
        size: The mean length of a token.
        confidence: Of `certified`, over random starts, 1 where there were none.
        reason: What limits `certified`.
    """

    certified: float
    attacked: float
    first_order: float
    per: Per
    label: int | None
    margin: float
    size: float
    confidence: float
    reason: str
    point: Float[Tensor, "n d"] | None = None

    @property
    def gap(self) -> float:
        """How many times as long the attack is."""
        return self.attacked / self.certified if self.certified else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; the point is left out."""
        names = ("certified", "attacked", "first_order", "per", "label", "margin", "size", "confidence", "reason")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        what = "the output" if self.label is None else f"answer {self.label}"
        found = "no attack found" if math.isinf(self.attacked) else f"an attack at {self.attacked:.4g}"
        return f"{what} holds within {self.certified:.4g} ({self.certified / self.size:.2g} of a token), {found}"

    __repr__ = __str__


def largest(holds: Callable[[float], bool], start: float) -> float:
    """The largest radius found for which a certificate holds; 0 where it holds for none. start: where to begin."""
    if not 0 < start < math.inf:
        return 0.0
    for share in (1.0, _NEAR):
        if holds(share * start):
            return share * start
    low, high = 0.0, _NEAR * start
    while low == 0.0:
        trial = 0.1 * high
        if trial < _LEAST * start:
            return 0.0
        if holds(trial):
            low = trial
        else:
            high = trial
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def length_of_change(delta: Float[Tensor, "n d"], per: Per) -> float:
    return float(delta.norm(dim=-1).max() if per == "token" else delta.norm())


def smallest_change(
    margins: Callable[[Tensor], Tensor],
    x: Float[Tensor, "n d"],
    per: Per,
    tokens: tuple[int, ...] | None,
    starts: Sequence[Tensor] = (),
    slopes: Callable[[Tensor], Tensor] | None = None,
) -> tuple[float, Tensor | None]:
    """The shortest change found after which some margin is not positive, and the input there.

    Steps to the nearest boundary of the linearised margins (Moosavi-Dezfooli et al. 2016), for the nearest answers one by one;
    then back along the way, and on from what was reached.

    starts: changes to begin from, where the margins have no gradient at `x` itself.  slopes: the same margins, for gradients.
    """
    bent = margins if slopes is None else slopes
    free = torch.zeros(len(x), 1, dtype=x.dtype)
    free[list(range(len(x))) if tokens is None else list(tokens)] = 1.0
    start = _values(margins, x)
    best, point = math.inf, None
    tries = [(k, torch.zeros_like(x)) for k in start.argsort()[:_RIVALS].tolist()] if not starts else [(0, s) for s in starts]
    for rival, delta in tries:
        for _ in range(_STEPS):
            value, slope = _slope(bent, x + delta, rival)
            if value <= 0:
                break
            delta = _towards(delta, value, slope * free, per)
            if not bool(delta.isfinite().all()) or length_of_change(delta, per) > 4 * best:
                break
        else:
            continue
        delta = _back(margins, x, delta)
        if delta is None:
            continue
        for _ in range(_STEPS):  # closer: along the boundary, from where it was crossed
            _, slope = _slope(bent, x + delta, rival)
            nearer = _back(margins, x, _projected(delta, slope * free, per))
            if nearer is None or length_of_change(nearer, per) >= (1 - 1e-4) * length_of_change(delta, per):
                break
            delta = nearer
        if length_of_change(delta, per) < best:
            best, point = length_of_change(delta, per), x + delta
    return best, point


def first_order(margins: Float[Tensor, " k"], slopes: Float[Tensor, "k n d"], per: Per) -> float:
    """The radius at which some linearised margin is gone."""
    lengths = slopes.norm(dim=-1)
    size = lengths.sum(-1) if per == "token" else lengths.norm(dim=-1)
    return float((margins / size.clamp_min(1e-300)).min())


@torch.no_grad()
def _values(margins: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return margins(x)


def _slope(margins: Callable[[Tensor], Tensor], x: Tensor, k: int) -> tuple[float, Tensor]:
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        value = margins(x)[k]
        (slope,) = torch.autograd.grad(value, x, materialize_grads=True)
    return float(value.detach()), slope


def _towards(delta: Tensor, value: float, slope: Tensor, per: Per) -> Tensor:
    """A step from `delta` to where the linearised margin is gone, as short as can be in the length that counts."""
    if per == "sequence":
        return delta - _OVER * value * slope / slope.square().sum().clamp_min(1e-300)
    lengths = slope.norm(dim=-1, keepdim=True)
    return delta - _OVER * value * (slope / lengths.clamp_min(1e-300)) / lengths.sum().clamp_min(1e-300)


def _projected(delta: Tensor, slope: Tensor, per: Per) -> Tensor:
    """The shortest change that lies as far along the slope as `delta` does, and a little further."""
    along = float((delta * slope).sum())
    return _towards(torch.zeros_like(delta), -along, slope, per)


def _back(margins: Callable[[Tensor], Tensor], x: Tensor, delta: Tensor) -> Tensor | None:
    """The shortest part of a change that still changes the answer."""
    if bool((_values(margins, x + delta) > 0).all()):
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if bool((_values(margins, x + middle * delta) > 0).all()) else (low, middle)
    return high * delta
