"""A part of a recorded run, or a function, as pieces that bounds around an input are known of, in float64.

The operations that torch makes of others are taken apart by torch's own tracer; norms and scalar functions that are spelled out
are put together again. What the pieces give is compared with what they were read from, at the input and beside it.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
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
from howsmooth.program.confirm import Function, record_function
from howsmooth.program.ends import Ends
from howsmooth.program.flow import Flow
from howsmooth.program.joining import joined
from howsmooth.program.kinds import Operation, Ref, layer_norm, pieces_for
from howsmooth.program.nodes import is_float, name, value
from howsmooth.program.operations import SHAPE_ALONE
from howsmooth.program.pieces import Piece, Pieces, pruned
from howsmooth.program.reads import read_by, reads
from howsmooth.program.replay import Run, called
from howsmooth.program.tracing import Program, trace

_BESIDE = (0.0, 1e-3, 0.3)  # how far beside its input a function is compared, relative to it
_AGREE = 1e-7  # float32 constants inside a model, grown by its layers, explain no more
_CAST = 2.0**-23  # of the largest number on the way: what a cast to float32 that is left out explains
_READS = (
    "expected a function that runs the same way for every input, got one that reads a number off it on the way; "
    "write choices as torch operations"
)


@dataclass(frozen=True, eq=False)
class Whole:
    """A layer that is taken whole: it stands for all that a program does from one node to another."""

    enter: Node
    leave: Node
    layer: Attention


@torch.no_grad()
def read(
    program: Program,
    ends: Ends,
    layers: Iterable[Whole] = (),
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
    path, wholes = _path(ends, layers)
    _check_read(program, ends, path, wholes)
    run = (run or Run(program, program.tensors)).at(torch.float64)
    at = _frozen(run, ends, path, {w.leave for w in wholes})
    start = torch.cat([at[n].clone() if at[n].ndim < 3 else at[n].flatten(0, -2) for n in ends.enter])
    with sdpa_kernel(SDPBackend.MATH):
        code = make_fx(_replay(ends, path, wholes, at), _error_on_data_dependent_ops=False)(
            start, [at[w.leave].clone() for w in wholes]
        )
        pieces = pruned(joined(_Reader(code, wholes).pieces()))
        strange = next((piece.name for piece in pieces.nodes if piece.kind == "unknown"), None)
        if strange is not None:
            raise BadFunctionError(
                f"expected linear operations, products, softmax, norms and known activations, got {strange}; "
                "measure a part of the function without it"
            )
        casts = sum(_dtype(n) is torch.float32 and any(_dtype(m) is torch.float64 for m in n.all_input_nodes) for n in path)
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
    flow, (*ends, y) = Flow(program, program.inputs), program.outputs
    if not flow.live(y):
        raise BadFunctionError("expected an output that depends on x, got one that does not; look for constants and numpy")
    wholes = [Whole(a, b, layer) for a, b, layer in zip(ends[::2], ends[1::2], layers, strict=True)]
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


def _path(ends: Ends, layers: Iterable[Whole]) -> tuple[list[Node], list[Whole]]:
    """The nodes of a map that are needed beside the layers, and those of the layers that are on the way."""
    over, needed = {w.leave: w for w in layers}, {*ends.leave}
    path: list[Node] = []
    for n in reversed(ends.flow.between(ends.enter, ends.leave)):
        if n in needed:
            path.append(n)
            needed.update([over[n].enter] if n in over else n.all_input_nodes)
    return path[::-1], [over[n] for n in reversed(path) if n in over]


def _replay(
    ends: Ends, path: Sequence[Node], wholes: Sequence[Whole], at: dict[Node, Any]
) -> Callable[[Tensor, list[Tensor]], list[Tensor]]:
    """What enters each layer, and in the end the map's value, as a function of tokens and of what each layer gives."""
    layers, shapes = [w.leave for w in wholes], [at[n].shape for n in ends.enter]
    rows = [math.prod(shape[:-1]) for shape in shapes]

    def f(x: Tensor, given: list[Tensor]) -> list[Tensor]:
        parts = [x] if len(shapes) == 1 else x.split(rows)
        env: dict[Node, Any] = {
            n: t if t.shape == s else t.reshape(s) for n, t, s in zip(ends.enter, parts, shapes, strict=True)
        }
        for n in path:
            env[n] = (
                given[layers.index(n)] if n in layers else called(n, lambda m: env[m] if m in env else at[m], torch.float64)
            )
        found = [env[n] if n in env else at[n] for n in ends.leave]
        y = found[0] if len(found) == 1 else torch.cat([t.reshape(-1, t.shape[-1]) for t in found])
        return [*(env[w.enter] for w in wholes), y.reshape(x.shape) - x if ends.less else y]

    return f


def _own(run: Run, ends: Ends) -> Callable[[Tensor], Tensor]:
    """The map by the program's own operations."""
    path, _ = _path(ends, ())
    f = _replay(ends, path, (), _frozen(run, ends, path, set()))
    return lambda t: f(t, [])[-1]


def _frozen(run: Run, ends: Ends, path: Sequence[Node], more: set[Node]) -> dict[Node, Any]:
    """The values of what a path takes from outside, of where it begins, and of some more nodes."""
    taken = {m for n in path for m in n.all_input_nodes} | {*ends.leave}
    return run.values((taken - {*path}) | {*ends.enter} | more)


def _check_read(program: Program, ends: Ends, path: Sequence[Node], wholes: Sequence[Whole]) -> None:
    """Refuse what may jump: numbers that are read off, choices that are made by values, and casts that round."""
    flow, moving = ends.flow, {*ends.enter}
    inside = {n for w in wholes for n in flow.between([w.enter], [w.leave])} - {w.leave for w in wholes}
    last = len(program.nodes) if {*ends.leave} & {*program.outputs} else max(map(flow.index.__getitem__, ends.leave)) + 1
    for n in program.nodes[:last]:
        if name(n) in SHAPE_ALONE or n in inside or not moving.intersection(n.all_input_nodes):
            continue
        moving.add(n)
        if reads(n) and moving.intersection(read_by(n)):
            raise BadFunctionError(_READS)
    width = min(4, *(value(n).dtype.itemsize for n in ends.enter))
    for n in path:
        chosen = next((m for m in n.all_input_nodes if m in moving and not flow.live(m)), None)
        if chosen is not None or (is_float(n) and 0 < getattr(_dtype(n), "itemsize", 0) < width):
            raise BadFunctionError(
                f"expected linear operations, products, softmax, norms and known activations, got {name(chosen or n)}, which "
                "jumps; measure a part of the function without it"
            )


def _dtype(n: Node) -> torch.dtype | None:
    return getattr(value(n), "dtype", None)


@final
class _Reader:
    """Reads the pieces off a graph of operations below torch's composite ones, one node after another."""

    def __init__(self, code: GraphModule, wholes: Sequence[Whole]):
        self._code, self._nodes = code, list(code.graph.nodes)
        *entered, self._leave = tree_leaves(self._nodes[-1].args)
        start, *given = (n for n in self._nodes if n.op == "placeholder")
        self._layers = dict(zip(given, zip(entered, wholes, strict=True), strict=True))
        self._made = [Piece("input", "input", (), lambda: None, tuple(value(start).shape))]
        self._place: dict[Node, int] = {start: 0}  # of what moves
        self._known: dict[Node, Any] = {}  # values of all else
        self._several: dict[Node, Operation] = {}  # those that give several tensors

    def pieces(self) -> Pieces:
        for n in self._nodes:
            if n.op == "get_attr":
                self._known[n] = getattr(self._code, str(n.target)).detach()
            elif n.op == "call_function" and any(self._moves(m) for m in n.all_input_nodes):
                self._read(n)
            elif n.op == "call_function":
                args, kwargs = map_arg((n.args, dict(n.kwargs)), self._known.__getitem__)
                self._known[n] = n.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        return Pieces(tuple(self._made), self._at(self._leave))

    def _moves(self, n: Node) -> bool:
        return n in self._place or n in self._layers

    def _at(self, n: Node) -> int:
        """The place of what moves; a layer's piece is made where it is first needed."""
        if n not in self._place:
            entered, whole = self._layers[n]
            attn, shape = whole.layer, tuple(value(n).shape)

            def run(t: Tensor) -> Tensor:
                return attn.value(t.reshape(1, -1, t.shape[-1]))[0].reshape(shape)

            inputs = (self._at(entered),)
            self._place[n] = self._add(Piece("opaque", "layer", inputs, run, shape, opaque=attn))
        return self._place[n]

    def _add(self, *pieces: Piece) -> int:
        self._made += pieces
        return len(self._made) - 1

    def _read(self, n: Node) -> None:
        inputs: list[int] = []

        def stand(m: Node) -> Any:
            if not self._moves(m):
                return self._known[m]
            inputs.append(self._at(m))
            return Ref(len(inputs) - 1)

        args, kwargs = map_arg((n.args, dict(n.kwargs)), stand)
        if n.target is operator.getitem:
            self._place[n] = self._part(n.args[0], args[1], value(n))  # pyright: ignore[reportArgumentType]
            return
        op, made = Operation.of(n.target, args, kwargs, tuple(inputs)), value(n)
        if isinstance(made, Tensor):
            before = [self._made[j].shape for j in inputs]
            pieces = pieces_for(op, tuple(made.shape), made.dtype is torch.float64, before, len(self._made))
            self._place[n] = self._add(*pieces)
            return
        self._several[n] = op
        self._place[n] = self._add(
            Piece("pick" if isinstance(made, tuple | list) else "unknown", op.name, op.inputs, op.run, ())
        )

    def _part(self, n: Node, index: int, made: Any) -> int:
        """One of several tensors that an operation gives."""
        op, shape = self._several[n], tuple(getattr(made, "shape", ()))
        norm = layer_norm(op, shape, len(self._made))
        if norm is not None and index == 0:
            return self._add(*norm)
        kind = op.kind if norm is None and getattr(made, "dtype", None) is torch.float64 else "unknown"
        return self._add(Piece(kind, op.name, (self._place[n],), lambda t: t[index], shape))
