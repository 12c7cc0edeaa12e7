"""A function written down as torch's own operations, by watching one run of it.

Norms and scalar functions that are spelled out in several operations are put together again, so that a bound sees them whole.
What a graph gives is checked against the function in float64, at the input and beside it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from howsmooth.errors import BadFunctionError
from howsmooth.maps.graph import Graph, Kind, Node, normalised, pruned
from howsmooth.maps.scalars import known_scalar

_LINEAR = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze",
    "squeeze", "clone", "alias", "detach", "cat", "stack", "split", "split_with_sizes", "unbind", "chunk", "add", "sub", "rsub",
    "neg", "scaled add", "sum", "mean", "index", "index_select", "gather", "where", "masked_fill", "_to_copy",
    "constant_pad_nd", "copy",
    "lift_fresh", "roll", "flip", "contiguous", "unfold", "as_strided", "narrow", "positive", "flatten",
}  # fmt: skip
_MATRIX = {"mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "dot"}
_SCALAR = {"gelu", "silu", "relu", "tanh", "sigmoid", "erf", "exp", "pow", "rsqrt", "sqrt", "reciprocal", "square"}
_BESIDE = (0.0, 1e-3, 0.3)  # how far beside its input a graph is compared, relative to it
_AGREE = 1e-7  # float32 constants inside a model, grown by its layers, explain no more
_ROUNDING = 1e-13  # of the largest number on the way: what an output that cancels is made of


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
) -> Graph:
    """The operations that `f` makes of `x`, in the precision of `x`; refused where they do not say what `f` does.

    recorder: one that `f` tells of layers which are to be taken whole.  truth: what the graph must agree with, `f` by default.
    """
    recorder = Recorder() if recorder is None else recorder
    with sdpa_kernel(SDPBackend.MATH):
        with recorder:
            start = recorder.start(x)
            y = f(start)
        out = recorder.known.get(id(y))
        if out is None:
            raise BadFunctionError("expected an output that depends on x, got one that does not; look for detach or numpy")
        graph = pruned(_joined(Graph(tuple(recorder.nodes), out)))
        _check(graph, truth or f, x)
    return graph


def _check(graph: Graph, f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    step = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
    for share in _BESIDE:
        at = x + share * float(x.abs().mean()) * step
        values, theirs = graph.values(at), f(at.clone())
        error = float((values[graph.output] - theirs).abs().max())
        sizes = [
            float(t.abs().max()) for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()
        ]
        largest = max((size for size in sizes if size < math.inf), default=0.0)  # what a mask hides is minus infinity
        if not error <= _AGREE * max(float(theirs.abs().max()), 1e-300) + _ROUNDING * largest:
            raise BadFunctionError(
                f"expected a function that torch's operations on its input describe, got one that they miss by {error:.1e}; "
                "look for values taken out of the graph"
            )


class Recorder(TorchDispatchMode):
    """Writes down every operation that what it was started with has a part in."""

    def __init__(self):
        super().__init__()
        self.nodes: list[Node] = []
        self.known: dict[int, int] = {}  # tensors that depend on the input, by identity
        self._alive: list[Any] = []  # so that no identity is used twice

    def start(self, x: Tensor) -> Tensor:
        start = x.clone()
        self.nodes, self.known, self._alive = [Node("input", "input", (), lambda: None, tuple(x.shape))], {}, []
        return self._note(start, 0)

    def take_whole(self, entering: Tensor, leaving: Tensor, run: Callable[[Tensor], Tensor], layer: Any) -> Tensor:
        """From here on, `leaving` is what a layer makes of `entering` in one operation."""
        source = self.known.get(id(entering))
        if source is None:
            return leaving
        fresh = leaving.clone()
        self.nodes.append(Node("opaque", "layer", (source,), run, tuple(fresh.shape), opaque=layer))
        return self._note(fresh, len(self.nodes) - 1)

    def _note(self, t: Tensor, index: int) -> Tensor:
        self._alive.append(t)
        self.known[id(t)] = index
        return t

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(id(t) in self.known for t in leaves):
            self._alive.append(out)
            return out
        inputs: list[int] = []

        def stand(t: Any) -> Any:
            if isinstance(t, Tensor) and id(t) in self.known:
                inputs.append(self.known[id(t)])
                return Ref(len(inputs) - 1)
            return t.clone() if isinstance(t, Tensor) else t

        spec_args, spec_kwargs = tree_map(stand, (args, kwargs))
        functional = _functional(func)

        def run(*values: Any) -> Any:
            a, k = tree_map(lambda t: values[t.index] if isinstance(t, Ref) else t, (spec_args, spec_kwargs))
            return functional(*a, **k)

        self._record(func, spec_args, spec_kwargs, tuple(inputs), run, out)
        if isinstance(out, Tensor) and out is (args[0] if args else None):  # written in place
            self.known[id(out)] = len(self.nodes) - 1
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, inputs: tuple[int, ...], run: Callable[..., Any], out: Any) -> None:
        name = func._schema.name.split("::")[-1].rstrip("_") or func._schema.name
        name = "scaled add" if kwargs.get("alpha", 1) != 1 else name
        kind = _kind(name, args, inputs)
        if name == "native_layer_norm":
            self._layer_norm(args, inputs, out)
            return
        if not isinstance(out, Tensor | tuple | list):
            raise BadFunctionError(
                "expected a function that runs the same way for every input, got one that reads a number off it on the way; "
                "write choices as torch operations"
            )
        if not isinstance(out, Tensor):
            self.nodes.append(Node("pick", name, inputs, run, ()))
            whole = len(self.nodes) - 1
            for i, part in enumerate(out):
                if isinstance(part, Tensor):
                    chosen: Kind = kind if part.is_floating_point() else "unknown"
                    self.nodes.append(Node(chosen, name, (whole,), lambda t, i=i: t[i], tuple(part.shape)))
                    self._note(part, len(self.nodes) - 1)
            return
        if not out.is_floating_point():  # comparisons: choices that may change beside the input
            kind = "unknown"
        axis = args[1] if kind == "softmax" else -1
        numbers = all(not isinstance(t, Tensor) or t.numel() == 1 for t in tree_leaves((args, kwargs)))
        shape = tuple(out.shape)
        alike = name in _SPELLED and numbers and all(self.nodes[j].shape == shape for j in inputs)
        scalar = known_scalar(run) if kind == "pointwise" and alike else None
        constant = _constant(name, args) if kind == "linear" else None
        self.nodes.append(Node(kind, name, inputs, run, shape, axis=axis, scalar=scalar, alike=alike, constant=constant))
        self._note(out, len(self.nodes) - 1)

    def _layer_norm(self, args: Any, inputs: tuple[int, ...], out: Any) -> None:
        """Split into the norm itself, the weight and the bias."""
        _, shape, weight, bias, eps = args
        d = len(shape)
        if len(inputs) != 1 or d != 1:
            self.nodes.append(Node("unknown", "native_layer_norm", inputs, lambda *v: v[0], tuple(out[0].shape)))
            self._note(out[0], len(self.nodes) - 1)
            return
        self.nodes.append(
            Node("norm", "layer_norm", inputs, normalised(True, eps), tuple(out[0].shape), eps=float(eps), centred=True)
        )
        if weight is not None:
            node = _after("mul", len(self.nodes) - 1, lambda t, w=weight: t * w, out[0])
            self.nodes.append(replace(node, constant=weight))
        if bias is not None:
            self.nodes.append(_after("add", len(self.nodes) - 1, lambda t, b=bias: t + b, out[0]))
        self._note(out[0], len(self.nodes) - 1)


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
    if not func._schema.is_mutable:
        return func
    if name == "copy_":
        return lambda old, new, *rest: new.expand(old.shape).clone() if isinstance(old, Tensor) else new
    plain = getattr(torch.ops.aten, name.rstrip("_"), None)
    overload = None if plain is None else getattr(plain, func._overloadname, None)
    if overload is None:
        raise BadFunctionError(f"expected operations that write nothing in place, got {name}; write it another way")
    return overload


def _kind(name: str, args: Any, inputs: tuple[int, ...]) -> Kind:
    """What an operation is in those of its arguments that depend on the input."""
    if name in _LINEAR:
        chosen = {"where": args[:1], "index": args[1:], "index_select": args[2:], "gather": args[2:], "masked_fill": args[1:2]}
        return "unknown" if any(isinstance(a, Ref) for a in tree_leaves(chosen.get(name, ()))) else "linear"
    if name in ("mul", "div"):
        if len(inputs) == 1:
            return "linear" if name == "mul" or isinstance(args[0], Ref) else "unknown"
        return "product" if name == "mul" else "unknown"
    if name in _MATRIX:
        last = [isinstance(a, Ref) for a in args[-2:]]
        return "matrix product" if all(last) else "linear"
    if name in ("_softmax", "_safe_softmax", "softmax"):
        return "softmax"
    if name in _SCALAR and len(inputs) == 1:
        return "pointwise"
    return "unknown"


_SPELLED = {"mul", "add", "sub", "rsub", "div", "neg", "pow", "square", "tanh", "erf", "sigmoid", "exp", "relu", "reciprocal",
            "silu", "gelu", "sqrt", "rsqrt", "clone", "_to_copy", "alias", "detach"}  # fmt: skip


def _joined(graph: Graph) -> Graph:
    """Norms and scalar functions that were spelled out, each in one node again."""
    nodes = list(graph.nodes)
    for i in range(len(nodes)):
        nodes[i] = _as_norm(nodes, i) or nodes[i]
    source: dict[int, int] = {}  # of what a node is a function of, entry by entry
    for i, node in enumerate(nodes):
        if node.alike and node.inputs:
            origins = {source.get(j, j) for j in node.inputs}
            if len(origins) == 1:
                source[i] = origins.pop()
    users: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for j in node.inputs:
            users.setdefault(j, []).append(i)
    for i, origin in source.items():
        leaves = i == graph.output or any(source.get(k) != origin for k in users.get(i, ()))
        if not leaves:
            continue
        inside = _between(nodes, i, origin)
        bent = [k for k in inside if nodes[k].kind != "linear"]
        if len(inside) > 1 and bent:
            run = _spelled(nodes, inside, origin, i)
            scalar = known_scalar(run)
            if scalar is not None:
                nodes[i] = replace(nodes[i], kind="pointwise", name=scalar.name, inputs=(origin,), run=run, scalar=scalar)
    return replace(graph, nodes=tuple(nodes))


def _between(nodes: list[Node], end: int, origin: int) -> list[int]:
    """The nodes on the ways from `origin` to `end`, in order."""
    found: set[int] = set()
    open_ = [end]
    while open_:
        i = open_.pop()
        if i != origin and i not in found:
            found.add(i)
            open_ += nodes[i].inputs
    return sorted(found)


def _spelled(nodes: list[Node], inside: list[int], origin: int, end: int) -> Callable[[Tensor], Tensor]:
    parts = [(k, nodes[k]) for k in inside]

    def run(t: Tensor) -> Tensor:
        values = {origin: t}
        for k, node in parts:
            values[k] = node.run(*(values[j] for j in node.inputs))
        return values[end]

    return run


def _as_norm(nodes: list[Node], i: int) -> Node | None:
    """`u · rsqrt(mean u² + eps)` or `u / sqrt(mean u² + eps)` over the last axis, whatever its parts are called."""
    node = nodes[i]
    if node.name not in ("mul", "div") or len(node.inputs) != 2 or len(node.shape) < 1:
        return None
    for u, s in (node.inputs, node.inputs[::-1]):
        if nodes[u].shape != node.shape or nodes[s].shape != (*node.shape[:-1], 1):
            continue
        inside = _between(nodes, s, u)
        if not inside or any(k < u for k in inside) or any(nodes[k].kind in ("input", "opaque") for k in inside):
            continue
        run = _spelled(nodes, [*inside, i], u, i)
        found = _norm_of(run, node.shape[-1])
        if found is not None:
            centred, eps = found
            return replace(node, kind="norm", name="norm", inputs=(u,), run=normalised(centred, eps), eps=eps, centred=centred)
    return None


def _norm_of(run: Callable[[Tensor], Tensor], d: int) -> tuple[bool, float] | None:
    """Whether a function of tokens divides them by `√(mean u² + eps)`, and that eps."""
    t = torch.randn(3, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    try:
        y = run(t)
    except RuntimeError:
        return None
    if y.shape != t.shape or not bool(y.isfinite().all()):
        return None
    small = 1e-4 * t
    ratio = (small / run(small))[:, :1]
    eps = max(0.0, float((ratio.square() - small.square().mean(-1, keepdim=True)).mean()))
    for guess in (eps, 0.0):
        plain = normalised(False, guess)
        if all(torch.allclose(run(s * t), plain(s * t), rtol=1e-9, atol=1e-12) for s in (1e-4, 1e-2, 1.0, 30.0)):
            return False, guess
    return None
