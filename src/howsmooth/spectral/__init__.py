"""The norm of a Jacobian from its products, with both ends; its top singular pairs, and what they leave."""

from howsmooth.spectral.dense import DenseSVD, small
from howsmooth.spectral.estimate import Estimate, Estimates, Solution, Solver, Status
from howsmooth.spectral.golub_kahan import GolubKahan
from howsmooth.spectral.pairs import TopPairs, top_pairs

__all__ = ["DenseSVD", "Estimate", "Estimates", "GolubKahan", "Solution", "Solver", "Status", "TopPairs", "small", "top_pairs"]
