"""The norm of a Jacobian from its products, with both ends."""

from howsmooth.spectral.dense import DenseSVD
from howsmooth.spectral.estimate import Estimate, Estimates
from howsmooth.spectral.golub_kahan import GolubKahan
from howsmooth.spectral.lipschitz import Solver, lipschitz

__all__ = ["DenseSVD", "Estimate", "Estimates", "GolubKahan", "Solver", "lipschitz"]
