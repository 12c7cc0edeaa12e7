"""A module's run at an input, recorded as a graph of aten operations in which weights are inputs by name, and what moves in it.

The recording is PyTorch's own (`make_fx`): `linear`, `scaled_dot_product_attention`, `layer_norm`, `einsum` and `softmax` stay
single nodes, and what is recorded is the function itself, whatever `no_grad`, `detach` or checkpointing do to its derivative.
Afterwards the graph is made plain (`howsmooth.program.functional`).
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from howsmooth.errors import BadFunctionError
from howsmooth.program.functional import plain
from howsmooth.program.modules import (
    Calls,
    Loans,
    NamedWeights,
    NotedReads,
    noted_calls,
    unhooked,
    watching,
    wide_experts,
    written_path,
)
from howsmooth.program.operations import SHAPE_ALONE, is_float, is_random, is_view, name, order, reads, value, writes

_lazy_clone: Any = vars(torch)["_lazy_clone"]
_inside: Any = torch._C
_LARGE = 2**28  # bytes of a weight


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

    def scope_of(self, *nodes: Node) -> Span | None:
        """The smallest call of a module that made some nodes."""
        return min((s for s in self.scopes if s.holds(*nodes)), key=len, default=None)

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


class Flow:
    """The nodes of a program that depend on some `begins`, and how: sets of nodes as bits, so that unions cost little.

    A node is live where a begin reaches it through floating-point tensors; all others stay as they are while an input moves.
    """

    def __init__(self, program: Program, begins: Iterable[Node]):
        self.program, self.nodes = program, program.nodes
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.begins = tuple(dict.fromkeys(begins))
        first = {self.index[n] for n in self.begins}
        self._up: list[int] = []
        for i, (n, read) in enumerate(zip(self.nodes, program.reads, strict=True)):
            bits = 1 << i if i in first else 0
            if not bits and n.op != "output":
                for m in read:
                    bits |= self._up[self.index[m]]
                bits |= (1 << i) * bool(bits)
            self._up.append(bits)

    @functools.cached_property
    def _down(self) -> list[int]:
        down = [0] * len(self.nodes)
        for i in reversed(range(len(self.nodes))):
            if self._up[i]:
                down[i] |= 1 << i
                for m in self.feeds(self.nodes[i]):
                    down[self.index[m]] |= down[i]
        return down

    def live(self, n: Node) -> bool:
        """Whether a begin reaches a node."""
        return bool(self._up[self.index[n]])

    def feeds(self, n: Node) -> list[Node]:
        """The live nodes that a node reads."""
        return [] if n in self.begins else [m for m in reads(n) if self._up[self.index[m]]]

    def only(self, n: Node) -> Node | None:
        """The only live node that a node reads; nothing where there are more, or none."""
        feeds = self.feeds(n)
        return feeds[0] if len(feeds) == 1 else None

    def back(self, n: Node, by: Collection[str]) -> Iterator[Node]:
        """A node, and those before it as far as each reads one live node alone, by an operation that `by` names."""
        yield n
        while name(n) in by and (before := self.only(n)) is not None:
            yield (n := before)

    def bare(self, n: Node, by: Collection[str]) -> Node:
        """A node without what is done to it alone by operations that `by` names."""
        *_, first = self.back(n, by)
        return first

    def users(self, n: Node) -> list[Node]:
        """The live nodes that read a node."""
        return [u for u in n.users if self.live(u)]

    def up(self, *nodes: Node) -> int:
        """The live nodes that some of these depend on, themselves among them, as bits."""
        bits = 0
        for n in nodes:
            bits |= self._up[self.index[n]]
        return bits

    def down(self, *nodes: Node) -> int:
        """The live nodes that depend on some of these, themselves among them, as bits."""
        bits = 0
        for n in nodes:
            bits |= self._down[self.index[n]]
        return bits

    def bit(self, n: Node) -> int:
        """A node as bits."""
        return 1 << self.index[n]

    def bits(self, nodes: Iterable[Node]) -> int:
        """Some nodes as bits."""
        return sum(1 << i for i in {self.index[n] for n in nodes})

    def unpack(self, bits: int) -> list[Node]:
        """The nodes of some bits, in order."""
        found: list[Node] = []
        while bits:
            low = bits & -bits
            found.append(self.nodes[low.bit_length() - 1])
            bits ^= low
        return found

    def between(self, starts: Sequence[Node], ends: Sequence[Node]) -> list[Node]:
        """The nodes on the ways from some nodes to others, without the starts."""
        return self.unpack(self.down(*starts) & self.up(*ends) & ~self.bits(starts))

    @functools.cached_property
    def outputs(self) -> tuple[Node, ...]:
        """The returned tensors that are live."""
        return tuple(dict.fromkeys(n for n in self.program.outputs if self.live(n)))

    def waists(self, ends: Sequence[Node]) -> list[Node]:
        """The nodes that every way from the begins to `ends` goes through, in order."""
        need = self.up(*ends)
        return self._narrow(need, [b for b in self.begins if need & self.bit(b)], ends)

    def after(self, starts: Sequence[Node], ends: Sequence[Node]) -> list[Node]:
        """The nodes that every way from `starts` to `ends` goes through, in order, the starts left out."""
        found = self._narrow(self.down(*starts) & self.up(*ends), starts, ends)
        return [n for n in found if n not in starts]

    def _narrow(self, need: int, starts: Sequence[Node], ends: Sequence[Node]) -> list[Node]:
        """The nodes of some bits that no edge among them jumps over."""
        far = len(self.nodes)
        last = max((self.index[e] for e in ends if need & self.bit(e)), default=far)
        reach = max((self.index[s] for s in starts), default=far)
        found: list[Node] = []
        for n in self.unpack(need):
            i = self.index[n]
            if i >= reach:
                found.append(n)
            if n in ends and i < last:
                break
            reach = max([reach, *(self.index[u] for u in n.users if u.op != "output" and need & self.bit(u))])
        return found


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
        with NotedReads():
            returned = torch.func.functional_call(module, given, args, kwargs)
        found, last = list(tensors_in(returned)), getattr(returned, "last_hidden_state", None)
        hidden[:] = [i for i, t in enumerate(found) if t is last]
        return found

    def graph(whole: bool) -> tuple[GraphModule, Calls]:
        tracer = make_fx(run, tracing_mode="real", pre_dispatch=whole, _error_on_data_dependent_ops=False)
        math = nullcontext() if whole else sdpa_kernel(SDPBackend.MATH)
        shapes = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))  # one for all nodes, not one for each
        with torch.no_grad(), noted_calls(module, loans) as calls, math, wide_experts(module), unhooked(module), shapes:
            return tracer(given, [t.detach().clone() for t in tensors]), calls

    code, calls = graph(whole)
    if whole and _wrapped(code):  # the function uses torch.func, whose operations show at the level below alone
        code, calls = graph(whole=False)
    for i, n in enumerate(code.graph.nodes):
        n.meta["order"] = i
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
            raise BadFunctionError(
                f"expected a forward pass that leaves its weights alone, got {n.target} into one of them; write into a copy"
            )
    for key, t in given.items():
        if not _inside._is_cow_tensor(t) and not torch.equal(t, weights[key]):
            raise BadFunctionError(
                f"expected a forward pass that leaves its weights alone, got one that writes into {key}; write into a copy"
            )
