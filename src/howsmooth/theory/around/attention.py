"""Bounds around an input: the largest norm of a map's Jacobian over a neighbourhood, and how far the map can move there.

Numbers such as 6.1 are those of docs/explanation/around.md.
"""

import math
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds.kind import check_softmax
from howsmooth.maps import Attention
from howsmooth.theory.around.covariances import Spread, beyond, matrix_norm
from howsmooth.theory.around.jets import ROUNDED, Centre, Parts, parts
from howsmooth.theory.around.neighbourhood import Around, Neighbourhood
from howsmooth.theory.around.pairs import Effort, Pairs, deflated, pairs_at
from howsmooth.theory.around.second import Curves, Second, curves, flattened
from howsmooth.theory.bound import TINY, largest_entry, lengths, no_nan
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.over_ball.table import LONGEST_TOKEN, rows_over_ball
from howsmooth.theory.upper import Upper

_MOST = 2**26  # attention weights: about twenty arrays of so many numbers are held at once
_WORTH = 1e-2  # of the norm: what there must be to gain before second derivatives are certified in all directions
APART = "the top singular pairs at the input, and how far the Jacobian can move along and beside them"
SECOND = "the Jacobian and its derivatives at the input, certified by products, and what is beyond them"
AT = "the norm at the input, and how far the Jacobian can move from it"
ANYWHERE = "the norms of the Jacobian's parts anywhere in the neighbourhood"
BALL = "the best bound over the ball that holds the neighbourhood"
_FAR = 2.0  # change of the Jacobian, in units of its norm, past which no pair is worth treating apart


def around_attention(
    layer: Attention,
    neighbourhood: Neighbourhood,
    *,
    tokens: tuple[int, ...] | None = None,
    norm: float | None = None,
    delta: float = 1e-6,
    seed: int = 0,
) -> Around:
    """Bounds on an attention layer over a neighbourhood, `AroundAttention` for one."""
    return AroundAttention(layer, neighbourhood.point, tokens=tokens, norm=norm, delta=delta, seed=seed).within(neighbourhood)


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
        by_v, by_o = (1.0 if w is None else _power_of_two(largest_entry(w)) for w in (layer.w_v, layer.w_o))
        w_o = None if layer.w_o is None else layer.w_o / by_o
        self.layer = replace(layer, w_v=layer.w_v / by_v, w_o=w_o, b_v=None, b_o=None)
        self._units = by_v, by_o  # taken out of the layer, so that squares of its Jacobian stay in range
        self.point, self.tokens = x.double(), tokens
        self._known = None if norm is None else norm / by_v / by_o
        self._delta, self._seed, self._effort = delta, seed, Effort.of(x.numel())
        self._columns = torch.arange(len(x), device=x.device) if tokens is None else torch.as_tensor(tokens, device=x.device)

    @cached_property
    def _centre(self) -> Centre:
        return Centre.of(self.layer, self.point)

    @cached_property
    def _pairs(self) -> Pairs:
        return pairs_at(self._centre.operator, self.tokens, self._effort.pairs, self._delta / 2, self._seed)

    @cached_property
    def _curves(self) -> Curves:
        return curves(self._second, self._pairs, self._effort, self._delta / 2, self._seed)

    @cached_property
    def _second(self) -> Second:
        return Second(self._centre)

    @cached_property
    def _flat(self) -> float:
        """How fast the Jacobian can change at the input, in all directions (Theorem 6.12)."""
        return flattened(self._second, self._columns, self._effort.probes, self._delta / 2, self._seed)

    @cached_property
    def _constants(self) -> Constants | None:
        try:
            return constants(self.layer)
        except BadInputError:  # weights whose products leave float64
            return None

    def _ball(self, reach: float) -> float:
        """The best bound over the ball, infinite where none applies."""
        if self._constants is None or not reach < LONGEST_TOKEN:
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
        r, columns = neighbourhood.radii, self._columns
        ball = self._ball(neighbourhood.reach)
        if self.layer.heads * len(r) ** 2 > _MOST:
            return _from_ball(ball, neighbourhood, f"the bound over a ball alone, for more than {_MOST} attention weights")
        centre, far = self._centre, neighbourhood.far
        upper = min(self._pairs.norm if self._known is None else self._known, ball)
        spread = Spread(centre, parts(centre, r), r, columns)
        found, along = spread.found, self._along(neighbourhood)
        change, rest = _combined(centre, columns, _moving(spread)), _length(_rows(centre, found.output.rest))
        bounds = [
            (upper + change, AT),
            (_combined(centre, columns, _anywhere(centre, found, r, columns), stochastic=True), ANYWHERE),
            (ball, BALL),
        ]
        if far > 0 and self._known is None:
            if change < _FAR * upper:
                bounds.append((self._apart(spread, neighbourhood, change), APART))
            gain = min(change, min(bounds)[0] - upper)
            if along and centre.affine and gain > _WORTH * upper and self._promising(gain, far, later := _later(spread)):
                first = _product(self._flat, far)
                if (sharper := _sum(first, later)) < change:
                    change, rest = sharper, min(rest, _product(_sum(0.5 * first, later), far))
                    bounds += [(self._apart(spread, neighbourhood, change, later), SECOND), (upper + change, SECOND)]
        slope, reason = min(bounds)
        if not slope < math.inf:
            reason = "nothing finite: logits can move further in this neighbourhood than float64 can follow"
        confidence = 1.0 if reason in (ANYWHERE, BALL) else 1 - self.risk
        if far == 0:
            slope, change, confidence = upper, 0.0, 1 - self.risk
        change = min(change, upper + slope)
        moved = _rows(centre, found.output.change)
        total = _length(moved)
        if along:
            rest = min(rest, _product(change, far))
            total = min(total, _product(slope, far), _product(upper, far) + rest)
        return Around(slope, change, moved.clamp_max(total), total, reason, upper, confidence, rest)

    def _promising(self, gain: float, far: float, later: float) -> bool:
        """Whether second derivatives in all directions may gain something: they are no smaller than those along the pairs."""
        if not later < gain:
            return False
        return "_flat" in vars(self) or later + far * float(torch.cat([self._curves.rows, self._curves.columns]).max()) < gain

    def _along(self, area: Neighbourhood) -> bool:
        """Whether no tokens move but those by which the Jacobian is taken."""
        fixed = torch.ones_like(area.radii, dtype=torch.bool)
        fixed[self._columns] = False
        return not bool((area.radii[fixed] > 0).any())

    @property
    def risk(self) -> float:
        """The probability that one of the certificates that were needed so far fails."""
        return self._delta * (1.5 if "_flat" in vars(self) else 1.0)

    def _apart(self, spread: Spread, area: Neighbourhood, change: float, later: float = math.inf) -> float:
        """The bound that treats the top pairs apart. change, later: of the Jacobian, and of it beyond first order."""
        limits = spread.r, area.far, area.total is not None
        return deflated(spread.centre, spread.found, limits, self._pairs, self._curves, spread.columns, change, later)

    @torch.no_grad()
    def by_derivatives(self, area: Neighbourhood) -> tuple[float, float]:
        """How far the Jacobian can move to first order, and beyond (6.12, 6.13); infinite where these do not reach."""
        if not (self._along(area) and self._centre.affine):
            return math.inf, math.inf
        spread = Spread(self._centre, parts(self._centre, area.radii), area.radii, self._columns)
        return tuple(self._in_units(t) for t in (_product(self._flat, area.far), _later(spread)))  # pyright: ignore[reportReturnType]


def _later(spread: Spread) -> float:
    """How far the Jacobian can be from its first-order expansion, all heads together (6.13)."""
    part = beyond(spread)
    beta = part.query[:, spread.columns].amax(-1)
    block = spread.nu[:, 0] * part.weights + beta + part.key
    return _together(spread.centre, block.value, part.weights.value, beta.value, part.key.value)


def _sum(a: float, b: float) -> float:
    return float(Upper(a) + b)


def _power_of_two(size: float) -> float:
    """A power of two near a size, by which numbers are divided without rounding."""
    return 2.0 ** max(-1000, min(1000, math.frexp(size)[1]))


def _rows(centre: Centre, apart: Float[Tensor, "heads n"]) -> Float[Tensor, " n"]:
    """Lengths of outputs, token by token, whose parts in the heads have these."""
    layer, apart = centre.layer, apart.T
    rows = no_nan(apart.sum(-1))
    if layer.heads > 1:
        rows = torch.minimum(rows, centre.geometry.blocks(apart, torch.float64))
    if layer.attention_mask is not None:
        rows = torch.where(layer.attention_mask[0], rows, 0.0)
    return rows * (1 + ROUNDED)


def _length(rows: Tensor) -> float:
    return float(lengths(rows)) * (1 + ROUNDED) if bool(rows.isfinite().all()) else math.inf


def _from_ball(ball: float, neighbourhood: Neighbourhood, reason: str) -> Around:
    """What a bound over the ball says alone."""
    total = _product(ball, neighbourhood.far)
    change = 2 * ball if neighbourhood.far > 0 else 0.0
    return Around(ball, change, torch.full_like(neighbourhood.radii, total), total, reason, ball)


def _product(a: float, b: float) -> float:
    return 0.0 if b == 0 else a * b * (1 + ROUNDED)


class Sizes(NamedTuple):
    """Bounds on the three parts of every head: norms of matrices of norms, and the matrices."""

    weights: Float[Tensor, "heads n columns"]
    key: Float[Tensor, "heads n columns"]
    query: Float[Tensor, "heads n"]
    key_norm: Float[Tensor, " heads"]


def _moving(spread: Spread) -> Sizes:
    """How far the three parts can move: entry by entry, or to first order by 6.8 and entry by entry for the rest."""
    found, columns = spread.found, spread.columns
    weights, key, query = found.weights.change[..., columns], found.key.change[..., columns], found.query.change
    key_norm = matrix_norm(key)
    if spread.centre.cap is None:
        first_query, first_key = spread.linear()
        query = (first_query + found.query.rest).min(query).value
        key_norm = (first_key + matrix_norm(found.key.rest[..., columns])).min(key_norm)
    return Sizes(weights, key, query, key_norm.value)


def _anywhere(centre: Centre, found: Parts, r: Tensor, columns: Tensor) -> Sizes:
    """The three parts anywhere: their sizes and changes, or variances of values and keys (6.7)."""
    weights, key, query = (t.size + t.change for t in (found.weights, found.key, found.query))
    by_key, by_query = (t.size + t.change for t in found.slopes)
    nu = centre.geometry.nu[:, None, None]

    def root_mean_square(t: Tensor) -> Tensor:
        t = torch.where(centre.visible, t, 0.0)
        return no_nan(torch.minimum(lengths(weights.sqrt() * t), t.amax(-1)))

    spread = root_mean_square(centre.values + nu * r)
    query = torch.minimum(query, no_nan(spread * root_mean_square(by_query)))
    received = no_nan(lengths((weights.sqrt() * by_key * spread[..., None]).mT)[:, columns].amax(-1))
    key = key[..., columns]
    return Sizes(weights[..., columns], key, query, torch.minimum(matrix_norm(key).value, received))


def _combined(centre: Centre, columns: Tensor, sizes: Sizes, *, stochastic: bool = False) -> float:
    """Heads put together: plainly, and through the directions they share (docs/explanation/point-bounds.md 4.5).

    stochastic: rows of the weights sum to one at most.
    """
    nu = centre.geometry.nu
    p, query = sizes.weights, sizes.query[:, columns]
    whole = nu[:, None, None] * p + sizes.key + torch.diag_embed(sizes.query)[..., columns]
    p_norm, beta = matrix_norm(p).value, query.amax(-1)
    p_norm = torch.minimum(p_norm, p.sum(1).amax(-1).sqrt()) if stochastic else p_norm
    block = torch.fmin(matrix_norm(whole).value, nu * p_norm + beta + sizes.key_norm)
    return _together(centre, block, p_norm, beta, sizes.key_norm)


def _together(centre: Centre, block: Tensor, weights: Tensor, query: Tensor, key: Tensor) -> float:
    """Heads of these norms put together; and of parts of these norms."""
    bounds = [no_nan(block.sum())]
    if centre.layer.heads > 1:
        bounds.append(centre.geometry.blocks(block[None], torch.float64)[0])
        if not centre.layer.coupled:
            bounds.append(centre.geometry.coupled(weights[None], query[None], key[None], torch.float64)[0])
    return float(no_nan(torch.stack(bounds)).min()) * (1 + ROUNDED)
