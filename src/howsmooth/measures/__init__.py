"""Probability measures and the distances between them."""

from howsmooth.measures.measure import Gaussian, Measure
from howsmooth.measures.transport import Distance, wasserstein

__all__ = ["Distance", "Gaussian", "Measure", "wasserstein"]
