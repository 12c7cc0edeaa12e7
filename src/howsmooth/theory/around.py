"""Bounds around an input: the largest norm of a map's Jacobian over a neighbourhood, and how far the map can move there.

Numbers such as 6.1 are those of docs/explanation/around.md.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, AttentionJacobian
from howsmooth.maps.operator import Operator, Restricted
from howsmooth.spectral import DenseSVD, GolubKahan
from howsmooth.theory.around_jets import ROUNDED, Centre, Parts, parts
from howsmooth.theory.ball import LARGEST, ball_bounds
from howsmooth.theory.bound import lengths
from howsmooth.theory.heads import Geometry
from howsmooth.theory.perron import perron_bound

_DENSE_SIZE = 256  # rows and columns up to which the Jacobian at the centre is decomposed
_STEPS = 8  # power steps on a matrix of norms: any number of them gives a bound


@final
@dataclass(frozen=True)
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

    @property
    def reach(self) -> float:
        """A ball of this radius around zero holds every token of the neighbourhood."""
        return float((lengths(self.point) + self.radii).max()) * (1 + ROUNDED)

    @property
    def far(self) -> float:
        """The largest `‖Y − X‖_F`."""
        apart = float(lengths(self.radii)) * (1 + ROUNDED)
        return apart if self.total is None else min(apart, self.total)


@final
@dataclass(frozen=True)
class Around:
    """What is certified of a map `f` over a neighbourhood of `X`.

    slope: `‖D_Y f‖₂` is at most this.  change: so is `‖D_Y f − D_X f‖₂`.  moved: `|f(Y)_i − f(X)_i|`, (n,).  moved_total:
    `‖f(Y) − f(X)‖_F`.  reason: which bound it is, or why it is infinite.
    centre: `‖D_X f‖₂` is at most this.  confidence: of all these, over the random starts behind them.
    """

    slope: float
    change: float
    moved: Float[Tensor, " n"]
    moved_total: float
    reason: str
    centre: float = math.inf
    confidence: float = 1.0


@torch.no_grad()
def around_attention(
    layer: Attention,
    neighbourhood: Neighbourhood,
    *,
    tokens: tuple[int, ...] | None = None,
    delta: float = 1e-6,
    seed: int = 0,
) -> Around:
    """Bounds on an attention layer over a neighbourhood; `D_Y f` by the tokens in `tokens` alone, all by default.

    The smallest of: the norm at the centre and how far the Jacobian can move from it (6.6), the norms of its parts anywhere in
    the neighbourhood (6.7), and the best bound over the ball that holds it (docs/bounds.md). All work is done in float64.

    delta: probability that an upper end at the centre fails.  seed: of its random start.
    """
    layer = layer.to(torch.float64)
    x, r = neighbourhood.point, neighbourhood.radii
    columns = torch.arange(len(x)) if tokens is None else torch.as_tensor(tokens)
    centre = Centre.of(layer, x)
    upper, confidence = _norm_at(centre.operator, tokens, delta, seed)
    ball = _ball(layer, len(x), neighbourhood.reach)
    found = parts(centre, r)
    change = _combined(centre.geometry, layer, *_sizes(found, columns))
    anywhere = _combined(centre.geometry, layer, *_sizes_anywhere(found, columns))
    slope, reason = min(
        (upper + change, "the norm at the input and how far the Jacobian can move from it"),
        (anywhere, "the norms of the Jacobian's parts anywhere in the neighbourhood"),
        (ball, "the best bound over the ball that holds the neighbourhood"),
    )
    if not slope < math.inf:
        reason = "exponents overflow: logits can move further in this neighbourhood than float64 can follow"
    if not float(r.max()) > 0:
        slope, change = upper, 0.0
    change = min(change, upper + slope)
    apart = found.output.change.T  # (n, heads)
    total = apart.sum(-1)
    if layer.heads > 1:
        total = torch.minimum(total, centre.geometry.blocks(apart, torch.float64))
    if layer.attention_mask is not None:
        total = torch.where(layer.attention_mask[0], total, 0.0)
    total = total * (1 + ROUNDED)
    moved_total = min(float(lengths(total)) * (1 + ROUNDED), _product(slope, neighbourhood.far) if tokens is None else math.inf)
    return Around(
        slope, change, total.clamp_max(moved_total), moved_total, reason, upper, confidence if slope < anywhere else 1.0
    )


def _product(a: float, b: float) -> float:
    return 0.0 if b == 0 else a * b * (1 + ROUNDED)


def _norm_at(operator: AttentionJacobian, tokens: tuple[int, ...] | None, delta: float, seed: int) -> tuple[float, float]:
    """The norm at the centre from above, and how sure that is."""
    J: Operator = operator if tokens is None else Restricted(operator, tokens)
    if max(J.in_size, J.out_size) <= _DENSE_SIZE:
        return DenseSVD().solve(J, 1e-3, None, [seed])[0].upper * (1 + ROUNDED), 1.0
    solution = GolubKahan(delta=delta).solve(J, 1e-3, 0.02, [seed])[0]
    return solution.upper * (1 + ROUNDED), 1 - delta


def _ball(layer: Attention, n: int, reach: float) -> float:
    """The best bound over the ball, infinite where none applies."""
    if not reach < LARGEST:
        return math.inf
    try:
        rows = ball_bounds(layer, n, reach)
    except BadInputError:  # weights whose products leave float64
        return math.inf
    return min((row.value for row in rows if row.side == "upper" and row.value is not None), default=math.inf)


def _sizes(found: Parts, columns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How far the three parts can move, and what they are together, in norms of matrices of norms, (heads,) each."""
    p, key, query = found.weights.change, found.key.change, found.query.change
    return p[..., columns], key[..., columns], torch.diag_embed(query)[..., columns], query[:, columns]


def _sizes_anywhere(found: Parts, columns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three parts anywhere: all of their sizes and changes, or variances of values and keys (6.7)."""
    p, key, query = (t.size + t.change for t in (found.weights, found.key, found.query))
    by_key, turned = found.slopes
    query = torch.minimum(query, (found.spread * turned).sqrt())
    return p[..., columns], key[..., columns], torch.diag_embed(query)[..., columns], query[:, columns]


def _combined(geometry: Geometry, layer: Attention, p: Tensor, key: Tensor, diagonal: Tensor, query: Tensor) -> float:
    """Heads put together: plainly, and through the directions they share (docs/point-bounds.md 4.5)."""
    nu = geometry.nu
    whole = nu[:, None, None] * p + key + diagonal
    p_norm, key_norm, block = (matrix_norm(t) for t in (p, key, whole))
    beta = query.amax(-1)
    block = torch.fmin(block, nu * p_norm + beta + key_norm)
    bounds = [block.sum()]
    if layer.heads > 1:
        bounds.append(geometry.blocks(block[None], torch.float64)[0])
        if not layer.coupled:
            bounds.append(geometry.coupled(p_norm[None], beta[None], key_norm[None], torch.float64)[0])
    return float(torch.stack(bounds).min()) * (1 + ROUNDED)


def matrix_norm(m: Float[Tensor, "heads n c"]) -> Float[Tensor, " heads"]:
    """Norms of non-negative matrices from above; infinity where an entry is."""
    finite = m.isfinite().all(-1).all(-1)
    m = torch.where(finite[:, None, None], m, 0.0)
    top = m.amax((-2, -1))
    even = m / torch.where(top > 0, top, 1.0)[:, None, None]
    bound, _ = perron_bound(
        lambda w: (even @ w[..., None])[..., 0], lambda z: (even.mT @ z[..., None])[..., 0], even.sum(1), _STEPS
    )
    return torch.where(finite, bound * top * (1 + ROUNDED), torch.inf)
