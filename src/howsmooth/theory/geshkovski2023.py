"""Geshkovski, Letrouit, Polyanskiy & Rigollet 2023, *A mathematical perspective on Transformers*: the mean-field bound.

As printed in "How Smooth Is Attention?" (Castin, Ablin & Peyré, ICML 2024); `a = ‖A‖₂`, `v = ‖V‖₂`.
"""

import math

from howsmooth.theory.bound import Bound, log_add, log_of, outward_log
from howsmooth.theory.castin2024 import plain
from howsmooth.theory.constants import Constants


def mean_field(layer: Constants, radius: float) -> Bound:
    """B4: the Wasserstein-2 constant on measures in the ball is at most `v(1 + 3aR²)e^{2aR²}`."""
    reason = plain(layer, one_head=True, causal=False)
    value = None
    if reason is None:
        exponent = layer.a[0] * radius**2
        value = outward_log(log_of(layer.v[0]) + log_add(0.0, math.log(3) + log_of(exponent)) + 2 * exponent, "upper")
    return Bound(
        "B4",
        "mean field",
        "upper",
        value,
        "Lip ≤ ‖V‖(1 + 3‖A‖R²)exp(2‖A‖R²), any number of tokens",
        "Geshkovski et al. 2023, as in Castin et al. 2024",
        "one head, no mask, no query bias, no soft-cap",
        reason,
        mean_field=True,
    )
