"""Kinds whose weights are no softmax of a row: sigmoid, products of features, the top few, Sinkhorn (8.5 to 8.8).

At Sinkhorn's limit the bound is one plus the slopes of the logits, and nothing of n. Changing logits by `ds` changes the
weights by `P ∘ θ`, `θ` what is left of `ds` beside functions of a row or column alone; at the limit it is the orthogonal
projection in the space weighted by `P`, which makes nothing larger. With finitely many normalisations each step may enlarge it
by the root of the largest factor it divides by. Numbers such as 8.5 are those of docs/explanation/kinds.md.
"""

import math
from collections.abc import Callable

from howsmooth.theory.bound import Bound, at_most, first_reason, least_of, log_add, log_of
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds.slopes import ANY_LAYER, KINDS_SOURCE
from howsmooth.theory.over_ball.columns import heads_together

_BALANCED = "biases, soft-cap, grouped heads, rotary phases, norms on queries and keys allowed"


def sigmoid(layer: Constants, n: int, radius: float) -> Bound:
    """S2: `n(w + w′R(G + K))`, `w` and `w′` the largest weight and slope in the ball (8.5)."""
    tokens = _counted(layer, n)
    most = math.log(layer.visible(tokens))

    def parts(h: int) -> tuple[float, float]:
        """log of the norm of the weights, and of how fast row sums move."""
        log_w, log_slope = weight_logs(layer, h, tokens, radius)
        moved = log_of(layer.reach(h, radius) + layer.key_reach(h, radius))
        return most + log_w, most + log_slope + moved

    answer = layer.unbounded(radius) or _with_bias(layer, radius, parts)
    statement = "Lip ≤ n‖V‖(w + 2w′‖A‖R²), w = sup σ, w′ = sup σ′ over |s| ≤ ‖A‖R²; b = −log n: ≤ ‖V‖e^{‖A‖R²}(1 + 2‖A‖R²)"
    return at_most("S2", "sigmoid", statement, f"{KINDS_SOURCE} 8.5", f"every mask; soft-cap, {ANY_LAYER}", answer)


def products(layer: Constants, n: int, radius: float) -> Bound:
    """U1: products of features, not normalised (8.7)."""
    attn, most = layer.attn, math.log(layer.visible(n))
    extra = math.sqrt(attn.head_width) if attn.kind.traits.features == "elu" else 0.0  # φ(t) ≤ 1 + t⁺ entry by entry

    def parts(h: int) -> tuple[float, float]:
        q, k = layer.unit
        long_q, long_k = (log_of(t.length(h, radius) + extra) for t in (q, k))
        slope_q, slope_k = (log_of(t.slope(h, radius)) for t in (q, k))
        return most + long_q + long_k, most + log_add(long_q + slope_k, long_k + slope_q)

    answer = layer.unbounded(radius) or _with_bias(layer, radius, parts)
    statement = "Lip ≤ n‖V‖(F_qF_k + RF_q‖W_k‖ + RF_k‖W_q‖), F = ‖W‖R + |b| (relu), and √(head width) more (elu + 1)"
    return at_most("U1", "products of features", statement, f"{KINDS_SOURCE} 8.7", f"every mask; {ANY_LAYER}", answer)


def hard(layer: Constants, n: int) -> Bound:
    """H1: where the choice of keys does not change, `P` is constant (8.8)."""
    attn, most, top = layer.attn, layer.visible(n), layer.attn.kind.traits.top
    assert top is not None
    if attn.bias is not None and math.isinf(layer.bias_range):
        column = most  # a row may see one key alone
    elif attn.causal:
        column = math.fsum(1 / t for t in range(1, min(top, int(most)) + 1)) + max(0.0, most - top) / top
    elif attn.window is not None and n > attn.window:
        column = most if attn.attention_mask is not None else max(1.0, most / min(top, attn.window))
    else:
        column = max(1.0, most / top)
    answer = heads_together(layer, lambda h: 0.5 * log_of(min(column, most)))
    statement = "L ≤ ‖V‖√(n/k) wherever the choice of k keys stays; where it changes the map jumps, and Lip = ∞"
    assumes = "the local constant at inputs where no choice changes, or that of the weights a tie has; every layer"
    return at_most("H1", "top few, between jumps", statement, f"{KINDS_SOURCE} 8.8", assumes, answer)


def sinkhorn_limit(layer: Constants, radius: float) -> Bound:
    """N1: Sinkhorn's doubly stochastic limit, any number of tokens (8.6)."""
    balancing = layer.attn.kind.traits.balancing
    assert balancing is not None
    reason = first_reason((balancing.iterations is not None, "for the limit; see N2"))
    plain = not layer.pairs and layer.attn.softcap is None  # then a query's bias is a function of the column alone

    def log_ell(h: int) -> float:
        both = 2 * layer.a[h] * radius if plain else layer.reach(h, radius) + layer.key_reach(h, radius)
        return log_add(0.0, log_of(both) + log_of(radius))

    answer = reason or layer.unbounded(radius) or heads_together(layer, log_ell)
    statement = "Lip ≤ ‖V‖(1 + 2‖A‖R²), any number of tokens"
    return at_most(
        "N1", "Sinkhorn, limit", statement, f"{KINDS_SOURCE} 8.6", f"the limit; {_BALANCED}", answer, mean_field=True
    )


def sinkhorn(layer: Constants, n: int, radius: float) -> Bound:
    """N2: Sinkhorn with `k` normalisations (8.6)."""
    balancing = layer.attn.kind.traits.balancing
    assert balancing is not None
    reason = first_reason(
        (balancing.iterations is None, "for finitely many normalisations; see N1"),
        (layer.attn.window is not None, "not proved for a window"),
    )
    k = balancing.iterations or 1
    odd, log_n = k % 2 == 1, math.log(n)

    def parts(h: int) -> tuple[float, float]:
        """log of the norm of `P`, and of what `θ` is at most, times the root of the row sums."""
        spread = layer.log_spread(h, radius) - layer.bias_range + layer.bias_total  # of all logits, up to one number a row
        shrink = math.tanh(min(spread, 100.0) / 2) if math.isfinite(spread) else 1.0
        query, key = log_of(layer.key_reach(h, radius)), log_of(layer.reach(h, radius))
        first = log_add(query, 0.5 * least_of(log_n, spread) + key)
        grown = 0.5 * spread * math.fsum(shrink**t for t in range(k - 1)) if k > 1 else 0.0
        theta = least_of(first + grown, math.log(2 * k) + 0.5 * log_n + log_add(query, key))
        sums = least_of(log_n, spread * shrink ** (k - 1))  # the largest sum along the axis normalised last but one
        return 0.5 * sums, theta if odd else theta + 0.5 * sums

    def log_ell(h: int) -> float:
        norm, theta = parts(h)
        return log_add(norm, log_of(radius) + theta)

    reason = reason or layer.unbounded(radius)
    answer = reason or heads_together(layer, log_ell)
    if isinstance(answer, float) and not odd and any(layer.value_shift):
        answer = log_add(answer, *(log_of(b) + parts(h)[1] for h, b in enumerate(layer.value_shift)))
    statement = "Lip ≤ ‖V‖[√S + R√r min(M(K + √C G), 2k√n(K + G))], M = e^{Λ/2 Σ_{t<k−1} tanh(Λ/2)^t}, Λ = 2‖A‖R²"
    return at_most(
        "N2", "Sinkhorn, k steps", statement, f"{KINDS_SOURCE} 8.6", f"k normalisations, no window; {_BALANCED}", answer
    )


def weight_logs(layer: Constants, h: int, n: int, radius: float) -> tuple[float, float]:
    """log of the largest weight of sigmoid attention in the ball, and of its largest slope in a logit."""
    attn, logistic = layer.attn, layer.attn.kind.traits.logistic
    assert logistic is not None
    shift = logistic.shift(n)
    size = logit_size(layer, h, radius)
    low, high = (0.0, 0.0) if attn.bias is None else (float(attn.bias.double().min()), float(attn.bias.double().max()))
    low, high = shift - size + low, shift + size + high
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return sigmoid_logs(high, nearest)


def sigmoid_logs(high: float, nearest: float) -> tuple[float, float]:
    """log of `sup σ` and of `sup σ′` over logits that are at most `high` and no nearer to zero than `nearest`."""
    return -log_add(0.0, -high), -log_add(0.0, -nearest) - log_add(0.0, nearest)


def logit_size(layer: Constants, h: int, radius: float) -> float:
    """The largest `|s_ij|` in the ball, before a bias."""
    attn, (q, k), size = layer.attn, layer.unit, layer.logit_size(h, radius)
    if not layer.pairs:
        fixed = abs(attn.scale) * q.shift[h] * k.shift[h]
        size = min(size, radius * (layer.a[h] * radius + layer.query_shift[h] + layer.key_shift[h]) + fixed)
    return size if attn.softcap is None else attn.softcap * math.tanh(size / attn.softcap)


def _counted(layer: Constants, n: int) -> int:
    """How many real tokens are worst: with padding there may be fewer than n, and a bias of −log n is larger then (8.5)."""
    attn, logistic = layer.attn, layer.attn.kind.traits.logistic
    assert logistic is not None
    if attn.attention_mask is None or logistic.bias is not None or attn.window is None:
        return n
    return int(layer.visible(n))


def _with_bias(layer: Constants, radius: float, parts: Callable[[int], tuple[float, float]]) -> float:
    """Heads together of `‖W‖ + R·moved`, and what moving row sums do to a value bias."""
    whole = heads_together(layer, lambda h: log_add(parts(h)[0], log_of(radius) + parts(h)[1]))
    if not any(layer.value_shift):
        return whole
    return log_add(whole, *(log_of(b) + parts(h)[1] for h, b in enumerate(layer.value_shift)))
