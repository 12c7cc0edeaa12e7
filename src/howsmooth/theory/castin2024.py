"""Castin, Ablin & Peyré 2024, *How Smooth Is Attention?* (ICML): the bounds over the ball of radius R that it prints.

Quoted in docs/bounds.md §3.2. One of them, B4, is of Geshkovski, Letrouit, Polyanskiy & Rigollet 2023, *A mathematical
perspective on Transformers*.
"""

import math

import torch

from howsmooth.maps import Attention
from howsmooth.theory.bound import Bound, log_add, log_of, outward_log
from howsmooth.theory.constants import Constants

SOURCE = "Castin, Ablin & Peyré 2024"
_BELOW = "one head, no mask, V = I, a real eigenvalue of A, no query bias, no soft-cap"


def upper(layer: Constants, n: int, radius: float) -> Bound:
    """B1: one head."""
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
    """B2: what one token among equal ones does."""
    reason, gamma = _gamma(layer)
    if n < 2:
        reason = reason or "one token has no other to attend to"
    value = None
    if reason is None:
        value = outward_log(0.5 * math.log(n - 1) - log_add(0.0, math.log(n - 1) - 2 * radius**2 * gamma), "lower")
    return Bound(
        "B2",
        "√n from below",
        "lower",
        value,
        "Lip ≥ √(n−1)/(1 + (n−1)exp(−2γR²)), γ = max(−γ_min, γ_max/8)",
        SOURCE,
        _BELOW,
        reason,
    )


def multi_head(layer: Constants, n: int, radius: float) -> Bound:
    """B3: the heads of B1 added up."""
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


def mean_field(layer: Constants, radius: float) -> Bound:
    """B4: the Wasserstein-2 constant on measures in the ball."""
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


def mean_field_lower(layer: Constants, radius: float) -> Bound:
    """B5: of the constant of B4. Printed as an asymptotic statement; two Diracs reach it at every radius (§3.12)."""
    reason, gamma = _gamma(layer)
    value = None if reason else outward_log(log_of(gamma / 2 * radius**2) + gamma * radius**2, "lower")
    return Bound(
        "B5",
        "mean field from below",
        "lower",
        value,
        "Lip ≥ (γ/2)R² exp(γR²), any number of tokens, γ = max(−γ_min, γ_max/8)",
        SOURCE,
        _BELOW,
        reason,
        mean_field=True,
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


def _gamma(layer: Constants) -> tuple[str | None, float]:
    """Why the lower bounds do not apply, or `γ` over the real eigenvalues of A, less what rounding explains."""
    reason = plain(layer, one_head=True, causal=False)
    if layer.layer.attention_mask is not None:
        reason = reason or "the number of real tokens varies with the sequence"
    if reason is not None:
        return reason, 0.0
    value, core = layer.value_maps[0], layer.core[0]
    eye = torch.eye(*value.shape, dtype=value.dtype, device=value.device)
    if value.shape[0] != value.shape[1] or not float((value - eye).abs().max()) <= 1e-15:  # the identity up to a rounding
        return "proved for V = I only", 0.0
    values, vectors = torch.linalg.eig(core)
    real = values.imag == 0
    if not bool(real.any()):  # where A vanishes somewhere, 0 is an eigenvalue
        return (None if layer.layer.width > len(core) else "A has no real eigenvalue"), 0.0
    # An eigenvalue moves by at most its condition number times the rounding of A.
    condition = vectors.norm(dim=0) * torch.linalg.pinv(vectors).norm(dim=1)
    slack = 64 * torch.finfo(torch.float64).eps * len(core) * layer.a[0] * condition
    low, high = (values.real + slack)[real].min(), (values.real - slack)[real].max()
    return None, max(0.0, -float(low), float(high) / 8)
