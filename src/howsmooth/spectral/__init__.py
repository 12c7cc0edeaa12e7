"""The norm of a Jacobian from its products, with both ends."""

from howsmooth.spectral.dense import DenseSVD
from howsmooth.spectral.estimate import Estimate, Estimates, Solution, Solver, Status
from howsmooth.spectral.golub_kahan import GolubKahan

__all__ = ["DenseSVD", "Estimate", "Estimates", "GolubKahan", "Solution", "Solver", "Status"]
