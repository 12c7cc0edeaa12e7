"""Bounds around an input: the largest norm of a map's Jacobian over a neighbourhood, and how far the map can move there.

Numbers such as 6.1 are those of docs/explanation/around.md.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, RefutedBoundError
from howsmooth.kernels.kinds.kind import check_softmax
from howsmooth.maps import Attention
from howsmooth.maps.base import one_sequence
from howsmooth.settings import Positions, choice, moving, number
from howsmooth.spectral.dense import SMALL
from howsmooth.theory.around.along import FEW, MANY, PROBES, Curves, Pairs, Second, curves, deflated, flattened, pairs_at
from howsmooth.theory.around.covariances import Spread, beyond, matrix_norm, visible
from howsmooth.theory.around.jets import Centre, parts
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.over_ball.table import LONGEST_TOKEN, rows_over_ball
from howsmooth.theory.upper import TINY, Upper, largest_entry, lengths

_MOST = 2**26  # attention weights: about twenty arrays of so many numbers are held at once
_WORTH = 1e-2  # of the norm: what there must be to gain before second derivatives are certified in all directions
APART = "the top singular pairs at the input, and how far the Jacobian can move along and beside them"
SECOND = "the Jacobian and its derivatives at the input, certified by products, and what is beyond them"
AT = "the norm at the input, and how far the Jacobian can move from it"
ANYWHERE = "the norms of the Jacobian's parts anywhere in the neighbourhood"
BALL = "the best bound over the ball that holds the neighbourhood"
_ROUNDED = 1e-9  # of a lower end beside an upper end: the rounding of the product it is attained by
_FAR = 2.0  # change of the Jacobian, in units of its norm, past which no pair is worth treating apart


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


@final
class AroundAttention:
    """Bounds on an attention layer around an input, for neighbourhoods of any size: what is known of the input is made once.

    The slope is the smallest of four: the top pairs at the centre treated apart (6.9), the norm at the centre and how far the
    Jacobian can move from it (6.6), the norms of its parts anywhere in the neighbourhood (6.7), and the best bound over the
    ball that holds it (docs/explanation/bounds.md). How far it can move is the smaller of two: from its parts, and, where
    queries and keys are affine, from a certificate of all second derivatives (6.12) and what is beyond them (6.13).

    x: the input, (n, d).  tokens: those by which `D_Y f` is taken, all by default.  norm: an upper end of `‖D_X f‖` that is
    known and good enough; no pairs are treated apart then, which costs many times as much.  delta: probability that one of the
    upper ends at the centre fails, all neighbourhoods together; half as much again for second derivatives in all directions,
    where they are needed.  seed: of their random starts.
    """

    def __init__(
        self,
        layer: Attention,
        x: Float[Tensor, "n d"],
        *,
        tokens: tuple[int, ...] | None = None,
        norm: float | None = None,
        delta: float = 1e-6,
        seed: int = 0,
    ):
        check_softmax(layer.kind, "a bound around an input")
        # biases of values and outputs move nothing, and what they hide in rounding is kept without them
        layer = layer.to(x.device, torch.float64)
        # powers of two, by which numbers are divided without rounding
        sizes = (0 if w is None else math.frexp(largest_entry(w))[1] for w in (layer.w_v, layer.w_o))
        by_v, by_o = (2.0 ** max(-1000, min(1000, size)) for size in sizes)
        w_o = None if layer.w_o is None else layer.w_o / by_o
        self.layer = replace(layer, w_v=layer.w_v / by_v, w_o=w_o, b_v=None, b_o=None)
        self._units = by_v, by_o  # taken out of the layer, so that squares of its Jacobian stay in range
        self.point, self.tokens = x.double(), tokens
        self._known = None if norm is None else norm / by_v / by_o
        self._delta, self._seed = delta, seed
        self._columns = torch.arange(len(x), device=x.device) if tokens is None else torch.as_tensor(tokens, device=x.device)

    @cached_property
    def _centre(self) -> Centre:
        return Centre.of(self.layer, self.point)

    @cached_property
    def _pairs(self) -> Pairs:
        return pairs_at(
            self._centre.operator, self.tokens, FEW if self.point.numel() <= SMALL else MANY, self._delta / 2, self._seed
        )

    @cached_property
    def _curves(self) -> Curves:
        return curves(Second(self._centre), self._pairs, self._delta / 2, self._seed)

    @cached_property
    def _flat(self) -> float:
        """How fast the Jacobian can change at the input, in all directions (Theorem 6.12)."""
        return flattened(Second(self._centre), self._columns, PROBES, self._delta / 2, self._seed)

    @cached_property
    def _constants(self) -> Constants | None:
        try:
            return constants(self.layer)
        except BadInputError:  # weights whose products leave float64
            return None

    def _ball(self, reach: float) -> float:
        """The best bound over the ball, infinite where none applies."""
        if not reach < LONGEST_TOKEN or self._constants is None:
            return math.inf
        rows = rows_over_ball(self._constants, len(self.point), reach)
        return min((row.value for row in rows if row.side == "upper" and row.value is not None), default=math.inf)

    def within(self, neighbourhood: Neighbourhood) -> Around:
        """The bounds over one neighbourhood of the input."""
        found = self._within(neighbourhood)
        numbers = {name: self._in_units(getattr(found, name)) for name in ("slope", "change", "moved_total", "centre", "rest")}
        moved = found.moved.new_tensor([self._in_units(t) for t in found.moved.tolist()])
        return replace(found, moved=moved, **numbers)

    def _in_units(self, bound: float) -> float:
        """A bound on the layer itself, no smaller than the least number where it vanishes."""
        by_v, by_o = sorted(self._units)
        return (
            bound
            if bound in (0.0, math.inf)
            else max(bound * by_v * by_o if bound * by_v > TINY else bound * by_o * by_v, TINY)
        )

    @torch.no_grad()
    def _within(self, neighbourhood: Neighbourhood) -> Around:
        """Bounds on the layer with its sizes taken out."""
        if not torch.equal(neighbourhood.point, self.point):
            raise BadInputError("expected a neighbourhood of the input, got one of another; make bounds around that one")
        r, columns, reach = neighbourhood.radii, self._columns, neighbourhood.reach
        if self.layer.heads * len(r) ** 2 > _MOST:
            why, ball = f"the bound over a ball alone, for more than {_MOST} attention weights", self._ball(reach)
            total, change = float(Upper(ball) * neighbourhood.far), 2 * ball if neighbourhood.far > 0 else 0.0
            return Around(ball, change, torch.full_like(r, total), total, why, ball)
        centre, far = self._centre, neighbourhood.far
        spread = Spread(centre, parts(centre, r), r, columns)
        found, along = spread.found, self._along(neighbourhood)
        change, rest = Upper(_combined(spread, _moving(spread))), _rows(centre, found.output.rest).length()
        upper, anywhere = self._known, _combined(spread, _anywhere(spread), stochastic=True)
        upper = self._pairs.norm if upper is None else upper
        # no bound over the ball is below `‖V_h‖ ‖A_h‖ R²`, where queries and keys are affine and not turned
        least = 0.0 if centre.cross is None else float((centre.nu * centre.cross).value.max()) * reach**2
        ball = self._ball(reach) if least < min(float(change + upper), anywhere) else math.inf
        upper = min(upper, anywhere, ball)
        bounds = [(float(change + upper), AT), (anywhere, ANYWHERE), (ball, BALL)]
        if far > 0 and self._known is None:
            if float(change) < _FAR * upper:
                bounds.append((deflated(spread, neighbourhood, self._pairs, self._curves, float(change), math.inf), APART))
            gain = min(float(change), min(bounds)[0] - upper)
            if along and centre.affine and gain > _WORTH * upper and (later := _later(spread)) < gain:
                # second derivatives in all directions are no smaller than those along the pairs
                least = (
                    0.0 if "_flat" in vars(self) else far * float(torch.cat([self._curves.rows, self._curves.columns]).max())
                )
                first = Upper(self._flat) * far if later + least < gain else Upper(math.inf)
                if float(sharper := first + later) < float(change):
                    change, rest = sharper, rest.min((first * 0.5 + later) * far)
                    treated = deflated(spread, neighbourhood, self._pairs, self._curves, float(change), later)
                    bounds += [(treated, SECOND), (float(change + upper), SECOND)]
        slope, reason = min(bounds)
        if not slope < math.inf:
            reason = "nothing finite: logits can move further in this neighbourhood than float64 can follow"
        confidence = 1.0 if reason in (ANYWHERE, BALL) else 1 - self.risk
        if far == 0:
            slope, change, confidence = upper, Upper(0.0), 1 - self.risk
        change = change.min(Upper(upper) + slope)
        moved = _rows(centre, found.output.change)
        total = moved.length()
        if along:
            rest = rest.min(change * far)
            total = total.min(Upper(slope) * far).min(Upper(upper) * far + rest)
        rows = moved.value.clamp_max(float(total))
        return Around(slope, float(change), rows, float(total), reason, upper, confidence, float(rest))

    def _along(self, area: Neighbourhood) -> bool:
        """Whether no tokens move but those by which the Jacobian is taken."""
        fixed = torch.ones_like(area.radii, dtype=torch.bool)
        fixed[self._columns] = False
        return not bool((area.radii[fixed] > 0).any())

    @property
    def risk(self) -> float:
        """The probability that one of the certificates that were needed so far fails."""
        return self._delta * (1.5 if "_flat" in vars(self) else 1.0)

    @torch.no_grad()
    def by_derivatives(self, area: Neighbourhood) -> tuple[float, float]:
        """How far the Jacobian can move to first order, and beyond (6.12, 6.13); infinite where these do not reach."""
        if not (self._along(area) and self._centre.affine):
            return math.inf, math.inf
        spread = Spread(self._centre, parts(self._centre, area.radii), area.radii, self._columns)
        return tuple(self._in_units(t) for t in (float(Upper(self._flat) * area.far), _later(spread)))  # pyright: ignore[reportReturnType]


def _later(spread: Spread) -> float:
    """How far the Jacobian can be from its first-order expansion, all heads together (6.13)."""
    part = beyond(spread)
    beta = part.query[:, spread.columns].amax(-1)
    return _together(spread.centre, spread.centre.nu[:, 0, 0] * part.weights + beta + part.key, part.weights, beta, part.key)


def _rows(centre: Centre, apart: Upper) -> Upper:
    """Lengths of outputs, token by token, whose parts in the heads have these, (heads, n)."""
    layer, apart = centre.layer, apart.map(lambda t: t.mT)
    rows = apart.sum()
    if layer.heads > 1:
        rows = rows.min(Upper(centre.geometry.blocks(apart.value, torch.float64)).raised(_units(centre)))
    if layer.attention_mask is not None:
        rows = rows * layer.attention_mask[0].double()
    return rows


def _units(centre: Centre) -> int:
    """What the sums behind a norm of heads together may leave over, in units of rounding."""
    return 64 * (centre.layer.width + centre.layer.out_width + len(centre.weights))


class Sizes(NamedTuple):
    """Bounds on the three parts of every head: norms of matrices of norms, and the matrices."""

    weights: Upper  # (heads, n, columns)
    key: Upper  # (heads, n, columns)
    query: Upper  # (heads, n)
    key_norm: Upper  # (heads,)


def _moving(spread: Spread) -> Sizes:
    """How far the three parts can move: entry by entry, or to first order by 6.8 and entry by entry for the rest."""
    found, columns = spread.found, spread.columns
    weights, key, query = found.weights.change[..., columns], found.key.change[..., columns], found.query.change
    key_norm = matrix_norm(key.value)
    if spread.centre.cap is None:
        first_query, first_key = spread.linear()
        query = (first_query + found.query.rest).min(query)
        key_norm = (first_key + matrix_norm(found.key.rest[..., columns].value)).min(key_norm)
    return Sizes(weights, key, query, key_norm)


def _anywhere(spread: Spread) -> Sizes:
    """The three parts anywhere: their sizes and changes, or variances of values and keys (6.7)."""
    centre, found, columns = spread.centre, spread.found, spread.columns
    weights, key, query = (t.size + t.change for t in (found.weights, found.key, found.query))
    by_key, by_query = (t.size + t.change for t in found.slopes)

    def root_mean_square(t: Upper) -> Upper:
        t = visible(centre, t)
        return (weights.sqrt() * t).length().min(t.amax())

    deviation = root_mean_square(centre.values + centre.nu * spread.r)
    query = query.min(deviation * root_mean_square(by_query))
    received = (weights.sqrt() * by_key * deviation[..., None]).map(lambda t: t.mT[:, columns]).length().amax()
    key = key[..., columns]
    return Sizes(weights[..., columns], key, query, matrix_norm(key.value).min(received))


def _combined(spread: Spread, sizes: Sizes, *, stochastic: bool = False) -> float:
    """Heads put together: plainly, and through the directions they share (docs/explanation/point-bounds.md 4.5).

    stochastic: rows of the weights sum to one at most.
    """
    p, columns = sizes.weights, spread.columns
    nu = spread.centre.nu
    whole = nu * p + sizes.key + sizes.query.map(lambda t: torch.diag_embed(t)[..., columns])
    p_norm, beta = matrix_norm(p.value), sizes.query[:, columns].amax()
    p_norm = p_norm.min(p.sum(1).amax().sqrt()) if stochastic else p_norm
    block = matrix_norm(whole.value).min(nu[:, 0, 0] * p_norm + beta + sizes.key_norm)
    return _together(spread.centre, block, p_norm, beta, sizes.key_norm)


def _together(centre: Centre, block: Upper, weights: Upper, query: Upper, key: Upper) -> float:
    """Heads of these norms put together; and of parts of these norms."""
    found, geometry = block.sum(), centre.geometry
    if centre.layer.heads > 1:
        shared = [geometry.blocks(block.value[None], torch.float64)[0]]
        if not centre.layer.coupled:
            shared.append(geometry.coupled(weights.value[None], query.value[None], key.value[None], torch.float64)[0])
        for bound in shared:
            found = found.min(Upper(bound).raised(_units(centre)))
    return float(found)
