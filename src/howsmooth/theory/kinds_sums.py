"""Kinds whose weights are not normalised, or do not move: sigmoid, products of features, the top few (8.5, 8.7, 8.8).

Numbers such as 8.5 are those of docs/explanation/kinds.md.
"""

import math
from collections.abc import Callable

from howsmooth.theory.bound import Bound, at_most, log_add, log_of
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds_slopes import LAYER, SOURCE
from howsmooth.theory.ours import heads_together, seen_by


def sigmoid(layer: Constants, n: int, radius: float) -> Bound:
    """S2: `n(w + w′R(G + K))`, `w` and `w′` the largest weight and slope in the ball (8.5)."""
    tokens = _counted(layer, n)
    seen = math.log(seen_by(layer, tokens))  # keys of a row, and queries of a key

    def parts(h: int) -> tuple[float, float]:
        """log of the norm of the weights, and of how fast row sums move."""
        log_w, log_slope = weight_logs(layer, h, tokens, radius)
        moved = log_of(layer.reach(h, radius) + _query_reach(layer, h, radius))
        return seen + log_w, seen + log_slope + moved

    answer = layer.unbounded(radius) or _with_bias(layer, radius, parts)
    statement = "Lip ≤ n‖V‖(w + 2w′‖A‖R²), w = sup σ, w′ = sup σ′ over |s| ≤ ‖A‖R²; b = −log n: ≤ ‖V‖e^{‖A‖R²}(1 + 2‖A‖R²)"
    return at_most("S2", "sigmoid", statement, f"{SOURCE} 8.5", f"every mask; soft-cap, {LAYER}", answer)


def products(layer: Constants, n: int, radius: float) -> Bound:
    """U1: products of features, not normalised (8.7)."""
    seen = math.log(seen_by(layer, n))  # keys of a row, and queries of a key
    attn = layer.layer
    extra = math.sqrt(attn.head_width) if attn.kind.traits.features == "elu" else 0.0  # φ(t) ≤ 1 + t⁺ entry by entry

    def parts(h: int) -> tuple[float, float]:
        q, k = layer.unit
        long_q, long_k = (log_of(t.length(h, radius) + extra) for t in (q, k))
        slope_q, slope_k = (log_of(t.slope(h, radius)) for t in (q, k))
        return seen + long_q + long_k, seen + log_add(long_q + slope_k, long_k + slope_q)

    answer = layer.unbounded(radius) or _with_bias(layer, radius, parts)
    statement = "Lip ≤ n‖V‖(F_qF_k + RF_q‖W_k‖ + RF_k‖W_q‖), F = ‖W‖R + |b| (relu), and √(head width) more (elu + 1)"
    return at_most("U1", "products of features", statement, f"{SOURCE} 8.7", f"every mask; {LAYER}", answer)


def hard(layer: Constants, n: int) -> Bound:
    """H1: where the choice of keys does not change, `P` is constant (8.8)."""
    attn, seen, top = layer.layer, seen_by(layer, n), layer.layer.kind.traits.top
    assert top is not None
    if attn.bias is not None and math.isinf(layer.bias_range):
        column = seen  # a row may see one key alone
    elif attn.causal:
        column = math.fsum(1 / t for t in range(1, min(top, int(seen)) + 1)) + max(0.0, seen - top) / top
    elif attn.window is not None and n > attn.window:
        column = seen if attn.attention_mask is not None else max(1.0, seen / min(top, attn.window))
    else:
        column = max(1.0, seen / top)
    answer = heads_together(layer, lambda h: 0.5 * log_of(min(column, seen)))
    statement = "L ≤ ‖V‖√(n/k) wherever the choice of k keys stays; where it changes the map jumps, and Lip = ∞"
    assumes = "the local constant at inputs where no choice changes, or that of the weights a tie has; every layer"
    return at_most("H1", "top few, between jumps", statement, f"{SOURCE} 8.8", assumes, answer)


def weight_logs(layer: Constants, h: int, n: int, radius: float) -> tuple[float, float]:
    """log of the largest weight of sigmoid attention in the ball, and of its largest slope in a logit."""
    attn, logistic = layer.layer, layer.layer.kind.traits.logistic
    assert logistic is not None
    shift = logistic.shift(n)
    size = logit_size(layer, h, radius)
    low, high = (0.0, 0.0) if attn.bias is None else (float(attn.bias.double().min()), float(attn.bias.double().max()))
    low, high = shift - size + low, shift + size + high
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return _log_sigmoid(high), _log_sigmoid(nearest) + _log_sigmoid(-nearest)


def logit_size(layer: Constants, h: int, radius: float) -> float:
    """The largest `|s_ij|` in the ball, before a bias."""
    attn, (q, k) = layer.layer, layer.unit
    size = abs(attn.scale) * q.length(h, radius) * k.length(h, radius)
    if layer.pairs:
        size = min(size, *(abs(attn.scale) * p.length(h, radius) * r.length(h, radius) for p, r in layer.pairs))
    else:
        fixed = abs(attn.scale) * q.shift[h] * k.shift[h]
        size = min(size, radius * (layer.a[h] * radius + layer.query_shift[h] + layer.key_shift[h]) + fixed)
    return size if attn.softcap is None else attn.softcap * math.tanh(size / attn.softcap)


def _query_reach(layer: Constants, h: int, radius: float) -> float:
    """How fast a logit moves with its query; what all keys of a row share counts, as rows do not sum to one."""
    if not layer.pairs:
        return layer.a[h] * radius + layer.key_shift[h]
    return abs(layer.layer.scale) * min(q.slope(h, radius) * k.length(h, radius) for q, k in layer.pairs)


def _log_sigmoid(t: float) -> float:
    return -log_add(0.0, -t)


def _counted(layer: Constants, n: int) -> int:
    """How many real tokens are worst: with padding there may be fewer than n, and a bias of −log n is larger then (8.5)."""
    attn, logistic = layer.layer, layer.layer.kind.traits.logistic
    assert logistic is not None
    if attn.attention_mask is None or logistic.bias is not None or attn.window is None:
        return n
    return min(n, attn.window if attn.causal else 2 * attn.window - 1)


def _with_bias(layer: Constants, radius: float, parts: Callable[[int], tuple[float, float]]) -> float:
    """Heads together of `‖W‖ + R·moved`, and what moving row sums do to a value bias."""
    whole = heads_together(layer, lambda h: log_add(parts(h)[0], log_of(radius) + parts(h)[1]))
    if not any(layer.value_shift):
        return whole
    return log_add(whole, *(log_of(b) + parts(h)[1] for h, b in enumerate(layer.value_shift)))
