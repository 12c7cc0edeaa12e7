"""The closed form of an attention layer, read off the recorded graph: one attention call, one projection behind."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.fx import Node

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.maps import Attention, Rotary
from howsmooth.program.attention import Call, Operands, attention
from howsmooth.program.calls import SDPA
from howsmooth.program.ends import Ends
from howsmooth.program.operations import name
from howsmooth.program.sides import SideFormula, read_affine, read_side
from howsmooth.program.stretch import FORMULA, PartOfRun, Values, agree, features_last, off, random_tensor
from howsmooth.program.tracing import Program


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
    def of(cls, program: Program, ends: Ends, values: Values) -> "ReadCall":
        """The call between the ends; refused where there are several, or where logits are no products alone."""
        flow = ends.flow
        between = flow.between(ends.enter, ends.leave)
        nodes = [n for n in between if n.target is attention or name(n) == SDPA]
        kind = _module_of(program, nodes[:1] or between)
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
        part = PartOfRun.of(flow, enter, leave, values, *vectors, *operands.beside, *gates)
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


def _module_of(program: Program, nodes: Sequence[Node]) -> str:
    """The type of the module that made some nodes."""
    scope = min((s for s in program.scopes if s.holds(*nodes)), key=len, default=None)
    return type(program.module if scope is None else program.module.get_submodule(scope.path)).__name__


@torch.no_grad()
def as_attention(program: Program, ends: Ends, values: Values) -> Attention:
    """The closed form of an `attention` map, read off the graph, in float64.

    values: of nodes, at an input in float64.  The result gives the layer's own queries, keys and values at that input to 1e-9,
    and what the layer makes of heads' outputs; the mask is that of the call. Gates, norms of another kind and anything else
    that is not this formula are refused.
    """
    read = ReadCall.of(program, ends, values)
    if read.gates:
        raise _other(read, "with gates")
    attn, call = _formula(read), read.call
    # queries, keys and values against those of the call; the output projection behind attention that gives random numbers
    ours, theirs = attn.vectors(read.x[None]), (call.q, call.k, call.v)
    before = [off(a.repeat_interleave(b.shape[1] // a.shape[1], 1), b) for a, b in zip(ours, theirs, strict=True)]
    given = random_tensor(*call.q.shape[:3], call.v.shape[-1], like=read.x, name="outputs of heads")
    behind = read.part.between(read.node, read.leave)(given).reshape(-1)[read.heads[1]]
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
