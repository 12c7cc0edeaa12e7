"""Qi et al. 2023, *LipsFormer: Introducing Lipschitz Continuity to Vision Transformers* (ICLR, arXiv 2304.09856).

Scaled cosine similarity attention, queries, keys and values divided by `√(|·|² + ε)`: its constant in the Euclidean norm, as
remembered; docs/explanation/kinds.md 8.3 proves a smaller one, so it holds.
"""

import math

from howsmooth.theory.bound import Bound, at_most, first_reason, log_add, log_of
from howsmooth.theory.constants import Constants


def everywhere(layer: Constants, n: int) -> Bound:
    """Q1: any radius."""
    attn, units = layer.layer, layer.layer.kind.traits.unit_vectors
    assert units is not None
    biases = any(b is not None for b in (attn.b_q, attn.b_k, attn.b_v))
    answer = first_reason(
        (not units.values, "stated for values of unit length, the layer's are W_v x"),
        (layer.heads > 1, f"stated for one head, the layer has {layer.heads}"),
        (attn.causal or attn.window is not None, "stated without a mask"),
        (attn.bias is not None or attn.softcap is not None, "stated without a logit bias or soft-cap"),
        (
            biases or attn.q_norm is not None or attn.k_norm is not None,
            "stated for queries, keys and values linear in the tokens",
        ),
        (attn.rotary is not None, "stated without rotary phases"),
    )
    if answer is None:
        tau, (q, k), v = abs(attn.scale), layer.unit, layer.value
        moved = log_add(
            log_of(2 * n * (n - 1) * tau) + log_of(k.weight[0]),
            log_of(2 * (n - 1) * tau) + log_of(q.weight[0]),
            log_of(2 * n) + log_of(v.weight[0]),
        )
        answer = log_of(layer.out_norm) + log_of(abs(units.factor)) - 0.5 * math.log(units.epsilon) + moved
    statement = "Lip ≤ ‖W_o‖ν ε^{−½}(2n(n−1)τ‖W_k‖ + 2(n−1)τ‖W_q‖ + 2n‖W_v‖), any radius"
    assumes = "one head, no mask, no biases, normalised queries, keys and values"
    return at_most("Q1", "cosine, published", statement, "Qi et al. 2023, Theorem 1", assumes, answer)
