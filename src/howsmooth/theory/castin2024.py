"""Castin, Ablin & Peyré 2024, *How Smooth Is Attention?* (ICML): their bounds over the ball of radius R.

`a = ‖A‖₂`, `v = ‖V‖₂`; statements in docs/bounds.md §3.2. Their mean-field upper bound is in `geshkovski2023`.
"""

import math

import torch

from howsmooth.maps import Attention
from howsmooth.theory.bound import Bound, log_add, log_of, outward_log
from howsmooth.theory.constants import Constants

SOURCE = "Castin, Ablin & Peyré 2024"


def upper(layer: Constants, n: int, radius: float) -> Bound:
    """B1: `Lip ≤ √3 v (a²R⁴(4n+1) + n)^½`, causal too."""
    reason = plain(layer, one_head=True, causal=True)
    value = None if reason else outward_log(log_of(layer.v[0]) + _discrete(layer.a[0], n, radius), "upper")
    return Bound(
        "B1",
        "√n",
        "upper",
        value,
        "Lip ≤ √3‖V‖(‖A‖²R⁴(4n+1) + n)^½",
        SOURCE,
        "one head, unmasked or causal, no query bias, no soft-cap",
        reason,
    )


def lower(layer: Constants, n: int, radius: float) -> Bound:
    """B2: with V = I, `Lip ≥ √(n−1)/(1 + (n−1)e^{−2R²γ})`, `γ = max(−γ_min, γ_max/8)` over the real eigenvalues of A."""
    reason = plain(layer, one_head=True, causal=False) or _identity_values(layer)
    reason = reason or ("one token has no other to attend to" if n < 2 else None)
    gamma = None if reason else _gamma(layer)
    value = None
    if reason is None and gamma is None:
        reason = "A has no real eigenvalue"
    elif gamma is not None:
        value = outward_log(0.5 * math.log(n - 1) - log_add(0.0, math.log(n - 1) - 2 * radius**2 * gamma), "lower")
    return Bound(
        "B2",
        "√n from below",
        "lower",
        value,
        "Lip ≥ √(n−1)/(1 + (n−1)exp(−2γR²)), γ = max(−γ_min, γ_max/8)",
        SOURCE,
        "one head, no mask, V = I, a real eigenvalue of A, no query bias, no soft-cap",
        reason,
    )


def multi_head(layer: Constants, n: int, radius: float) -> Bound:
    """B3: `Lip ≤ Σ_h ‖W_h‖ Lip_h`, every `Lip_h` from B1."""
    reason = plain(layer, one_head=False, causal=True)
    value = None
    if reason is None:
        logs = [log_of(w) + log_of(v) + _discrete(a, n, radius) for a, v, w in zip(layer.a, layer.w_v, layer.w_o, strict=True)]
        value = outward_log(log_add(*logs), "upper")
    return Bound(
        "B3",
        "sum of heads",
        "upper",
        value,
        "Lip ≤ Σ_h ‖W_o^h‖ √3‖W_v^h‖(‖A_h‖²R⁴(4n+1) + n)^½",
        SOURCE,
        "unmasked or causal, no query bias, no soft-cap",
        reason,
    )


def mean_field_lower(layer: Constants, radius: float) -> Bound:
    """B5: with V = I the Wasserstein-2 constant on measures is at least `(γ/2)R²e^{γR²}`, γ as in B2.

    Printed as an asymptotic statement; two Diracs reach it at every radius (docs/bounds.md §3.12).
    """
    reason = plain(layer, one_head=True, causal=False) or _identity_values(layer)
    gamma = None if reason else _gamma(layer)
    value = None
    if reason is None and gamma is None:
        reason = "A has no real eigenvalue"
    elif gamma is not None:
        value = outward_log(log_of(gamma / 2 * radius**2) + gamma * radius**2, "lower")
    return Bound(
        "B5",
        "mean field from below",
        "lower",
        value,
        "Lip ≥ (γ/2)R² exp(γR²), any number of tokens, γ = max(−γ_min, γ_max/8)",
        SOURCE,
        "one head, no mask, V = I, a real eigenvalue of A, no query bias, no soft-cap",
        reason,
        mean_field=True,
    )


def large_radius(layer: Constants, n: int) -> Bound:
    """B11: for almost every X, `‖D_{RX} f‖ → ‖P_hardmax V‖ ≤ √n v` as R grows: a limit, so no number at a finite radius."""
    return Bound(
        "B11",
        "large radius",
        "upper",
        None,
        "for almost every X: lim ‖D_{RX} f‖ ≤ √n‖V‖ as R → ∞",
        SOURCE,
        "one head, no soft-cap",
        "a limit as R → ∞ at almost every input, not a bound at a finite radius",
    )


def plain(layer: Constants, *, one_head: bool, causal: bool) -> str | None:
    """Why the paper's setting, softmax of ⟨A x_i, x_j⟩, is not this layer's; None if it is."""
    attn = layer.layer
    if one_head and layer.heads > 1:
        return f"proved for one head, the layer has {layer.heads}"
    if attn.causal and not causal:
        return "proved without a mask, the layer is causal"
    if attn.window is not None:
        return "not proved for a window"
    if attn.softcap is not None:
        return "not proved for soft-capped logits"
    if attn.bias is not None:
        return "not proved for a logit bias"
    if max(layer.query_shift) > 0:
        return "not proved for a query bias"
    return not_bilinear(attn)


def not_bilinear(attn: Attention) -> str | None:
    """Why logits are not `⟨A x_i, x_j⟩` plus shifts with one `A` for all positions; None if they are."""
    if attn.rotary is not None:
        return "needs one A for all positions: not for rotary phases"
    if attn.q_norm is not None or attn.k_norm is not None:
        return "needs queries and keys affine in the tokens: not for norms on them"
    return None


def _discrete(a: float, n: int, radius: float) -> float:
    """log √3(a²R⁴(4n+1) + n)^½."""
    return 0.5 * (math.log(3) + log_add(2 * log_of(a * radius**2) + math.log(4 * n + 1), math.log(n)))


def _identity_values(layer: Constants) -> str | None:
    if layer.layer.attention_mask is not None:
        return "the number of real tokens varies with the sequence"
    value = layer.value_maps[0]
    eye = torch.eye(*value.shape, dtype=value.dtype, device=value.device)
    return None if value.shape[0] == value.shape[1] and float((value - eye).abs().max()) <= 1e-15 else "proved for V = I only"


def _gamma(layer: Constants) -> float | None:
    """`max(−γ_min, γ_max/8)` over the real eigenvalues of A, less what rounding explains; None without one."""
    core = layer.core[0]
    values, vectors = torch.linalg.eig(core)
    real = values.imag == 0
    if layer.layer.width > core.shape[0]:  # A vanishes somewhere: 0 is an eigenvalue
        found = [0.0]
    elif not bool(real.any()):
        return None
    else:
        found = []
    # An eigenvalue moves by at most its condition number times the rounding of A.
    left = torch.linalg.pinv(vectors)
    condition = vectors.norm(dim=0) * left.norm(dim=1)
    slack = 64 * torch.finfo(torch.float64).eps * len(core) * layer.a[0] * condition
    low = values.real[real] + slack[real]
    high = values.real[real] - slack[real]
    found += [-float(low.min()), float(high.max()) / 8] if bool(real.any()) else []
    return max(0.0, *found)
