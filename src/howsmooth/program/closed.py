"""The closed form of an attention layer, read off the recorded graph: one attention call, one projection behind.

And which entries of which parameters make one head's queries, keys, values or output: what an entry does to a random functional
of all heads, over what it does to one in which each head counts by its number, names the head. Scaling the entries that are
found must scale the heads, which is tried.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.fx import Node

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.maps import Attention, Rotary
from howsmooth.program.attention import Call, Operands, attention
from howsmooth.program.calls import SDPA
from howsmooth.program.ends import Ends
from howsmooth.program.operations import dependents, name, shape
from howsmooth.program.replay import Run
from howsmooth.program.sides import (
    FORMULA,
    PartOfRun,
    SideFormula,
    agree,
    features_last,
    heads_of,
    off,
    random_tensor,
    read_affine,
    read_side,
    unmoved,
)
from howsmooth.program.tracing import Program

Labels = Mapping[str, Int[Tensor, "*axes"]]  # by parameter: the head of every entry

_FIRST = 2  # the number of head 0, so that an entry that no head scales has none
_NEAR = 1e-6
_NOISE = 1e-12  # of a derivative, relative to the largest, that is zero but for rounding


@dataclass(frozen=True, eq=False)
class ReadCall:
    """A layer's only attention call at an input: what enters, what leaves, and the values of what stays as it is.

    gates: what reaches the nodes behind the call without going through it.  tokens: the entries of what enters by token and
    feature.  x: their values.  kind: the module that attends, for people.
    """

    part: PartOfRun
    enter: Node
    leave: Node
    node: Node
    operands: Operands
    call: Call
    gates: tuple[Node, ...]
    tokens: Int[Tensor, "n d"]
    x: Float[Tensor, "n d"]
    kind: str

    @classmethod
    def of(cls, run: Run, ends: Ends) -> "ReadCall":
        """The call between the ends; refused where there are several, or where logits are no products alone."""
        flow = ends.flow
        between = flow.between(ends.enter, ends.leave)
        nodes = [n for n in between if n.target is attention or name(n) == SDPA]
        scope, module = run.program.scope_of(*(nodes[:1] or between)), run.program.module
        kind = type(module if scope is None else module.get_submodule(scope.path)).__name__
        alone = BadInputError(f"expected a layer with one attention call over all tokens, got {kind}; measure it instead")
        if len(nodes) != 1 or len(ends.enter) != 1 or len(ends.leave) != 1:
            raise alone
        (enter,), (leave,), (node,) = ends.enter, ends.leave, nodes
        operands, own = Operands.of(node), flow.down(enter)
        if any(own & flow.bit(n) for n in operands.beside):
            raise BadInputError(
                "expected logits that are products of queries and keys, got a bias that depends on the tokens; "
                "measure it instead"
            )
        behind, vectors = flow.between([node], [leave]), (operands.q, operands.k, operands.v)
        gates = {m: None for n in behind for m in n.all_input_nodes if own & flow.bit(m) and m not in (node, *behind)}
        part = PartOfRun.of(flow, enter, leave, run, *vectors, *operands.beside, *gates)
        try:
            call = operands.call(part.known)
        except BadFunctionError as error:
            raise BadInputError(f"expected attention of a known form, got {error}; measure it instead") from None
        tokens = features_last(enter, call.q.shape[2])
        if tokens is None or call.q.shape[0] != 1:
            raise alone
        entered: Tensor = part.known[enter]
        tokens = tokens.to(entered.device)
        return cls(part, enter, leave, node, operands, call, tuple(gates), tokens, entered.reshape(-1)[tokens], kind)

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        """The entries of the call's output by token, heads side by side, and those of what leaves."""
        (_, heads, n, _), width = self.call.q.shape, self.call.v.shape[-1]
        out = features_last(self.leave, n)
        if out is None:
            raise BadInputError("expected a layer that gives one output per token, got another; measure it instead")
        own = torch.arange(heads * n * width).reshape(heads, n, width).transpose(0, 1).flatten(1)
        return own.to(self.x.device), out.to(self.x.device)


@torch.no_grad()
def as_attention(run: Run, ends: Ends) -> Attention:
    """The closed form of an `attention` map, read off the graph, in float64.

    run: at an input, in float64.  The result gives the layer's own queries, keys and values at that input to 1e-9,
    and what the layer makes of heads' outputs; the mask is that of the call. Gates, norms of another kind and anything else
    that is not this formula are refused.
    """
    read = ReadCall.of(run, ends)
    if read.gates:
        raise _other(read, "with gates")
    attn, call = _formula(read), read.call
    # queries, keys and values against those of the call; the output projection behind attention that gives random numbers
    ours, theirs = attn.vectors(read.x[None]), (call.q, call.k, call.v)
    before = [off(a.repeat_interleave(b.shape[1] // a.shape[1], 1), b) for a, b in zip(ours, theirs, strict=True)]
    given = random_tensor(*call.q.shape[:3], call.v.shape[-1], like=read.x, name="outputs of heads")
    behind = read.part.between(read.node, read.leave).of_flat(given).reshape(-1)[read.heads[1]]
    error = max(*before, off(attn.finish(given)[0], behind))
    if not error <= FORMULA:
        raise _other(read, f"off by {error:.1e}")
    return attn


def _other(read: ReadCall, how: str) -> BadInputError:
    return BadInputError(
        f"expected a layer of affine, normalised or turned queries and keys and affine values, got {read.kind}, {how} "
        "(gates, other norms); measure it instead"
    )


def _formula(read: ReadCall) -> Attention:
    """The layer that the graph seems to be."""
    call, mask = read.call, read.call.scores.mask
    if mask.keys is not None or mask.ends is not None:
        raise BadInputError("expected an input without padding, got a mask that hides tokens; leave them out")
    q, k, v = (
        read_side(read.part, read.enter, n, read.tokens, read.x) for n in (read.operands.q, read.operands.k, read.operands.v)
    )
    q, shared = q.repeated(call.q.shape[1]), max(k.heads, v.heads)
    k, v = k.repeated(shared), v.repeated(shared)
    if v.norm is not None or v.rotary is not None:
        raise BadInputError("expected values that are affine in the tokens, got norms or phases on them; measure the layer")
    matrices = (q.matrix, k.matrix, v.matrix, read_affine(read.part, read.node, read.leave, *read.heads, read.x))
    b_q, b_k, b_v, b_o = (m.bias if bool(m.bias.any()) else None for m in matrices)
    w_q, w_k, w_v, w_o = (m.weight.contiguous() for m in matrices)
    return Attention(
        w_q,
        w_k,
        w_v,
        w_o,
        heads=q.heads,
        kv_heads=shared,
        b_q=b_q,
        b_k=b_k,
        b_v=b_v,
        b_o=b_o,
        scale=call.scores.scale,
        softcap=call.scores.softcap,
        causal=mask.causal,
        window=mask.window,
        bias=mask.bias,
        q_norm=q.norm,
        k_norm=k.norm,
        rotary=_one_rotary(q, k),
        kind=call.scores.kind,
    )


def _one_rotary(q: SideFormula, k: SideFormula) -> Rotary | None:
    """The phases that queries and keys have in common."""
    a, b = q.rotary, k.rotary
    if a is None and b is None:
        return None
    if a is None or b is None or a.interleaved != b.interleaved or not (agree(a.cos, b.cos) and agree(a.sin, b.sin)):
        raise BadInputError("expected the same phases on queries and keys, got others; measure the layer instead")
    return a


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


def head_weights(run: Run, ends: Ends) -> HeadParameters:
    """Which rows of which parameters make each head of an `attention` map.

    To multiply a head's logits by `c²`, multiply its `queries` and `keys` by `c`, and what is `facing` by `c²`. A matrix with
    an adapter has rows in both; only the factor that heads do not share is among them.
    """
    read = ReadCall.of(run, ends)
    weighted = _AtParameters.of(run.program, read)
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
