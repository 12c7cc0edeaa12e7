"""Kinds that are softmax of other logits, over the ball: distances, cosines, normalised products of features, two softmaxes.

Rows of their weights sum to one, so Theorem 3.16 holds with what their logits are: `G` and `K`, how fast a logit moves with its
key and with its query, and `E`, the largest ratio of two weights of a row. Numbers such as 8.3 are those of
docs/explanation/kinds.md.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.kernels.kinds import Softmax
from howsmooth.kernels.kinds.kind import Traits, TwoSoftmaxes
from howsmooth.maps import Attention
from howsmooth.theory.bound import Bound, at_most, first_reason, least_of, log_add, log_of
from howsmooth.theory.constants import Constants, constants, once_a_layer
from howsmooth.theory.over_ball.columns import causal_free, head_constant, heads_together, log_received
from howsmooth.theory.scaled import Scaled

KINDS_SOURCE = "howsmooth, docs/explanation/kinds.md"
ANY_LAYER = "biases, grouped heads, rotary phases, norms on queries and keys allowed"


class LogitSlopes(NamedTuple):
    """Of the logits of one head in the ball: in the key, in the query (up to what a row ignores), and log E."""

    key: float
    query: float
    log_e: float


class Values(NamedTuple):
    """Of the values of one head in the ball: how long, and how fast they move with their token."""

    length: float
    slope: float


def by_slopes(layer: Constants, n: int | None, radius: float) -> Bound:
    """G1, G1m: `ℓ = √C(1 + GR) + KR` with the slopes of the kind's own logits (8.3). `n=None` for the form free of n."""
    attn = layer.attn
    reason = first_reason(
        (not attn.kind.traits.smooth, "relu features can vanish, and the weights jump there"),
        (n is None and attn.causal and attn.window is not None, "not proved for a window; G1 is free of n there"),
        (n is None and math.isinf(layer.bias_range), "a logit bias hides keys"),
    )

    def columns(s: LogitSlopes, slope: float) -> float:
        """log of `√C(slope + G)`, in units of the length of values."""
        if n is None and attn.causal:  # 3.8, whose first term is that for values of slope one
            unit = log_of(slope)
            return unit + causal_free(s.log_e, log_of(s.key) - unit) if slope > 0 else math.inf
        return 0.5 * log_received(layer, n, s.log_e) + log_add(log_of(slope), log_of(s.key))

    answer = reason or in_values(layer, radius, lambda h, v: _ell(logit_slopes(layer, h, radius), v, columns))
    free = "E" if n is None else "min(n, E)"
    id, name = ("G1m", "slopes of logits, any n") if n is None else ("G1", "slopes of logits")
    statement = f"Lip ≤ ‖V‖[√C(1 + GR) + KR], C = {free}: {_said(attn.kind.traits)}"
    return at_most(id, name, statement, f"{KINDS_SOURCE} 8.3", f"every mask; {ANY_LAYER}", answer, mean_field=n is None)


def _ell(s: LogitSlopes, v: Values, columns: Callable[[LogitSlopes, float], float]) -> float:
    """log of `√C(slope + G·length) + K·length`."""
    if v.length == 0:
        return columns(LogitSlopes(0.0, 0.0, s.log_e), v.slope)
    return log_of(v.length) + log_add(columns(s, v.slope / v.length), log_of(s.query))


def in_values(layer: Constants, radius: float, log_ell: Callable[[int, Values], float]) -> float:
    """Heads together: through `V_h` where values are linear in tokens, through `W_o^h` where they are normalised (8.3)."""
    units = layer.attn.kind.traits.unit_vectors
    if units is None:
        return heads_together(layer, lambda h: log_ell(h, Values(radius, 1.0)))
    factor = log_of(abs(units.factor))
    if not units.values:
        return factor + heads_together(layer, lambda h: log_ell(h, Values(radius, 1.0)))
    root, heads = math.sqrt(units.epsilon), range(layer.heads)
    value = layer.value
    spread = [
        (unit_length(value.length(h, radius), root), value.slope(h, radius) / math.hypot(_nearest(value, h, radius), root))
        for h in heads
    ]
    return factor + through_outputs(layer, [log_ell(h, Values(*spread[h])) for h in heads])


def through_outputs(layer: Constants, logs: list[float]) -> float:
    """log of the least of `Σ_h ‖W_o^h‖ b_h` and `‖W_o‖ (Σ_h b_h²)^½`, `b_h` a bound on head `h` before `W_o`."""
    parts = (log_of(w) + b for w, b in zip(layer.w_o, logs, strict=True))
    return least_of(log_add(*parts), log_of(layer.out_norm) + 0.5 * log_add(*(2 * b for b in logs)))


def logit_slopes(layer: Constants, h: int, radius: float) -> LogitSlopes:
    """`G`, `K`, `log E` of one head (8.3)."""
    attn, traits, (q, k) = layer.attn, layer.attn.kind.traits, layer.unit
    tau, long_q, long_k = abs(attn.scale), q.length(h, radius), k.length(h, radius)
    slope_q, slope_k = q.slope(h, radius), k.slope(h, radius)
    if traits.unit_vectors is not None:
        root = math.sqrt(traits.unit_vectors.epsilon)
        unit_q, unit_k = unit_length(long_q, root), unit_length(long_k, root)
        shrink = 1.0 if attn.rotary is None else attn.rotary.shrink
        key = tau * unit_q * slope_k / math.hypot(shrink * _nearest(k, h, radius), root)
        query = tau * unit_k * slope_q / math.hypot(shrink * _nearest(q, h, radius), root)
        size, cap = tau * unit_q * unit_k, attn.softcap
        return LogitSlopes(key, query, 2 * (size if cap is None else cap * math.tanh(size / cap)) + layer.bias_range)
    if traits.distances is not None:
        # tied queries and keys are points of one ball; phases turn a bias too
        far = 2 * slope_k * radius if same_points(layer) and attn.rotary is None else long_q + long_k
        key = 2 * tau * slope_k * far
        query = 2 * tau * slope_q * long_k if layer.pairs else 2 * layer.a[h] * radius
        return LogitSlopes(key, query, tau * far * far + layer.bias_range)
    features = long_k + math.log1p(long_k)
    return LogitSlopes(slope_k, slope_q, features if attn.rotary is not None else min(features, 2 * slope_k * radius))


def same_points(layer: Constants) -> bool:
    """Whether every token has one vector as query and as key."""
    attn = layer.attn
    return attn.kind.traits.tied and attn.q_norm is None and attn.k_norm is None


def unit_length(length: float, root: float) -> float:
    """`|x|/√(|x|² + ε)` at the largest `|x|`."""
    return 1.0 if math.isinf(length) else min(1.0, length / math.hypot(length, root) * (1 + 1e-12))


def _nearest(t: Scaled, h: int, radius: float) -> float:
    """A lower bound on the length of a query, key or value in the ball before phases; zero behind a norm."""
    return t.nearest(h, radius) if t.alpha is None else 0.0


def difference(layer: Constants, n: int | None, radius: float) -> Bound:
    """F1, F1m: `ℓ = ℓ₁ + |λ|ℓ₂`, of softmax on the two halves; a norm behind multiplies by `1/√ε`."""
    attn = layer.attn
    two = attn.kind.traits.two_softmaxes
    assert two is not None
    reason = first_reason(
        (attn.coupled, "not for norms over all heads, whose halves hang together"),
        (n is None and attn.causal and attn.window is not None, "not proved for a window; F1 is free of n there"),
        (n is None and layer.bias_range == float("inf"), "a logit bias hides keys"),
    )
    answer = reason or _heads(layer, two, n, radius)
    statement = "Lip ≤ ‖V‖(ℓ₁ + |λ|ℓ₂), ℓ the bound of softmax (B7 to B12) on either half; ‖W_o‖‖W_v‖/√ε for ‖V‖ before a norm"
    id, name = ("F1m", "differential, any n") if n is None else ("F1", "differential")
    return at_most(
        id, name, statement, f"{KINDS_SOURCE} 8.9", f"every mask; soft-cap, {ANY_LAYER}", answer, mean_field=n is None
    )


def _heads(layer: Constants, two: TwoSoftmaxes, n: int | None, radius: float) -> float | str:
    first, second = halves(layer)
    steep = first.unbounded(radius) or second.unbounded(radius)
    if steep is not None:
        return steep
    factor, lam = log_of(abs(two.factor)), log_of(abs(two.lam))

    def log_ell(h: int) -> float:
        return log_add(head_constant(first, n, radius, h), lam + head_constant(second, n, radius, h))

    if two.epsilon is None:
        return factor + heads_together(layer, log_ell)
    return (
        factor
        - 0.5 * log_of(two.epsilon)
        + through_outputs(layer, [log_of(layer.w_v[h]) + log_ell(h) for h in range(layer.heads)])
    )


@once_a_layer
def halves(layer: Constants) -> tuple[Constants, Constants]:
    """Softmax attention on the first and on the second halves of queries and keys."""
    return constants(_half(layer.attn, 0)), constants(_half(layer.attn, 1))


def _half(attn: Attention, index: int) -> Attention:
    w_k = torch.eye(attn.width, dtype=attn.w_q.dtype, device=attn.w_q.device) if attn.w_k is None else attn.w_k

    def part(t: Tensor, heads: int) -> Tensor:
        return t.unflatten(0, (heads, 2, -1))[:, index].flatten(0, 1)

    b_q, b_k = (None if t is None else part(t, heads) for t, heads in ((attn.b_q, attn.heads), (attn.b_k, attn.kv_heads)))
    w_q, w_k = part(attn.w_q, attn.heads), part(w_k, attn.kv_heads)
    return replace(attn, kind=Softmax(), w_q=w_q, w_k=w_k, b_q=b_q, b_k=b_k)


def _said(traits: Traits) -> str:
    """The slopes of the logits, in words."""
    if traits.distances is not None:
        return "G = 2τ‖W_k‖ max|q − k|, K = 2‖A‖R, log E = τ max|q − k|²"
    if traits.unit_vectors is not None:
        return "G = τ‖W_k‖/√ε, K = τ‖W_q‖/√ε, log E = 2τ; for normalised values 1 and ‖W_v‖/√ε in place of R and 1"
    return "G = ‖W_k‖, K = ‖W_q‖, log E = κ + log(1 + κ), κ = ‖W_k‖R"
