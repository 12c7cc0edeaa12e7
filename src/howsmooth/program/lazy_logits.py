"""What attention that is written out has become so far: which vectors its logits are made of, and what was done to them.

A node of a graph is logits, or weights made of them, where `howsmooth.program.logits_steps` can follow it; else it is a plain
tensor. Steps propose a reading; whether it is right, numbers decide (`howsmooth.program.written_out`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from howsmooth.program.operations import FLATTENS, MATMULS, TURNS, dependents, name, order, shape, value

aten = torch.ops.aten


def permutation(n: Node) -> tuple[int, ...]:
    """The order in which a node that turns axes has those of its first argument."""
    ndim = len(size(n.args[0]))
    turned = n.target(torch.empty(tuple(range(2, 2 + ndim)), device="meta"), *n.args[1:])  # pyright: ignore[reportCallIssue]
    return tuple(s - 2 for s in turned.shape)


def size(n: Any) -> tuple[int, ...]:
    """The shape of a node's tensor, which it must have."""
    found = shape(n)
    assert found is not None
    return found


class Editor:
    """Adds nodes to a graph right behind one of its own (`at`); those that depend on the module's input are `moving`."""

    def __init__(self, graph: Graph, inputs: Sequence[Node]):
        self._graph, self.moving, self._fake = graph, dependents(graph.nodes, inputs), FakeTensorMode()

    def at(self, n: Node) -> None:
        """Put what is added next behind a node."""
        self._last, self._order = n, order(n)

    def before(self, n: Node) -> None:
        """Put what is added next before a node."""
        self._last, self._order = n.prev, order(n)

    def call(self, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> Node:
        """A new node."""
        with self._graph.inserting_after(self._last):
            n = self._graph.call_function(target, args, kwargs)
        if val is None:
            val = self.outcome(n)
        n.meta.update(order=self._order, val=val)
        self._last = n
        if any(m in self.moving for m in n.all_input_nodes):
            self.moving.add(n)
        return n

    def outcome(self, n: Node) -> Any:
        """What a node gives for contiguous tensors: its shape, and where in their memory it is."""
        with self._fake:
            return n.target(*map_arg(n.args, self._blank), **map_arg(dict(n.kwargs), self._blank))  # pyright: ignore

    def blank(self, like: Node, shape: Sequence[int]) -> Tensor:
        """What stands for a tensor of a shape, in the precision and on the device of a node's."""
        with self._fake:
            return torch.empty(shape, dtype=value(like).dtype, device=value(like).device)

    def _blank(self, n: Node) -> Any:
        def one(t: Any) -> Any:
            return torch.empty(t.shape, dtype=t.dtype, device=t.device) if isinstance(t, Tensor) else t

        return tree_map(one, value(n))

    def permute(self, n: Node, perm: Sequence[int]) -> Node:
        """A node with its axes in another order, without turning them twice."""
        perm = tuple(perm)
        while name(n) in TURNS and isinstance(n.args[0], Node):
            before = permutation(n)
            n, perm = n.args[0], tuple(before[p] for p in perm)
        return n if perm == tuple(range(len(perm))) else self.call(aten.permute.default, n, list(perm))

    def swapped(self, n: Node) -> Node:
        """A node with its last two axes exchanged."""
        ndim = len(size(n))
        return self.permute(n, (*range(ndim - 2), ndim - 1, ndim - 2))

    def expand(self, n: Node, wanted: Sequence[int]) -> Node:
        return n if size(n) == tuple(wanted) else self.call(aten.expand.default, n, list(wanted))

    def reshape(self, n: Node, wanted: Sequence[int]) -> Node:
        return n if size(n) == tuple(wanted) else self.call(aten.reshape.default, n, list(wanted))

    def unsqueeze(self, n: Node, axis: int) -> Node:
        return self.call(aten.unsqueeze.default, n, axis)

    def squeeze(self, n: Node, axis: int) -> Node:
        """A node without an axis of one entry."""
        if name(n) == "unsqueeze" and isinstance(n.args[0], Node) and n.args[1] in (axis, axis - len(size(n))):
            return n.args[0]
        return self.call(aten.squeeze.dim, n, axis)

    def times(self, n: Node, factor: Node | float) -> Node:
        return n if isinstance(factor, float) and factor == 1 else self.call(aten.mul.Tensor, n, factor)

    def like(self, n: Node, other: Node) -> Node:
        """A node in the precision of another."""
        dtype = value(other).dtype
        return n if value(n).dtype == dtype else self.call(aten.to.dtype, n, dtype)

    def picked(self, n: Node, index: Sequence[int]) -> Node:
        """Some entries of a node along its first axis."""
        if list(index) == list(range(size(n)[0])):
            return n
        return self.call(aten.index_select.default, n, 0, self.call(torch.tensor, [*index], device=value(n).device))


def unrepeated(n: Node) -> Node | None:
    """The keys or values (batch, kv_heads, m, d) that heads share which a node (batch, heads, m, d) repeats for each."""
    if len(size(n)) != 4:
        return None
    given: Any = n.args[0] if n.op == "call_function" else None
    if name(n) == "repeat_interleave":
        return given if isinstance(n.args[1], int) and (*n.args, None)[2] in (1, -3) else None
    while isinstance(given, Node) and name(given) in ("clone", "contiguous"):
        given = given.args[0]
    if name(n) not in FLATTENS or not isinstance(given, Node) or name(given) != "expand":
        return None
    repeated: Any = given.args[0]
    source: Any = repeated.args[0] if name(repeated) == "unsqueeze" else None
    fits = source is not None and len(size(source)) == 4
    return source if fits and size(repeated) == (*size(source)[:2], 1, *size(source)[2:]) else None


# products


@dataclass(frozen=True)
class Equation:
    """A product `a, b -> out`: its operands, and the letters of their axes and of its own."""

    a: Node
    b: Node
    left: tuple[str, ...]
    right: tuple[str, ...]
    out: tuple[str, ...]

    def turned(self) -> "Equation":
        """An equation with the operands in the other order."""
        return Equation(self.b, self.a, self.right, self.left, self.out)

    def size(self, letter: str) -> int:
        """The length of an axis, which one operand may broadcast."""
        sides = ((self.a, self.left), (self.b, self.right))
        return max((shape(n) or ())[letters.index(letter)] for n, letters in sides if letter in letters)


def equation_of(n: Node) -> Equation | None:
    """The equation of a product of two tensors; nothing where a node is none, or where an axis is repeated.

    The axes that dots stand for, or those in front of matrices, are numbered from behind.
    """
    if name(n) in MATMULS:
        equation, given = "...id,...dj->...ij", n.args[:2]
    elif name(n) == "einsum":
        equation, given = str(n.args[0]).replace(" ", ""), n.args[1]
    else:
        return None
    inputs, arrow, out = equation.partition("->")
    operands, sides = tuple(m for m in given if isinstance(m, Node)), inputs.split(",")  # pyright: ignore
    if not arrow or len(operands) != 2 or len(sides) != 2:
        return None
    ranks = [len(shape(m) or ()) for m in operands]
    counts = [rank - len(side.replace("...", "")) for rank, side in zip(ranks, sides, strict=True)]
    dots = max((c for c, side in zip(counts, sides, strict=True) if "..." in side), default=0)

    def letters(side: str, count: int) -> tuple[str, ...]:
        before, found, behind = side.partition("...")
        return (*before, *(str(dots - count + i) for i in range(count if found else 0)), *behind)

    left, right, whole = letters(sides[0], counts[0]), letters(sides[1], counts[1]), letters(out, dots)
    repeated = any(len(set(side)) != len(side) for side in (left, right, whole))
    return None if repeated or [len(left), len(right)] != ranks else Equation(*operands, left=left, right=right, out=whole)


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
