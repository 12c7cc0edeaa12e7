"""A stretch of a recorded run between two nodes, as a function whose entries are told apart.

Which entries of a node make which head's query of which token is an index tensor. It is carried back through nodes that only
move entries by sending labels through them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.fx import Node

from howsmooth.program.flow import Flow
from howsmooth.program.operations import shape, value
from howsmooth.program.replay import Way
from howsmooth.spectral.operator import drawn, stream

FORMULA = 1e-9  # agreement in float64 that only the same formula, evaluated another way, gives

Values = Callable[[set[Node]], dict[Node, Any]]


def off(ours: Tensor, theirs: Tensor) -> float:
    """How far two tensors are apart, relative to the largest entry; infinite where they are not to be compared."""
    if ours.shape != theirs.shape:
        return math.inf
    error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return 0.0 if error == 0 else error / size if size > 0 and math.isfinite(error) else math.inf


def agree(ours: Tensor, theirs: Tensor, tolerance: float = FORMULA) -> bool:
    """Whether two tensors are the same up to rounding."""
    return off(ours, theirs) <= tolerance


def random_tensor(*size: int, like: Tensor, name: str = "probe") -> Tensor:
    """Normal random numbers in float64, the same each time."""
    return drawn(size, stream(0, name, like.device), torch.float64)


@dataclass(frozen=True, eq=False)
class Stretch:
    """The function from one node to another; what else its nodes read stays as it is."""

    way: Way
    known: Mapping[Node, Any]

    def __call__(self, t: Tensor) -> Tensor:
        """What the end gives where the start gives `t`, whose shape may be another of as many entries."""
        return self.way.follow(self.known, (t.reshape(shape(self.way.enter[0]) or ()),), torch.float64)[0]

    @property
    def numel(self) -> int:
        """How many entries the start has."""
        return math.prod(shape(self.way.enter[0]) or ())

    @property
    def real(self) -> bool:
        """Whether both ends are real numbers."""
        return all(isinstance(t := value(n), Tensor) and t.is_floating_point() for n in (*self.way.enter, *self.way.leave))

    def of_entries(self, into: Int[Tensor, "*axes"], out: Int[Tensor, "*others"]) -> Callable[[Tensor], Tensor]:
        """Some entries of the end as a function of some of the start, the others of which are one."""

        def f(z: Tensor) -> Tensor:
            flat = torch.ones(self.numel, dtype=z.dtype, device=z.device)
            return self(flat.index_put((into,), z.expand(into.shape))).reshape(-1)[out]

        return f

    def moved(self, like: Tensor) -> Int[Tensor, "*axes"] | None:
        """Where every entry of the end lies in the start, where the stretch does no more than move entries."""
        if not self.real:
            return None
        labels = torch.arange(1, self.numel + 1, dtype=torch.float64, device=like.device)
        marked = self(labels)
        if not bool(((marked >= 1) & (marked <= self.numel) & (marked == marked.round())).all()):
            return None
        return marked.long() - 1 if torch.equal(self(-labels), -marked) else None


@dataclass(frozen=True, eq=False)
class PartOfRun:
    """A part of a program at one input: what moves with the input, and the values of what does not."""

    flow: Flow
    known: Mapping[Node, Any]

    @classmethod
    def of(cls, flow: Flow, start: Node, end: Node, values: Values, *more: Node) -> "PartOfRun":
        """The part between two nodes; `more` nodes are evaluated with it."""
        return cls(flow, values({start, *Way.of(flow, (start,), (end,), check=False).beside, *more}))

    def between(self, start: Node, end: Node) -> Stretch:
        """The stretch from one node to another."""
        return Stretch(Way.of(self.flow, (start,), (end,), check=False), self.known)


def features_last(n: Node, tokens: int) -> Int[Tensor, "tokens features"] | None:
    """The entries of a node by token and feature, the features on the last axis that leaves as many tokens."""
    size = shape(n) or ()
    for axis in reversed(range(len(size))):
        if size[axis] * tokens == math.prod(size):
            return torch.arange(math.prod(size)).reshape(size).movedim(axis, -1).reshape(tokens, size[axis])
    return None


def heads_of(n: Node, like: Tensor) -> Int[Tensor, "heads n d"]:
    """The entries of an operand of attention by head, token and feature."""
    size = value(n).shape
    return torch.arange(math.prod(size), device=like.device).reshape(-1, *size[-2:])


def unmoved(
    part: PartOfRun, waists: Sequence[Node], layout: Int[Tensor, "heads n d"], like: Tensor
) -> tuple[int, Int[Tensor, "kept n d"]]:
    """Back from the last node as far as entries are only moved: which node that is, and the heads' entries there, each once."""
    at = len(waists) - 1
    while at and (index := part.between(waists[at - 1], waists[at]).moved(like)) is not None:
        layout, at = distinct(index.reshape(-1)[layout])[0], at - 1
    return at, layout


def distinct(layout: Int[Tensor, "heads n d"]) -> tuple[Int[Tensor, "kept n d"], int]:
    """The heads that are made of other entries than the one before, and how many in a row share theirs."""
    last = (layout[1:] == layout[:-1]).flatten(1).all(1).tolist()
    group = next((i + 1 for i, same in enumerate(last) if not same), len(layout))
    if len(layout) % group or not torch.equal(layout[::group].repeat_interleave(group, 0), layout):
        return layout, 1
    return layout[::group], group
