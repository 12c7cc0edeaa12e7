"""Replays of a recorded run: values of its nodes at an input, and a part of it as a function of what enters it.

Weights are looked up by name each time, so they are those of the moment.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from howsmooth.errors import BadFunctionError
from howsmooth.program.operations import CASTS, GROUPED, JUMPS, name, taken_from, takes_float, value, walk
from howsmooth.program.tracing import Flow, Program

_NARROW: dict[torch.dtype | None, tuple[torch.dtype, ...]] = {
    torch.float64: (torch.float16, torch.bfloat16, torch.float32),
    torch.float32: (torch.float16, torch.bfloat16),
    None: (),
}


@dataclass(frozen=True, eq=False)
class Run:
    """A program at an input: values of its nodes, computed when they are needed.

    tensors: those among the arguments.  work: the precision, in which casts to narrower ones are left out; nothing for the
    module's own.  kept: values that are known already, in the module's own precision, as hidden states between blocks are.
    weights: in place of the module's own, which are looked up each time; values then have a graph where these have one.
    """

    program: Program
    tensors: tuple[Tensor, ...]
    work: torch.dtype | None = torch.float64
    kept: Mapping[Node, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] | None = None

    @classmethod
    def recorded(cls, program: Program, work: torch.dtype | None = torch.float64) -> "Run":
        """The run that was recorded."""
        return cls(program, program.tensors, work)

    def at(self, work: torch.dtype | None) -> "Run":
        """A run like this one in another precision."""
        return self if work is self.work else replace(self, work=work)

    def values(self, wanted: Iterable[Node]) -> dict[Node, Any]:
        """What some nodes give; what is needed on the way is let go of as soon as it can be."""
        with torch.set_grad_enabled(self.weights is not None and torch.is_grad_enabled()):
            return self._values(set(wanted))

    def _values(self, wanted: set[Node]) -> dict[Node, Any]:
        return followed([n for n in self.needed(wanted) if n.op == "call_function"], self.given(), wanted, self.work)

    def given(self) -> Callable[[Node], Any]:
        """The values of nodes that are no operations, or that are kept, in the precision of the run, where its input is."""
        weights = self.program.weights_now() if self.weights is None else self.weights
        program, inputs = self.program, dict(zip(self.program.inputs, self.tensors, strict=True))

        def known(n: Node) -> Any:
            if n in program.weights:
                t = weights[program.weights[n]]
                return self._fit(t.detach() if self.weights is None else t)
            if n in self.kept:
                return self._fit(self.kept[n])
            return self._fit(inputs[n] if n.op == "placeholder" else getattr(program.code, str(n.target)))

        return known

    def _fit(self, t: Any) -> Any:
        """A tensor in the precision of the run, where the run's input is."""
        if not isinstance(t, Tensor):
            return t
        device = self.device
        moved = t if t.device == device or t.ndim == 0 else t.to(device)
        if self.work is None or not (moved.is_floating_point() or moved.is_complex()):
            return moved
        return moved.to(self.work.to_complex() if moved.is_complex() else self.work)

    @property
    def device(self) -> torch.device:
        """Where the run is computed: where its input is."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def needed(self, wanted: Iterable[Node]) -> list[Node]:
        """The nodes that lead from what is known to what is wanted, in order; in the own precision, those of autocast too."""
        kept = self.kept
        needed = {n for n in walk(wanted, lambda n: () if n in kept else n.all_input_nodes) if n not in kept}
        modes = {"_enter_autocast", "_exit_autocast"} if self.work is None else set[str]()
        return [n for n in self.program.nodes if n in needed or name(n) in modes]


@dataclass(frozen=True, eq=False)
class Way:
    """The nodes on the ways from some nodes to others, in order, and those beside them that they read."""

    enter: tuple[Node, ...]
    leave: tuple[Node, ...]
    nodes: tuple[Node, ...]

    @classmethod
    def of(
        cls, flow: Flow, enter: Sequence[Node], leave: Sequence[Node], through: Sequence[Node] = (), *, check: bool = True
    ) -> "Way":
        """The way through a flow. through: nodes that all of it leads through.  check: refuse what has no derivative."""
        ends = [n for n in leave if n not in enter]
        path = flow.between(enter, ends) if ends else []
        if through:
            inside = {*flow.between(enter, through), *flow.between(through, leave)}
            path = [n for n in path if n in inside]
        if check:
            _check_smooth(path, flow)
            _check_unread(path, enter, flow)
        return cls(tuple(enter), tuple(leave), tuple(path))

    @property
    def beside(self) -> set[Node]:
        """What is read on the way and does not move."""
        own = {*self.nodes, *self.enter}
        return {m for n in self.nodes for m in n.all_input_nodes if m not in own} | {n for n in self.leave if n not in own}

    def at(self, run: Run) -> "Segment":
        """The function along the way at a run, where what is beside it is as it is there."""
        return Segment(self, run.values({*self.beside, *self.enter}), run.work)


@dataclass(frozen=True, eq=False)
class Segment:
    """The function from some nodes to others; what is not on the way stays as it is, choices made from the input among it.

    known: the values of what is beside the way, and of what enters where `start` is wanted.
    """

    way: Way
    known: Mapping[Node, Any]
    work: torch.dtype | None = torch.float64

    def __call__(self, *points: Tensor) -> list[Tensor]:
        """What leaves where `points` enter."""
        entered, way = dict(zip(self.way.enter, points, strict=True)), self.way
        found = followed(way.nodes, lambda n: entered[n] if n in entered else self.known[n], way.leave, self.work)
        return [found[n] for n in way.leave]

    @property
    def start(self) -> list[Tensor]:
        """What enters in the run."""
        return [self.known[n].detach().clone() for n in self.way.enter]


def followed(
    nodes: Sequence[Node],
    known: Callable[[Node], Any],
    wanted: Collection[Node],
    work: torch.dtype | None,
    added: Mapping[Node, Tensor] | None = None,
) -> dict[Node, Any]:
    """What some nodes give, given what others do, by running nodes in order; values are let go of where nothing needs them.

    added: to what some of the nodes give.
    """
    env, last = dict[Node, Any](), dict[Node, list[Node]]()
    for m, reader in {m: n for n in nodes for m in n.all_input_nodes}.items():
        last.setdefault(reader, []).append(m)

    def find(m: Node) -> Any:
        return env[m] if m in env else known(m)

    for n in nodes:
        env[n] = called(n, find, work)
        if added and n in added:
            env[n] = env[n] + added[n]
        for m in last.get(n, ()):
            if m not in wanted:
                env.pop(m, None)
    return {n: find(n) for n in wanted}


def called(n: Node, known: Callable[[Node], Any], work: torch.dtype | None) -> Any:
    """What a node gives. In another precision than the module's own, casts are to that one, and what is detached moves."""
    args, kwargs = _arguments(n, known, work)
    operation = _operation(n, work)
    return args[0] if operation is None else operation(*args, **kwargs)


def _arguments(n: Node, known: Callable[[Node], Any], work: torch.dtype | None) -> tuple[Any, Any]:
    """The arguments of a node: what is known of others, and the precision of a run in place of narrower ones."""
    narrow = _NARROW.get(work, ())

    def given(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return known(leaf)
        return work if isinstance(leaf, torch.dtype) and leaf in narrow else leaf

    return map_aggregate(n.args, given), map_aggregate(n.kwargs, given) if n.kwargs else {}


def compiled(
    nodes: Sequence[Node],
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    work: torch.dtype | None,
    together: Sequence[Sequence[Node]] = (),
) -> Callable[..., list[Tensor]]:
    """Nodes that run in order as Python code of their own, for replays that come often.

    work: as for `called`.  together: calls of attention that run as one, items of one behind those of another, in the place of
    the last.
    """
    graph, groups = Graph(), {n: group for group in together for n in group}
    env: dict[Any, Any] = {n: graph.placeholder(f"given_{i}") for i, n in enumerate(inputs)}
    for n in nodes:
        group = groups.get(n, ())
        if group and n is not group[-1]:
            continue
        args, kwargs = _arguments(n, env.__getitem__, work)
        if group:
            joined = [graph.call_function(torch.cat, ([env[m.args[i]] for m in group],)) for i in range(3)]
            whole = graph.call_function(n.target, (*joined, *args[3:]), kwargs)  # pyright: ignore[reportArgumentType]
            parts = graph.call_function(torch.chunk, (whole, len(group)))
            env |= {m: graph.call_function(operator.getitem, (parts, i)) for i, m in enumerate(group)}
        else:
            operation = _operation(n, work)
            env[n] = args[0] if operation is None else graph.call_function(operation, args, kwargs)
    graph.output([env[n] for n in outputs])
    return GraphModule(torch.nn.Module(), graph).forward


def _check_smooth(path: Sequence[Node], flow: Flow) -> None:
    """Refuse nodes that round what moves, or whose operation is not one of torch's own with a derivative."""
    for n in path:
        schema, got = getattr(n.target, "_schema", None), ""
        quantized = schema is not None and schema.name.startswith("quantized")
        if isinstance(n.target, HigherOrderOperator):
            got = f"{name(n)} in {{}}, which chooses between functions"
        elif name(n) in JUMPS or n.kwargs.get("rounding_mode") is not None or quantized:
            got = f"{name(n)} in {{}}, which rounds"
        elif any(not flow.live(m) and _rounded(m, flow) for m in n.all_input_nodes):
            got = f"a cast to integers before {name(n)} in {{}}"
        if got:
            got = got.format(_place(flow.program, n))
            raise BadFunctionError(f"expected operations with a derivative, got {got}; measure a part without it")


def _check_unread(path: Sequence[Node], enter: Sequence[Node], flow: Flow) -> None:
    """Refuse numbers that the run reads off what moves before the path ends: nobody knows what becomes of them."""
    last, moving = max(map(flow.index.__getitem__, path), default=0), flow.bits(enter)
    for n in flow.nodes[:last]:
        if takes_float(n) and any(flow.up(m) & moving for m in taken_from(n)):
            raise BadFunctionError(
                f"expected operations on tensors alone, got a number that {_place(flow.program, n)} reads off its tokens "
                "(item, tolist, numpy or the like); keep it a tensor"
            )


def _place(program: Program, n: Node) -> str:
    """The module that made a node."""
    scope = program.scope_of(n)
    return scope.path if scope is not None and scope.path else "the module"


def _rounded(n: Node, flow: Flow) -> bool:
    """Whether a frozen value is made of whole numbers that something moving was cast to."""

    def moves(m: Node) -> bool:
        return any(flow.live(i) for i in m.all_input_nodes)

    for m in walk([n], lambda m: () if m.op != "call_function" or moves(m) else m.all_input_nodes):
        dtype = getattr(value(m), "dtype", torch.bool)
        whole = m.op == "call_function" and not dtype.is_floating_point and dtype is not torch.bool
        if whole and name(m) in CASTS and moves(m):
            return True
    return False


def _operation(n: Node, work: torch.dtype | None) -> Callable[..., Any] | None:
    """The operation of a node, or one in its place that knows float64, any layout in memory, and its own derivative.

    Nothing where it gives what it takes.
    """
    what = name(n)
    if what in ("detach", "alias"):
        return None
    if what in ("view", "_unsafe_view") and isinstance(n.args[1], list | tuple):
        return torch.ops.aten.reshape.default
    if what in GROUPED and work is not None:
        return grouped_product
    return _NORMS.get(what, n.target)  # pyright: ignore


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Torch's batch norm as a formula: where gradients come in some layouts, torch's own are wrong (seen with 2.11 and 2.13).

    >>> x = torch.randn(2, 3, 4)
    >>> ours = batch_norm(x, None, None, torch.zeros(3), torch.ones(3), False)
    >>> torch.allclose(ours, torch.nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3)))
    True
    """
    axes, channels = [i for i in range(x.ndim) if i != 1], [-1, *[1] * (x.ndim - 2)]
    if training or mean is None or var is None:
        mean, var = x.mean(axes), x.var(axes, correction=0)
    y = (x - mean.reshape(channels)) * (var + eps).rsqrt().reshape(channels)
    y = y if weight is None else y * weight.reshape(channels)
    return (y if bias is None else y + bias.reshape(channels)).to(x.dtype)


def instance_norm(x: Tensor, *given: Any) -> Tensor:
    """Torch's instance norm: the batch norm of every item alone."""
    return torch.cat([batch_norm(t, *given) for t in x.split(1)])


_NORMS: dict[str, Callable[..., Any]] = {"batch_norm": batch_norm, "instance_norm": instance_norm}


def grouped_product(
    x: Tensor, weights: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Rows of `x` times the matrix of their group, one product a group; `offs` gives where groups of rows end.

    >>> grouped_product(torch.eye(2), torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), torch.tensor([1, 2]))
    tensor([[1.],
            [4.]])
    """
    if offs is None or x.ndim != 2 or weights.ndim != 3:
        raise BadFunctionError("expected products of groups of rows, got groups of columns; measure a part without them")
    ends = [0, *offs.tolist()]
    y = torch.cat([x[a:b] @ w for a, b, w in zip(ends, ends[1:], weights, strict=False)])
    y = y if bias is None else y + bias
    return torch.nn.functional.pad(y, (0, 0, 0, len(x) - len(y)))
