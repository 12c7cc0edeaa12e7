"""A function written down as torch's own operations, by watching one run of it.

The run gets a placeholder that has a shape and no numbers, so what it does cannot depend on them. The graph says how values
move, and its derivative is that of the values: detach, no_grad and backward passes of one's own leave nothing out. Norms and
scalar functions that are spelled out in several operations are put together again, so that a bound sees them whole. What a
graph gives is checked against the function in float64, at the input and beside it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.maps.graph import Graph, Kind, Node, normalised, pruned
from howsmooth.maps.joining import joined
from howsmooth.maps.scalars import known_scalar

_LINEAR = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze",
    "squeeze", "clone", "alias", "detach", "cat", "stack", "split", "split_with_sizes", "unbind", "chunk", "add", "sub", "rsub",
    "neg", "scaled add", "sum", "mean", "index", "index_select", "gather", "where", "masked_fill", "_to_copy",
    "constant_pad_nd", "copy", "lift_fresh", "roll", "flip", "contiguous", "unfold", "narrow", "positive", "flatten",
}  # fmt: skip
_MATRIX = {"mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "dot"}
_SCALAR = {"gelu", "silu", "relu", "tanh", "sigmoid", "erf", "exp", "pow", "rsqrt", "sqrt", "reciprocal", "square"}
_BESIDE = (0.0, 1e-3, 0.3)  # how far beside its input a graph is compared, relative to it
_AGREE = 1e-7  # float32 constants inside a model, grown by its layers, explain no more
_CAST = 2.0**-23  # of the largest number on the way: what a cast to float32 that is left out explains


@dataclass(frozen=True)
class Ref:
    """What another node gave."""

    index: int


@torch.no_grad()
def record(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    recorder: "Recorder | None" = None,
    truth: Callable[[Tensor], Tensor] | None = None,
    within: float = 0.0,
) -> Graph:
    """The operations that `f` makes of `x`, in the precision of `x`; refused where they do not say what `f` does.

    recorder: one that `f` tells of layers which are to be taken whole.  truth: what the graph must agree with, `f` by default.
    within: how far tokens will move; the graph is compared there too.
    """
    recorder = Recorder() if recorder is None else recorder
    with sdpa_kernel(SDPBackend.MATH):
        with recorder:
            y = _ran(recorder, f, x)
        if not isinstance(y, Placeholder):
            raise BadFunctionError("expected an output that depends on x, got one that does not; look for constants and numpy")
        graph = pruned(joined(Graph(tuple(recorder.nodes), y.node)))
        strange = next((node.name for node in graph.nodes if node.kind == "unknown"), None)
        if strange is not None:
            raise BadFunctionError(
                f"expected linear operations, products, softmax, norms and known activations, got {strange}; "
                "measure a part of the function without it"
            )
        graph = replace(graph, rounding=graph.rounding + _CAST * recorder.widened)
        check_agrees(graph, truth or f, _beside(x, within))
    return graph


def _ran(recorder: "Recorder", f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    try:
        y = f(recorder.start(x))
        if isinstance(y, Placeholder):
            recorder.check_current(y)
        return y
    except _Refused as refused:
        raise BadFunctionError(str(refused)) from None
    except (RuntimeError, TypeError, BadInputError) as error:  # where something asks for numbers that are not there
        said = next(iter(str(error).strip().splitlines()), "no word")[:120]
        raise BadFunctionError(
            f"expected a function made of torch operations alone, got one that ends in an error without numbers ({said}); "
            "write it in torch operations"
        ) from error


def _beside(x: Tensor, within: float) -> list[Tensor]:
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
    size = float(x.abs().mean()) or 1.0
    points = [x + share * size * step for share in _BESIDE]
    if within > 0:
        points += [x + sign * within * step / step.norm(dim=-1, keepdim=True) for sign in (1, -1)]
    return points


@torch.no_grad()
def check_agrees(graph: Graph, f: Callable[[Tensor], Tensor], points: Sequence[Tensor]) -> None:
    """Refuse a graph that does not give what `f` gives at some points."""
    truths = [f(at.clone()) for at in points]
    size = max(float(y.abs().max()) for y in truths)
    for at, truth in zip(points, truths, strict=True):
        values = graph.values(at)
        error = float((values[graph.output].reshape(truth.shape) - truth).abs().max())
        sizes = [
            float(t.abs().max()) for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()
        ]
        largest = max((size for size in sizes if size < math.inf), default=0.0)  # what a mask hides is minus infinity
        if not error <= _AGREE * max(size, 1e-300) + graph.rounding * largest:
            raise BadFunctionError(
                f"expected a function that torch's operations on its input describe, got one that they miss by {error:.1e}; "
                "look for values taken out of the graph"
            )


class _Refused(BaseException):
    """A refusal that no `except Exception` of the function catches."""


def _refuse_reading(*_: Any, **__: Any) -> NoReturn:
    raise _Refused(
        "expected a function that runs the same way for every input, got one that reads a number off it on the way; "
        "write choices as torch operations"
    )


def _refuse_writing(name: str) -> NoReturn:
    raise _Refused(f"expected operations that write nothing in place, got {name}; write it another way")


class Placeholder(Tensor):
    """Stands for what a node gives while a function is recorded: it has a shape and a type, and no numbers to be read."""

    node: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    tolist = numpy = data_ptr = untyped_storage = apply_ = map_ = map2_ = _refuse_reading
    __array__ = __dlpack__ = __reduce_ex__ = __repr__ = __format__ = _refuse_reading

    @staticmethod
    def __new__(cls, value: Tensor, node: int) -> "Placeholder":
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        made.node = node
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> NoReturn:
        raise BadFunctionError(
            "expected a function that keeps nothing of one call for the next, got one that does; compute it anew in every call"
        )


class Recorder(TorchDispatchMode):
    """Writes down every operation that what it was started with has a part in.

    widened: how many casts from float64 to float32 were left out.
    """

    def __init__(self):
        super().__init__()
        self.nodes: list[Node] = []
        self.widened = 0
        self._values: dict[int, Tensor] = {}  # what placeholders stand for
        self._overwritten: set[int] = set()  # nodes whose values were written over by way of another tensor
        self._dtype = torch.float64

    def start(self, x: Tensor) -> Tensor:
        self.nodes, self._values = [Node("input", "input", (), lambda: None, tuple(x.shape))], {}
        self.widened, self._dtype, self._overwritten = 0, x.dtype, set()
        return self._note(x.clone(), 0)

    def take_whole(self, entering: Tensor, leaving: Tensor, run: Callable[[Tensor], Tensor], layer: Any) -> Tensor:
        """From here on, `leaving` is what a layer makes of `entering` in one operation."""
        if not isinstance(entering, Placeholder):
            return leaving
        value = self._values[leaving.node] if isinstance(leaving, Placeholder) else leaving
        self.nodes.append(Node("opaque", "layer", (entering.node,), run, tuple(leaving.shape), opaque=layer))
        return self._note(value.clone(), len(self.nodes) - 1)

    def _note(self, value: Tensor, node: int) -> Placeholder:
        self._values[node] = value
        return Placeholder(value, node)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(t, Placeholder) for t in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        self._check(func, args)
        written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if written and (written != [0] or not isinstance(args[0], Placeholder)):
            _refuse_writing(func._schema.name.split("::")[-1])
        wide = self._dtype is torch.float64
        if wide and kwargs.get("dtype") is torch.float32:
            kwargs, self.widened = kwargs | {"dtype": torch.float64}, self.widened + 1
        inputs: list[int] = []

        def stand(t: Any) -> Any:
            if isinstance(t, Placeholder):
                self.check_current(t)
                inputs.append(t.node)
                return Ref(len(inputs) - 1)
            if not isinstance(t, Tensor):
                return t
            return t.double() if wide and t.dtype is torch.float32 else t.clone()

        spec_args, spec_kwargs = tree_map(stand, (args, kwargs))
        call, functional = _called(func, spec_args, spec_kwargs), _functional(func)

        def run(*values: Any) -> Any:
            return _filled(functional, spec_args, spec_kwargs, values)

        try:
            out = _filled(func, spec_args, spec_kwargs, [self._values[i] for i in inputs])
        except Exception as error:  # it may depend on numbers whether there is one
            raise _Refused(f"expected a function that takes float64, got an error from {call.name} ({error})") from error
        given = self._record(call, tuple(inputs), run, out)
        if not written:
            return given
        if given.shape != args[0].shape:
            _refuse_writing(call.name)
        args[0].node = given.node
        memory = out.untyped_storage()._cdata
        self._overwritten |= {i for i, v in self._values.items() if v is not out and v.untyped_storage()._cdata == memory}
        return args[0]

    def check_current(self, t: Placeholder) -> None:
        """Refuse a tensor whose memory was written to by way of a view of it, or of what it is a view of."""
        if t.node in self._overwritten:
            _refuse_writing("a view that was written to")

    def _check(self, func: Any, args: Any) -> None:
        """Refuse what is not torch's own, and outputs whose shape depends on numbers."""
        if func.namespace != "aten":
            raise _Refused(f"expected torch's own operations, got {func.name()}; write it in them")
        chosen = args[1:] if func.overloadpacket is torch.ops.aten.index else args
        if torch.Tag.dynamic_output_shape in func.tags and any(isinstance(t, Placeholder) for t in tree_leaves(chosen)):
            _refuse_reading()

    def _record(self, call: "_Call", inputs: tuple[int, ...], run: Callable[..., Any], out: Any) -> Any:
        if call.name == "native_layer_norm" and isinstance(call.args[0], Ref) and len(inputs) == len(call.args[1]) == 1:
            return self._layer_norm(call.args, inputs, run, out)
        if not isinstance(out, Tensor | tuple | list):
            _refuse_reading()
        kind = _kind(call, inputs)
        if not isinstance(out, Tensor):
            self.nodes.append(Node("pick", call.name, inputs, run, ()))
            whole = len(self.nodes) - 1
            return type(out)(self._part(call, kind, whole, i, part) for i, part in enumerate(out))
        shape = tuple(out.shape)
        if call.bilinear:
            self.nodes.append(Node("matrix product", "matmul", inputs, torch.matmul, shape))
            self.nodes.append(_after(call.name, len(self.nodes) - 1, _scaled(call), out))
            return self._note(out, len(self.nodes) - 1)
        fits = out.dtype is self._dtype
        kind = kind if fits else "unknown"  # comparisons, and whatever rounds: they jump
        axis = -1
        if kind == "softmax":
            axis = call.args[1] - (out.ndim if call.args[1] >= 0 else 0)
        numbers = all(not isinstance(t, Tensor) or t.numel() == 1 for t in tree_leaves((call.args, call.kwargs)))
        alike = fits and call.name in _SPELLED and numbers and all(self.nodes[j].shape == shape for j in inputs)
        scalar = known_scalar(run) if kind == "pointwise" and alike else None
        constant = _constant(call.name, call.args) if kind == "linear" else None
        self.nodes.append(Node(kind, call.name, inputs, run, shape, axis=axis, scalar=scalar, alike=alike, constant=constant))
        return self._note(out, len(self.nodes) - 1)

    def _part(self, call: "_Call", kind: Kind, whole: int, i: int, part: Any) -> Any:
        """One of several tensors that an operation gives."""
        if not isinstance(part, Tensor):
            _refuse_reading()
        kind = kind if part.dtype is self._dtype else "unknown"
        self.nodes.append(Node(kind, call.name, (whole,), lambda t: t[i], tuple(part.shape)))
        return self._note(part, len(self.nodes) - 1)

    def _layer_norm(self, args: Any, inputs: tuple[int, ...], run: Callable[..., Any], out: Any) -> Any:
        """Split into the norm itself, the weight and the bias; mean and scale are known to nobody."""
        _, _, weight, bias, eps = args
        y, *rest = out
        self.nodes.append(
            Node("norm", "layer_norm", inputs, normalised(True, eps), tuple(y.shape), eps=float(eps), centred=True)
        )
        if weight is not None:
            node = _after("mul", len(self.nodes) - 1, lambda t, w=weight: t * w, y)
            self.nodes.append(replace(node, constant=weight))
        if bias is not None:
            self.nodes.append(_after("add", len(self.nodes) - 1, lambda t, b=bias: t + b, y))
        made = [self._note(y, len(self.nodes) - 1)]
        for i, part in enumerate(rest, 1):
            self.nodes.append(Node("unknown", "layer_norm", inputs, lambda *v, i=i: run(*v)[i], tuple(part.shape)))
            made.append(self._note(part, len(self.nodes) - 1))
        return tuple(made)


@dataclass(frozen=True)
class _Call:
    """An operation with its arguments, references where they depend on the input.

    name: torch's, changed where arguments make another operation of it.
    bilinear: a product of two matrices that depend on the input, scaled and added to what does not.
    """

    name: str
    args: Any
    kwargs: Any
    bilinear: bool = False


def _called(func: Any, args: Any, kwargs: Any) -> _Call:
    name = func._schema.name.split("::")[-1].rstrip("_")
    if kwargs.get("rounding_mode") is not None:
        name = "rounded " + name
    elif name in ("addmm", "baddbmm") and [isinstance(a, Ref) for a in args[:3]] == [False, True, True]:
        return _Call(name, args, kwargs, bilinear=True)
    elif kwargs.get("alpha", 1) != 1:
        name = "scaled add" if name in ("add", "sub", "rsub") else "scaled " + name
    return _Call(name, args, kwargs)


def _filled(run: Callable[..., Any], args: Any, kwargs: Any, values: Any) -> Any:
    """What an operation gives where values stand for the references among its arguments."""
    a, k = tree_map(lambda t: values[t.index] if isinstance(t, Ref) else t, (args, kwargs))
    return run(*a, **k)


def _scaled(call: _Call) -> Callable[[Tensor], Tensor]:
    """What `addmm` does with a product of matrices."""
    beta, alpha, added = call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1), call.args[0]
    return lambda t: alpha * t if beta == 0 else beta * added + alpha * t


def _constant(name: str, args: Any) -> Any:
    """The matrix on the right of rows that depend on the input, or the factor of every entry."""
    if name in ("mm", "addmm") and isinstance(args[-2], Ref) and not any(isinstance(a, Ref) for a in (*args[:-2], args[-1])):
        return args[-1]
    if name == "mul":
        return args[1] if isinstance(args[0], Ref) else args[0]
    if name == "div" and isinstance(args[0], Ref):
        return 1 / args[1]
    return None


def _after(name: str, source: int, run: Callable[[Tensor], Tensor], like: Tensor) -> Node:
    return Node("linear", name, (source,), run, tuple(like.shape))


def _functional(func: Any) -> Callable[..., Any]:
    """The operation without writing in place."""
    name = func._schema.name.split("::")[-1]
    if name in ("detach", "detach_"):  # what is cut off for derivatives moves all the same
        return lambda t: t.clone()
    if not func._schema.is_mutable:
        return func
    if name == "copy_":
        return lambda old, new, *rest: new.expand(old.shape).to(old.dtype, copy=True)
    plain = getattr(torch.ops.aten, name.rstrip("_"), None)
    overload = None if plain is None else getattr(plain, func._overloadname, None)
    if overload is None:
        _refuse_writing(name)
    return overload


def _kind(call: _Call, inputs: tuple[int, ...]) -> Kind:
    """What an operation is in those of its arguments that depend on the input."""
    name, args = call.name, call.args
    if name in _LINEAR:
        chosen = {"where": args[:1], "index": args[1:], "index_select": args[2:], "gather": args[2:], "masked_fill": args[1:2]}
        return "unknown" if any(isinstance(a, Ref) for a in tree_leaves(chosen.get(name, ()))) else "linear"
    if name in ("mul", "div"):
        if len(inputs) == 1:
            return "linear" if name == "mul" or isinstance(args[0], Ref) else "unknown"
        return "product" if name == "mul" else "unknown"
    if name.removeprefix("scaled ") in _MATRIX:
        if not all(isinstance(a, Ref) for a in args[-2:]):
            return "linear"
        return "matrix product" if name in ("mm", "bmm") else "unknown"
    if name in ("_softmax", "_safe_softmax"):
        return "softmax"
    if name in _SCALAR and len(inputs) == 1:
        return "pointwise"
    return "unknown"


_SPELLED = {"mul", "add", "sub", "rsub", "div", "neg", "pow", "square", "tanh", "erf", "sigmoid", "exp", "relu", "reciprocal",
            "silu", "gelu", "sqrt", "rsqrt", "clone", "_to_copy", "alias", "detach"}  # fmt: skip
