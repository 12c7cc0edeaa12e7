"""Linear maps by their products, and from them norms with both ends, top singular pairs and what these leave."""

from howsmooth.spectral.dense import DenseSVD, small
from howsmooth.spectral.estimate import Estimate, Estimates, Solution, Solver, Status
from howsmooth.spectral.golub_kahan import GolubKahan
from howsmooth.spectral.matrices import eig, eigh, largest_eigenvalue, led_to, spectral_norm, svd, top_eigenvalue
from howsmooth.spectral.operator import Composed, Operator, Weighted, inner
from howsmooth.spectral.pairs import TopPairs, norm_upper, top_pairs
from howsmooth.spectral.spectrum import AttainedValues, Spectrum, attained_values, narrow, width_of_run
from howsmooth.spectral.trace import Gain, GaussianProbes, dense_gains, probed_gains

__all__ = [
    "AttainedValues",
    "Composed",
    "DenseSVD",
    "Estimate",
    "Estimates",
    "Gain",
    "GaussianProbes",
    "GolubKahan",
    "Operator",
    "Solution",
    "Solver",
    "Spectrum",
    "Status",
    "TopPairs",
    "Weighted",
    "attained_values",
    "dense_gains",
    "eig",
    "eigh",
    "inner",
    "largest_eigenvalue",
    "led_to",
    "narrow",
    "norm_upper",
    "probed_gains",
    "small",
    "spectral_norm",
    "svd",
    "top_eigenvalue",
    "top_pairs",
    "width_of_run",
]
