"""Attention as one operation of a recorded run, be it torch's function, the library's interface or plain products.

A graph in which attention is one operation has nodes whose target is `attention`. A replay may answer them by kernels of its
own choice (`answering`).
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from howsmooth.errors import BadFunctionError, BadInputError, HowSmoothError
from howsmooth.kernels import Mask, Scores, attend
from howsmooth.kernels.kinds import L2, Kind, Sigmoid, Softmax
from howsmooth.program import masks
from howsmooth.program.operations import value as value_of


class MovingTermError(HowSmoothError):
    """What is added to logits depends on the input, for which the kernels have no derivative."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention in a replay: heads (batch, heads, n, d), and how logits come from them."""

    q: Float[Tensor, "batch heads n d"]
    k: Float[Tensor, "batch kv_heads m d"]
    v: Float[Tensor, "batch kv_heads m d_v"]
    scores: Scores

    def head(self, index: int) -> "Call":
        """The call of one head alone."""
        kind, bias = self.scores.kind, self.scores.mask.bias
        parts, group = kind.parts, self.q.shape[1] // self.k.shape[1]
        scores = replace(self.scores, kind=kind.head(index))
        q, k, v = (slice(h * p, (h + 1) * p) for h, p in ((index, parts), (index // group, parts), (index // group, 1)))
        if bias is not None and bias.shape[1] > 1:
            scores = replace(scores, mask=replace(scores.mask, bias=bias[:, index : index + 1]))
        return Call(self.q[:, q], self.k[:, k], self.v[:, v], scores)


Answer = Callable[[Call], Tensor]
_ANSWER: ContextVar[Answer | None] = ContextVar("answer", default=None)
_DERIVES: ContextVar[bool] = ContextVar("derives", default=False)


@contextmanager
def answering(answer: Answer, *, derives: bool = False) -> Iterator[None]:
    """Inside it, `answer` gives the output of every call of attention in a replay.

    derives: with a derivative in biases and sinks too.
    """
    token, derived = _ANSWER.set(answer), _DERIVES.set(derives)
    try:
        yield
    finally:
        _ANSWER.reset(token)
        _DERIVES.reset(derived)


def attention(
    q: Float[Tensor, "*lead n d"],
    k: Float[Tensor, "*kv_lead m d"],
    v: Float[Tensor, "*kv_lead m d_v"],
    terms: Sequence[Float[Tensor, "..."]] = (),
    keys: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    kind: str = "softmax",
    scale: float,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    shift: float = 0.0,
) -> Float[Tensor, "*lead n d_v"]:
    """The output of attention of one kind ("softmax", "sigmoid", "l2"), with logits `scale · q·k`, soft-capped, plus the terms.

    Two to any number of axes; the one before tokens counts heads, those before it are a batch. Keys and values may have fewer
    heads.  terms: each broadcasts to (…, heads, n, m); true hides no key where one is boolean.  keys: (batch, m), true where a
    key may be seen.  sink: one logit a head that takes weight and gives no value.  shift: a number added to every logit, which
    only a sigmoid feels.
    """
    moving = any(t.requires_grad for t in (*terms, *(() if sink is None else (sink,))))
    if moving and torch.is_grad_enabled() and not _DERIVES.get():
        raise MovingTermError(
            "expected attention whose biases stay as they are, got one that depends on the input; replay its steps"
        )
    lead = q.shape[:-2]
    q4, k4, v4 = (_four(t) for t in (q, k, v))
    k4, v4 = (t.expand(q4.shape[0], -1, -1, -1) for t in (k4, v4))
    mask = Mask(causal, window, keys)
    for term in terms:
        mask = masks.joined(mask, masks.of_tensor(_term(term, q, k4.shape[2]), q.dtype))
    mask = mask if mask.keys is None else replace(mask, keys=mask.keys.expand(len(q4), -1))
    try:
        call = Call(q4, k4, v4, Scores(scale, softcap, mask, kind_of(kind, sink, q4.shape[1], shift)))
    except BadInputError as error:
        raise BadFunctionError(str(error)) from None
    answer = _ANSWER.get()
    out = attend(call.q, call.k, call.v, call.scores) if answer is None else answer(call)
    return out.reshape(*lead, *out.shape[-2:])


def kind_of(name: str, sink: Tensor | None, heads: int, shift: float) -> Kind:
    """The kind of weights of a call."""
    if name == "sigmoid":
        return Sigmoid(shift)
    if name == "l2":
        return L2()
    if sink is None:
        return Softmax()
    own = sink.reshape(-1)
    return Softmax((own if len(own) == heads else own.expand(heads)) - shift)


def _four(t: Tensor) -> Tensor:
    """Heads with a batch in front: (batch, heads, n, d)."""
    return t[(None,) * (4 - t.ndim)] if t.ndim < 4 else t.reshape(-1, *t.shape[-3:])


def _term(term: Tensor, q: Tensor, m: int) -> Tensor:
    """What is added to logits, with the axes that the kernels' masks have."""
    while term.ndim < q.ndim:
        term = term[None]
    term = _four(term if term.ndim <= 4 else term.expand(*q.shape[:-3], *term.shape[-3:]))
    return term.expand(*term.shape[:3], m)


@dataclass(frozen=True, eq=False)
class Operands:
    """An attention node in terms of the package's own function: what it attends with, and how."""

    q: Node
    k: Node
    v: Node
    terms: tuple[Any, ...]
    keys: Any
    sink: Any
    settings: dict[str, Any]

    @classmethod
    def of(cls, n: Node) -> "Operands":
        """The operands of an attention node, be it the package's or torch's own."""
        if n.target is torch.ops.aten.scaled_dot_product_attention.default:
            given = _torchs_own(*n.args, **n.kwargs)  # pyright: ignore[reportArgumentType]
        else:
            given = dict(signature(attention).bind(*n.args, **n.kwargs).arguments)
        q, k, v, terms, keys, sink = (given.pop(key, None) for key in ("q", "k", "v", "terms", "keys", "sink"))
        return cls(q, k, v, tuple(terms or ()), keys, sink, given)

    @property
    def beside(self) -> tuple[Node, ...]:
        """The nodes that say how logits become weights."""
        return tuple(t for t in (*self.terms, self.keys, self.sink) if isinstance(t, Node))

    def call(self, known: Mapping[Node, Any]) -> Call:
        """The call at given values, heads in one axis."""
        calls: list[Call] = []

        def answer(call: Call) -> Tensor:
            calls.append(call)
            return call.q

        q, k, v = (known[n][None] if known[n].ndim == 3 else known[n] for n in (self.q, self.k, self.v))
        given: Any = map_arg((self.terms, self.keys, self.sink), known.__getitem__)
        with answering(answer), torch.no_grad():
            attention(q, k, v, *given, **self.settings)
        return calls[0]


def _torchs_own(
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """What torch's own function is given, as arguments of `attention`."""
    own = value_of(query).shape[-1] ** -0.5 if scale is None else float(scale)
    terms = () if attn_mask is None else (attn_mask,)
    return {"q": query, "k": key, "v": value, "terms": terms, "scale": own, "causal": is_causal}


# what a recording keeps as one node where a model's code hands attention over
_LIBRARY = torch.library.Library("howsmooth", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] terms, Tensor? keys, Tensor? sink, "
    "float scale, float? softcap, bool causal, int? window) -> Tensor"
)


def _whole(q, k, v, terms, keys, sink, scale, softcap, causal, window) -> Tensor:
    return attention(q, k, v, terms, keys, sink, scale=scale, softcap=softcap, causal=causal, window=window)


_LIBRARY.impl("attention", _whole, "CompositeExplicitAutograd")


def unify(code: GraphModule) -> None:
    """Make every attention that was kept as one node, the library's or `howsmooth.sdpa`, a call of `attention`."""
    for n in list(code.graph.nodes):
        if n.target is torch.ops.howsmooth.attention.default:
            old, (*given, scale, softcap, causal, window) = n, n.args
        elif n.op == "call_function" and _is_first_of_own(n):
            old, (q, k, v, bias, scale, softcap, causal, window, *_) = n.args[0], n.args[0].args
            given = [q, k, v, () if bias is None else (bias,)]
        else:
            continue
        with code.graph.inserting_before(n):
            how = {"scale": scale, "softcap": softcap, "causal": causal, "window": window}
            new = code.graph.call_function(attention, tuple(given), how)
        new.meta.update(n.meta)
        n.replace_all_uses_with(new)
        for gone in dict.fromkeys((n, *old.users, old)):
            code.graph.erase_node(gone)


def _is_first_of_own(n: Node) -> bool:
    """Whether a node is the output of `howsmooth.sdpa` of whole sequences, whose other value nobody reads."""
    source = n.args[0] if n.target is operator.getitem and n.args[1] == 0 else None
    if not isinstance(source, Node) or source.target is not torch.ops.howsmooth.attend.default:
        return False
    *_, first, documents, _, _, _, seed = source.args
    if first or documents is not None or seed is not None:
        return False
    return not any(u.users for u in source.users if u is not n)
