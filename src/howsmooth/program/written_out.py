"""Attention that is written out in a recorded graph, as one operation each; torch's own function too.

Each product of weights and values for which `howsmooth.program.logits_steps` has a reading gets a node of attention beside it.
The graph is then run with both, at the recording's input and beside it, and a reading that is apart anywhere is dropped: its
steps stay as they are, exact, with all their logits.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from howsmooth.errors import HowSmoothError
from howsmooth.program.attention import Operands, attention
from howsmooth.program.calls import SDPA
from howsmooth.program.confirm import beside, same
from howsmooth.program.lazy_logits import (
    Editor,
    LazyLogits,
    LogitsReader,
    NotAttentionError,
    aten,
    equation_of,
    need,
    size,
    unrepeated,
)
from howsmooth.program.logits_steps import read
from howsmooth.program.operations import dependents, is_float, is_random, name, takes_numbers, value
from howsmooth.program.replay import Run
from howsmooth.program.tracing import Flow, Program

_ALIKE = 1e3  # units in the last place within which a sum of squares, added up in another order, is the same
_COARSEST = 0.05  # beyond which nothing is told apart


@dataclass(frozen=True, eq=False)
class Reading:
    """A node of a graph that is read as attention: the nodes of attention, and what of them stands for it.

    compared: the node that says whether the two agree.  squares: by a node of attention, the terms that may be a number of each
    key's own, such as `−σ |k|²`, and the node that gives the `σ`.
    """

    output: Node
    attention: tuple[Node, ...]
    answer: Node
    compared: Node
    squares: Mapping[Node, tuple[Sequence[Node], Node]] = field(default_factory=dict)


def rewrite(program: Program, flow: Flow | None = None) -> Program:
    """A program with every attention that is recognised as one node, whose target is `attention`.

    flow: what moves, in the program as it is; attention whose biases or sinks move with it stays written out.

    >>> from howsmooth.program import record
    >>> mha = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    >>> program = record(mha, (torch.randn(1, 3, 4),) * 3, {"need_weights": False})
    >>> [name(n) for n in rewrite(program).nodes if name(n) in ("softmax", "attention")]
    ['attention']
    """
    new, places = _copy(program)
    kept = (n for n in new.nodes if is_float(n) or n.op != "call_function" or n.meta.get("mode") or takes_numbers(n))
    unused = {n for n in kept if not n.users}
    readings = _readings(new)
    right = _confirmed(replace(new), readings) if readings else []
    both = replace(new)
    moving = set() if flow is None else moving_terms(both, Flow(both, [places[b] for b in flow.begins]))
    for reading in right:
        if not moving & {*reading.attention}:
            reading.output.replace_all_uses_with(reading.answer)
    # what nobody read before stays, as streams end
    new.code.graph.eliminate_dead_code(lambda n: n.op == "placeholder" or n in unused)
    new.code.recompile()
    return replace(new)


def moving_terms(program: Program, flow: Flow) -> set[Node]:
    """The nodes of attention whose biases or sinks are live in a flow, for which the kernels have no derivative."""
    calls = {n: Operands.of(n) for n in program.nodes if n.target is attention}
    return {n for n, given in calls.items() if any(map(flow.live, given.beside))}


def _copy(program: Program) -> tuple[Program, dict[Node, Node]]:
    """A copy of a program, with a graph of its own, and where each node is in it."""
    graph = Graph()
    graph.output(graph.graph_copy(program.code.graph, {}))
    places = dict(zip(program.nodes, graph.nodes, strict=True))
    places[program.nodes[-1]].meta.update(program.nodes[-1].meta)
    weights = {places[n]: key for n, key in program.weights.items()}
    inputs = tuple(places[n] for n in program.inputs)
    code = GraphModule(program.code, graph)
    return replace(program, code=code, weights=weights, inputs=inputs), places


# readings


def _readings(program: Program) -> list[Reading]:
    """What may be attention, with nodes for it behind each."""
    edit = Editor(program.code.graph, program.inputs)
    reader = LogitsReader(edit, _constants(program, edit))
    found: list[Reading] = []
    for n in program.nodes:
        if n.op != "call_function":
            continue
        edit.at(n)
        try:
            found.append(_whole(edit, n) if name(n) == SDPA else _written(edit, reader, n))
        except NotAttentionError:
            read(reader, n)
    return found


def _whole(edit: Editor, n: Node) -> Reading:
    """Torch's own function."""
    need(not is_random(n))
    given = Operands.of(n)
    call = edit.call(_tried, given.q, given.k, given.v, given.terms, val=value(n), **given.settings)
    return Reading(n, (call,), call, edit.call(same, n, call, val=True))


def _written(edit: Editor, reader: LogitsReader, n: Node) -> Reading:
    """A product of weights and values."""
    eq = equation_of(n)
    if eq is not None and reader.weights(eq.a) is None:
        eq = eq.turned()
    weights = None if eq is None else reader.weights(eq.a)
    if eq is None or weights is None:
        raise NotAttentionError
    *lead, i, j = (eq.left[c] for c in weights.order)
    outer = [c for c in eq.right if c not in eq.left]
    need(j in eq.right and i not in eq.right and {*eq.out} == {*lead, i, *outer})
    need([eq.size(c) for c in (*lead, j)] == [*weights.lead, weights.m])
    v, parts = reader.arranged(eq.turned(), [*lead, j], outer), (weights, *weights.beside)
    need(all(m in edit.moving for part in parts for m in (part.k, v)))
    calls = tuple(_call(edit, part, v) for part in parts)
    outputs = [functools.reduce(edit.times, part.gains, call) for part, call in zip(parts, calls, strict=True)]
    answer = functools.reduce(lambda total, more: edit.call(aten.add.Tensor, total, more), outputs)
    answer = edit.reshape(answer, [*weights.lead, weights.n, *map(eq.size, outer)])
    given = [*lead, i, *outer]
    answer = edit.like(edit.permute(answer, [given.index(c) for c in eq.out]), n)
    squares: dict[Node, tuple[Sequence[Node], Node]] = {}
    for m in calls:
        how = m.kwargs  # softmax does not see what is a number of each query
        alone = how["kind"] == "softmax" and how.get("sink") is None and how.get("softcap") is None
        terms = [t for t in Operands.of(m).terms if alone and t in edit.moving and is_float(t) and size(t)[-1] > 1]
        if terms:
            squares[m] = terms, edit.call(_sigma, m.args[1], terms, m.kwargs["scale"], val=0.0)
    return Reading(n, calls, answer, edit.call(same, n, answer, val=True), squares)


def _call(edit: Editor, part: LazyLogits, v: Node) -> Node:
    """The node of attention that weights and values amount to."""
    kind = {"product": part.weights, "squared": "l2" if part.weights == "softmax" else None}.get(part.form)
    plain = part.weights == "softmax" and part.sink is None
    need(kind is not None and (part.sink is None or kind == "softmax"))
    q, k = (edit.like(t, v) for t in (part.q, part.k))
    terms = tuple(t for t in part.terms if not (plain and size(t)[-1] == 1 < part.m))  # softmax sees none that keys share
    kwargs: dict[str, Any] = {"scale": part.scale if part.cap is None else part.cap * part.scale, "kind": kind}
    kwargs["scale"] *= -1 if kind == "l2" else 1
    kwargs |= {} if part.cap is None else {"softcap": abs(part.cap)}
    kwargs |= {} if plain or not part.shift else {"shift": part.shift}
    sink = _sink(edit, part, v)
    if sink is not None:
        kwargs["sink"] = sink
    few_k, few_v = unrepeated(k), unrepeated(v)
    if few_k is not None and few_v is not None and size(few_k)[1] == size(few_v)[1] and not edit.moving & {*terms}:
        k, v = few_k, few_v
    val = edit.blank(v, (*part.lead, part.n, size(v)[-1]))
    call = edit.call(_tried, q, k, v, terms, val=val, **kwargs)
    call.meta["written_out"] = True
    return call


def _sink(edit: Editor, part: LazyLogits, v: Node) -> Node | None:
    """The logit of each head beside its keys."""
    if part.sink is None or isinstance(part.sink, Node):
        n = part.sink
        for axis in reversed(range(0 if n is None else len(size(n)))):
            n = n if axis == len(part.lead) - 1 else edit.call(aten.select.int, n, axis, 0)
        return n
    val = edit.blank(v, (1,))
    return edit.call(aten.full.default, [1], part.sink, dtype=val.dtype, device=val.device, val=val)


def _constants(program: Program, edit: Editor) -> Callable[[Node, bool], float | None]:
    """What gives the number that a node of one entry is, where no input reaches it; weights where they are asked for."""
    run = replace(Run.recorded(program), weights=program.weights_now())
    weighted = dependents(program.nodes, program.weights)

    def constant(n: Node, weights: bool) -> float | None:
        if n in edit.moving or (n in weighted and not weights):
            return None
        try:
            return float(run.values((n,))[n])
        except RuntimeError:
            return None

    return constant


# numbers decide


def _confirmed(program: Program, readings: list[Reading]) -> list[Reading]:
    """The readings that agree with what they stand for, at the recording's input and beside it; squares become distances.

    All of it runs in the widest precision of the program: rounding in between would hide what is apart.
    """
    floats = [t.dtype for t in (*program.tensors, *program.weights_now().values()) if t.is_floating_point()]
    widest = max(floats, key=lambda t: t.itemsize, default=torch.float32)
    wanted = {m for r in readings for m in (r.compared, *(sigma for _, sigma in r.squares.values()))}
    points = [tuple(t.clone() for t in tensors) for tensors in (program.tensors, beside(program))]
    here, there = (Run(program, tensors, widest).values(wanted) for tensors in points)
    for n in (n for r in readings for n in r.attention):
        n.target = attention
    right = [r for r in readings if here[r.compared] and there[r.compared]]
    for n, (terms, sigma) in (found for r in right for found in r.squares.items()):
        one, other = here[sigma], there[sigma]
        if one and other and abs(other - one) <= _tolerance(widest) * abs(one):
            _as_distances(program, n, terms)
    return right


def _tried(q: Tensor, k: Tensor, v: Tensor, *given: Any, **settings: Any) -> Tensor:
    """Attention, or numbers that agree with nothing where there is no such attention."""
    try:
        return attention(q, k, v, *given, **settings)
    except (HowSmoothError, RuntimeError):
        return v.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)


def _tolerance(dtype: torch.dtype) -> float:
    return min(_ALIKE * torch.finfo(dtype).eps, _COARSEST)


def _sigma(k: Tensor, terms: list[Tensor], scale: float) -> float | None:
    """The `σ` for which terms are `−σ |k|²` and a number of each query's own, so that softmax sees `−σ |q' − k|²`."""
    lengths = k.double().square().sum(-1)[..., None, :]
    total: Any = sum(t.double() for t in terms)
    spread, along = torch.broadcast_tensors(*(t - t.mean(-1, keepdim=True) for t in (total, lengths)))
    length = float(along.square().sum())
    if length == 0 or scale == 0:
        return None
    sigma = -float((spread * along).sum()) / length
    error, most = float((spread + sigma * along).abs().max()), abs(sigma) * float(along.abs().max())
    return sigma if sigma != 0 and error <= _tolerance(k.dtype) * most else None


def _as_distances(program: Program, n: Node, squares: Sequence[Node]) -> None:
    """Make attention of products and of squares of keys one of distances, with its `σ` to double precision."""
    edit, given = Editor(program.code.graph, program.inputs), Operands.of(n)
    q, k, scale = given.q, given.k, given.settings["scale"]
    exact = Run.recorded(program).values({k, *squares})
    sigma = _sigma(exact[k], [exact[t] for t in squares], scale)
    if sigma is None:
        return
    if abs(2 * sigma / scale - 1) <= _tolerance(exact[k].dtype):
        sigma = scale / 2
    else:
        edit.before(n)
        q = edit.times(q, scale / (2 * sigma))
    n.args = (q, k, given.v, tuple(t for t in given.terms if t not in squares))
    n.kwargs = {**n.kwargs, "kind": "l2", "scale": sigma}
