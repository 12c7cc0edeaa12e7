"""Neighbourhoods of an input, and what is certified of a map over one."""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, RefutedBoundError
from howsmooth.settings import Positions, choice, moving, number
from howsmooth.theory.at_point.table import one_sequence
from howsmooth.theory.bound import lengths
from howsmooth.theory.over_ball.table import LONGEST_TOKEN
from howsmooth.theory.upper import Upper

_ROUNDED = 1e-9  # of a lower end beside an upper end: the rounding of the product it is attained by


@final
@dataclass(frozen=True, repr=False)
class Neighbourhood:
    """All `Y` with `|y_i − x_i| ≤ radii_i` for every token, and `‖Y − X‖_F ≤ total` where that is given.

    point: `X`, (n, d) float64.  radii: (n,) float64.
    """

    point: Float[Tensor, "n d"]
    radii: Float[Tensor, " n"]
    total: float | None = None

    def __post_init__(self):
        if self.point.ndim != 2 or self.point.dtype != torch.float64:
            raise BadInputError(
                f"expected a point (n, d) in float64, got {tuple(self.point.shape)} in {self.point.dtype}; pass x.double()"
            )
        if self.radii.shape != self.point.shape[:1] or not bool((self.radii >= 0).all()):
            raise BadInputError("expected one radius of at least 0 for every token, got others; give n of them")
        if self.total is not None and not self.total >= 0:
            raise BadInputError(f"expected a total of at least 0, got {self.total}; leave it out for none")

    def __repr__(self) -> str:
        total = "" if self.total is None else f", {self.total:g} together"
        return f"Neighbourhood({len(self.radii)} tokens, up to {float(self.radii.max()):g} each{total})"

    @classmethod
    def of(cls, x: Float[Tensor, "n d"], within: float, per: str = "token", tokens: Positions | None = None) -> "Neighbourhood":
        """All inputs within a distance of `x`: of every token (`per="token"`), or of all tokens together (`"sequence"`).

        tokens: positions that may move; all by default.
        """
        x = one_sequence(x).double()
        fix = "give the distance that an input may move"
        r = number(within, f"a finite distance within ≥ 0 and below {LONGEST_TOKEN:g}", fix, least=0.0, below=LONGEST_TOKEN)
        choice(per, "per", ("token", "sequence"))
        radii = torch.full((len(x),), r, dtype=torch.float64, device=x.device)
        if tokens is not None:
            fixed = torch.ones(len(x), dtype=torch.bool, device=x.device)
            fixed[list(moving(tokens, len(x)))] = False
            radii[fixed] = 0.0
        return cls(x, radii, r if per == "sequence" else None)

    @property
    def reach(self) -> float:
        """A ball of this radius around zero holds every token of the neighbourhood."""
        return float((Upper(lengths(self.point)).raised(2 * self.point.shape[1]) + self.radii).amax())

    @property
    def far(self) -> float:
        """The largest `‖Y − X‖_F`."""
        apart = float(Upper(self.radii).length())
        return apart if self.total is None else min(apart, self.total)


@final
@dataclass(frozen=True)
class Around:
    """What is certified of a map `f` over a neighbourhood of `X`.

    slope: `‖D_Y f‖₂` is at most this.  change: so is `‖D_Y f − D_X f‖₂`.  moved: `|f(Y)_i − f(X)_i|`, (n,).  moved_total:
    `‖f(Y) − f(X)‖_F`.  reason: which bound it is, or why it is infinite.
    centre: `‖D_X f‖₂` is at most this.  confidence: of the slope, over the random starts behind it.
    rest: `‖f(Y) − f(X) − D_X f (Y − X)‖_F` is at most this.
    """

    slope: float
    change: float
    moved: Float[Tensor, " n"]
    moved_total: float
    reason: str
    centre: float = math.inf
    confidence: float = 1.0
    rest: float = math.inf

    def upper_end(self, lower: float, noise: float = 0.0) -> float:
        """The slope as an upper end beside a lower end that is attained inside, which refutes the slope if it is larger.

        noise: the relative rounding error of the lower end where it is more than that of the slope.
        """
        if not lower <= self.slope * (1 + max(_ROUNDED, noise)):
            raise RefutedBoundError(
                f"expected an upper end of at least the lower end up to rounding, got {self.slope!r} below {lower!r}, which is "
                f"attained inside the neighbourhood, from {self.reason}; the bound is wrong, please report it with map and x"
            )
        return max(lower, self.slope)
