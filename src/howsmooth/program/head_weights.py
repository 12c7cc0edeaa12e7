"""Which entries of which parameters make one head's queries, keys, values or output.

Heads are told apart by derivatives: what a parameter's entry does to a random functional of all heads, and to one in which each
head counts by a number of its own. The quotient of the two names the head; an entry that several heads share has none. Scaling
the entries that are found must scale the heads, which is tried.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.fx import Node

from howsmooth.program.closed import ReadCall
from howsmooth.program.ends import Ends
from howsmooth.program.flow import Flow
from howsmooth.program.nodes import is_float
from howsmooth.program.stretch import PartOfRun, Values, agree, called, heads_of, random_tensor, unmoved
from howsmooth.program.tracing import Program

Labels = Mapping[Node, Int[Tensor, "*axes"]]  # by parameter: the head of every entry

_FIRST = 2  # the number of head 0, so that an entry that no head scales has none
_NEAR = 1e-6
_NOISE = 1e-12  # of a derivative, relative to the largest, that is zero but for rounding


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a parameter, or columns: its name in the module, the axis, and their indices along it."""

    name: str
    axis: int
    index: Int[Tensor, " rows"]


ByHead = tuple[tuple[Rows, ...], ...]


@dataclass(frozen=True, eq=False)
class HeadParameters:
    """The parameters' rows that make each head; nothing for a side that they do not scale, such as one behind a norm.

    queries, outputs: by query head.  keys, values: by key/value head.  facing: by query head, what makes the entries of queries
    that face entries of keys which `keys` do not scale, as the rotary part of MLA, which all heads share; empty elsewhere.
    """

    queries: ByHead | None
    keys: ByHead | None
    values: ByHead | None
    outputs: ByHead | None
    facing: ByHead | None = ()


def head_weights(program: Program, ends: Ends, values: Values) -> HeadParameters:
    """Which rows of which parameters make each head of an `attention` map.

    To multiply a head's logits by `c²`, multiply its `queries` and `keys` by `c`, and what is `facing` by `c²`. A matrix with
    an adapter has rows in both; only the factor that heads do not share is among them.
    """
    read = ReadCall.of(program, ends, values)
    weighted = _Weighted.of(program, read, values)
    q, k, v = (_Operand.of(weighted, read, n) for n in (read.operands.q, read.operands.k, read.operands.v))
    every = torch.ones(read.call.q.shape[-1], dtype=torch.bool, device=read.x.device)
    keys, own = k.labels(every), every
    if keys:
        own = k.doubled(keys)
        keys = None if own is None else keys
    own = every if own is None or not bool(own.any()) else own
    return HeadParameters(
        q.rows(own),
        None if not keys else weighted.by_head(keys, k.heads),
        v.rows(torch.ones(read.call.v.shape[-1], dtype=torch.bool, device=read.x.device)),
        _outputs(weighted, read),
        () if bool(own.all()) else q.rows(~own),
    )


@dataclass(frozen=True, eq=False)
class _Weighted:
    """A part of a run as a function of the parameters that it reads."""

    flow: Flow
    names: Mapping[Node, str]
    made: tuple[Node, ...]
    known: Mapping[Node, Any]

    @classmethod
    def of(cls, program: Program, read: ReadCall, values: Values) -> "_Weighted":
        flow, parameters = read.part.flow, dict(program.module.named_parameters(remove_duplicate=False))
        names = {n: key for n, key in program.weights.items() if key in parameters}
        path = flow.between([read.enter], [read.leave])
        inside, needed = {read.enter, *path}, set[Node]()
        todo = [m for n in path for m in n.all_input_nodes]
        while todo:
            n = todo.pop()
            if n not in needed and n not in inside and not flow.live(n):
                needed.add(n)
                todo += n.all_input_nodes
        made: dict[Node, None] = {}  # in order, what is made of parameters before the tokens meet it
        for n in program.nodes:
            if n in needed and n.op == "call_function" and is_float(n):
                made |= dict.fromkeys([n] * any(m in names or m in made for m in n.all_input_nodes))
        beside = {m for n in (*path, *made) for m in n.all_input_nodes} - {*inside, *made}
        return cls(flow, {n: key for n, key in names.items() if n in beside}, tuple(made), values({*beside, *read.gates}))

    @property
    def weights(self) -> dict[Node, Tensor]:
        """The parameters as they are."""
        return {n: self.known[n] for n in self.names}

    def part(self, weights: Mapping[Node, Tensor]) -> PartOfRun:
        """The part with other numbers for its parameters."""
        env = {**self.known, **weights}
        for n in self.made:
            env[n] = called(n, env.__getitem__, torch.float64)
        return PartOfRun(self.flow, env)

    def labels(self, numbers: Callable[[PartOfRun], tuple[Tensor, Tensor]]) -> Labels:
        """The head that every entry of some parameters acts through, −1 for none.

        numbers: a functional of all heads, and one in which each head counts by its number.
        """
        weights = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        with torch.enable_grad():
            one, coded = numbers(self.part(weights))
            if not one.requires_grad:
                return {}
            given = list(weights.values())
            ones = torch.autograd.grad(one, given, retain_graph=True, allow_unused=True)
            codeds = torch.autograd.grad(coded, given, allow_unused=True)
        found: dict[Node, Tensor] = {}
        for n, a, b in zip(weights, ones, codeds, strict=True):
            if a is None or b is None or not bool(a.any()):
                continue
            acts = a.abs() > _NOISE * a.abs().max()
            number = torch.where(acts, b / torch.where(acts, a, 1), _FIRST - 1)
            label = number.round().long() - _FIRST
            if bool(((number - number.round()).abs() <= _NEAR).all() & (label[acts] >= 0).all()):
                found[n] = label
        return found

    def doubled(self, labels: Labels) -> PartOfRun:
        """The part with twice the numbers in all entries that have a head."""
        weights = self.weights
        return self.part(weights | {n: torch.where(label >= 0, 2 * weights[n], weights[n]) for n, label in labels.items()})

    def by_head(self, labels: Labels, heads: int) -> ByHead | None:
        """Labels as rows of parameters; nothing where they are no whole rows or columns."""
        lines = {self.names[n]: _lines(label) for n, label in labels.items()}
        found: list[tuple[Rows, ...]] = []
        for h in range(heads):
            own = [(key, axis, (label == h).nonzero()[:, 0]) for key, (axis, label) in lines.items()]
            found.append(tuple(Rows(key, axis, index) for key, axis, index in own if len(index)))
        return tuple(found) if all(found) and all(axis >= 0 for axis, _ in lines.values()) else None


def _lines(label: Int[Tensor, "*axes"]) -> tuple[int, Int[Tensor, " rows"]]:
    """The axis along which every row has one label, and the labels of its rows; −1 where there is none."""
    for axis in range(label.ndim):
        rows = label.movedim(axis, 0).reshape(label.shape[axis], -1)
        first = rows[:, 0]
        if bool((rows == first[:, None]).all()):
            return axis, first
    return -1, label.new_empty(0)


@dataclass(frozen=True, eq=False)
class _Operand:
    """Queries, keys or values of random tokens as a function of the parameters."""

    weighted: _Weighted
    enter: Node
    node: Node
    tokens: Tensor
    layout: Int[Tensor, "kept n d"]

    @classmethod
    def of(cls, weighted: _Weighted, read: ReadCall, node: Node) -> "_Operand":
        waists, whole = [read.enter, *read.part.flow.after([read.enter], [node])], heads_of(node, read.x)
        _, moved = unmoved(read.part, waists, whole, read.x)
        return cls(weighted, read.enter, node, random_tensor(read.x.numel(), like=read.x), whole[:: len(whole) // len(moved)])

    @property
    def heads(self) -> int:
        return len(self.layout)

    def of_heads(self, part: PartOfRun) -> Float[Tensor, "kept n d"]:
        return part.between(self.enter, self.node)(self.tokens).reshape(-1)[self.layout]

    def labels(self, columns: Bool[Tensor, " d"]) -> Labels:
        """The heads whose entries in some columns the parameters' entries make."""

        def numbers(part: PartOfRun) -> tuple[Tensor, Tensor]:
            out = self.of_heads(part)
            by_head = (random_tensor(*out.shape, like=out, name="by head") * out * columns).sum((1, 2))
            return by_head.sum(), by_head @ (_FIRST + torch.arange(len(out)).to(by_head))

        return self.weighted.labels(numbers)

    def doubled(self, labels: Labels) -> Bool[Tensor, " d"] | None:
        """The columns that double with the labelled entries; nothing where the others do not stay as they are."""
        before, after = self.of_heads(self.weighted.part({})), self.of_heads(self.weighted.doubled(labels))
        columns = list(zip(before.unbind(-1), after.unbind(-1), strict=True))
        twice = [agree(b, 2 * a) for a, b in columns]
        if not all(two or agree(b, a) for two, (a, b) in zip(twice, columns, strict=True)):
            return None
        return torch.tensor(twice, device=before.device)

    def rows(self, columns: Bool[Tensor, " d"]) -> ByHead | None:
        """The rows that make some columns of every head; nothing where they do not scale these, and these alone."""
        labels = self.labels(columns)
        twice = self.doubled(labels) if labels else None
        return None if twice is None or not torch.equal(twice, columns) else self.weighted.by_head(labels, self.heads)


def _outputs(weighted: _Weighted, read: ReadCall) -> ByHead | None:
    """The rows or columns that take each head's output."""
    heads = read.call.q.shape[1]
    z = random_tensor(heads, *read.call.q.shape[2:3], read.call.v.shape[-1], like=read.x)
    code = (_FIRST + torch.arange(heads).to(z))[:, None, None]

    def f(part: PartOfRun, z: Tensor) -> Tensor:
        return part.between(read.node, read.leave)(z)

    def numbers(part: PartOfRun) -> tuple[Tensor, Tensor]:
        out = f(part, z)
        weigh = random_tensor(*out.shape, like=out)
        return (weigh * out).sum(), (weigh * f(part, code * z)).sum()

    labels = weighted.labels(numbers)
    own, twice = weighted.part({}), weighted.doubled(labels)
    if not agree(f(twice, z) - f(twice, 0 * z), 2 * (f(own, z) - f(own, 0 * z))):
        return None
    return weighted.by_head(labels, heads)
