"""Maps on token sequences: attention, norms, and their compositions."""

from howsmooth.attention.layer import Attention
from howsmooth.attention.maps import Composition, Map
from howsmooth.attention.norms import LayerNorm, RMSNorm
from howsmooth.attention.rotary import Rotary

__all__ = ["Attention", "Composition", "LayerNorm", "Map", "RMSNorm", "Rotary"]
