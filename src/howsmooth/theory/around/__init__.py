"""Bounds around an input: how large a map's Jacobian can be near it, and how far the map can move there."""

from howsmooth.theory.around.attention import Around, AroundAttention, Neighbourhood
from howsmooth.theory.around.graph import Derivatives, output_move, scalar_changes
from howsmooth.theory.around.norms import Certified, around_graph
from howsmooth.theory.around.values import Expansion, Moved, expand

__all__ = [
    "Around",
    "AroundAttention",
    "Certified",
    "Derivatives",
    "Expansion",
    "Moved",
    "Neighbourhood",
    "around_graph",
    "expand",
    "output_move",
    "scalar_changes",
]
