"""Small problems: the Jacobian as a matrix, and its singular value decomposition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import NoConvergenceError
from howsmooth.spectral.estimate import Solution
from howsmooth.spectral.operator import Operator

SMALL = 256  # rows and columns up to which a decomposition is the quicker way too


def small(operator: Operator) -> bool:
    """Whether the matrix of a map is small enough to decompose."""
    return max(operator.in_size, operator.out_size) <= SMALL


def decomposed(operator: Operator, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decompositions of a batch of maps: the matrices from their products, then LAPACK."""
    matrices = operator.dense().to(dtype)
    if not bool(matrices.isfinite().all()):
        raise NoConvergenceError("expected a finite Jacobian, got NaN or infinity; measure where the map is differentiable")
    return torch.linalg.svd(matrices, full_matrices=False)


def rounding_of(operator: Operator, sigma: Float[Tensor, "batch k"]) -> Float[Tensor, " batch"]:
    """How far singular values that were decomposed may be off: the SVD's own error, and that of the products it was made of."""
    known = operator.rounding()
    sides = operator.in_size, operator.out_size
    proved = 0.0 if known is None else min(sides) ** 0.5 * known.error + known.fixed
    return sigma[:, 0].double() * (max(sides) ** 0.5 * operator.noise) + proved


@final
@dataclass(frozen=True)
class DenseSVD:
    """Decompose the matrix in float64. Exact to rounding, so the upper end is certain."""

    def solve(
        self, operator: Operator, tol: float, certify: float | None, seeds: Sequence[int], *, k: int = 1
    ) -> list[Solution]:
        """The `k` top singular pairs of every map of a batch. `tol`, `certify` and `seeds` have nothing to decide here."""
        _, sigma, right = decomposed(operator)
        return [
            Solution(
                values=tuple(s[:k].tolist()),
                uppers=tuple((s[:k] + e).tolist()),
                directions=vh[:k].unflatten(1, operator.in_shape),
                steps=min(operator.in_size, operator.out_size),
                converged=True,
            )
            for s, vh, e in zip(sigma, right, rounding_of(operator, sigma), strict=True)
        ]
