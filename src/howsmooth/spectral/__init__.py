"""The norm of a Jacobian from its products, with both ends; its top singular pairs, and what they leave."""

from howsmooth.spectral.dense import SMALL, DenseSVD, small
from howsmooth.spectral.estimate import Estimate, Estimates, Solution, Solver, Status
from howsmooth.spectral.golub_kahan import GolubKahan
from howsmooth.spectral.pairs import TopPairs, norm_above, top_pairs

__all__ = [
    "SMALL",
    "DenseSVD",
    "Estimate",
    "Estimates",
    "GolubKahan",
    "Solution",
    "Solver",
    "Status",
    "TopPairs",
    "norm_above",
    "small",
    "top_pairs",
]
