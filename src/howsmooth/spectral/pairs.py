"""The top singular pairs of a batch of maps, and a certificate for what they leave."""

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import NoConvergenceError
from howsmooth.kernels.tensors import float32_products
from howsmooth.spectral.dense import decomposed, rounding_of, small
from howsmooth.spectral.estimate import Solver
from howsmooth.spectral.golub_kahan import GolubKahan
from howsmooth.spectral.operator import Operator, Weighted, WrappedOperator, stream, unit_rows
from howsmooth.spectral.ritz import Block, converged, krylov

_PRODUCTS = 24  # with `JᵀJ`, that the pairs are found with unless more is wanted: better ones leave less, any are sound
_AHEAD = 4  # the same for each pair, where there are many
_REST_STEPS = 32  # at most, for the certificate of what the pairs leave
_NARROW = 0.04  # of that certificate
_ROUNDED = 1 + 1e-9  # by which upper ends are raised
_TINY = torch.finfo(torch.float64).tiny


class TopPairs(NamedTuple):
    """Orthonormal directions with `J right = value · left`, the largest value first.

    value: attained, so at most the singular value of its number.  rest: an upper bound on `‖(I − UUᵀ) J (I − VVᵀ)‖`, with the
    left directions `U` and the right ones `V`: certain where `J` was decomposed, else with probability `1 − delta` an item.
    """

    value: Float[Tensor, "pairs batch"]
    left: Float[Tensor, "pairs batch *out"]
    right: Float[Tensor, "pairs batch *in"]
    rest: Float[Tensor, " batch"] | None = None

    def __repr__(self) -> str:
        return f"TopPairs({self.value.shape[0]} of each of {self.value.shape[1]} maps)"

    def put(self, items: Tensor, other: "TopPairs") -> "TopPairs":
        """Pairs like these, with those of `items` replaced."""
        return TopPairs(*(t.index_copy(1, items, new) for t, new in zip(self[:3], other[:3], strict=True)))

    def select(self, items: Tensor) -> "TopPairs":
        """The pairs of some items of the batch."""
        return TopPairs(*(t[:, items] for t in self[:3]))


@torch.no_grad()
@float32_products()
def top_pairs(
    operator: Operator,
    count: int,
    start: Float[Tensor, "times batch *in"] | None = None,
    *,
    seeds: Sequence[int],
    tol: float | None = None,
    delta: float | None = None,
) -> TopPairs:
    """The `count` top singular pairs of every map of a batch, fewer where a side of it has no more.

    Small maps are decomposed. Else `V` are Ritz vectors of a block Krylov space of `JᵀJ`, and the SVD of `J V` gives the rest.
    The block is `start` and one random direction, so that no start hides a pair: few directions make the space deep, which
    spectra that fall off reward. A bad start costs quality, never the certificate, which has a random start of its own on the
    deflated map (Theorem 2.2).

    start: directions that may be near the top ones, from a call before; the operator's guess by default.  seeds: of every item.
    tol: go on until the pairs have converged so far, one pair by Golub–Kahan, which waits until a larger value would show; by
    default 24 products are made, or four for each pair.  delta: certify what is left.

    >>> from howsmooth.maps import AutodiffJacobian
    >>> J = AutodiffJacobian(lambda x: torch.tensor([3.0, 2.0, 1.0]) * x, torch.zeros(1, 3), batched=True)
    >>> pairs = top_pairs(J, 2, seeds=[0], delta=1e-6)
    >>> pairs.value[:, 0].tolist(), round(float(pairs.rest), 3)
    ([3.0, 2.0], 1.0)
    """
    count, rest = max(1, min(count, operator.in_size, operator.out_size)), None
    if small(operator):
        u, value, vh = decomposed(operator, operator.dtype)
        if delta is not None:
            beyond = value[:, count].double() if value.shape[1] > count else 0.0
            rest = beyond + rounding_of(operator, value)
        u, value, right = u[..., :count], value[:, :count], vh[:, :count].transpose(0, 1)
    else:
        right = _right(operator, count, start, seeds, tol)
        image = operator.jvp(right.unflatten(-1, operator.in_shape)).flatten(2)
        u, value, turn = torch.linalg.svd(image.permute(1, 2, 0), full_matrices=False)
        sign = torch.where(turn.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).to(turn)  # nothing is turned about in vain
        u, right = u * sign[:, None], torch.einsum("bkp,pbN->kbN", sign[..., None] * turn, right)
        if delta is not None:
            if start is not None or tol is not None:  # pairs of a run like the certificate's may know its random start
                seeds = [stream(seed, "rest").initial_seed() for seed in seeds]
            solver = GolubKahan(max_steps=_REST_STEPS, delta=delta)
            rest = norm_upper(Deflated(operator, u.mT, right.transpose(0, 1)), solver, _NARROW, seeds)
            rest = rest + operator.noise * value[:, 0].to(rest)
    left = u.permute(2, 0, 1).unflatten(-1, operator.out_shape)
    return TopPairs(value.T, left, right.unflatten(-1, operator.in_shape), rest)


def _right(
    operator: Operator, count: int, start: Tensor | None, seeds: Sequence[int], tol: float | None
) -> Float[Tensor, "pairs batch N"]:
    """Orthonormal directions near the top right singular ones."""
    if count == 1 and tol is not None:
        solutions = GolubKahan().solve(operator, tol, None, seeds, None if start is None else start[0])
        found = torch.stack([s.direction for s in solutions])
        return unit_rows(found.to(operator.device, operator.dtype).flatten(1))[None]

    def gram(block: Block) -> Block:
        return operator.gram(block.transpose(0, 1).unflatten(2, operator.in_shape))[0].flatten(2).transpose(0, 1)

    random = torch.stack([torch.randn(operator.in_size, generator=stream(seed, "pairs")) for seed in seeds])
    block = unit_rows(random.to(operator.device, operator.dtype))[:, None]
    if start is not None:
        block = torch.cat([start.to(block).flatten(2).transpose(0, 1), block], 1)
    elif (guess := operator.guess(seeds)) is not None:
        block = block + unit_rows(guess.flatten(1).to(block))[:, None]
    products = max(_PRODUCTS, _AHEAD * count, block.shape[1] + count)
    found = krylov(gram, block, products, count) if tol is None else converged(gram, block, products, tol, count)
    return found.vectors[:, :count].transpose(0, 1)


def norm_upper(operator: Operator, solver: Solver, narrow: float, seeds: Sequence[int]) -> Float[Tensor, " batch"]:
    """Upper ends of norms, of maps divided by a size that they attain, so that squares stay in range; infinite past it.

    narrow: how wide an interval may be, relatively.
    """
    v = torch.stack([torch.randn(operator.in_shape, generator=stream(s, "size"), dtype=torch.float64) for s in seeds])
    size = operator.jvp(v.to(operator.device, operator.dtype)[None])[0].flatten(1).abs().amax(-1)
    size = torch.where(size > _TINY, size, 1.0)
    even = Weighted(operator, (1 / size).reshape(-1, *[1] * len(operator.out_shape)), size.new_ones(()))
    try:
        upper = [s.upper for s in solver.solve(even, 1e-3, narrow, seeds)] if bool(size.isfinite().all()) else math.inf
    except NoConvergenceError:  # products past the range
        upper = math.inf
    return size.double().nan_to_num(nan=math.inf, posinf=math.inf) * size.new_tensor(upper, dtype=torch.float64) * _ROUNDED


@final
class Deflated(WrappedOperator):
    """`(I − UUᵀ) J (I − VVᵀ)`, for orthonormal rows `left` and `right` of every item."""

    def __init__(self, operator: Operator, left: Float[Tensor, "batch pairs M"], right: Float[Tensor, "batch pairs N"]):
        super().__init__(operator)
        self._left, self._right = left, right

    def around(self, operator):
        return Deflated(operator, self._left, self._right)

    def rounding(self, moved=0.0):
        return None  # what is proved of products with `J` is not, of those with two projections beside

    def jvp(self, v):
        return _without(self.operator.jvp(_without(v, self._right)), self._left)

    def vjp(self, u):
        return _without(self.operator.vjp(_without(u, self._left)), self._right)

    def select(self, items):
        return Deflated(self.operator.select(items), self._left[items], self._right[items])


def _without(t: Float[Tensor, "probes batch *shape"], basis: Block) -> Tensor:
    flat = t.flatten(2).transpose(0, 1)
    return (flat - (flat @ basis.mT) @ basis).transpose(0, 1).reshape(t.shape)
