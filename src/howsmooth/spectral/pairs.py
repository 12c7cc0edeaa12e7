"""The top singular pairs of a batch of maps, and a certificate for what they leave."""

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import NoConvergenceError
from howsmooth.kernels.products import float32_products
from howsmooth.maps.operator import Around, Operator, Weighted, stream, unit_rows
from howsmooth.spectral.dense import decomposed, off, small
from howsmooth.spectral.estimate import Solver
from howsmooth.spectral.golub_kahan import GolubKahan
from howsmooth.spectral.ritz import Block, converged, krylov

_PRODUCTS = 24  # with `JᵀJ`, that the pairs are found with unless more is wanted: better ones leave less, any are sound
_AHEAD = 4  # the same for each pair, where there are many
_REST_STEPS = 32  # at most, for the certificate of what the pairs leave
_NARROW = 0.04  # of that certificate
_ROUNDED = 1e-9  # what upper ends are raised by, relatively
_TINY = torch.finfo(torch.float64).tiny


class TopPairs(NamedTuple):
    """Orthonormal directions with `J right = value · left`, the largest value first.

    value: attained, so at most the singular value of its number.  rest: `‖(I − UUᵀ) J (I − VVᵀ)‖` from above, with `U` and `V`
    the left and the right directions: certain where `J` was decomposed, else with probability `1 − delta` for each item;
    nothing where it was not wanted.
    """

    value: Float[Tensor, "pairs batch"]
    left: Float[Tensor, "pairs batch *out"]
    right: Float[Tensor, "pairs batch *in"]
    rest: Float[Tensor, " batch"] | None = None

    def put(self, items: Tensor, other: "TopPairs") -> "TopPairs":
        """These pairs, with those of `items` replaced."""
        value, left, right = (t.index_copy(1, items, new) for t, new in zip(self[:3], other[:3], strict=True))
        return TopPairs(value, left, right)

    def select(self, items: Tensor) -> "TopPairs":
        """The pairs of some items of the batch."""
        value, left, right = (t[:, items] for t in self[:3])
        return TopPairs(value, left, right, None if self.rest is None else self.rest[items])


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

    Small maps are decomposed. Else the right directions are Ritz vectors of one block Krylov space of `JᵀJ`: it begins with
    `start` and a random direction, so that no start hides a pair for good, and as few directions as there are make it deep,
    which spectra that fall off reward. The SVD of `J V` gives the values and the left directions, and what a product costs is
    all that a wrong start does: the certificate has a random start of its own (Theorem 2.2 on the deflated map), whatever the
    pairs are.

    start: directions that may be near the top ones, from a call before or a guess; the operator's own guess otherwise.
    seeds: of every item.  tol: go on until the pairs have converged so far: one pair by Golub–Kahan, which also waits until a
    larger value would have shown; without it 24 products are made, or four for each pair.  delta: certify what is left.

    >>> from howsmooth.maps import AutodiffJacobian
    >>> J = AutodiffJacobian(lambda x: torch.tensor([3.0, 2.0, 1.0]) * x, torch.zeros(1, 3), batched=True)
    >>> pairs = top_pairs(J, 2, seeds=[0], delta=1e-6)
    >>> pairs.value[:, 0].tolist(), round(float(pairs.rest), 3)
    ([3.0, 2.0], 1.0)
    """
    count = max(1, min(count, operator.in_size, operator.out_size))
    if small(operator):
        return _decomposed(operator, count, delta is not None)
    right = _right(operator, count, start, seeds, tol).unflatten(-1, operator.in_shape)
    image = operator.jvp(right).flatten(2)
    if not bool(image.isfinite().all()):
        raise NoConvergenceError("expected finite products with the Jacobian, got NaN or infinity; rescale the map")
    u, value, wt = torch.linalg.svd(image.permute(1, 2, 0), full_matrices=False)  # image of item b: U S Wᵀ
    sign = torch.where(wt.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).to(wt)[..., None]  # no pair is turned about for nothing
    right = torch.einsum("bkp,pbN->kbN", sign * wt, right.flatten(2))
    left = (u * sign.mT).permute(2, 0, 1)
    rest = None
    if delta is not None:
        others = Deflated(operator, left.transpose(0, 1), right.transpose(0, 1))
        apart = [seed + 1 for seed in seeds]  # the pairs must not know the certificate's start
        rest = norm_above(others, GolubKahan(max_steps=_REST_STEPS, delta=delta), _NARROW, apart)
        rest = rest + operator.noise * value[:, 0].to(rest)
    return TopPairs(value.T, left.unflatten(-1, operator.out_shape), right.unflatten(-1, operator.in_shape), rest)


def _decomposed(operator: Operator, count: int, certify: bool) -> TopPairs:
    u, sigma, vh = decomposed(operator, operator.dtype)
    left = u[..., :count].permute(2, 0, 1).unflatten(-1, operator.out_shape)
    right = vh[:, :count].transpose(0, 1).unflatten(-1, operator.in_shape)
    if not certify:
        return TopPairs(sigma[:, :count].T, left, right)
    beyond = sigma[:, count] if sigma.shape[1] > count else torch.zeros_like(sigma[:, 0])
    return TopPairs(sigma[:, :count].T, left, right, beyond.double() + off(operator, sigma))


def _right(
    operator: Operator, count: int, start: Tensor | None, seeds: Sequence[int], tol: float | None
) -> Float[Tensor, "pairs batch N"]:
    """Orthonormal directions near the top right singular ones."""
    if count == 1 and tol is not None:
        begun = operator if start is None else Started(operator, start[0])
        found = torch.stack([s.direction for s in GolubKahan().solve(begun, tol, None, seeds)])
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


def norm_above(operator: Operator, solver: Solver, narrow: float, seeds: Sequence[int]) -> Float[Tensor, " batch"]:
    """Upper ends of norms, of maps divided by a size that they attain, so that squares stay in range; infinite past it.

    narrow: how wide an interval may be, relatively.
    """
    v = torch.stack([torch.randn(operator.in_shape, generator=stream(s, "size"), dtype=torch.float64) for s in seeds])
    size = operator.jvp(v.to(operator.device, operator.dtype)[None])[0].flatten(1).abs().amax(-1)
    size = torch.where(size > _TINY, size, 1.0).reshape(-1, *[1] * len(operator.out_shape))
    if not bool(size.isfinite().all()):
        return torch.full((operator.batch,), math.inf, dtype=torch.float64, device=operator.device)
    try:
        solutions = solver.solve(Weighted(operator, 1 / size, torch.ones_like(size.flatten()[0])), 1e-3, narrow, seeds)
    except NoConvergenceError:  # products past the range
        return torch.full((operator.batch,), math.inf, dtype=torch.float64, device=operator.device)
    return size.flatten().double() * size.new_tensor([s.upper for s in solutions], dtype=torch.float64) * (1 + _ROUNDED)


@final
class Deflated(Around):
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


@final
class Started(Around):
    """An operator with a guess of its top direction."""

    def __init__(self, operator: Operator, direction: Float[Tensor, "batch *in_shape"]):
        super().__init__(operator)
        self._direction = direction

    def around(self, operator):
        return Started(operator, self._direction)

    def jvp(self, v):
        return self.operator.jvp(v)

    def vjp(self, u):
        return self.operator.vjp(u)

    def gram(self, v):
        return self.operator.gram(v)

    def guess(self, seeds):
        return self._direction

    def select(self, items):
        return Started(self.operator.select(items), self._direction[items])
