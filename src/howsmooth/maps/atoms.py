"""Attention on points that carry mass, or stand for many equal tokens, of every kind, as a plain function for autodiff.

Kinds that are softmax of some logits take masses in their kernels, `log a_j` beside the logits. Others are here: normalised
features, whose weights are multiplied by `a_j`; Sinkhorn, whose rows sum to one and whose columns, every row weighted by its
own mass, to `a_j`; hard attention, which shares its weight among ties by mass (docs/explanation/kinds.md 8.12).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import NoConvergenceError
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.kernels.kinds.balanced import unbalanced
from howsmooth.kernels.kinds.mapped import softened
from howsmooth.kernels.kinds.pointwise import features_of
from howsmooth.maps.base import Map
from howsmooth.maps.jacobian import AutodiffJacobian
from howsmooth.maps.operator import Operator

if TYPE_CHECKING:
    from howsmooth.maps.attention import Attention

_ROUNDS = 2000  # pairs of normalisations within which the limit of Sinkhorn must be reached
_SETTLED = 1e-14  # change of potentials, as a share of their size, that rounding explains
_TIE = 1e-12  # relative difference of logits that rounding explains

Points = Float[Tensor, "batch points d"]
Counts = Float[Tensor, "batch points"]
Weights = Float[Tensor, "batch heads points points"]
Seen = Bool[Tensor, "points points"]


def no_measures(kind: Kind) -> str | None:
    """Why a kind is no map of measures of mass one; None if it is."""
    if isinstance(kind, Sigmoid) or (isinstance(kind, Linear) and not kind.normalized):
        return "its rows do not sum to one, so its output grows with the number of tokens, which a measure does not have"
    if isinstance(kind, Softmax) and kind.sink is not None:
        return "a sink weighs as much as one token, and a measure has none to count"
    if isinstance(kind, Hard) and kind.top > 1:
        return "it counts the tokens it takes, and a measure has none to count; use Hard(top=1)"
    return None


class Balance(NamedTuple):
    """Potentials of Sinkhorn: of rows, of columns, of columns before the last step on them; whether the limit was reached."""

    f: Tensor
    g: Tensor
    before: Tensor
    settled: Bool[Tensor, " batch"]


def counted(attn: "Attention", x: Points, counts: Counts, seen: Seen | None = None, at: Points | None = None) -> Tensor:
    """The layer's outputs at points that stand for `counts` tokens each, (batch, points, d_out).

    seen: which points each one sees; all by default.  at: where the queries are, if not at `x`; keys, values and what columns
    are divided by stay. Limits of Sinkhorn that were not reached give zero.
    """
    kind, log_count = attn.kind, counts.log()[:, None, None]
    q, k, v = attn.vectors(x)
    asked = q if at is None else attn.vectors(at)[0]
    k = k.unflatten(1, (attn.kv_heads, -1)).repeat_interleave(attn.heads // attn.kv_heads, 1).flatten(1, 2)
    v = v.repeat_interleave(attn.heads // attn.kv_heads, 1)
    if isinstance(kind, Cosine):
        q, asked, k = (softened(t, kind.epsilon)[0] for t in (q, asked, k))
        v = kind.factor * (softened(v, kind.epsilon)[0] if kind.values else v)
    if isinstance(kind, Sinkhorn):
        return attn.finish(_balanced(kind, _logits(attn, q, k), _logits(attn, asked, k), log_count) @ v)
    weights = _weights(attn, asked, k, log_count, seen)
    if isinstance(kind, Differential):
        weights = weights.unflatten(1, (-1, 2))
        o = (weights[:, :, 0] - kind.lam * weights[:, :, 1]) @ v
        if kind.epsilon is not None:
            o = o / (o.square().mean(-1, keepdim=True) + kind.epsilon).sqrt()
        return attn.finish(kind.factor * o)
    return attn.finish(weights @ v)


def _logits(attn: "Attention", q: Tensor, k: Tensor) -> Tensor:
    if isinstance(attn.kind, L2):
        return -attn.scale * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    s = attn.scale * q @ k.mT
    return s if attn.softcap is None else attn.softcap * (s / attn.softcap).tanh()


def _weights(attn: "Attention", q: Tensor, k: Tensor, log_count: Tensor, seen: Seen | None) -> Weights:
    """What each point gets altogether, where rows do not hang on each other."""
    kind, count = attn.kind, log_count.exp()
    if isinstance(kind, Linear):
        products = features_of(q, kind.features)[0] @ features_of(k, kind.features)[0].mT * count
        products = products if seen is None else products * seen
        total = products.sum(-1, keepdim=True)
        return products / torch.where(total > 0, total, 1.0) if kind.normalized else products
    s = _logits(attn, q, k)
    s = s if seen is None else s.masked_fill(~seen, -torch.inf)
    if isinstance(kind, Sigmoid):
        return (s + (-count.sum(-1, keepdim=True).log() if kind.bias is None else kind.bias)).sigmoid() * count
    if isinstance(kind, Hard):
        return _chosen(s, count, kind.top)
    s = s + log_count
    if isinstance(kind, Softmax) and kind.sink is not None:
        sink = kind.sink.to(s)[:, None, None].expand(*s.shape[:-1], 1)
        return torch.cat([s, sink], -1).softmax(-1)[..., :-1]
    return s.softmax(-1)


def _chosen(s: Tensor, count: Tensor, top: int) -> Weights:
    """Equal weights on the tokens of the best points until there are `top` of them; of mass, on the best alone."""
    s, count = s.detach(), count.expand(s.shape)
    order = s.argsort(-1, descending=True)
    sizes = count.gather(-1, order)
    before = sizes.cumsum(-1) - sizes
    few = before < top - 0.5 if top > 1 else before <= 0
    last = torch.where(few, s.gather(-1, order), torch.inf).amin(-1, keepdim=True)
    size = torch.where(s.isfinite(), s.abs(), 0.0).amax(-1, keepdim=True)
    chosen = torch.where((s >= last - _TIE * size) & s.isfinite(), count, 0.0)
    return chosen / chosen.sum(-1, keepdim=True)


def _balanced(kind: Sinkhorn, s: Tensor, asked: Tensor, log_count: Tensor) -> Weights:
    """`a_j exp(s_ij + f_i + g_j)` at the queries that are asked for, `g` that of the points."""
    balance = _potentials(kind, s, log_count)
    if asked is s:
        f, g = balance.f, balance.g
    else:  # every row is normalised last, or last but one, on its own
        g, rows = balance.g, balance.before if kind.iterations is not None and kind.iterations % 2 == 0 else balance.g
        f = -(asked + rows + log_count).logsumexp(-1, keepdim=True)
    return torch.where(balance.settled[:, None, None, None], (asked + f + g + log_count).exp(), 0.0)


def _potentials(kind: Sinkhorn, s: Tensor, log_count: Tensor) -> Balance:
    f, g = torch.zeros_like(s[..., :1]), torch.zeros_like(s[..., :1, :])
    everywhere = torch.ones(len(s), dtype=torch.bool, device=s.device)
    if kind.iterations is None:
        return _limit(s, log_count)
    before = g
    for step in range(kind.iterations):
        if step % 2 == 0:
            f = -(s + g + log_count).logsumexp(-1, keepdim=True)
        else:
            before, g = g, -(s + f + log_count.mT).logsumexp(-2, keepdim=True)
    return Balance(f, g, before, everywhere)


def _limit(s: Tensor, log_count: Tensor) -> Balance:
    """Potentials of the limit without a graph, then one step of Newton's method with one, which gives their derivative."""
    with torch.no_grad():
        f, g = torch.zeros_like(s[..., :1]), torch.zeros_like(s[..., :1, :])
        settled = torch.zeros(len(s), dtype=torch.bool, device=s.device)
        for _ in range(_ROUNDS):
            f = -(s + g + log_count).logsumexp(-1, keepdim=True)
            old, g = g, -(s + f + log_count.mT).logsumexp(-2, keepdim=True)
            settled = ((g - old).abs() <= _SETTLED * (1 + g.abs().amax(-1, keepdim=True))).all(-1).flatten(1).all(-1)
            if bool(settled.all()):
                break
        mass = log_count.exp().expand(*s.shape[:-2], 1, s.shape[-1])  # (batch, heads, 1, points)
        p = mass.mT * (s + f + g).exp() * mass
        system = torch.cat([torch.cat([p.sum(-1).diag_embed(), p], -1), torch.cat([p.mT, p.sum(-2).diag_embed()], -1)], -2)
        inverse = torch.linalg.pinv(torch.where(settled[:, None, None, None], system, 0.0), hermitian=True)
    p = mass.mT * (s + f + g).exp() * mass
    off = torch.cat([p.sum(-1) - mass[..., 0, :], p.sum(-2) - mass[..., 0, :]], -1)[..., None]
    step = (inverse @ off)[..., 0]
    m = s.shape[-1]
    g = g - step[..., None, m:]
    return Balance(f - step[..., :m, None], g, g, settled)


@dataclass(frozen=True, eq=False, repr=False)
class OnMeasure(Map):
    """An attention layer on the atoms of a measure."""

    layer: "Attention"

    @property
    def width(self) -> int:
        return self.layer.width

    @property
    def out_width(self) -> int:
        return self.layer.out_width

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    def __repr__(self) -> str:
        return f"{self.layer!r} on a measure"


@final
@dataclass(frozen=True, eq=False, repr=False)
class CountedAttention(OnMeasure):
    """Of a kind whose kernel takes no masses."""

    mass: Float[Tensor, " atoms"]
    seen: Seen | None = None

    def moved(self, device, dtype):
        seen = None if self.seen is None else self.seen.to(device)
        return replace(self, layer=self.layer.to(device, dtype), mass=self.mass.to(device), seen=seen)

    def value(self, x):
        value = self.asked(x, x)
        kind = self.layer.kind
        if isinstance(kind, Sinkhorn) and kind.iterations is None and not bool(_limit_reached(self.layer, x, self._mass(x))):
            raise NoConvergenceError(unbalanced())
        return value

    def linearize(self, x):
        layer = self.to(x.device, x.dtype)
        value = layer.value(x)
        return value.detach(), AtomJacobian(layer, x.detach())

    def _mass(self, x: Points) -> Counts:
        return self.mass.to(x).expand(len(x), -1)

    def asked(self, y: Points, x: Points) -> Tensor:
        """Outputs at queries `y` while keys, values and what columns are divided by stay at `x`."""
        return counted(self.layer, x, self._mass(x), self.seen, None if y is x else y)


def _limit_reached(attn: "Attention", x: Points, mass: Counts) -> Tensor:
    q, k, _ = attn.vectors(x)
    k = k.repeat_interleave(attn.heads // attn.kv_heads, 1)
    return _limit(_logits(attn, q, k), mass.log()[:, None, None]).settled.all()


@final
class AtomJacobian(Operator):
    """The Jacobian of `CountedAttention`, by automatic differentiation."""

    def __init__(self, layer: CountedAttention, x: Points):
        self._layer, self._x = layer, x
        self._whole = AutodiffJacobian(layer.value, x, batched=True)
        self.batch, self.in_shape, self.out_shape = self._whole.batch, self._whole.in_shape, self._whole.out_shape
        self.dtype, self.device = self._whole.dtype, self._whole.device

    def jvp(self, v):
        return self._whole.jvp(v)

    def vjp(self, u):
        return self._whole.vjp(u)

    def select(self, items):
        return AtomJacobian(self._layer, self._x[items])

    def queries(self) -> AutodiffJacobian:
        """The derivative through the queries alone, block diagonal."""
        zero = 0.0  # hard attention does not move with its queries, and autodiff wants an output that hangs on them

        def alone(y: Tensor) -> Tensor:
            return self._layer.asked(y, self._x) + zero * y.sum((-2, -1), keepdim=True)

        return AutodiffJacobian(alone, self._x, batched=True, checked=False)
