"""Linear maps by their products, and the norm of one from them with both ends; its top singular pairs, and what they leave."""

from howsmooth.spectral.dense import DenseSVD, small
from howsmooth.spectral.estimate import Estimate, Estimates, Solution, Solver, Status
from howsmooth.spectral.golub_kahan import GolubKahan
from howsmooth.spectral.matrices import eig, eigh, largest_eigenvalue, led_to, spectral_norm, svd, top_eigenvalue
from howsmooth.spectral.operator import Composed, Operator, Weighted, inner
from howsmooth.spectral.pairs import TopPairs, norm_upper, top_pairs

__all__ = [
    "Composed",
    "DenseSVD",
    "Estimate",
    "Estimates",
    "GolubKahan",
    "Operator",
    "Solution",
    "Solver",
    "Status",
    "TopPairs",
    "Weighted",
    "eig",
    "eigh",
    "inner",
    "largest_eigenvalue",
    "led_to",
    "norm_upper",
    "small",
    "spectral_norm",
    "svd",
    "top_eigenvalue",
    "top_pairs",
]
