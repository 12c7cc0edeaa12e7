"""How smooth is attention? Certified local Lipschitz constants of attention layers."""

from howsmooth.attention import Attention, LayerNorm, RMSNorm, Rotary
from howsmooth.catalogue import bounds
from howsmooth.errors import HowSmoothError
from howsmooth.local import lipschitz
from howsmooth.measures.measure import Measure
from howsmooth.measures.wasserstein import wasserstein
from howsmooth.models import load
from howsmooth.report.inspect import inspect
from howsmooth.search import worst_case
from howsmooth.spectral import DenseSVD, Estimate, GolubKahan
from howsmooth.splitting import splitting
from howsmooth.studies.growth import growth

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "DenseSVD",
    "Estimate",
    "GolubKahan",
    "HowSmoothError",
    "LayerNorm",
    "Measure",
    "RMSNorm",
    "Rotary",
    "bounds",
    "growth",
    "inspect",
    "lipschitz",
    "load",
    "splitting",
    "wasserstein",
    "worst_case",
]
