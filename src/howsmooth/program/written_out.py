"""Attention that is written out in a recorded graph, as one operation each; torch's own function too.

Each product of weights and values for which `howsmooth.program.logits_steps` has a reading gets a node of attention beside it.
The graph is then run with both, at the recording's input and beside it, and a reading that is apart anywhere is dropped: its
steps stay as they are, exact, with all their logits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from howsmooth.errors import HowSmoothError
from howsmooth.program.attention import attention
from howsmooth.program.calls import SDPA
from howsmooth.program.confirm import beside, same
from howsmooth.program.editing import Editor, aten, size, unrepeated
from howsmooth.program.equations import equation_of
from howsmooth.program.flow import Flow
from howsmooth.program.lazy_logits import LazyLogits, LogitsReader
from howsmooth.program.logits_steps import read
from howsmooth.program.nodes import is_float, name, shape, value
from howsmooth.program.reads import reads
from howsmooth.program.replay import Run
from howsmooth.program.tracing import Program

_ALIKE = 1e3  # units in the last place within which a sum of squares, added up in another order, is the same
_COARSEST = 0.05  # beyond which nothing is told apart


@dataclass(eq=False)
class Reading:
    """A node of a graph that is read as attention: the nodes of attention, and what of them stands for it.

    squares: by a node of attention, the terms that move.  sigmas: the `σ` for which their sum is `−σ |k|²`, so that weights are
    those of `−σ |q' − k|²`; nothing where there is none.
    """

    output: Node
    attention: tuple[Node, ...]
    answer: Node
    squares: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    agrees: bool = True
    sigmas: dict[Node, float | None] = field(default_factory=dict)


def rewrite(program: Program, flow: Flow | None = None) -> Program:
    """The same program with every attention that is recognised as one node, whose target is `attention`.

    flow: what moves, in the program as it is; attention whose biases or sinks move with it stays written out.

    >>> from howsmooth.program import record
    >>> program = record(torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (torch.randn(1, 3, 4),))
    >>> (
    ...     [name(n) for n in program.nodes if "attention" in name(n)],
    ...     [name(n) for n in rewrite(program).nodes if "attention" in name(n)],
    ... )
    (['scaled_dot_product_attention'], ['attention'])
    """
    new, places = _copy(program)
    unused = {
        n for n in new.nodes if not n.users and (is_float(n) or n.op != "call_function" or n.meta.get("mode") or reads(n))
    }
    readings = _readings(new)
    if readings:
        _confirm(new, readings)
    for reading in readings:
        for n, sigma in reading.sigmas.items():
            if reading.agrees and sigma is not None:
                _as_distances(_fresh(new), n, reading.squares[n])
    if flow is not None:
        both = _fresh(new)
        moving = moving_terms(both, Flow(both, [places[b] for b in flow.begins]))
        for reading in readings:
            reading.agrees &= not moving & {*reading.attention}
    for reading in readings:
        if reading.agrees:
            reading.output.replace_all_uses_with(reading.answer)
    new.code.graph.eliminate_dead_code(
        lambda n: n.op == "placeholder" or n in unused
    )  # what nobody reads stays, as streams end
    new.code.recompile()
    return _fresh(new)


def moving_terms(program: Program, flow: Flow) -> set[Node]:
    """The nodes of attention whose biases or sinks are live in a flow, for which the kernels have no derivative."""
    calls = [n for n in program.nodes if n.target is attention]
    return {n for n in calls if any(isinstance(t, Node) and flow.live(t) for t in (*_terms(n), n.kwargs.get("sink")))}


def _terms(n: Node) -> tuple[Node, ...]:
    given = n.kwargs.get("terms", n.args[3] if len(n.args) > 3 else ())
    return tuple(t for t in given if isinstance(t, Node))  # pyright: ignore


def _copy(program: Program) -> tuple[Program, dict[Node, Node]]:
    """The same program with a graph of its own, and where each node is in it."""
    places: dict[Node, Node] = {}
    graph = Graph()
    returned = graph.graph_copy(program.code.graph, places)
    graph.output(returned)
    old, new = program.nodes[-1], next(iter(reversed(graph.nodes)))
    new.meta.update(old.meta)
    places[old] = new
    weights = {places[n]: key for n, key in program.weights.items()}
    inputs = tuple(places[n] for n in program.inputs)
    code = GraphModule(program.code, graph)
    return replace(program, code=code, weights=weights, inputs=inputs), places


def _fresh(program: Program) -> Program:
    """A program whose graph was changed, its nodes listed anew."""
    return replace(program)


# readings


def _readings(program: Program) -> list[Reading]:
    """What may be attention, with nodes for it behind each."""
    edit = Editor(program.code.graph, program.inputs)
    reader = LogitsReader(edit, _constants(program))
    found: list[Reading] = []
    for n in program.nodes:
        if n.op != "call_function":
            continue
        edit.at(n)
        reading = _whole(edit, n) if name(n) == SDPA else _written(edit, reader, n)
        if reading is None:
            read(reader, n)
        else:
            found.append(reading)
    return found


def _whole(edit: Editor, n: Node) -> Reading | None:
    """Torch's own function."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, n.args, strict=False)), **n.kwargs}
    q, k, v, mask, dropout, causal, scale = (given.get(key) for key in (*names, "scale"))
    if dropout:
        return None
    own = size(q)[-1] ** -0.5 if scale is None else float(scale)  # pyright: ignore
    kwargs = {"causal": True} if causal else {}
    made = edit.call(attention, q, k, v, () if mask is None else (mask,), val=value(n), scale=own, **kwargs)
    return Reading(n, (made,), made)


def _written(edit: Editor, reader: LogitsReader, n: Node) -> Reading | None:
    """A product of weights and values."""
    eq = equation_of(n)
    weights = None if eq is None else reader.weights(eq.a)
    if eq is not None and weights is None:
        eq = eq.turned()
        weights = reader.weights(eq.a)
    if eq is None or weights is None:
        return None
    canon = [eq.left[weights.axes.index(c)] for c in range(len(weights.axes))]
    *lead, i, j = canon
    outer = [c for c in eq.right if c not in eq.left]
    fits = j in eq.right and i not in eq.right and {*eq.out} == {*lead, i, *outer} and len(eq.left) == len(weights.axes)
    if not fits or [eq.size(c) for c in (*lead, j)] != [*weights.lead, weights.m]:
        return None
    v = reader.arranged(eq.turned(), [*lead, j], outer)
    parts = (weights, *weights.beside)
    if not all(m in edit.moving for part in parts for m in (part.k, v)):
        return None
    made = [_call(edit, part, v, n) for part in parts]
    calls = tuple(m for m in made if m is not None)
    if len(calls) < len(made):
        return None
    answer = _total(edit, parts, calls)
    answer = edit.reshape(answer, [*weights.lead, weights.n, *map(eq.size, outer)])
    given = [*lead, i, *outer]
    squares = {m: tuple(t for t in _terms(m) if t in edit.moving and _of_keys(m, t)) for m in calls}
    return Reading(n, calls, edit.like(edit.permute(answer, [given.index(c) for c in eq.out]), n), squares)


def _total(edit: Editor, parts: tuple[LazyLogits, ...], calls: tuple[Node, ...]) -> Node:
    """The outputs of some attention, each with its gain, as one."""
    total: Node | None = None
    for part, n in zip(parts, calls, strict=True):
        for gain in (part.gain, *part.gains):
            n = edit.times(n, gain)
        total = n if total is None else edit.call(aten.add.Tensor, total, n)
    assert total is not None
    return total


def _call(edit: Editor, part: LazyLogits, v: Node, output: Node) -> Node | None:
    """The node of attention that weights and values amount to; nothing where there is no such kind."""
    kind = {"product": part.weights, "squared": "l2" if part.weights == "softmax" else None}.get(part.form)
    plain = part.weights == "softmax" and part.sink is None
    if kind is None or (part.sink is not None and kind != "softmax"):
        return None
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
    made = edit.call(attention, q, k, v, terms, val=val, **kwargs)
    made.meta["written_out"] = True
    return made


def _sink(edit: Editor, part: LazyLogits, v: Node) -> Node | None:
    """The logit of each head beside its keys."""
    if part.sink is None or isinstance(part.sink, Node):
        n = part.sink
        while n is not None and len(size(n)) > 1:
            axis = 0 if len(size(n)) > 3 else len(size(n)) - 1 if size(n)[-1] == 1 or len(size(n)) == 2 else 1
            n = edit.call(aten.select.int, n, axis, 0)
        return n
    val = edit.blank(v, (1,))
    return edit.call(aten.full.default, [1], part.sink, dtype=val.dtype, device=val.device, val=val)


def _constants(program: Program) -> Callable[[Node, bool], float | None]:
    """What gives the number that a node of one entry is, where no input reaches it; weights where they are asked for."""
    known: dict[Node, Any] = {}

    def get(n: Node, weights: bool) -> Any:
        if n.op == "placeholder":
            if not weights or n not in program.weights:
                raise KeyError(n)
            return program.weights_now()[program.weights[n]].detach()
        if n.op == "get_attr":
            return getattr(program.code, str(n.target))
        if n not in known:
            args, kwargs = map_arg((n.args, dict(n.kwargs)), lambda m: get(m, weights))  # pyright: ignore
            if weights and any(m in program.weights for m in n.all_input_nodes):
                return n.target(*args, **kwargs)  # pyright: ignore
            known[n] = n.target(*args, **kwargs)  # pyright: ignore
        return known[n]

    def constant(n: Node, weights: bool) -> float | None:
        try:
            with torch.no_grad():
                return float(get(n, weights))
        except (KeyError, RuntimeError):
            return None

    return constant


# numbers decide


def _confirm(program: Program, readings: list[Reading]) -> None:
    """Find the readings that agree with what they stand for, at the recording's input and beside it."""
    weights = [t.detach() for t in program.weights_now().values()]
    program.code.recompile()
    for tensors in (program.tensors, beside(program)):
        with torch.no_grad():
            _Comparing(program, readings).run(*weights, *(t.clone() for t in tensors))


class _Comparing(Interpreter):
    """Runs a graph in which attention stands beside its steps, and notes which readings are apart.

    All of it runs in the widest precision of the program, as a replay does: rounding in between would hide what is apart.
    """

    def __init__(self, program: Program, readings: list[Reading]):
        super().__init__(program.code)
        self._readings = {r.answer: r for r in readings}
        self._of = {n: r for r in readings for n in r.attention}
        floats = [t.dtype for t in (*program.tensors, *program.weights_now().values()) if t.is_floating_point()]
        self._widest = max(floats, key=lambda t: t.itemsize, default=torch.float32)

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            result = super().run_node(n)
            return result.to(self._widest) if isinstance(result, Tensor) and self._narrow(result.dtype) else result
        if n.meta.get("mode"):
            return None
        args, kwargs = tree_map(lambda t: self._widest if self._narrow(t) else t, self.fetch_args_kwargs_from_env(n))
        result = self._attend(n, self._of[n], args, kwargs) if n in self._of else n.target(*args, **kwargs)  # pyright: ignore
        reading = self._readings.get(n)
        if reading is not None:
            reading.agrees &= same(self.env[reading.output], result)
        return result

    def _narrow(self, t: Any) -> bool:
        return isinstance(t, torch.dtype) and t.is_floating_point and t.itemsize < self._widest.itemsize

    def _attend(self, n: Node, reading: Reading, args: Any, kwargs: Any) -> Any:
        squares = reading.squares.get(n, ())
        try:
            if squares and reading.sigmas.get(n, 0.0) is not None:
                sigma = _sigma(args[1], [self.env[t] for t in squares], kwargs["scale"])
                known = reading.sigmas.setdefault(n, sigma)
                same_sigma = known is not None and sigma is not None and abs(sigma - known) <= _tolerance(args[1]) * abs(known)
                reading.sigmas[n] = known if same_sigma else None
            return attention(*args, **kwargs)
        except (HowSmoothError, RuntimeError):
            reading.agrees = False
            return torch.full(shape(n) or (), torch.nan, dtype=args[2].dtype, device=args[2].device)


def _of_keys(n: Node, term: Node) -> bool:
    """Whether a term may be a number of each key, and one of each query that softmax does not see."""
    plain = n.kwargs["kind"] == "softmax" and n.kwargs.get("sink") is None and n.kwargs.get("softcap") is None
    return plain and is_float(term) and size(term)[-1] > 1


def _tolerance(t: Tensor) -> float:
    return min(_ALIKE * torch.finfo(t.dtype).eps, _COARSEST)


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
    return sigma if sigma != 0 and error <= _tolerance(k) * most else None


def _as_distances(program: Program, n: Node, squares: tuple[Node, ...]) -> None:
    """Make attention of products and of squares of keys one of distances, with its `σ` to double precision."""
    edit = Editor(program.code.graph, program.inputs)
    q, k, scale = n.args[0], n.args[1], n.kwargs["scale"]
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    assert isinstance(scale, float)
    exact = Run(program, program.tensors).values({k, *squares})
    sigma = _sigma(exact[k], [exact[t] for t in squares], scale)
    if sigma is None:
        return
    if abs(2 * sigma / scale - 1) <= _tolerance(exact[k]):
        sigma = scale / 2
    else:
        edit.before(n)
        q = edit.times(q, scale / (2 * sigma))
    n.args = (q, *n.args[1:3], tuple(t for t in _terms(n) if t not in squares))
    n.kwargs = {**n.kwargs, "kind": "l2", "scale": sigma}
