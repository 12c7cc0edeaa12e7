"""New nodes in a recorded graph, and products of two tensors as equations.

Each new node knows its value's shape, and has the place of the node that it comes right behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
