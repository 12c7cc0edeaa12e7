"""Ramapuram et al. 2024, *Theory, Analysis, and Best Practices for Sigmoid Self-Attention* (arXiv 2409.04431).

Their bound at an input, `‖W_v‖(σ_∞ + 2σ′_∞ ‖W_qᵀW_k‖ mean|x|²)` with `σ_∞ = n sup σ` and `σ′_∞ = n sup σ′` over the logits
there, as remembered and proved in docs/explanation/kinds.md 8.5; over a ball with `R²` in place of the mean.
"""

import math
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from howsmooth.theory.bound import Bound, at_most, first_reason, log_add, log_of
from howsmooth.theory.castin2024 import not_bilinear
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds_sums import weight_logs

SOURCE = "Ramapuram et al. 2024, Theorem 3.2; proved in howsmooth, docs/explanation/kinds.md 8.5"
STATEMENT = "‖V‖(σ_∞ + 2σ′_∞‖A‖ mean|x_i|²), σ_∞ = n sup σ(s + b), σ′_∞ = n sup σ′(s + b)"
ASSUMES = "one head, no mask, no biases on queries, keys and values, no soft-cap"


def plain(layer: Constants) -> str | None:
    """Why the paper's setting is not this layer's; None if it is."""
    attn = layer.layer
    biases = any(b is not None for b in (attn.b_q, attn.b_k, attn.b_v))
    return first_reason(
        (layer.heads > 1, f"stated for one head, the layer has {layer.heads}"),
        (attn.causal or attn.window is not None, "stated without a mask"),
        (attn.softcap is not None, "stated without a soft-cap"),
        (attn.bias is not None, "stated without a logit bias"),
        (biases, "stated without biases"),
    ) or not_bilinear(attn)


def over_ball(layer: Constants, n: int, radius: float) -> Bound:
    """S1: with `R²` in place of the mean of the squares."""
    answer = plain(layer)
    if answer is None:
        log_w, log_slope = weight_logs(layer, 0, n, radius)
        moved = math.log(2) + log_slope + log_of(layer.a[0] * radius * radius)
        answer = log_of(layer.v[0]) + math.log(n) + log_add(log_w, moved)
    statement = f"Lip ≤ {STATEMENT.replace('mean|x_i|²', 'R²')}"
    return at_most("S1", "sigmoid, published", statement, SOURCE, ASSUMES, answer)


def at_point(layer: Constants, x: Float[Tensor, "n d"]) -> Bound:
    """S1 at an input: its own logits, and the mean of its squares."""
    answer, attn = plain(layer), layer.layer
    if answer is None:
        logistic = attn.kind.traits.logistic
        assert logistic is not None
        x = x if attn.attention_mask is None else x[attn.attention_mask[0]]
        q, k, _ = replace(attn, attention_mask=None).vectors(x[None])
        s = attn.scale * (q @ k.mT) + logistic.shift(len(x))
        # logits carry a rounding of their size
        size = 1e-12 * (1 + abs(attn.scale) * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()))
        high, nearest = float(s.max()) + size, max(0.0, float(s.abs().min()) - size)
        log_w, log_slope = _log_sigmoid(high), _log_sigmoid(nearest) + _log_sigmoid(-nearest)
        moved = math.log(2) + log_slope + log_of(layer.a[0]) + 2 * log_of(float(x.norm())) - math.log(len(x))
        answer = log_of(layer.v[0]) + math.log(len(x)) + log_add(log_w, moved)
    return at_most("S1", "sigmoid, published", STATEMENT, SOURCE, ASSUMES, answer)


def _log_sigmoid(t: float) -> float:
    return -log_add(0.0, -t)
