"""A part of a recorded run, or a function, as pieces that bounds around an input are known of, in float64.

The operations that torch makes of others are taken apart by torch's own tracer; norms and scalar functions that are spelled out
are put together again. What the pieces give is compared with what they were read from, at the input and beside it.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.maps.attention import Attention
from howsmooth.maps.scalars import known_scalar
from howsmooth.program.confirm import Function, moving_with, record_function
from howsmooth.program.ends import Ends
from howsmooth.program.operations import SHAPE_ALONE, is_float, name, taken_from, takes_numbers, value
from howsmooth.program.pieces import Kind, Piece, Pieces, joined, norm_pieces, pruned
from howsmooth.program.replay import Run, Segment, Way, called
from howsmooth.program.tracing import Flow, Program, trace

_BESIDE = (0.0, 1e-3, 0.3)  # how far beside its input a function is compared, relative to it
_AGREE = 1e-7  # float32 constants inside a model, grown by its layers, explain no more
_CAST = 2.0**-23  # of the largest number on the way: what a cast to float32 that is left out explains
_READS = (
    "expected a function that runs the same way for every input, got one that reads a number off it on the way; "
    "write choices as torch operations"
)


@dataclass(frozen=True, eq=False)
class WholeLayer:
    """A layer that is taken whole: it stands for all that a program does from one node to another."""

    enter: Node
    leave: Node
    layer: Attention


@torch.no_grad()
def read(
    program: Program,
    ends: Ends,
    layers: Iterable[WholeLayer] = (),
    *,
    run: Run | None = None,
    truth: Callable[[Tensor], Tensor] | None = None,
    within: float = 0.0,
) -> Pieces:
    """A map of a program as pieces, of tokens (n, d) in float64; refused where a piece is not known.

    ends: where it begins and ends; several nodes are one input, or output, of stacked rows.  layers: those taken whole.
    run: at which input, the recording's by default.  truth: what the pieces must agree with, the program's own operations by
    default.  within: how far tokens will move; the two are compared there too.
    """
    if ends.through:
        raise BadInputError("expected a map of all ways from its input, got one of some; measure it at the input")
    between = ends.flow.between(ends.enter, ends.leave)
    wholes = [w for w in layers if w.leave in between]
    way = _way(ends, wholes)
    _check_read(program, ends, way, wholes)
    run = (run or Run.recorded(program)).at(torch.float64)
    segment = way.at(run)
    start = torch.cat([t if t.ndim < 3 else t.flatten(0, -2) for t in segment.start[: len(ends.enter)]])
    with sdpa_kernel(SDPBackend.MATH):
        entering = start, segment.start[len(ends.enter) :]
        code = make_fx(_replay(ends, segment), _error_on_data_dependent_ops=False)(*entering)
        pieces = pruned(joined(_PieceReader(code, wholes).pieces()))
        strange = next((piece.name for piece in pieces.nodes if piece.kind == "unknown"), None)
        if strange is not None:
            raise BadFunctionError(
                f"expected linear operations, products, softmax, norms and known activations, got {strange}; "
                "measure a part of the function without it"
            )
        casts = sum(
            _dtype(n) is torch.float32 and any(_dtype(m) is torch.float64 for m in n.all_input_nodes) for n in way.nodes
        )
        pieces = replace(pieces, rounding=pieces.rounding + _CAST * casts)
        check_agrees(pieces, truth or _own(run, ends), _beside(start, within))
    return pieces


def read_function(
    f: Callable[[Tensor], Any],
    x: Tensor,
    layers: Sequence[Attention] = (),
    *,
    truth: Callable[[Tensor], Tensor] | None = None,
    within: float = 0.0,
    closed: bool = True,
) -> Pieces:
    """A function of tokens in float64 as pieces, once its recording is confirmed.

    layers: those that are taken whole; `f` gives what enters and what leaves each of them in turn, and then its value.
    closed: whether it makes its own tensors in every call, so that constants may not differ between two inputs.

    >>> [piece.name for piece in read_function(lambda t: torch.tanh(t) * t, torch.ones(2, 3).double()).nodes]
    ['input', 'tanh', 'mul']
    """
    program = record_function(f, x)
    if closed:
        _check_constants(program, _beside(x, 0.0)[1])
    flow, (*ends, y) = moving_with(program), program.outputs
    wholes = [WholeLayer(a, b, layer) for a, b, layer in zip(ends[::2], ends[1::2], layers, strict=True)]
    own = truth or (f if not layers else lambda t: f(t)[-1])
    return read(program, Ends(program.inputs, (y,), flow), wholes, truth=own, within=within)


def _check_constants(program: Program, beside: Tensor) -> None:
    """Refuse constants that are others at another input: numbers of it, which may be read off unnoticed."""
    assert isinstance(program.module, Function)
    ours = program.constants
    versions = [t._version for t in ours]
    theirs = trace(program.module, (beside,), whole=not program.module.derived).constants
    same = (
        versions == [t._version for t in ours]
        and len(ours) == len(theirs)
        and all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ours, theirs, strict=True))
    )
    if not same:
        raise BadFunctionError(_READS)


def _beside(x: Tensor, within: float) -> list[Tensor]:
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
    size = float(x.abs().mean()) or 1.0
    points = [x + share * size * step for share in _BESIDE]
    if within > 0:
        points += [x + sign * within * step / step.norm(dim=-1, keepdim=True) for sign in (1, -1)]
    return points


@torch.no_grad()
def check_agrees(pieces: Pieces, f: Callable[[Tensor], Tensor], points: Sequence[Tensor]) -> None:
    """Refuse pieces that do not give what `f` gives at some points."""
    truths = [f(at.clone()) for at in points]
    size = max(float(y.abs().max()) for y in truths)
    for at, truth in zip(points, truths, strict=True):
        found = pieces.values(at)
        error = float((found[pieces.output].reshape(truth.shape) - truth).abs().max())
        sizes = [
            float(t.abs().max()) for t in tree_leaves(found) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()
        ]
        largest = max((size for size in sizes if size < math.inf), default=0.0)  # what a mask hides is minus infinity
        if not error <= _AGREE * max(size, 1e-300) + pieces.rounding * largest:
            raise BadFunctionError(
                f"expected a function that torch's operations on its input describe, got one that they miss by {error:.1e}; "
                "look for values taken out of the graph"
            )


def _way(ends: Ends, layers: Sequence[WholeLayer] = ()) -> Way:
    """The way of a map around layers that are taken whole: it ends where they begin, and begins again where they end."""
    flow = Flow(ends.flow.program, (*ends.enter, *(w.leave for w in layers)))
    return Way.of(flow, flow.begins, (*(w.enter for w in layers), *ends.leave), check=False)


def _replay(ends: Ends, segment: Segment) -> Callable[[Tensor, list[Tensor]], list[Tensor]]:
    """What enters each layer, and in the end the map's value, as a function of tokens and of what each layer gives."""
    shapes = [segment.known[n].shape for n in ends.enter]
    rows = [math.prod(shape[:-1]) for shape in shapes]

    def f(x: Tensor, given: list[Tensor]) -> list[Tensor]:
        parts = [x] if len(shapes) == 1 else x.split(rows)
        starts = [t if t.shape == s else t.reshape(s) for t, s in zip(parts, shapes, strict=True)]
        leaving = segment(*starts, *given)
        entered, found = leaving[: len(given)], leaving[len(given) :]
        y = found[0] if len(found) == 1 else torch.cat([t.reshape(-1, t.shape[-1]) for t in found])
        return [*entered, y.reshape(x.shape) - x if ends.less else y]

    return f


def _own(run: Run, ends: Ends) -> Callable[[Tensor], Tensor]:
    """The map by the program's own operations."""
    f = _replay(ends, _way(ends).at(run))
    return lambda t: f(t, [])[-1]


def _check_read(program: Program, ends: Ends, way: Way, wholes: Sequence[WholeLayer]) -> None:
    """Refuse what may jump: numbers that are read off, choices that are made by values, and casts that round."""
    flow, moving = ends.flow, {*way.enter}
    inside = {n for w in wholes for n in flow.between([w.enter], [w.leave])} - {w.leave for w in wholes}
    last = len(program.nodes) if {*ends.leave} & {*program.outputs} else max(map(flow.index.__getitem__, ends.leave)) + 1
    for n in program.nodes[:last]:
        if name(n) in SHAPE_ALONE or n in inside or not moving.intersection(n.all_input_nodes):
            continue
        moving.add(n)
        if takes_numbers(n) and moving.intersection(taken_from(n)):
            raise BadFunctionError(_READS)
    width = min(4, *(value(n).dtype.itemsize for n in ends.enter))
    for n in way.nodes:
        chosen = next((m for m in n.all_input_nodes if m in moving and not flow.live(m)), None)
        if chosen is not None or (is_float(n) and 0 < getattr(_dtype(n), "itemsize", 0) < width):
            raise BadFunctionError(
                f"expected linear operations, products, softmax, norms and known activations, got {name(chosen or n)}, which "
                "jumps; measure a part of the function without it"
            )


def _dtype(n: Node) -> torch.dtype | None:
    return getattr(value(n), "dtype", None)


# what an operation is for a bound: linear, a product, a softmax, a norm or a scalar function

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


@final
class _PieceReader:
    """Reads the pieces off a graph of operations below torch's composite ones, one node after another."""

    def __init__(self, code: GraphModule, wholes: Sequence[WholeLayer]):
        self._code, self._nodes = code, list(code.graph.nodes)
        *entered, self._leave = tree_leaves(self._nodes[-1].args)
        start, *given = (n for n in self._nodes if n.op == "placeholder")
        self._layers = dict(zip(given, zip(entered, wholes, strict=True), strict=True))
        self._pieces = [Piece("input", "input", (), lambda: None, tuple(value(start).shape))]
        self._place: dict[Node, int] = {start: 0}  # of what moves
        self._known: dict[Node, Any] = {}  # values of all else

    def pieces(self) -> Pieces:
        for n in self._nodes:
            if n.op == "get_attr":
                self._known[n] = getattr(self._code, str(n.target)).detach()
            elif n.op == "call_function" and all(m in self._known for m in n.all_input_nodes):
                self._known[n] = called(n, self._known.__getitem__, None)
            elif n.op == "call_function":
                self._pieces += self._read(n)
                self._place[n] = len(self._pieces) - 1
        return Pieces(tuple(self._pieces), self._at(self._leave))

    def _at(self, n: Node) -> int:
        """The place of what moves; a layer's piece is made where it is first needed."""
        if n not in self._place:
            entered, whole = self._layers[n]
            attn, shape = whole.layer, tuple(value(n).shape)

            def run(t: Tensor) -> Tensor:
                return attn.value(t.reshape(1, -1, t.shape[-1]))[0].reshape(shape)

            self._pieces.append(Piece("opaque", "layer", (self._at(entered),), run, shape, opaque=attn))
            self._place[n] = len(self._pieces) - 1
        return self._place[n]

    def _read(self, n: Node) -> list[Piece]:
        """The pieces that a node is, behind those that are there, the last of which gives it.

        What does not give the precision of the input rounds or compares, and jumps.
        """
        part = n.target is operator.getitem
        op = Operation.of(n.args[0] if part else n, self._known)  # pyright: ignore[reportArgumentType]
        inputs, given, shape = tuple(map(self._at, op.moving)), value(n), tuple(getattr(value(n), "shape", ()))
        kind = op.kind if getattr(given, "dtype", None) is torch.float64 else "unknown"
        if part:
            source, index = n.args
            if op.name == "native_layer_norm" and isinstance(op.args[0], Node) and len(inputs) == len(op.args[1]) == 1:
                if index == 0:
                    weight, bias, eps = op.args[2:]
                    return norm_pieces("layer_norm", inputs[0], len(self._pieces), shape, True, eps, weight, bias)
                kind = "unknown"
            return [Piece(kind, op.name, (self._at(source),), lambda t: t[index], shape)]  # pyright: ignore
        if not isinstance(given, Tensor):
            return [Piece("pick" if isinstance(given, tuple | list) else "unknown", op.name, inputs, op.run, ())]
        if op.bilinear:
            product = Piece("matrix product", "matmul", inputs, torch.matmul, shape)
            beta, alpha, added = op.kwargs.get("beta", 1), op.kwargs.get("alpha", 1), op.args[0]
            run = (lambda t: alpha * t) if beta == 0 else lambda t: beta * added + alpha * t
            return [product, Piece("linear", op.name, (len(self._pieces),), run, shape)]
        axis = op.args[1] - (len(shape) if op.args[1] >= 0 else 0) if kind == "softmax" else -1
        numbers = all(not isinstance(t, Tensor) or t.numel() == 1 for t in tree_leaves((op.args, op.kwargs)))
        alike = given.dtype is torch.float64 and op.name in _SPELLED and numbers
        alike = alike and all(self._pieces[i].shape == shape for i in inputs)
        scalar = known_scalar(op.run) if kind == "pointwise" and alike else None
        constant = op.constant if kind == "linear" else None
        return [Piece(kind, op.name, inputs, op.run, shape, axis=axis, scalar=scalar, alike=alike, constant=constant)]
