"""What attention that is written out has become so far: which vectors its logits are made of, and what was done to them.

A node of a graph is logits, or weights made of them, where `howsmooth.program.logits_steps` can follow it; else it is a plain
tensor. Steps propose a reading; whether it is right, numbers decide (`howsmooth.program.written_out`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.fx import Node

from howsmooth.program.editing import Editor, size
from howsmooth.program.equations import Equation
from howsmooth.program.nodes import name


class NotAttentionError(Exception):
    """What a node does to logits is no part of attention."""


@dataclass(frozen=True, eq=False)
class LazyLogits:
    """Logits `cap·tanh(scale·form(q, k)) + shift + terms`, without the tanh where there is no cap; their weights once there.

    q, k: (…, n, d) and (…, m, d), the same axes in front.  axes: the node's axis i is the logits' `axes[i]`.  terms: each has
    the axes of the logits, or 1; true hides no key where one is boolean.  sink: a column beside the keys, the first or the
    last.  weights: of logits behind that function.  gain, gains: factors of the output.  beside: further weights, added.
    """

    q: Node
    k: Node
    axes: tuple[int, ...]
    form: Literal["product", "distance", "squared"] = "product"
    scale: float = 1.0
    cap: float | None = None
    shift: float = 0.0
    terms: tuple[Node, ...] = ()
    sink: Node | float | None = None
    sink_first: bool = False
    weights: Literal["exp", "softmax", "sigmoid"] | None = None
    gain: float = 1.0
    gains: tuple[Node, ...] = ()
    beside: "tuple[LazyLogits, ...]" = ()

    @property
    def lead(self) -> tuple[int, ...]:
        return size(self.q)[:-2]

    @property
    def n(self) -> int:
        return size(self.q)[-2]

    @property
    def m(self) -> int:
        return size(self.k)[-2]


@dataclass(frozen=True, eq=False)
class LazyRow:
    """The sum of a row of weights, and of `more`."""

    of: LazyLogits
    more: Node | float = 0.0


@dataclass(frozen=True, eq=False)
class LazyParts:
    """The parts that a node cuts logits into along an axis in front."""

    of: LazyLogits
    cut: Callable[[Node, int], Node]


def need(fits: bool) -> None:
    """Leave a node that is not as attention has it."""
    if not fits:
        raise NotAttentionError


class LogitsReader:
    """What is known of the nodes of a graph that were read so far, in order.

    constant: the number that a node of one entry is; with `weights`, also where it depends on those.
    """

    def __init__(self, edit: Editor, constant: Callable[[Node, bool], float | None]):
        self.edit, self._constant = edit, constant
        self.known: dict[Node, LazyLogits | LazyRow | LazyParts] = {}

    def weights(self, n: Node) -> LazyLogits | None:
        """The attention weights that a node is."""
        found = self.known.get(n)
        return found if isinstance(found, LazyLogits) and found.weights in ("softmax", "sigmoid") else None

    def logits(self, n: Any) -> LazyLogits:
        """The logits, or weights, that an argument is."""
        found = self.known.get(n) if isinstance(n, Node) else None
        if not isinstance(found, LazyLogits):
            raise NotAttentionError
        return found

    def before(self, n: Any) -> LazyLogits:
        """Logits, to which one may still do something."""
        found = self.logits(n)
        need(found.weights is None and found.sink is None)
        return found

    def number(self, n: Any, weights: bool = False) -> float | None:
        """A number; with `weights` also one that depends on those, or that fills a tensor."""
        if not isinstance(n, Node):
            return None if n is None or isinstance(n, list | tuple) else float(n)
        if weights and name(n) in ("full_like", "full", "new_full"):
            fill = n.args[2 if name(n) == "new_full" else 1]
            return float(fill) if isinstance(fill, int | float) else None
        return self._constant(n, weights) if math.prod(size(n)) == 1 else None

    def own_axes(self, n: Any, logits: LazyLogits) -> Node:
        """A tensor beside logits, with their axes in their order."""
        need(isinstance(n, Node) and len(size(n)) <= len(logits.axes))
        while len(size(n)) < len(logits.axes):
            n = self.edit.unsqueeze(n, 0)
        return self.edit.permute(n, [logits.axes.index(c) for c in range(len(logits.axes))])

    def arranged(self, eq: Equation, front: list[str], last: list[str]) -> Node:
        """The first operand of an equation with its axes in an order, those in front spread out, the last ones as one."""
        order = [c for c in (*front, *last) if c in eq.left]
        n = self.edit.permute(eq.a, [eq.left.index(c) for c in order])
        for i, c in enumerate(front):
            if c not in eq.left:
                n = self.edit.unsqueeze(n, i)
        n = self.edit.expand(n, [*map(eq.size, front), *size(n)[len(front) :]])
        return self.edit.reshape(n, (*size(n)[: len(front)], math.prod(size(n)[len(front) :])))

    def in_front(self, logits: LazyLogits, lead: tuple[int, ...], f: Callable[[Node], Node]) -> LazyLogits:
        """The same with `f` done to everything along the axes in front, spread out where it is not the same for all."""
        if lead == logits.lead:
            return logits
        count = len(logits.axes) - 2
        need(logits.axes[:-2] == tuple(range(count)))

        def spread(t: Node) -> Node:
            if all(s == 1 for s in size(t)[:-2]):
                return self.edit.reshape(t, (*(1 for _ in lead), *size(t)[-2:]))
            return f(self.edit.expand(t, (*logits.lead, *size(t)[-2:])))

        def change(part: LazyLogits) -> LazyLogits:
            return replace(
                part,
                q=f(part.q),
                k=f(part.k),
                axes=(*range(len(lead)), *(c - count + len(lead) for c in logits.axes[-2:])),
                terms=tuple(map(spread, part.terms)),
                sink=spread(part.sink) if isinstance(part.sink, Node) else part.sink,
                gains=tuple(map(spread, part.gains)),
            )

        return replace(change(logits), beside=tuple(map(change, logits.beside)))
