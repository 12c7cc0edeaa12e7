"""What attention that is written out has become so far: which vectors its logits are made of, and what was done to them.

A node of a graph is logits, or weights made of them, where `howsmooth.program.logits_steps` can follow it; else it is a plain
tensor. Steps propose a reading; whether it is right, numbers decide (`howsmooth.program.written_out`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from howsmooth.program.editing import Editor, Equation, size
from howsmooth.program.operations import name


class NotAttentionError(Exception):
    """What a node does to logits is no part of attention."""


@dataclass(frozen=True, eq=False)
class LazyLogits:
    """Logits `cap·tanh(scale·form(q, k)) + shift + terms`, without the tanh where there is no cap; their weights once there.

    q, k: (…, n, d) and (…, m, d), the same axes in front.  rows, cols: the node's axes of queries and of keys, the others are
    those in front, in order.  terms: each has the axes of the logits, or 1; true hides no key where one is boolean.  sink: a
    column beside the keys, the first or the last.  weights: of logits behind that function.  gains: factors of the output.
    beside: further weights, added.
    """

    q: Node
    k: Node
    rows: int
    cols: int
    form: Literal["product", "distance", "squared"] = "product"
    scale: float = 1.0
    cap: float | None = None
    shift: float = 0.0
    terms: tuple[Node, ...] = ()
    sink: Node | float | None = None
    sink_first: bool = False
    weights: Literal["exp", "softmax", "sigmoid"] | None = None
    gains: tuple[Node | float, ...] = ()
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

    @property
    def order(self) -> tuple[int, ...]:
        """The node's axes: those in front, that of queries, that of keys."""
        return (*(c for c in range(len(self.lead) + 2) if c not in (self.rows, self.cols)), self.rows, self.cols)

    @property
    def keys_last(self) -> bool:
        """Whether the node's last axis is that of keys."""
        return self.cols == len(self.lead) + 1


@dataclass(frozen=True, eq=False)
class LazyRow:
    """The sum of a row of weights, and of `more`."""

    of: LazyLogits
    more: Node | float = 0.0


def need(fits: bool) -> None:
    """Leave a node that is not as attention has it."""
    if not fits:
        raise NotAttentionError


class LogitsReader:
    """What is known of the nodes of a graph that were read so far, in order; of one that gives several, of each of them.

    constant: the number that a node of one entry is; with `weights`, also where it depends on those.
    """

    def __init__(self, edit: Editor, constant: Callable[[Node, bool], float | None]):
        self.edit, self._constant = edit, constant
        self.known: dict[Node, LazyLogits | LazyRow | tuple[LazyLogits, ...]] = {}

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
        need(isinstance(n, Node) and len(size(n)) <= len(logits.order))
        while len(size(n)) < len(logits.order):
            n = self.edit.unsqueeze(n, 0)
        return self.edit.permute(n, logits.order)

    def arranged(self, eq: Equation, front: list[str], last: list[str]) -> Node:
        """The first operand of an equation with its axes in an order, those in front spread out, the last ones as one."""
        order = [c for c in (*front, *last) if c in eq.left]
        n = self.edit.permute(eq.a, [eq.left.index(c) for c in order])
        for i, c in enumerate(front):
            if c not in eq.left:
                n = self.edit.unsqueeze(n, i)
        n = self.edit.expand(n, [*map(eq.size, front), *size(n)[len(front) :]])
        return self.edit.reshape(n, (*size(n)[: len(front)], math.prod(size(n)[len(front) :])))

    def spread(self, n: Node, lead: tuple[int, ...]) -> Node:
        """A node (…, n, d) the same for all along axes in front."""
        return self.edit.expand(n, (*lead, *size(n)[-2:]))

    def view(self, logits: LazyLogits, before: Tensor, after: Tensor) -> LazyLogits:
        """Logits whose entries lie in other places, or some of them.

        before, after: tensors that share memory as the nodes do; strides say which entries of the one are those of the other.
        """
        axes, ends = list(range(after.ndim)), dict[int, int]()
        for axis, sizes in ((logits.cols, (before.shape[logits.cols], logits.m)), (logits.rows, (logits.n,))):
            alike = {d for d in axes if after.stride(d) == before.stride(axis) or after.shape[d] == 1}
            places = [d for d in axes if d in alike and after.shape[d] in sizes]
            need(bool(places))
            ends[axis] = places[-1]
            axes.remove(places[-1])
        place = torch.tensor(after.storage_offset())  # of the first logit of everything in front
        for d in axes:
            place = place[..., None] + after.stride(d) * torch.arange(after.shape[d])
        first = torch.unravel_index(place, before.shape)
        less = after.shape[ends[logits.cols]] < before.shape[logits.cols]  # without the sink
        need(bool((first[logits.rows] == 0).all() & (first[logits.cols] == int(less and logits.sink_first)).all()))
        need(not less or (logits.weights == "softmax" and before.shape[logits.cols] == logits.m + 1))
        index = torch.zeros_like(place)
        for axis in logits.order[:-2]:
            index = index * before.shape[axis] + first[axis]
        moved = replace(logits, rows=ends[logits.rows], cols=ends[logits.cols])
        lead, entries = tuple(after.shape[d] for d in axes), index.flatten().tolist()
        if lead == logits.lead and entries == list(range(math.prod(lead))):
            return moved

        def pick(t: Node) -> Node:
            flat = self.edit.reshape(t, (math.prod(logits.lead), *size(t)[-2:]))
            return self.edit.reshape(self.edit.picked(flat, entries), (*lead, *size(t)[-2:]))

        return self.in_front(moved, lead, pick)

    def in_front(self, logits: LazyLogits, lead: tuple[int, ...], f: Callable[[Node], Node]) -> LazyLogits:
        """Logits with `f` done to everything along the axes in front, spread out where it is not the same for all."""

        def some(t: Any) -> Any:
            if not isinstance(t, Node):
                return t
            if any(s > 1 for s in size(t)[:-2]):
                return f(self.spread(t, logits.lead))
            return self.edit.reshape(t, (*(1 for _ in lead), *size(t)[-2:]))

        def change(part: LazyLogits) -> LazyLogits:
            terms, gains = (tuple(map(some, t)) for t in (part.terms, part.gains))
            return replace(part, q=f(part.q), k=f(part.k), terms=terms, sink=some(part.sink), gains=gains)

        return replace(change(logits), beside=tuple(map(change, logits.beside)))
