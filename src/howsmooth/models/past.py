"""What attention that is written out has become so far: logits, what was done to them, and the call that it amounts to."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels import Mask, Scores
from howsmooth.kernels.kinds import L2, Kind, Sigmoid, Softmax
from howsmooth.maps.operator import drawn, stream
from howsmooth.models.intercept import Call, UncuttableError, answer
from howsmooth.program import masks

LOW = -1e4  # a fill this low hides a key
_ALIKE = 1e3  # units in the last place within which a sum of squares, added up in another order, is the same

# a product of queries and keys; their differences, entry by entry, and the squares of those; distances, and their squares
Form = Literal["product", "differences", "squares", "distance", "squared distance"]
Weights = Literal["exp", "softmax", "sigmoid"]


@dataclass(frozen=True)
class Past:
    """Logits `cap·tanh(scale·form(q, k)) + shift + terms`, without the tanh where there is no cap; their weights once there.

    q, k: (…, n, d) and (…, m, d), the same axes in front.  attend: what gives the output for values, four axes each.
    terms: each broadcasts to (…, n, m).  lowered: less a number of each query's own, which softmax does not see.
    sink: a column beside the keys, (…, n, 1), the first one or the last.  weights: of logits behind that function.
    gain: of the output, (…, n, 1).  beside: further weights that are added to these.
    """

    q: Float[Tensor, "*lead n d"]
    k: Float[Tensor, "*lead m d"]
    attend: "Callable[[Past, Tensor], Tensor]" = field(repr=False)
    form: Form = "product"
    scale: float = 1.0
    cap: float | None = None
    shift: float = 0.0
    terms: tuple[Tensor, ...] = ()
    lowered: bool = False
    sink: Tensor | None = None
    sink_first: bool = False
    weights: Weights | None = None
    gain: float | Tensor = 1.0
    beside: "tuple[Past, ...]" = ()

    @property
    def lead(self) -> torch.Size:
        return self.q.shape[:-2]

    def over_lead(self, f: Callable[[Tensor], Tensor]) -> "Past":
        """The same with `f` done to everything along the axes in front, spread out where it is not the same for all."""
        q = f(self.q)

        def spread(t: Tensor) -> Tensor:
            if all(size == 1 for size in t.shape[:-2]):
                return t.reshape(*(1,) * (q.ndim - 2), *t.shape[-2:])
            return f(t.expand(*self.lead, *t.shape[-2:]))

        return replace(
            self,
            q=q,
            k=f(self.k),
            terms=tuple(spread(t) for t in self.terms),
            sink=None if self.sink is None else spread(self.sink),
            gain=spread(self.gain) if isinstance(self.gain, Tensor) else self.gain,
            beside=tuple(p.over_lead(f) for p in self.beside),
        )

    def four(self) -> "Past":
        """With a batch and heads in front, heads alone where there is one axis."""
        size = len(self.lead)
        if size == 2:
            return self
        return self.over_lead(lambda t: t[(None,) * (2 - size)] if size < 2 else t.flatten(0, size - 2))

    def output(self, v: Float[Tensor, "*lead m d_v"]) -> Float[Tensor, "*lead n d_v"]:
        """All weights, these and those beside them, times values."""
        total = None
        for part in (self, *self.beside):
            whole, gain = replace(part, beside=()).four(), part.gain
            own = v if isinstance(gain, Tensor) or gain == 1 else gain * v  # a number is one of the values' own
            out = whole.attend(whole, own.reshape(*whole.lead, *v.shape[-2:]))
            out = out.reshape(*part.lead, *out.shape[-2:])
            out = gain * out if isinstance(gain, Tensor) else out
            total = out if total is None else total + out
        assert total is not None
        return total

    def rows(self, rows: Tensor) -> Float[Tensor, "*lead rows m"]:
        """The weights of some queries, in the steps that the code takes."""
        q = self.q[..., rows, :]
        s = self.scale * (q @ self.k.mT if self.form == "product" else torch.cdist(q, self.k).square())
        s = (s if self.cap is None else self.cap * torch.tanh(s)) + self.shift
        for term in self.terms:
            s = s + (term if term.shape[-2] == 1 else term[..., rows, :])
        if self.weights == "sigmoid":
            return s.sigmoid()
        if self.sink is None:
            return s.softmax(-1)
        sink = self.sink if self.sink.shape[-2] == 1 else self.sink[..., rows, :]
        return torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def depends(t: Tensor) -> bool:
    """Whether a tensor may depend on a map's tokens: its weights have no gradient, and nothing has one in a trace."""
    return t.requires_grad and torch.is_grad_enabled()


def called(past: Past, v: Float[Tensor, "batch heads m d_v"]) -> Float[Tensor, "batch heads n d_v"]:
    """The output as one call of attention. past: with four axes."""
    plain = past.weights == "softmax" and past.sink is None  # then nothing that all keys of a query share is seen
    m = past.k.shape[-2]
    terms = [t for t in past.terms if not (plain and t.shape[-1] == 1)]
    q, scale, kind = past.q, past.scale, _kind(past)
    if past.form == "squared distance":
        scale, kind = -scale, L2()
    elif plain and past.cap is None:
        shown = [t.shape[-1] == m and bool((t > LOW).all()) for t in terms]  # terms that hide nothing
        sigma = _squares(past, [t for t, own in zip(terms, shown, strict=True) if own])
        if sigma is not None:
            q = q if 2 * sigma == scale else q * (scale / (2 * sigma))
            scale, kind = sigma, L2()
            terms = [t for t, own in zip(terms, shown, strict=True) if not own]
    if any(depends(t) for t in terms):
        raise UncuttableError("a bias that depends on the input")
    mask = Mask()
    for term in terms:
        mask = _both(mask, masks.of_tensor(term.expand(*term.shape[:3], m), past.q.dtype))
    try:
        scores = Scores(scale if past.cap is None else past.cap * scale, past.cap and abs(past.cap), mask, kind)
    except BadInputError as error:
        raise UncuttableError(str(error)) from None
    return answer(Call(q, past.k, v, scores))


def _kind(past: Past) -> Kind:
    """The kind of weights, were logits products."""
    if past.form not in ("product", "squared distance") or past.weights not in ("softmax", "sigmoid"):
        raise UncuttableError(f"weights that are {past.weights} of a {past.form}")
    if past.weights == "sigmoid":
        if past.form != "product":
            raise UncuttableError("a sigmoid of distances")
        return Sigmoid(past.shift)
    if past.sink is None:
        return Softmax()
    if past.form != "product":
        raise UncuttableError("a sink beside distances")
    return Softmax(_one_per_head(past.sink, past.q.shape[1]) - past.shift)


def _one_per_head(sink: Float[Tensor, "#batch #heads #n 1"], heads: int) -> Float[Tensor, " heads"]:
    if depends(sink):
        raise UncuttableError("attention sinks that depend on the input")
    sink = sink.detach().expand(-1, heads, -1, -1)
    own = sink[0, :, 0, 0]
    if not bool((sink == own[:, None, None]).all()) or not bool(own.isfinite().all()):
        raise UncuttableError("attention sinks that are not one finite number per head")
    return own.contiguous()


def _squares(past: Past, terms: list[Tensor]) -> float | None:
    """The `σ` for which terms are `−σ |k|²` and a number of each query's own, so that softmax sees `−σ |q' − k|²`.

    They must be that in value, and their derivative too where they have one.
    """
    if past.scale == 0 or not terms:
        return None
    total: Any = sum(terms)
    lengths = past.k.square().sum(-1)[..., None, :]
    spread, along = torch.broadcast_tensors(*(_centred(t.detach().double()) for t in (total, lengths)))
    size = float(along.square().sum())
    if size == 0:
        return None
    sigma = -float((spread * along).sum()) / size
    sigma = past.scale / 2 if math.isclose(2 * sigma, past.scale, rel_tol=_ALIKE * torch.finfo(total.dtype).eps) else sigma
    error, most = (spread + sigma * along).abs().amax(), (sigma * along).abs().amax()
    if not float(error) <= _ALIKE * torch.finfo(total.dtype).eps * float(most):
        return None
    if sigma == 0 or (depends(total) and not _moves_alike(total, -sigma * lengths)):
        return None
    return sigma


def _centred(t: Tensor) -> Tensor:
    return t - t.mean(-1, keepdim=True)


def _moves_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two numbers for each key have the same derivative in all that they depend on, up to one of each query's own."""
    leaves = _leaves(one) + [t for t in _leaves(other) if all(t is not s for s in _leaves(one))]
    shape = torch.broadcast_shapes(one.shape, other.shape)
    weights = _centred(drawn(shape, stream(0, "terms", one.device), one.dtype))

    def along(t: Tensor) -> list[Tensor]:
        found = torch.autograd.grad((weights * t).sum(), leaves, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    pairs = list(zip(along(one), along(other), strict=True))
    most = max((float(b.abs().amax()) for _, b in pairs), default=0.0)
    allowed = _ALIKE * torch.finfo(one.dtype).eps * most
    return bool(leaves) and all(float((a - b).abs().amax()) <= allowed for a, b in pairs)


def _leaves(t: Tensor) -> list[Tensor]:
    """The tensors that a graph of torch's begins with."""
    seen, found, open_nodes = set[Any](), list[Tensor](), [t.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found.append(leaf)
        open_nodes += [inner for inner, _ in node.next_functions]
    return found


def _both(one: Mask, other: Mask) -> Mask:
    """What two masks leave together."""
    if one.keys is not None and other.keys is not None:
        other = replace(other, keys=one.keys & other.keys)
    windows = [w for w in (one.window, other.window) if w is not None]
    keys = one.keys if other.keys is None else other.keys
    bias = other.bias if one.bias is None else one.bias if other.bias is None else one.bias + other.bias
    return Mask(one.causal or other.causal, min(windows, default=None), keys, bias)
