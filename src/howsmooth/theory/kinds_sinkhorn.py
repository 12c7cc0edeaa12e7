"""Sinkhorn attention over the ball of radius R: at the limit one plus the slopes of the logits, and nothing of n (8.6).

Changing logits by `ds` changes the weights by `P ∘ θ`, `θ` what is left of `ds` beside functions of a row or column alone; at
the limit it is the orthogonal projection in the space weighted by `P`, which makes nothing larger. With finitely many
normalisations each step may enlarge it by the root of the largest factor it divides by. Numbers such as 8.6 are those of
docs/explanation/kinds.md.
"""

import math

from howsmooth.theory.bound import Bound, at_most, first_reason, least_of, log_add, log_of
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds_slopes import SOURCE
from howsmooth.theory.ours import heads_together

_LAYER = "biases, soft-cap, grouped heads, rotary phases, norms on queries and keys allowed"


def limit(layer: Constants, radius: float) -> Bound:
    """N1: the doubly stochastic limit, any number of tokens (8.6)."""
    balancing = layer.layer.kind.traits.balancing
    assert balancing is not None
    reason = first_reason((balancing.iterations is not None, "for the limit; see N2"))
    plain = not layer.pairs and layer.layer.softcap is None  # then a query's bias is a function of the column alone

    def log_ell(h: int) -> float:
        both = 2 * layer.a[h] * radius if plain else layer.reach(h, radius) + layer.key_reach(h, radius)
        return log_add(0.0, log_of(both) + log_of(radius))

    answer = reason or layer.unbounded(radius) or heads_together(layer, log_ell)
    statement = "Lip ≤ ‖V‖(1 + 2‖A‖R²), any number of tokens"
    return at_most("N1", "Sinkhorn, limit", statement, f"{SOURCE} 8.6", f"the limit; {_LAYER}", answer, mean_field=True)


def finite(layer: Constants, n: int, radius: float) -> Bound:
    """N2: `k` normalisations (8.6)."""
    balancing = layer.layer.kind.traits.balancing
    assert balancing is not None
    reason = first_reason(
        (balancing.iterations is None, "for finitely many normalisations; see N1"),
        (layer.layer.window is not None, "not proved for a window"),
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
    return at_most("N2", "Sinkhorn, k steps", statement, f"{SOURCE} 8.6", f"k normalisations, no window; {_LAYER}", answer)
