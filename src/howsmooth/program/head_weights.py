"""Which entries of which parameters make one head's queries, keys, values or output.

Heads are told apart by derivatives: what a parameter's entry does to a random functional of all heads, and to one in which each
head counts by a number of its own. The quotient of the two names the head; an entry that several heads share has none. Scaling
the entries that are found must scale the heads, which is tried.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.fx import Node

from howsmooth.program.closed import ReadCall
from howsmooth.program.ends import Ends
from howsmooth.program.operations import dependents, shape
from howsmooth.program.replay import Run
from howsmooth.program.stretch import Values, agree, heads_of, random_tensor, unmoved
from howsmooth.program.tracing import Program

Labels = Mapping[str, Int[Tensor, "*axes"]]  # by parameter: the head of every entry

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


class HeadParameters(NamedTuple):
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
    weighted = _AtParameters.of(program, read)
    q, k, v = (_SideOfParameters.of(weighted, read, n) for n in (read.operands.q, read.operands.k, read.operands.v))
    every = torch.ones(read.call.q.shape[-1], dtype=torch.bool, device=read.x.device)
    keys, own = k.labels(every), every
    if keys:
        own = k.doubled(keys)
        keys = None if own is None else keys
    own = every if own is None or not bool(own.any()) else own
    return HeadParameters(
        q.rows(own),
        None if not keys else _by_head(keys, len(k.layout)),
        v.rows(torch.ones(read.call.v.shape[-1], dtype=torch.bool, device=read.x.device)),
        _outputs(weighted, read),
        () if bool(own.all()) else q.rows(~own),
    )


@dataclass(frozen=True, eq=False)
class _AtParameters:
    """Nodes of a layer as functions of the parameters that they are made of. run: with all that stays as it is."""

    run: Run
    parameters: Mapping[str, Tensor]

    @classmethod
    def of(cls, program: Program, read: ReadCall) -> "_AtParameters":
        flow, named = read.part.flow, dict(program.module.named_parameters(remove_duplicate=False))
        weights = {n: key for n, key in program.weights.items() if key in named}
        behind, inside = dependents(program.nodes, weights), {read.enter, *flow.between([read.enter], [read.leave])}
        kept = {n: t for n, t in read.part.known.items() if n not in inside and (n not in behind or flow.live(n))}
        run = Run(program, program.tensors, kept=kept, weights=program.weights_now())
        needed = replace(run, kept={**kept, read.enter: read.x}).needed({read.leave})
        return cls(run, {weights[n]: named[weights[n]].detach().double() for n in needed if n in weights})

    def value(self, n: Node, given: Mapping[Node, Tensor], parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """What a node gives where others are given, with some numbers for the parameters in place of their own."""
        own = {m: t.reshape(shape(m) or ()) for m, t in given.items()}
        weights = {**(self.run.weights or {}), **self.parameters, **(parameters or {})}
        return replace(self.run, kept={**self.run.kept, **own}, weights=weights).values((n,))[n]

    def labels(self, numbers: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]) -> Labels:
        """The head that every entry of some parameters acts through, −1 for none.

        numbers: a functional of all heads, and one in which each head counts by its number.
        """
        weights = {key: w.detach().requires_grad_() for key, w in self.parameters.items()}
        with torch.enable_grad():
            one, coded = numbers(weights)
            if not one.requires_grad:
                return {}
            given = list(weights.values())
            ones = torch.autograd.grad(one, given, retain_graph=True, allow_unused=True)
            codeds = torch.autograd.grad(coded, given, allow_unused=True)
        found: dict[str, Tensor] = {}
        for key, a, b in zip(weights, ones, codeds, strict=True):
            if a is None or b is None or not bool(a.any()):
                continue
            acts = a.abs() > _NOISE * a.abs().max()
            number = torch.where(acts, b / torch.where(acts, a, 1), _FIRST - 1)
            label = number.round().long() - _FIRST
            if bool(((number - number.round()).abs() <= _NEAR).all() & (label[acts] >= 0).all()):
                found[key] = label
        return found

    def doubled(self, labels: Labels) -> dict[str, Tensor]:
        """The parameters with twice the numbers in all entries that have a head."""
        return {key: torch.where(label >= 0, 2, 1) * self.parameters[key] for key, label in labels.items()}


def _by_head(labels: Labels, heads: int) -> ByHead | None:
    """Labels as rows of parameters; nothing where they are no whole rows or columns."""
    lines = {key: _lines(label) for key, label in labels.items()}
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
class _SideOfParameters:
    """Queries, keys or values of random tokens as a function of the parameters."""

    weighted: _AtParameters
    node: Node
    given: Mapping[Node, Tensor]
    layout: Int[Tensor, "kept n d"]

    @classmethod
    def of(cls, weighted: _AtParameters, read: ReadCall, node: Node) -> "_SideOfParameters":
        waists, whole = [read.enter, *read.part.flow.after([read.enter], [node])], heads_of(node, read.x)
        _, moved = unmoved(read.part, waists, whole, read.x)
        tokens = random_tensor(read.x.numel(), like=read.x)
        return cls(weighted, node, {read.enter: tokens}, whole[:: len(whole) // len(moved)])

    def heads(self, parameters: Mapping[str, Tensor] | None = None) -> Float[Tensor, "kept n d"]:
        return self.weighted.value(self.node, self.given, parameters).reshape(-1)[self.layout]

    def labels(self, columns: Bool[Tensor, " d"]) -> Labels:
        """The heads whose entries in some columns the parameters' entries make."""

        def numbers(parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            out = self.heads(parameters)
            by_head = (random_tensor(*out.shape, like=out, name="by head") * out * columns).sum((1, 2))
            return by_head.sum(), by_head @ (_FIRST + torch.arange(len(out)).to(by_head))

        return self.weighted.labels(numbers)

    def doubled(self, labels: Labels) -> Bool[Tensor, " d"] | None:
        """The columns that double with the labelled entries; nothing where the others do not stay as they are."""
        before, after = self.heads(), self.heads(self.weighted.doubled(labels))
        columns = list(zip(before.unbind(-1), after.unbind(-1), strict=True))
        twice = [agree(b, 2 * a) for a, b in columns]
        if not all(two or agree(b, a) for two, (a, b) in zip(twice, columns, strict=True)):
            return None
        return torch.tensor(twice, device=before.device)

    def rows(self, columns: Bool[Tensor, " d"]) -> ByHead | None:
        """The rows that make some columns of every head; nothing where they do not scale these, and these alone."""
        labels = self.labels(columns)
        twice = self.doubled(labels) if labels else None
        return None if twice is None or not torch.equal(twice, columns) else _by_head(labels, len(self.layout))


def _outputs(weighted: _AtParameters, read: ReadCall) -> ByHead | None:
    """The rows or columns that take each head's output."""
    _, heads, n, _ = read.call.q.shape
    z, gates = random_tensor(heads, n, read.call.v.shape[-1], like=read.x), {m: read.part.known[m] for m in read.gates}
    code = (_FIRST + torch.arange(heads).to(z))[:, None, None]

    def f(z: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        return weighted.value(read.leave, {read.node: z, **gates}, parameters)

    def numbers(parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = f(z, parameters)
        weigh = random_tensor(*out.shape, like=out)
        return (weigh * out).sum(), (weigh * f(code * z, parameters)).sum()

    labels = weighted.labels(numbers)
    twice = weighted.doubled(labels)
    if not agree(f(z, twice) - f(0 * z, twice), 2 * (f(z) - f(0 * z))):
        return None
    return _by_head(labels, heads)
