"""Probability measures and the distances between them."""

from howsmooth.measures.gaussian import Gaussian
from howsmooth.measures.measure import Measure
from howsmooth.measures.wasserstein import Distance

__all__ = ["Distance", "Gaussian", "Measure"]
