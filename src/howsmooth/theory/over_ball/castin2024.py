"""Castin, Ablin & Peyré 2024, *How Smooth Is Attention?* (ICML): the bounds over the ball of radius R that it prints.

Quoted in docs/explanation/bounds.md §3.2. One of them, B4, is of Geshkovski, Letrouit, Polyanskiy & Rigollet 2023, *The
emergence of clusters in self-attention dynamics*, and came second hand.
"""

import math

import torch

from howsmooth.kernels.kinds.kind import not_softmax
from howsmooth.spectral import eig
from howsmooth.theory.bound import Bound, at_least, at_most, log_add, log_of
from howsmooth.theory.constants import Constants
from howsmooth.theory.needs import BILINEAR, unmet

_SOURCE = "Castin, Ablin & Peyré 2024"
_BELOW = "one head, no mask, V = I, a real eigenvalue of A, no query bias, no soft-cap"


def upper(layer: Constants, n: int, radius: float) -> Bound:
    """B1: one head."""
    statement = "Lip ≤ √3‖V‖(‖A‖²R⁴(4n+1) + n)^½"
    assumes = "one head, unmasked or causal, no query bias, no soft-cap"
    answer = plain(layer, one_head=True, causal=True) or log_of(layer.v[0]) + _discrete(layer.a[0], n, radius)
    return at_most("B1", "√n", statement, _SOURCE, assumes, answer)


def lower(layer: Constants, n: int, radius: float) -> Bound:
    """B2: what one token among equal ones does."""
    statement = "Lip ≥ √(n−1)/(1 + (n−1)exp(−2γR²)), γ = max(−γ_min, γ_max/8)"
    answer = _gamma(layer)
    if isinstance(answer, float) and n < 2:
        answer = "one token has no other to attend to"
    elif isinstance(answer, float):
        answer = 0.5 * math.log(n - 1) - log_add(0.0, math.log(n - 1) - 2 * (answer * radius * radius))
    return at_least("B2", "√n, attained", statement, _SOURCE, _BELOW, answer)


def multi_head(layer: Constants, n: int, radius: float) -> Bound:
    """B3: the heads of B1 added up."""
    statement = "Lip ≤ Σ_h ‖W_o^h‖ √3‖W_v^h‖(‖A_h‖²R⁴(4n+1) + n)^½"
    heads = zip(layer.a, layer.w_v, layer.w_o, strict=True)
    answer = plain(layer, one_head=False, causal=True) or log_add(
        *(log_of(w) + log_of(v) + _discrete(a, n, radius) for a, v, w in heads)
    )
    return at_most("B3", "sum of heads", statement, _SOURCE, "unmasked or causal, no query bias, no soft-cap", answer)


def mean_field(layer: Constants, radius: float) -> Bound:
    """B4: the Wasserstein-2 constant on measures in the ball."""
    statement = "Lip ≤ ‖V‖(1 + 3‖A‖R²)exp(2‖A‖R²), any number of tokens"
    source, assumes = "Geshkovski et al. 2023, as in Castin et al. 2024", "one head, no mask, no query bias, no soft-cap"
    square = layer.a[0] * radius * radius
    value = log_of(layer.v[0]) + log_add(0.0, math.log(3) + log_of(square)) + 2 * square
    answer = plain(layer, one_head=True, causal=False) or value
    return at_most("B4", "mean field", statement, source, assumes, answer, mean_field=True)


def mean_field_lower(layer: Constants, radius: float) -> Bound:
    """B5: of the constant of B4. Printed as an asymptotic statement; two Diracs reach it at every radius (§3.12)."""
    statement = "Lip ≥ (γ/2)R² exp(γR²), any number of tokens, γ = max(−γ_min, γ_max/8)"
    gamma = _gamma(layer)
    answer = gamma
    if isinstance(gamma, float):
        square = gamma * radius * radius
        answer = log_of(square / 2) + square
    return at_least("B5", "mean field, attained", statement, _SOURCE, _BELOW, answer, mean_field=True)


def plain(layer: Constants, *, one_head: bool, causal: bool) -> str | None:
    """Why the paper's setting, softmax of ⟨A x_i, x_j⟩, is not this layer's; None if it is."""
    needs = ["one head"] * one_head + ["not causal"] * (not causal) + ["no window", "no soft-cap", "no logit bias", *BILINEAR]
    shifted = "not proved for a query bias" if max(layer.query_shift) > 0 else None
    return not_softmax(layer.attn.kind) or unmet(layer.attn, *needs) or shifted


def _discrete(a: float, n: int, radius: float) -> float:
    """log √3(a²R⁴(4n+1) + n)^½."""
    return 0.5 * (math.log(3) + log_add(2 * log_of(a * radius * radius) + math.log(4 * n + 1), math.log(n)))


def _gamma(layer: Constants) -> float | str:
    """`γ` over the real eigenvalues of A, less what rounding explains; or why the lower bounds do not apply."""
    reason = plain(layer, one_head=True, causal=False) or unmet(layer.attn, "no padding")
    if reason is not None:
        return reason
    value, core = layer.value_maps[0], layer.core.matrix[0]
    eye = torch.eye(*value.shape, dtype=value.dtype, device=value.device)
    if value.shape[0] != value.shape[1] or not float((value - eye).abs().max()) <= 1e-15:  # the identity up to a rounding
        return "proved for V = I only"
    values, vectors = eig(core)
    real = values.imag == 0
    if not bool(real.any()):  # where A vanishes somewhere, 0 is an eigenvalue
        return 0.0 if layer.attn.width > len(core) else "A has no real eigenvalue"
    # An eigenvalue moves by at most its condition number times the rounding of A.
    condition = vectors.norm(dim=0) * torch.linalg.pinv(vectors).norm(dim=1)
    slack = (64 * torch.finfo(torch.float64).eps * len(core) * layer.a[0] + layer.blur[0][0]) * condition
    low, high = (values.real + slack)[real].min(), (values.real - slack)[real].max()
    return max(0.0, -float(low), float(high) / 8)
