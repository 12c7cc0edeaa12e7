"""The norm of a Jacobian from its products, with both ends."""

from howsmooth.spectral.dense import DenseSVD
from howsmooth.spectral.estimate import Estimate, Estimates, Status
from howsmooth.spectral.golub_kahan import GolubKahan
from howsmooth.spectral.solution import Solution, Solver

__all__ = ["DenseSVD", "Estimate", "Estimates", "GolubKahan", "Solution", "Solver", "Status"]
