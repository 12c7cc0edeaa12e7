"""Small problems: the Jacobian as a matrix, and its singular value decomposition in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from howsmooth.errors import NoConvergenceError
from howsmooth.maps import Operator
from howsmooth.spectral.estimate import Solution


@final
@dataclass(frozen=True)
class DenseSVD:
    """Form the matrix from its products, then LAPACK. Exact to rounding, so the upper end is certain."""

    def solve(self, operator: Operator, tol: float, certify: float | None, seeds: Sequence[int]) -> list[Solution]:
        """The top singular pair of every map of a batch. `tol`, `certify` and `seeds` have nothing to decide here."""
        matrices = operator.dense().double()
        if not bool(matrices.isfinite().all()):
            raise NoConvergenceError("expected a finite Jacobian, got NaN or infinity; measure where the map is differentiable")
        _, sigma, right = torch.linalg.svd(matrices, full_matrices=False)
        # backward error of the SVD, and of the products that made the columns
        slack = max(matrices.shape[1:]) ** 0.5 * operator.noise
        known = operator.rounding()
        error = 0.0 if known is None else min(matrices.shape[1:]) ** 0.5 * known.error + known.fixed
        return [
            Solution(
                value=float(s[0]),
                upper=float(s[0]) * (1 + slack) + error,
                direction=vh[0].reshape(operator.in_shape),
                steps=min(operator.in_size, operator.out_size),
                converged=True,
            )
            for s, vh in zip(sigma, right, strict=True)
        ]
