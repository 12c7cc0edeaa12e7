"""Upper bounds at one input for every kind of attention: the matrix of block norms (docs/explanation/kinds.md 8.11).

Block (i, j) of a head's derivative is what token j does to output i through its value and key, and on the diagonal through its
query. Bounds on the norms of the blocks make a non-negative matrix, whose norm is bounded by products (Proposition 4.1). In
float64.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.kinds.features import features_of, supported
from howsmooth.kernels.kinds.mapped import softened
from howsmooth.kernels.kinds.traits import Balancing, FeatureMap, TwoSoftmaxes
from howsmooth.kernels.saturating import sigmoid_slope, tanh_slope
from howsmooth.maps import Attention, LayerNorm, RMSNorm
from howsmooth.theory.at_point.perron import perron_bound
from howsmooth.theory.bound import ROUNDINGS, TINY, Bound, at_most, log_of
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.kinds.published import sigmoid_at_point
from howsmooth.theory.kinds.slopes import SOURCE, halves
from howsmooth.theory.scaled import Scaled

_TOKENS = 8192  # up to which a head's matrix of block norms is formed
_STEPS = 12  # of power iteration on it; every number of them gives a bound
_ROUNDS = 2000  # pairs of normalisations for the limit of Sinkhorn
_SETTLED = 1e-13  # sums this close to one are those of the limit
_SMALL = 1e-130  # sums below which the squares of their terms leave the range
_BLUR = 1e-13  # of `|q||k|`: far above the rounding of their product

PerPair = Float[Tensor, "n n"]


class Head(NamedTuple):
    """One head at an input, all float64.

    q, k: (n, d_h), as the kind takes them.  v: (n, d_v), its values.  slope_q, slope_k, slope_v: (n,), how fast they move with
    their token, at most.  seen: (n, n).  bias: added to logits.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slope_q: Tensor
    slope_k: Tensor
    slope_v: Tensor
    seen: PerPair
    bias: Tensor | float


@torch.no_grad()
def point_of_kind(attn: Attention, x: Float[Tensor, "n d"]) -> list[Bound]:
    """The rows at an input for a layer of any kind: what is published for it, and D7."""
    attn, x = attn.to("cpu", torch.float64), x.detach().to("cpu", torch.float64)
    rows = [sigmoid_at_point(constants(attn), x)] if attn.kind.traits.logistic is not None else []
    reason = f"for up to {_TOKENS} tokens, the input has {len(x)}" if len(x) > _TOKENS else None
    statement = "min(Σ_h ‖N_h‖, ‖W_o‖(Σ_h ‖N_h′‖²)^½), N the matrix of bounds on the norms of the blocks, after and before W_o"
    answer = reason or log_of(block_bound(attn, x))
    return [*rows, at_most("D7", "block norms, any kind", statement, f"{SOURCE} 8.11", "any attention layer", answer)]


@torch.no_grad()
def block_bound(attn: Attention, x: Float[Tensor, "n d"]) -> float:
    """D7; infinity where arithmetic leaves the range."""
    layer = constants(attn)
    before = [_head_bound(layer, h, x, outer=False) for h in range(attn.heads)]
    stacked = layer.out_norm * math.hypot(*before)
    if _bent(attn):  # values or outputs are not linear in the tokens
        apart = math.fsum(b * w for b, w in zip(before, layer.w_o, strict=True))
    else:
        apart = math.fsum(_head_bound(layer, h, x, outer=True) for h in range(attn.heads))
    least = min(t if not math.isnan(t) else math.inf for t in (stacked, apart))
    return least * (1 + 1e-9)


def _bent(attn: Attention) -> bool:
    units, two = attn.kind.traits.unit_vectors, attn.kind.traits.two_softmaxes
    return (units is not None and units.values) or (two is not None and two.epsilon is not None)


def _head_bound(layer: Constants, h: int, x: Float[Tensor, "n d"], *, outer: bool) -> float:
    """`‖N‖` of a head, after `W_o` (outer) or before it."""
    attn, traits = layer.layer, layer.layer.kind.traits
    if traits.two_softmaxes is not None:
        return _difference(layer, traits.two_softmaxes, h, x, outer)
    head = _head(layer, h, x, outer)
    if traits.balancing is not None:
        value, logits = _balanced(attn, traits.balancing, head)
    else:
        N, logits = _block_norms(attn, h, head)
        value = _norm(N)
    return value * _rounding(x, logits)


def _difference(layer: Constants, two: TwoSoftmaxes, h: int, x: Tensor, outer: bool) -> float:
    total, logits, weights, values = None, 0.0, [], None
    for half, share in zip(halves(layer), (1.0, abs(two.lam)), strict=True):
        head = _head(half, h, x, outer)
        N, largest, P = _softmaxed(half.layer, head, *_dot_products(half.layer, head), None)
        total = share * N if total is None else total + share * N
        logits, values = max(logits, largest), head.v
        weights.append(P)
    assert total is not None
    assert values is not None
    size = torch.full((len(total), 1), abs(two.factor), dtype=torch.float64)
    if two.epsilon is not None:
        o = (weights[0] - two.lam * weights[1]) @ values
        blur = 1e-12 * (1 + abs(two.lam)) * values.norm(dim=-1).max()
        shortest = (o.square().mean(-1, keepdim=True).sqrt() - blur).clamp_min(0.0)
        size = size / (shortest.square() + two.epsilon).sqrt()
    return _norm(size * total) * _rounding(x, logits)


def _head(layer: Constants, h: int, x: Float[Tensor, "n d"], outer: bool) -> Head:
    attn, n = layer.layer, len(x)
    group, real = h // (attn.heads // attn.kv_heads), slice(None) if attn.attention_mask is None else attn.attention_mask[0]
    raw_q, raw_k, _ = attn.project(x[None], with_bias=True)
    q, k, v = (t[0] for t in attn.vectors(x[None]))
    v, slope_v = (v[group] @ attn.by_head().o[h].mT, layer.v[h]) if outer else (v[group], layer.w_v[h])
    i = torch.arange(n)
    seen = torch.ones(n, n, dtype=torch.bool)
    if attn.causal:
        seen &= i[:, None] >= i
    if attn.window is not None:
        seen &= (i[:, None] - i).abs() < attn.window
    bias: Tensor | float = 0.0
    if attn.bias is not None:
        bias = attn.bias.double()[0, min(h, attn.bias.shape[1] - 1)].expand(n, n)
        seen = seen & (bias > -torch.inf)
        bias = torch.where(bias > -torch.inf, bias, 0.0)
    query, key = layer.unit
    slope_q, slope_k = _slopes(query, h, attn.q_norm, raw_q[0], h), _slopes(key, h, attn.k_norm, raw_k[0], group)
    slopes = [t[real] for t in (slope_q, slope_k, torch.full((n,), slope_v, dtype=torch.float64))]
    bias = bias[real][:, real] if isinstance(bias, Tensor) else bias
    return Head(q[h, real], k[group, real], v[real], slopes[0], slopes[1], slopes[2], seen[real][:, real], bias)


def _slopes(t: Scaled, h: int, norm: LayerNorm | RMSNorm | None, raw: Float[Tensor, "heads n d_h"], own: int) -> Tensor:
    """How fast the queries, or keys, of a head move with their tokens, at most, (n,)."""
    n = raw.shape[1]
    if norm is None or t.alpha is None:
        return torch.full((n,), t.gain * t.weight[h], dtype=torch.float64)
    together = norm.width != raw.shape[-1]
    p = norm.center(raw.transpose(0, 1).flatten(1) if together else raw[own])
    return t.gain * t.alpha[h] * t.weight[h] / (p.square().mean(-1) + norm.eps).sqrt() * (1 + 1e-12)


def _dot_products(attn: Attention, head: Head) -> tuple[PerPair, PerPair, PerPair, PerPair]:
    """Logits `τ q·k`, how fast they move with keys and with queries at most, and the soft-cap's slope."""
    tau, s = abs(attn.scale), attn.scale * head.q @ head.k.mT
    by_key = tau * head.q.norm(dim=-1)[:, None] * head.slope_k
    by_query = tau * head.slope_q[:, None] * head.k.norm(dim=-1)
    cap = attn.softcap
    if cap is None:
        return s, torch.ones_like(s), by_key, by_query
    # the slope falls with |s|, which rounding may have moved away from zero
    off = _BLUR * tau * head.q.norm(dim=-1)[:, None] * head.k.norm(dim=-1)
    slope = tanh_slope((s.abs() - off).clamp_min(0.0) / cap) * (1 + 1e-12) + TINY
    return cap * (s / cap).tanh(), slope, by_key, by_query


def _softmaxed(
    attn: Attention, head: Head, s: PerPair, slope: PerPair, by_key: PerPair, by_query: PerPair, sink: float | None
) -> tuple[PerPair, float, PerPair]:
    """`P_ij(ν + |v_j − o_i| |g_ij|) + δ_ij Σ_l P_il |v_l − o_i| |h_il|`, the largest logit, and `P`."""
    s = (s + head.bias).masked_fill(~head.seen, -torch.inf)
    top = s.amax(-1, keepdim=True) if sink is None else s.amax(-1, keepdim=True).clamp_min(sink)
    top = torch.where(top > -torch.inf, top, 0.0)
    weights = (s - top).exp()
    total = weights.sum(-1, keepdim=True) + (0.0 if sink is None else (sink - top).exp())
    P = weights / torch.where(total > 0, total, 1.0)
    far = _distances(head.v, P @ head.v)
    N = P * (head.slope_v + far * slope * by_key) + (P * far * slope * by_query).sum(-1).diag_embed()
    return N, float(torch.where(head.seen, s, 0.0).abs().max()), P


def _block_norms(attn: Attention, h: int, head: Head) -> tuple[PerPair, float]:
    """The matrix of bounds on block norms, and the largest logit."""
    q, k, v, traits = head.q, head.k, head.v, attn.kind.traits
    tau = abs(attn.scale)
    if traits.softmax:
        sink = None if traits.sink is None else float(traits.sink[h])
        return _softmaxed(attn, head, *_dot_products(attn, head), sink)[:2]
    if traits.distances is not None:
        far = _distances(k, q)
        middle = (k - k.mean(0)).norm(dim=-1)  # what all keys share moves no weight
        by_query = 2 * tau * head.slope_q[:, None] * middle
        one = torch.ones_like(far)
        return _softmaxed(attn, head, -attn.scale * far.square(), one, 2 * tau * far * head.slope_k, by_query, None)[:2]
    if (units := traits.unit_vectors) is not None:
        (q, long_q), (k, long_k) = (softened(t, units.epsilon) for t in (q, k))
        slope_v = head.slope_v
        if units.values:
            v, long_v = softened(v, units.epsilon)
            slope_v = slope_v / long_v[..., 0]
        v, slope_v = units.factor * v, abs(units.factor) * slope_v
        slope_q, slope_k = head.slope_q / long_q[..., 0], head.slope_k / long_k[..., 0]
        head = head._replace(q=q, k=k, v=v, slope_q=slope_q, slope_k=slope_k, slope_v=slope_v)
        return _softmaxed(attn, head, *_dot_products(attn, head), None)[:2]
    if traits.features is not None:
        return _featured(traits.features, traits.divided, head)
    if traits.top is not None:
        return _chosen(attn, traits.top, head)
    assert traits.logistic is not None
    s, slope, by_key, by_query = _dot_products(attn, head)
    s = s + head.bias + traits.logistic.shift(len(q))
    P = (s.sigmoid() + TINY) * head.seen  # TINY: what underflow may take
    slope = slope * (sigmoid_slope(s) * (1 + 1e-12) + TINY) * head.seen * v.norm(dim=-1)
    return P * head.slope_v + slope * by_key + (slope * by_query).sum(-1).diag_embed(), float(s.abs().max())


def _featured(features: FeatureMap, divided: bool, head: Head) -> tuple[PerPair, float]:
    made = features_of(head.q[None], head.k[None], features, divided=divided)
    q, dq, k, dk = (t[0] for t in made)
    F = (q @ k.mT) * head.seen
    by_key = _lengths(q, dk) * head.slope_k * head.seen
    by_query = _lengths(dq, k) * head.slope_q[:, None] * head.seen
    far = head.v.norm(dim=-1)
    if divided:
        total = F.sum(-1, keepdim=True)
        by = torch.where(total > 0, 1 / total, 0.0)
        F, by_key, by_query = F * by, by_key * by, by_query * by
        far = _distances(head.v, F @ head.v)
        seen = supported(head.q, features) @ supported(head.k, features).mT * head.seen
        F[(total < _SMALL)[:, 0] & (seen > 0).any(-1)] = torch.inf  # squares of what it is made of underflow
    size = 3 * float(head.q.abs().max() + head.k.abs().max())  # exp makes a share of an error
    return F * head.slope_v + far * by_key + (far * by_query).sum(-1).diag_embed(), size


def _lengths(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """`|a_i ∘ b_j|`, entries that would leave the range when squared divided by the largest one before."""
    size_a, size_b = (float(t.abs().max().clamp_min(TINY)) for t in (a, b))
    return ((a / size_a).square() @ (b / size_b).square().mT).sqrt() * size_a * size_b


def _chosen(attn: Attention, top: int, head: Head) -> tuple[PerPair, float]:
    """Weights at most `1/m`, `m` the keys that are chosen for sure, on all that may be chosen up to rounding."""
    s = (_dot_products(attn, head)[0] + head.bias).masked_fill(~head.seen, -torch.inf)
    last = s.topk(min(top, s.shape[-1]), -1).values[..., -1:]
    slack = 1e-9 * (abs(attn.scale) * head.q.norm(dim=-1, keepdim=True) * head.k.norm(dim=-1).max() + 1e-300)
    may, must = (s >= last - slack) & head.seen, (s > last + slack) & head.seen
    least = must.sum(-1, keepdim=True).clamp_min(1)
    least = torch.maximum(least, torch.full_like(least, top).minimum(head.seen.sum(-1, keepdim=True)).clamp_min(1))
    return may / least * head.slope_v, 0.0


def _balanced(attn: Attention, balancing: Balancing, head: Head) -> tuple[float, float]:
    """The bound of 8.6 with the weights, values and slopes of the input; and the largest logit, several times over."""
    s, slope, by_key, by_query = _dot_products(attn, head)
    s = (s + head.bias).masked_fill(~head.seen, -torch.inf)
    p, grown = s - s.logsumexp(-1, keepdim=True), 0.0
    first = p.exp()
    rounds = 2 * _ROUNDS if balancing.iterations is None else balancing.iterations
    for step in range(1, rounds):
        sums = p.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
        grown += max(0.0, float(-sums.min()))
        p = p - sums
        if balancing.iterations is None and float(sums.abs().max()) < _SETTLED:
            break
    P = p.exp()
    if balancing.iterations is None:
        first, grown = P, 0.0
    rows, columns = P.sum(-1), P.sum(-2)
    off = max(float((rows - 1).abs().max()), float((columns - 1).abs().max()))
    if balancing.iterations is None and not off < 1e-9:
        return math.inf, 0.0
    moved = (first * (slope * by_query).square()).sum(-1).amax().sqrt() + (first * (slope * by_key).square()).sum(
        -2
    ).amax().sqrt()
    # rows that sum to one let values be measured from the outputs
    centre = P @ head.v if balancing.iterations is None or balancing.iterations % 2 else torch.zeros_like(head.v)
    spread = (P * _distances(head.v, centre).square()).sum(-1).amax().sqrt()
    norm = (rows.max() * columns.max()).sqrt()
    value = float(head.slope_v.max() * norm + spread * moved * math.exp(min(grown / 2, 700.0)))
    return value * (1 + 1e-6), float(torch.where(head.seen, s, 0.0).abs().max()) * min(rounds, 8)


def _distances(v: Float[Tensor, "n d"], o: Float[Tensor, "m d"]) -> Float[Tensor, "m n"]:
    """`|v_j − o_i|`, with what rounding hides of it."""
    far = torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
    return far + 1e-14 * (v.norm(dim=-1).max() + o.norm(dim=-1).max())


def _norm(N: PerPair) -> float:
    """`‖N‖₂` of a non-negative matrix from above."""
    if not bool(N.isfinite().all()):
        return math.inf
    size = float(N.max())
    if size == 0:
        return 0.0
    even = (N / size)[None]
    start = even.sum(1)
    bound, _ = perron_bound(lambda w: (even @ w[..., None])[..., 0], lambda z: (even.mT @ z[..., None])[..., 0], start, _STEPS)
    return float(bound) * size * (1 + 1e-12 * len(N))


def _rounding(x: Float[Tensor, "n d"], logits: float) -> float:
    """What float64 may have taken: an error in a logit is a share of its weight."""
    return math.exp(min(ROUNDINGS * torch.finfo(torch.float64).eps * math.sqrt(sum(x.shape)) * (64 + logits), 700.0))
