"""How smooth is attention? Certified local Lipschitz constants of attention layers."""

from howsmooth.attention import Attention, LayerNorm, RMSNorm, Rotary
from howsmooth.catalogue import bounds
from howsmooth.errors import HowSmoothError
from howsmooth.local import lipschitz
from howsmooth.models import load
from howsmooth.search import worst_case
from howsmooth.spectral import DenseSVD, Estimate, GolubKahan

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "DenseSVD",
    "Estimate",
    "GolubKahan",
    "HowSmoothError",
    "LayerNorm",
    "RMSNorm",
    "Rotary",
    "bounds",
    "lipschitz",
    "load",
    "worst_case",
]
