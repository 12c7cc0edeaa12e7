"""What an operation is for a bound: linear, a product, a softmax, a norm or a scalar function, by its aten name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from howsmooth.maps.scalars import known_scalar
from howsmooth.program.operations import value
from howsmooth.program.pieces import Kind, Piece, norm_pieces

_LINEAR = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze",
    "squeeze", "clone", "alias", "detach", "cat", "stack", "split", "split_with_sizes", "unbind", "chunk", "add", "sub", "rsub",
    "neg", "scaled add", "sum", "mean", "index", "index_select", "gather", "where", "masked_fill", "_to_copy",
    "constant_pad_nd", "copy", "lift_fresh", "roll", "flip", "contiguous", "unfold", "narrow", "positive", "flatten",
}  # fmt: skip
_MATRIX = {"mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "dot"}
_SCALAR = {"gelu", "silu", "relu", "tanh", "sigmoid", "erf", "exp", "pow", "rsqrt", "sqrt", "reciprocal", "square"}
_SPELLED = _SCALAR | {"mul", "add", "sub", "rsub", "div", "neg", "clone", "_to_copy", "alias", "detach"}
# of these arguments, those that choose: they may not move
_CHOOSING = {"where": slice(0, 1), "index": slice(1, None), "index_select": slice(2, None), "gather": slice(2, None),
             "masked_fill": slice(1, 2)}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """An aten operation with its arguments, nodes where they move.

    name: torch's, changed where arguments make another operation of it.  moving: the nodes among its arguments.  bilinear: a
    product of two matrices that move, scaled and added to what does not.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    moving: tuple[Node, ...]
    bilinear: bool = False

    @classmethod
    def of(cls, n: Node, known: Mapping[Node, Any]) -> "Operation":
        """The operation of a node. known: what the nodes give that do not move."""
        target: Any = n.target
        args, kwargs = map_arg((n.args, dict(n.kwargs)), lambda m: known.get(m, m))
        moving = tuple(t for t in tree_leaves((args, kwargs)) if isinstance(t, Node))
        name = target._schema.name.partition("::")[2]
        both = name in ("addmm", "baddbmm") and [isinstance(a, Node) for a in args[:3]] == [False, True, True]
        if kwargs.get("rounding_mode") is not None:
            name = "rounded " + name
        elif target is torch.ops.aten.view.dtype or target.namespace != "aten" or target._schema.is_mutable:
            name = str(target)
        elif kwargs.get("alpha", 1) != 1 and not both:
            name = "scaled add" if name in ("add", "sub", "rsub") else "scaled " + name
        return cls(name, target, args, kwargs, moving, both)

    def run(self, *values: Any) -> Any:
        """What it gives where values stand for what moves."""
        given = dict(zip(self.moving, values, strict=True))
        args, kwargs = map_arg((self.args, self.kwargs), given.__getitem__)
        return args[0].clone() if self.name == "detach" else self.target(*args, **kwargs)

    @property
    def kind(self) -> Kind:
        """What it is in those of its arguments that move."""
        name, args = self.name, self.args
        if name in _LINEAR:
            chosen = args[_CHOOSING[name]] if name in _CHOOSING else ()
            return "unknown" if any(isinstance(a, Node) for a in tree_leaves(chosen)) else "linear"
        if name in ("mul", "div"):
            if len(self.moving) == 1:
                return "linear" if name == "mul" or isinstance(args[0], Node) else "unknown"
            return "product" if name == "mul" else "unknown"
        if name.removeprefix("scaled ") in _MATRIX:
            if not all(isinstance(a, Node) for a in args[-2:]):
                return "linear"
            return "matrix product" if name in ("mm", "bmm") else "unknown"
        if name in ("_softmax", "_safe_softmax"):
            return "softmax"
        return "pointwise" if name in _SCALAR and len(self.moving) == 1 else "unknown"

    @property
    def constant(self) -> Any:
        """The matrix on the right of rows that move, or the factor of every entry."""
        name, args = self.name, self.args
        if name in ("mm", "addmm") and [isinstance(a, Node) for a in args] == [*(len(args) - 2) * [False], True, False]:
            return args[-1]
        if name == "mul":
            return args[1] if isinstance(args[0], Node) else args[0]
        return 1 / args[1] if name == "div" and isinstance(args[0], Node) else None


def pieces_for(op: Operation, n: Node, inputs: tuple[int, ...], before: Sequence[Piece]) -> list[Piece]:
    """The pieces that an operation of one output is, the last of which gives it.

    inputs: the pieces of what moves among its arguments.  before: all pieces that there are.  What does not give the precision
    of the input rounds or compares, and jumps.
    """
    shape, fits = tuple(value(n).shape), value(n).dtype is torch.float64
    if op.bilinear:
        product = Piece("matrix product", "matmul", inputs, torch.matmul, shape)
        return [product, Piece("linear", op.name, (len(before),), _scaled(op), shape)]
    kind = op.kind if fits else "unknown"
    axis = op.args[1] - (len(shape) if op.args[1] >= 0 else 0) if kind == "softmax" else -1
    numbers = all(not isinstance(t, Tensor) or t.numel() == 1 for t in tree_leaves((op.args, op.kwargs)))
    alike = fits and op.name in _SPELLED and numbers and all(before[i].shape == shape for i in inputs)
    scalar = known_scalar(op.run) if kind == "pointwise" and alike else None
    constant = op.constant if kind == "linear" else None
    return [Piece(kind, op.name, inputs, op.run, shape, axis=axis, scalar=scalar, alike=alike, constant=constant)]


def part_of(op: Operation, n: Node, index: int, inputs: tuple[int, ...], several: int, first: int) -> list[Piece]:
    """The pieces that one of several tensors is which an operation gives; norms of one axis by what they normalise.

    several: the place of the operation.  first: that of the first of the pieces.
    """
    part = value(n)
    shape = tuple(getattr(part, "shape", ()))
    if op.name == "native_layer_norm" and isinstance(op.args[0], Node) and len(inputs) == len(op.args[1]) == 1:
        if index == 0:
            weight, bias, eps = op.args[2:]
            return norm_pieces("layer_norm", inputs[0], first, shape, True, eps, weight, bias)
        return [Piece("unknown", op.name, (several,), lambda t: t[index], shape)]
    kind = op.kind if getattr(part, "dtype", None) is torch.float64 else "unknown"
    return [Piece(kind, op.name, (several,), lambda t: t[index], shape)]


def _scaled(op: Operation) -> Callable[[Tensor], Tensor]:
    """What `addmm` does with a product of matrices."""
    beta, alpha, added = op.kwargs.get("beta", 1), op.kwargs.get("alpha", 1), op.args[0]
    return lambda t: alpha * t if beta == 0 else beta * added + alpha * t
