"""Maps on token sequences, and their Jacobians as products."""

from howsmooth.maps.attention import Attention
from howsmooth.maps.base import Composition, Map
from howsmooth.maps.jacobian import AttentionJacobian, AutodiffJacobian
from howsmooth.maps.norms import LayerNorm, NormJacobian, RMSNorm
from howsmooth.maps.products import Jacobian
from howsmooth.maps.rotary import Rotary

__all__ = [
    "Attention",
    "AttentionJacobian",
    "AutodiffJacobian",
    "Composition",
    "Jacobian",
    "LayerNorm",
    "Map",
    "NormJacobian",
    "RMSNorm",
    "Rotary",
]
