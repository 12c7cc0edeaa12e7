"""A module's run at an input, recorded as a graph of aten operations in which weights are inputs by name.

The recording is PyTorch's own (`make_fx`): `linear`, `scaled_dot_product_attention`, `layer_norm`, `einsum` and `softmax` stay
single nodes, and what is recorded is the function itself, whatever `no_grad`, `detach` or checkpointing do to its derivative.
Afterwards the graph is made plain (`howsmooth.program.functional`).
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from howsmooth.errors import BadFunctionError
from howsmooth.program.functional import plain
from howsmooth.program.modules import Loans, NamedWeights, unhooked, watching, wide_experts, written_path
from howsmooth.program.operations import SHAPE_ALONE, is_float, is_random, is_view, name, order, reads, value, writes

_lazy_clone: Any = vars(torch)["_lazy_clone"]
_inside: Any = torch._C
_LARGE = 2**28  # bytes of a weight
# ways past the dispatcher, where an operation would be recorded
_READERS = {
    getattr(Tensor, reader)
    for reader in (
        "tolist", "numpy", "data_ptr", "untyped_storage", "storage", "apply_", "map_", "map2_", "__array__", "__dlpack__",
        "__reduce_ex__", "__deepcopy__", "__repr__", "__format__",
    )
}  # fmt: skip
_DATA: Any = Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]

Calls = list[tuple[nn.Module, Node | None, Node | None]]  # calls of modules, with the last nodes before and in each


@dataclass(frozen=True, eq=False)
class Span:
    """One call of a module: its path, and the orders of its nodes, `first` to before `last`."""

    path: str
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def holds(self, *nodes: Node) -> bool:
        return all(self.first <= order(n) < self.last for n in nodes)

    def overlaps(self, other: "Span") -> bool:
        return self.first < other.last and other.first < self.last

    @property
    def parent(self) -> str:
        """The path of the module that holds this one."""
        return self.path.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class Program:
    """A recorded run: the graph, what its placeholders stand for, and which module made which nodes.

    code: the graph with its constants.  weights: names, by placeholder.  inputs: placeholders of the tensors among the
    arguments.  scopes: calls of modules, each after those inside it.  example, spec: the arguments, flat, and how they nest.
    hidden: the place among the tensors that the module returns of the one that it calls its last hidden state.
    """

    module: nn.Module
    code: GraphModule
    weights: Mapping[Node, str]
    inputs: tuple[Node, ...]
    scopes: tuple[Span, ...]
    example: tuple[Any, ...]
    spec: TreeSpec
    hidden: int | None = None

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.code.graph.nodes)

    @functools.cached_property
    def reads(self) -> list[list[Node]]:
        """Node by node, those through which what moves reaches it; none where a node is no floats, or takes a shape alone."""
        return [reads(n) if is_float(n) and name(n) not in SHAPE_ALONE else [] for n in self.nodes]

    @property
    def constants(self) -> list[Tensor]:
        """The tensors that are in the graph as they are."""
        found = [getattr(self.code, str(n.target)) for n in self.nodes if n.op == "get_attr"]
        return [t for t in found if isinstance(t, Tensor)]

    @property
    def has_weights(self) -> bool:
        """Whether the module still has all weights by the names and in the shapes that the recording knows."""
        now = self.weights_now()
        return all(key in now and now.shape(key) == value(n).shape for n, key in self.weights.items())

    def stamp(self) -> list[tuple[int, int]]:
        """What changes when a weight is written into, or when another tensor takes its place."""
        weights = (*self.module.parameters(), *self.module.buffers())
        return [(id(t), 0 if t.is_inference() else t._version) for t in weights if not t.is_meta]  # others come and go

    @functools.cached_property
    def outputs(self) -> tuple[Node, ...]:
        """The tensors that the module returns, in order."""
        return tuple(n for n in tree_leaves(self.nodes[-1].args) if isinstance(n, Node))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments; one that is given several times is one input."""
        return distinct(self.example)

    def weights_now(self) -> NamedWeights:
        """The weights as they are now, by name."""
        return NamedWeights(self.module)

    def own(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """What the module itself gives with other tensors among its arguments."""
        args, kwargs = tree_unflatten(_with(self.example, [t.clone() for t in tensors]), self.spec)
        loans = Loans(self.module, tensors[0].device if tensors else None)
        with torch.no_grad(), wide_experts(self.module), watching(loans.before, loans.after), written_path():
            return list(tensors_in(self.module(*args, **kwargs)))


def trace(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, whole: bool = True
) -> Program:
    """The program of one run of `module(*args, **kwargs)` without gradients, not yet compared with the module.

    whole: operations made of others are single nodes, unless the run uses torch.func.
    """
    leaves, spec = tree_flatten((tuple(args), dict(kwargs or {})))
    tensors, weights = distinct(leaves), NamedWeights(module)
    loans = Loans(module, tensors[0].device if tensors else None, alone=True)
    given = {key: _spare(t.detach()) for key, t in weights.items()}
    hidden: list[int] = []

    def run(given: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
        args, kwargs = tree_unflatten(_with(leaves, tensors), spec)
        with _NotedReads():
            returned = torch.func.functional_call(module, given, args, kwargs)
        found, last = list(tensors_in(returned)), getattr(returned, "last_hidden_state", None)
        hidden[:] = [i for i, t in enumerate(found) if t is last]
        return found

    def graph(calls: Calls, whole: bool) -> GraphModule:
        tracer = make_fx(run, tracing_mode="real", pre_dispatch=whole, _error_on_data_dependent_ops=False)
        math = nullcontext() if whole else sdpa_kernel(SDPBackend.MATH)
        shapes = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))  # one for all nodes, not one for each
        heard = _Heard(calls, loans)
        hears = watching(heard.before, heard.after), _with_own_hooks(module, heard)
        with torch.no_grad(), hears[0], hears[1], math, wide_experts(module), unhooked(module), shapes:
            return tracer(given, [t.detach().clone() for t in tensors])

    calls: Calls = []
    try:
        code = graph(calls, whole=True) if whole else None
    except RuntimeError:  # as older versions of torch end in inside vmap
        code = None
    if code is None or _wrapped(code):  # the function uses torch.func, whose operations show at the level below alone
        calls = []
        code = graph(calls, whole=False)
    for i, n in enumerate(code.graph.nodes):
        n.meta["order"] = i
        if n.op == "get_attr":  # of which older versions of torch note nothing
            n.meta.setdefault("val", getattr(code, str(n.target)))
    holders = [n for n in code.graph.nodes if n.op == "placeholder"]
    _check(code, given, weights, set(holders[: len(given)]))
    plain(code, [*given.values(), *tensors])
    names = dict(zip(holders, given, strict=False))
    inputs, scopes = tuple(holders[len(given) :]), _scopes(module, calls)
    return Program(module, code, names, inputs, scopes, tuple(leaves), spec, next(iter(hidden), None))


def distinct(leaves: Iterable[Any]) -> tuple[Tensor, ...]:
    """The tensors among arguments, one that is there several times once."""
    return tuple({id(t): t for t in leaves if isinstance(t, Tensor)}.values())


def _with(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Arguments with others in the place of their distinct tensors."""
    known = dict(zip(map(id, distinct(leaves)), tensors, strict=True))
    return [known[id(t)] if isinstance(t, Tensor) else t for t in leaves]


def _spare(t: Tensor) -> Tensor:
    """A tensor of the same numbers, copied where the run writes into it, or where its memory is that of a file."""
    try:
        return _lazy_clone(t)
    except RuntimeError:
        return t.clone() if t.numel() * t.element_size() <= _LARGE else t


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns, in order."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for part in fields(leaf):
                yield from tensors_in(getattr(leaf, part.name))


@final
class _NotedReads(TorchFunctionMode):
    """Inside it a tensor whose numbers are read without an operation is compared with itself, which is recorded."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == _DATA:
            return args[0].detach()  # the same, as an operation
        if func in _READERS:
            torch.equal(args[0], args[0])
        return func(*args, **(kwargs or {}))


@final
class _Heard:
    """Notes every call of a module in the recording under way, and lends weights meanwhile."""

    def __init__(self, calls: Calls, loans: Loans):
        self._calls, self._loans = calls, loans
        self._began: list[tuple[nn.Module, Node | None]] = []

    def before(self, module: nn.Module) -> None:
        self._began.append((module, _last_node()))
        self._loans.before(module)

    def after(self, module: nn.Module) -> None:
        self._loans.after(module)
        while self._began:
            known, start = self._began.pop()
            if known is module:
                self._calls.append((module, start, _last_node()))
                return

    def again(self, module: nn.Module) -> None:
        """A module's own hooks have run, whose operations are part of its call."""
        for i in reversed(range(len(self._calls))):
            if self._calls[i][0] is module:
                self._calls[i] = (*self._calls[i][:2], _last_node())
                return


@contextmanager
def _with_own_hooks(module: nn.Module, heard: _Heard) -> Iterator[None]:
    """Inside it, `heard` is told when hooks of modules themselves have run, which come behind those of all modules."""
    hooked = [part for part in module.modules() if vars(part).get("_forward_hooks")]
    hooks = [part.register_forward_hook(lambda m, *_: heard.again(m)) for part in hooked]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _last_node() -> Node | None:
    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def _scopes(module: nn.Module, calls: Calls) -> tuple[Span, ...]:
    """The calls of modules; a module of several paths has the one that its caller's path begins."""
    paths: dict[nn.Module, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        paths.setdefault(part, []).append(path)
    found: list[Span] = []
    around: list[Span] = []
    for part, before, end in reversed(calls):  # callers first
        if part not in paths:
            continue
        first, last = (0 if n is None else order(n) + 1 for n in (before, end))
        while around and not (around[-1].first <= first and last <= around[-1].last):
            around.pop()
        begun = [p for s in reversed(around) for p in paths[part] if p.startswith(f"{s.path}." if s.path else "")]
        found.append(Span((begun or paths[part])[0], first, last))
        around.append(found[-1])
    return tuple(reversed(found))


def _wrapped(code: GraphModule) -> bool:
    """Whether a graph holds constants that belong to a transform of torch.func, or its numbers with a derivative."""
    constants = [t for t in (*vars(code).values(), *code.buffers()) if isinstance(t, Tensor)]
    dual = any(n.op == "call_function" and name(n) == "_make_dual" for n in code.graph.nodes)
    return dual or any(_inside._functorch.is_functorch_wrapped_tensor(t) for t in constants)


def _check(code: GraphModule, given: Mapping[str, Tensor], weights: Mapping[str, Tensor], holders: set[Node]) -> None:
    """Refuse random numbers, and a run that writes into its weights, which would be others at the next call."""
    for n in code.graph.nodes:
        if is_random(n):
            raise BadFunctionError(
                f"expected a function that gives the same twice, got random numbers ({n.target}) in it; take them out"
            )
        target = writes(n)
        while target is not None and is_view(target):
            target = target.all_input_nodes[0]
        if target in holders:
            raise BadFunctionError(f"expected a forward pass that leaves its weights alone, got {n.target} into one of them")
    for key, t in given.items():
        if not _inside._is_cow_tensor(t) and not torch.equal(t, weights[key]):
            raise BadFunctionError(f"expected a forward pass that leaves its weights alone, got one that writes into {key}")
