"""Rayleigh–Ritz: what the span of a few directions knows of the top of a spectrum.

Blocks are (items, times, N): `times` directions of every item of a batch. `M` is positive semi-definite and known through
products, `JᵀJ` as a rule. A Ritz value is attained, so it is at most the eigenvalue of its number (Cauchy), from any start.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import NoConvergenceError

_DEPENDENT = 64  # units of rounding below which nothing is left of a direction
_RESTARTS = 40

Block = Float[Tensor, "items times N"]


class Ritz(NamedTuple):
    """The Ritz pairs of `M`, the largest first. images: `M` times the vectors."""

    values: Float[Tensor, "items k"]
    vectors: Float[Tensor, "items k N"]
    images: Float[Tensor, "items k N"]

    def residual(self, count: int) -> float:
        """`max |M v − θ v|/θ_1` over the first pairs of every item."""
        values, top = self.values[:, :count, None].to(self.images), self.values[:, :1].to(self.images)
        rest = (self.images[:, :count] - values * self.vectors[:, :count]).norm(dim=-1)
        return float((rest / torch.where(top > 0, top, 1.0)).max())

    def ahead(self, count: int) -> Block:
        """The first vectors after one more product with `M`, which costs nothing; those that it takes to zero as they are."""
        return torch.where(self.values[:, :count, None] > 0, self.images[:, :count], self.vectors[:, :count])


def orthonormal(block: Block, beside: Block | None = None) -> Block:
    """Orthonormal directions for what a block adds to the span of `beside`, its first one first; zero where nothing is left.

    >>> orthonormal(torch.tensor([[[0.0, 2.0], [1.0, 1.0]]])).tolist()
    [[[0.0, 1.0], [1.0, 0.0]]]
    """
    known = block[:, :0] if beside is None else beside
    count = known.shape[1]
    for v in block.split(1, 1):
        least = _DEPENDENT * torch.finfo(v.dtype).eps * v.norm(dim=-1, keepdim=True)
        for _ in range(2):
            v = v - (v @ known.mT) @ known
        left = v.norm(dim=-1, keepdim=True)
        known = torch.cat([known, torch.where(left > least, v / torch.where(left > 0, left, 1.0), 0.0)], 1)
    return known[:, count:]


def krylov(gram: Callable[[Block], Block], start: Block, products: int, count: int = 1) -> Ritz:
    """Rayleigh–Ritz on the block Krylov space `start, M start, M² start, …` of at most so many vectors.

    Where the space is invariant it goes on from a random direction until it has `count` vectors, so that the copies of a
    multiple eigenvalue, and directions in the kernel, are found too.

    gram: `M` applied to a block.  start: as many directions as there are, of any length.  products: with one vector each.

    >>> spectrum = torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64)
    >>> found = krylov(lambda v: spectrum * v, torch.ones(1, 1, 3, dtype=torch.float64), products=3, count=3)
    >>> found.values.round(decimals=9).tolist()
    [[4.0, 4.0, 1.0]]
    """
    basis, images, w = start[:, :0], start[:, :0], start
    limit, random = min(products, start.shape[2]), torch.Generator().manual_seed(0)
    while (left := limit - basis.shape[1]) > 0:
        w = orthonormal(w[:, :left], basis)
        gone = (w == 0).all(-1, keepdim=True)
        if bool(gone.any()):
            if bool(gone.all()) and basis.shape[1] >= count:
                break
            w = orthonormal(torch.where(gone, torch.randn(w.shape[1:], generator=random).to(w), w), basis)
        basis, w = torch.cat([basis, w], 1), gram(w)
        images = torch.cat([images, w], 1)
    small = (basis @ images.mT).double()
    if not bool(small.isfinite().all()):
        raise NoConvergenceError("expected finite products with the Jacobian, got NaN or infinity; rescale the map")
    values, turn = torch.linalg.eigh((small + small.mT) / 2)
    turn = turn.flip(-1).mT.to(basis)
    return Ritz(values.flip(-1), turn @ basis, turn @ images)


def converged(gram: Callable[[Block], Block], start: Block, products: int, tol: float, count: int = 1) -> Ritz:
    """`krylov`, restarted from its first `count` vectors until the residual of each is at most `tol` of the top value."""
    found, rounds = krylov(gram, start, products, count), 1
    while found.residual(count) > tol and rounds < _RESTARTS:
        found, rounds = krylov(gram, found.ahead(count), products, count), rounds + 1
    return found
