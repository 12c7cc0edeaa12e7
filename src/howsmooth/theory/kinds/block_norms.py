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
from howsmooth.kernels.kinds.kind import Balancing, FeatureMap, TwoSoftmaxes, UnitVectors
from howsmooth.kernels.kinds.mapped import softened
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.tensors import sigmoid_slope, tanh_slope
from howsmooth.maps import Attention, LayerNorm, RMSNorm
from howsmooth.theory.at_point.heads import perron_bound
from howsmooth.theory.bound import Bound, at_most, least_of, log_of
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.kinds.published import sigmoid_at_point
from howsmooth.theory.kinds.slopes import KINDS_SOURCE, halves
from howsmooth.theory.scaled import Scaled
from howsmooth.theory.upper import ROUNDINGS, TINY, Upper

_TOKENS = 8192  # up to which a head's matrix of block norms is formed
_STEPS = 12  # of power iteration on it; every number of them gives a bound
_ROUNDS = 2000  # pairs of normalisations for the limit of Sinkhorn
_CONVERGED = 1e-13  # sums this close to one are those of the limit
_SMALL = 1e-130  # sums below which the squares of their terms leave the range
_BLUR = 1e-13  # of `|q||k|`: far above the rounding of their product
_ROUNDED = 1 + 1e-9  # covers the rounding of what is made of non-negative numbers, slopes and lengths

PerPair = Float[Tensor, "n n"]


class HeadInput(NamedTuple):
    """One head at an input, all float64.

    q, k: (n, d_h), as the kind takes them.  v: (n, d_v), its values.  slope_q, slope_k, slope_v: (n,), how fast they move with
    their token, at most.  visible: (n, n).  bias: added to logits.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slope_q: Tensor
    slope_k: Tensor
    slope_v: Tensor
    visible: PerPair
    bias: Tensor | float


class HeadBlocks(NamedTuple):
    """Upper bounds on the norms of a head's blocks, the largest logit, as many times as its error counts, and `P`."""

    norms: PerPair
    logit: float
    weights: PerPair


@torch.no_grad()
def point_of_kind(attn: Attention, x: Float[Tensor, "n d"]) -> list[Bound]:
    """The rows at an input for a layer of any kind: what is published for it, and D7."""
    attn, x = attn.to("cpu", torch.float64), x.detach().to("cpu", torch.float64)
    rows = [sigmoid_at_point(constants(attn), x)] if attn.kind.traits.logistic is not None else []
    reason = f"for up to {_TOKENS} tokens, the input has {len(x)}" if len(x) > _TOKENS else None
    statement = "min(Σ_h ‖N_h‖, ‖W_o‖(Σ_h ‖N_h′‖²)^½), N the matrix of bounds on the norms of the blocks, after and before W_o"
    answer = reason or log_of(block_bound(attn, x))
    return [*rows, at_most("D7", "block norms, any kind", statement, f"{KINDS_SOURCE} 8.11", "any attention layer", answer)]


@torch.no_grad()
def block_bound(attn: Attention, x: Float[Tensor, "n d"]) -> float:
    """D7; infinity where arithmetic leaves the range."""
    layer, units, two = constants(attn), attn.kind.traits.unit_vectors, attn.kind.traits.two_softmaxes
    before = [_head_bound(layer, h, x, outer=False) for h in range(attn.heads)]
    if (units is not None and units.values) or (two is not None and two.epsilon is not None):
        # values or outputs are not linear in the tokens
        apart = math.fsum(b * w for b, w in zip(before, layer.w_o, strict=True))
    else:
        apart = math.fsum(_head_bound(layer, h, x, outer=True) for h in range(attn.heads))
    return least_of(layer.out_norm * math.hypot(*before), apart) * _ROUNDED


def _head_bound(layer: Constants, h: int, x: Float[Tensor, "n d"], *, outer: bool) -> float:
    """`‖N‖` of a head, after `W_o` (outer) or before it."""
    traits = layer.attn.kind.traits
    if traits.two_softmaxes is not None:
        N, logit = _difference(layer, traits.two_softmaxes, h, x, outer)
        value = _norm(N)
    elif traits.balancing is not None:
        value, logit = _balanced(layer.attn, traits.balancing, _head(layer, h, x, outer))
    else:
        N, logit, _ = _block_norms(layer.attn, h, _head(layer, h, x, outer))
        value = _norm(N)
    # what float64 may have taken: an error in a logit is a share of its weight
    noise = ROUNDINGS * torch.finfo(torch.float64).eps * math.sqrt(sum(x.shape))
    return value * math.exp(min(noise * (64 + logit), 700.0))


def _difference(layer: Constants, two: TwoSoftmaxes, h: int, x: Tensor, outer: bool) -> tuple[PerPair, float]:
    """`|factor| (N₁ + |λ| N₂)`, each row over the least its norm divides by, and the largest logit."""
    lam, heads = abs(two.lam), [_head(half, h, x, outer) for half in halves(layer)]
    first, second = (_block_norms(half.attn, h, head) for half, head in zip(halves(layer), heads, strict=True))
    size = torch.full((len(first.norms), 1), abs(two.factor), dtype=torch.float64)
    if two.epsilon is not None:
        values = heads[0].v
        o = (first.weights - two.lam * second.weights) @ values
        blur = 1e-12 * (1 + lam) * values.norm(dim=-1).max()
        shortest = (o.square().mean(-1, keepdim=True).sqrt() - blur).clamp_min(0.0)
        size = size / (shortest.square() + two.epsilon).sqrt()
    return size * (first.norms + lam * second.norms), max(first.logit, second.logit)


def _head(layer: Constants, h: int, x: Float[Tensor, "n d"], outer: bool) -> HeadInput:
    attn, n = layer.attn, len(x)
    group, real = h // (attn.heads // attn.kv_heads), slice(None) if attn.attention_mask is None else attn.attention_mask[0]
    raw_q, raw_k, _ = attn.project(x[None], with_bias=True)
    q, k, v = (t[0] for t in attn.vectors(x[None]))
    v, slope_v = (v[group] @ attn.by_head().o[h].mT, layer.v[h]) if outer else (v[group], layer.w_v[h])
    visible = Mask(attn.causal, attn.window).visible(slice(0, n), slice(0, n), x.device)
    bias: Tensor | float = 0.0
    if attn.bias is not None:
        bias = attn.bias.double()[0, min(h, attn.bias.shape[1] - 1)].expand(n, n)
        visible = visible & (bias > -torch.inf)
        bias = torch.where(bias > -torch.inf, bias, 0.0)[real][:, real]
    query, key = layer.unit
    slope_q, slope_k = _slopes(query, h, attn.q_norm, raw_q[0], h), _slopes(key, h, attn.k_norm, raw_k[0], group)
    slope_q, slope_k, slope_v = (t[real] for t in (slope_q, slope_k, torch.full((n,), slope_v, dtype=torch.float64)))
    return HeadInput(q[h, real], k[group, real], v[real], slope_q, slope_k, slope_v, visible[real][:, real], bias)


def _slopes(t: Scaled, h: int, norm: LayerNorm | RMSNorm | None, raw: Float[Tensor, "heads n d_h"], own: int) -> Tensor:
    """How fast the queries, or keys, of a head move with their tokens, at most, (n,)."""
    n = raw.shape[1]
    if norm is None or t.alpha is None:
        return torch.full((n,), t.gain * t.weight[h], dtype=torch.float64)
    together = norm.width != raw.shape[-1]
    p = norm.center(raw.transpose(0, 1).flatten(1) if together else raw[own])
    return t.gain * t.alpha[h] * t.weight[h] / (p.square().mean(-1) + norm.eps).sqrt()


def _block_norms(attn: Attention, h: int, head: HeadInput) -> HeadBlocks:
    """`P_ij ν_j + M_ij |g_ij| + δ_ij Σ_l M_il |h_il|`, `M` how far the output moves with a logit, `g, h` slopes of logits."""
    traits = attn.kind.traits
    if traits.features is not None:
        return _featured(traits.features, traits.divided, head)
    if traits.top is not None:
        return _chosen(attn, traits.top, head)
    if traits.unit_vectors is not None:
        head = _normalised(traits.unit_vectors, head)
    s, slope, by_key, by_query = _dot_products(attn, head) if traits.distances is None else _distance_logits(attn, head)
    s = s + head.bias
    if traits.logistic is not None:
        s = s + traits.logistic.shift(len(s))
        weights = (s.sigmoid() + TINY) * head.visible  # TINY: what underflow may take
        moved = slope * (sigmoid_slope(s) + TINY) * head.visible * head.v.norm(dim=-1)
        largest = float(s.abs().max())
    else:
        s = s.masked_fill(~head.visible, -torch.inf)
        sink = -torch.inf if traits.sink is None else float(traits.sink[h])
        top = s.amax(-1, keepdim=True).clamp_min(sink)
        top = torch.where(top > -torch.inf, top, 0.0)
        weights = (s - top).exp()
        total = weights.sum(-1, keepdim=True) + (sink - top).exp()
        weights = weights / torch.where(total > 0, total, 1.0)
        moved = weights * _distances(head.v, weights @ head.v) * slope
        largest = float(torch.where(head.visible, s, 0.0).abs().max())
    return HeadBlocks(weights * head.slope_v + moved * by_key + (moved * by_query).sum(-1).diag_embed(), largest, weights)


def _normalised(units: UnitVectors, head: HeadInput) -> HeadInput:
    """The head with its vectors divided by their lengths, and their slopes too."""
    (q, long_q), (k, long_k) = (softened(t, units.epsilon) for t in (head.q, head.k))
    v, long_v = softened(head.v, units.epsilon) if units.values else (head.v, torch.ones_like(head.v[:, :1]))
    return head._replace(
        q=q,
        k=k,
        v=units.factor * v,
        slope_q=head.slope_q / long_q[..., 0],
        slope_k=head.slope_k / long_k[..., 0],
        slope_v=abs(units.factor) * head.slope_v / long_v[..., 0],
    )


def _dot_products(attn: Attention, head: HeadInput) -> tuple[PerPair, PerPair, PerPair, PerPair]:
    """Logits `τ q·k`, the soft-cap's slope, and how fast they move with keys and with queries before it, at most."""
    tau, s = abs(attn.scale), attn.scale * head.q @ head.k.mT
    long_q, long_k, cap = head.q.norm(dim=-1)[:, None], head.k.norm(dim=-1), attn.softcap
    by_key, by_query = tau * long_q * head.slope_k, tau * head.slope_q[:, None] * long_k
    if cap is None:
        return s, torch.ones_like(s), by_key, by_query
    # the slope falls with |s|, which rounding may have moved away from zero
    slope = tanh_slope((s.abs() - _BLUR * tau * long_q * long_k).clamp_min(0.0) / cap) + TINY
    return cap * (s / cap).tanh(), slope, by_key, by_query


def _distance_logits(attn: Attention, head: HeadInput) -> tuple[PerPair, PerPair, PerPair, PerPair]:
    """Logits `−τ |q − k|²` and their slopes, as `_dot_products` has them; what all keys share moves no weight."""
    tau, far = abs(attn.scale), _distances(head.k, head.q)
    by_query = 2 * tau * head.slope_q[:, None] * (head.k - head.k.mean(0)).norm(dim=-1)
    return -attn.scale * far.square(), torch.ones_like(far), 2 * tau * far * head.slope_k, by_query


def _featured(features: FeatureMap, divided: bool, head: HeadInput) -> HeadBlocks:
    q, dq, k, dk = (t[0] for t in features_of(head.q[None], head.k[None], features, divided=divided))
    F = (q @ k.mT) * head.visible
    by_key = _lengths(q, dk) * head.slope_k * head.visible
    by_query = _lengths(dq, k) * head.slope_q[:, None] * head.visible
    far = head.v.norm(dim=-1)
    if divided:
        total = F.sum(-1, keepdim=True)
        by = torch.where(total > 0, 1 / total, 0.0)
        F, by_key, by_query = F * by, by_key * by, by_query * by
        far = _distances(head.v, F @ head.v)
        positive = supported(head.q, features) @ supported(head.k, features).mT * head.visible
        F[(total < _SMALL)[:, 0] & (positive > 0).any(-1)] = torch.inf  # squares of what it is made of underflow
    size = 3 * float(head.q.abs().max() + head.k.abs().max())  # exp makes a share of an error
    return HeadBlocks(F * head.slope_v + far * by_key + (far * by_query).sum(-1).diag_embed(), size, F)


def _lengths(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """`|a_i ∘ b_j|`, entries that would leave the range when squared divided by the largest one before."""
    size_a, size_b = (float(t.abs().max().clamp_min(TINY)) for t in (a, b))
    return ((a / size_a).square() @ (b / size_b).square().mT).sqrt() * size_a * size_b


def _chosen(attn: Attention, top: int, head: HeadInput) -> HeadBlocks:
    """Weights at most `1/m`, `m` the keys that are chosen for sure, on all that may be chosen up to rounding."""
    s = (_dot_products(attn, head)[0] + head.bias).masked_fill(~head.visible, -torch.inf)
    last = s.topk(min(top, s.shape[-1]), -1).values[..., -1:]
    slack = 1e-9 * (abs(attn.scale) * head.q.norm(dim=-1, keepdim=True) * head.k.norm(dim=-1).max() + 1e-300)
    may, must = (s >= last - slack) & head.visible, (s > last + slack) & head.visible
    least = must.sum(-1, keepdim=True).clamp_min(1)
    least = torch.maximum(least, torch.full_like(least, top).minimum(head.visible.sum(-1, keepdim=True)).clamp_min(1))
    return HeadBlocks(may / least * head.slope_v, 0.0, may / least)


def _balanced(attn: Attention, balancing: Balancing, head: HeadInput) -> tuple[float, float]:
    """The bound of 8.6 with the weights, values and slopes of the input; and the largest logit, several times over."""
    s, slope, by_key, by_query = _dot_products(attn, head)
    s = (s + head.bias).masked_fill(~head.visible, -torch.inf)
    p, grown = s - s.logsumexp(-1, keepdim=True), 0.0
    first = p.exp()
    rounds = 2 * _ROUNDS if balancing.iterations is None else balancing.iterations
    for step in range(1, rounds):
        sums = p.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
        grown += max(0.0, float(-sums.min()))
        p = p - sums
        if balancing.iterations is None and float(sums.abs().max()) < _CONVERGED:
            break
    P = p.exp()
    if balancing.iterations is None:
        first, grown = P, 0.0
    rows, columns = P.sum(-1), P.sum(-2)
    off = max(float((rows - 1).abs().max()), float((columns - 1).abs().max()))
    if balancing.iterations is None and not off < 1e-9:
        return math.inf, 0.0
    moved_q, moved_k = ((first * (slope * t).square()).sum(axis).amax().sqrt() for t, axis in ((by_query, -1), (by_key, -2)))
    # rows that sum to one let values be measured from the outputs
    centre = P @ head.v if balancing.iterations is None or balancing.iterations % 2 else torch.zeros_like(head.v)
    spread = (P * _distances(head.v, centre).square()).sum(-1).amax().sqrt()
    norm = (rows.max() * columns.max()).sqrt()
    value = float(head.slope_v.max() * norm + spread * (moved_q + moved_k) * math.exp(min(grown / 2, 700.0)))
    return value * (1 + 1e-6), float(torch.where(head.visible, s, 0.0).abs().max()) * min(rounds, 8)


def _distances(v: Float[Tensor, "n d"], o: Float[Tensor, "m d"]) -> Float[Tensor, "m n"]:
    """`|v_j − o_i|`, with what rounding hides of it."""
    far = torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
    return far + 1e-14 * (v.norm(dim=-1).max() + o.norm(dim=-1).max())


def _norm(N: PerPair) -> float:
    """An upper bound on `‖N‖₂` of a non-negative matrix."""
    if not bool(N.isfinite().all()):
        return math.inf
    size = float(N.max())
    if size == 0:
        return 0.0
    even = (N / size)[None]
    start = even.sum(1)
    bound, _ = perron_bound(lambda w: (even @ w[..., None])[..., 0], lambda z: (even.mT @ z[..., None])[..., 0], start, _STEPS)
    return float(Upper(float(bound)).raised(2 * len(N)) * size)  # products of n terms, one after the other
