"""One walk through the graph of a function around an input: how far every node can move, and what those that bend make of it.

Every node gives `f_v(Y) = f_v(X) + J_v Δ + Σ_u G_uv e_u`, where `Δ = Y − X`, `J_v` and `G_uv` are derivatives at `X` and
`e_u` is what node `u` alone adds beyond its own first order. Derivatives are formed where the function is small (`values`), or
known by their norms (`norms`). Proofs: docs/explanation/around-blocks.md §3 and §4.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.program.pieces import Pieces
from howsmooth.theory.around.attention import Neighbourhood
from howsmooth.theory.around.pieces import Bend, Entered, rule
from howsmooth.theory.upper import Upper


@dataclass(frozen=True)
class Reach:
    """How far a node can move, and how far its derivative by the input goes.

    rows: length of every token's move, (n,), nothing where tokens are not its rows.  entries: of every entry, where known.
    slope: of the derivative by the input, from the nodes before it one by one.
    """

    rows: Upper | None
    entries: Upper | None = None
    slope: Upper = field(default_factory=lambda: Upper(math.inf))


@dataclass(frozen=True)
class NearNodes:
    """Nodes that are not linear, and how far every node can move."""

    bends: dict[int, Bend]
    reach: list[Reach]


class Derivatives(ABC):
    """Derivatives of a graph at an input, and what they say of its nodes around it.

    bends: the nodes that are not linear.  confidence: of all that is said, together.
    """

    graph: Pieces
    bends: list[int]

    @property
    @abstractmethod
    def confidence(self) -> float: ...

    @abstractmethod
    def entered(self, i: int, near: NearNodes, area: Neighbourhood) -> list[Entered]:
        """What enters a node that is not linear, from those before it."""

    def bend(self, i: int, entered: list[Entered]) -> Bend:
        """A node that is not linear, around what enters it."""
        return rule(self.graph.nodes[i]).bend(self.graph.nodes[i], entered)

    def reach(self, i: int, near: NearNodes, area: Neighbourhood) -> Reach:
        """How far a node can move by those before it alone."""
        return Reach(None)

    @abstractmethod
    def moved(self, near: NearNodes, area: Neighbourhood) -> float:
        """How far the output can move, in length."""

    @abstractmethod
    def changes(self, near: NearNodes, area: Neighbourhood) -> Float[Tensor, " outputs"]:
        """How far every output can fall."""


@torch.no_grad()
def spread(known: Derivatives, area: Neighbourhood) -> NearNodes:
    """How far every node can move, and what those that are not linear make of it."""
    near = NearNodes({}, [Reach(Upper(area.radii), None, Upper(1.0))])
    for i in range(1, known.graph.output + 1):
        if i in known.bends:
            near.bends[i] = known.bend(i, known.entered(i, near, area))
        near.reach.append(known.reach(i, near, area))
    return near


def output_move(known: Derivatives, area: Neighbourhood) -> float:
    """How far the output of a graph can move, in length."""
    return known.moved(spread(known, area), area)


@torch.no_grad()
def scalar_changes(known: Derivatives, area: Neighbourhood) -> Float[Tensor, " outputs"]:
    """How far every output of a graph with few of them, such as margins, can fall."""
    return known.changes(spread(known, area), area)
