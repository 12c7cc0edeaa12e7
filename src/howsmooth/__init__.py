"""How smooth is attention? Certified local Lipschitz constants of attention layers."""

from howsmooth.errors import HowSmoothError
from howsmooth.kernels import kinds, sdpa, varlen
from howsmooth.maps import Attention, LayerNorm, Map, RMSNorm, Rotary
from howsmooth.measures import Gaussian, Measure, wasserstein
from howsmooth.models import Capture, Lens, Model, load, patch, use_sdpa
from howsmooth.parallel import context_parallel
from howsmooth.report import inspect
from howsmooth.search import Ball, BallAround, Ellipsoid
from howsmooth.spectral import DenseSVD, Estimate, Gain, GolubKahan, Spectrum
from howsmooth.study import certified_radius, growth
from howsmooth.training import SmoothnessPenalty, Tracker, WarmStart, clip_, smoothness
from howsmooth.verbs import bounds, gain, jacobian, lipschitz, lipschitz_batch, splitting, worst_case

__version__ = "0.2.0"
__all__ = [
    "Attention",
    "Ball",
    "BallAround",
    "Capture",
    "DenseSVD",
    "Ellipsoid",
    "Estimate",
    "Gain",
    "Gaussian",
    "GolubKahan",
    "HowSmoothError",
    "LayerNorm",
    "Lens",
    "Map",
    "Measure",
    "Model",
    "RMSNorm",
    "Rotary",
    "SmoothnessPenalty",
    "Spectrum",
    "Tracker",
    "WarmStart",
    "bounds",
    "certified_radius",
    "clip_",
    "context_parallel",
    "gain",
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
    "varlen",
    "wasserstein",
    "worst_case",
]


def __dir__() -> list[str]:
    """The public names; rooms are imported by their own."""
    return __all__
