"""How smooth is attention? Certified local Lipschitz constants of attention layers."""

from howsmooth.errors import HowSmoothError
from howsmooth.kernels import kinds, sdpa
from howsmooth.maps import Attention, Jacobian, LayerNorm, Map, RMSNorm, Rotary
from howsmooth.measures import Distance, Gaussian, Measure, wasserstein
from howsmooth.models import Capture, Measurement, Measurements, Model, load, patch, use_sdpa
from howsmooth.report import Report, inspect
from howsmooth.search import Ball, BallAround, Ellipsoid, Radius, WorstCase
from howsmooth.spectral import DenseSVD, Estimate, Estimates, GolubKahan
from howsmooth.study import Growth, certified_radius, growth
from howsmooth.theory import Bound, Bounds, Splitting
from howsmooth.training import Check, Clipped, SmoothnessPenalty, Tracker, WarmStart, clip_, smoothness
from howsmooth.verbs import bounds, jacobian, lipschitz, lipschitz_batch, splitting, worst_case

__version__ = "0.2.0"
__all__ = [
    "Attention",
    "Ball",
    "BallAround",
    "Bound",
    "Bounds",
    "Capture",
    "Check",
    "Clipped",
    "DenseSVD",
    "Distance",
    "Ellipsoid",
    "Estimate",
    "Estimates",
    "Gaussian",
    "GolubKahan",
    "Growth",
    "HowSmoothError",
    "Jacobian",
    "LayerNorm",
    "Map",
    "Measure",
    "Measurement",
    "Measurements",
    "Model",
    "RMSNorm",
    "Radius",
    "Report",
    "Rotary",
    "SmoothnessPenalty",
    "Splitting",
    "Tracker",
    "WarmStart",
    "WorstCase",
    "bounds",
    "certified_radius",
    "clip_",
    "growth",
    "inspect",
    "jacobian",
    "kinds",
    "lipschitz",
    "lipschitz_batch",
    "load",
    "patch",
    "sdpa",
    "smoothness",
    "splitting",
    "use_sdpa",
    "wasserstein",
    "worst_case",
]
