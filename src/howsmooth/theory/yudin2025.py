"""Yudin et al. 2025, "Pay Attention to Attention Distribution", arXiv 2507.07814: a bound at a point."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.tiled import Tiled
from howsmooth.maps import Attention, AttentionJacobian
from howsmooth.theory.bound import Bound, log_of, outward_log, spectral_norm
from howsmooth.theory.castin2024 import not_bilinear
from howsmooth.theory.perron import weights_norm

_NAME = "Yudin et al. at a point"
_STATEMENT = "‖V‖ (‖P‖ + 2 ‖X‖² ‖A‖ max_i p₍₁₎(1 − p₍₁₎ + p₍₂₎))"
_SOURCE = "Yudin et al. 2025, arXiv 2507.07814"
_ASSUMPTIONS = "one head, q = W_q x and k = W_k x without biases, no soft-cap; A = τ W_kᵀ W_q, V = W_o W_v"


@torch.no_grad()
def yudin_bound(attn: Attention, x: Float[Tensor, "n d"]) -> Bound:
    """D2: Proposition 4.10 in docs/point-bounds.md, `p₍₁₎ ≥ p₍₂₎` the two largest weights of a row.

    Masks only change `P`, whose norm is the bound of Proposition 4.1. Float64.
    """
    if attn.heads > 1:
        reason = f"stated for one head, this layer has {attn.heads}"
    elif attn.b_q is not None or attn.b_k is not None:
        reason = "stated for queries and keys linear in the tokens, this layer adds biases"
    elif attn.softcap is not None:
        reason = "stated without a soft-cap"
    else:
        reason = not_bilinear(attn)
    if reason is not None:
        return Bound("D2", _NAME, "upper", None, _STATEMENT, _SOURCE, _ASSUMPTIONS, reason)
    operator = attn.linearize(x.double()[None])[1]
    assert isinstance(operator, AttentionJacobian)
    layer, kernel = operator.layer, operator.kernel.tiled()
    a = abs(layer.scale) * float(spectral_norm(layer.w_q if layer.w_k is None else layer.w_k.mT @ layer.w_q))
    v = float(spectral_norm(layer.w_v if layer.w_o is None else layer.w_o @ layer.w_v))
    tokens = x.double() if layer.attention_mask is None else x.double()[layer.attention_mask[0]]
    # more power steps than our own rows take: a published bound is shown at its best
    p = float(weights_norm(kernel, kernel.inverse[..., 0], steps=30)[0])
    value = v * (p + 2 * float(spectral_norm(tokens)) ** 2 * a * _concentration(kernel))
    # matrix norms by LAPACK: a few roundings of their size
    slack = 1 + 64 * torch.finfo(torch.float64).eps * math.sqrt(x.numel())
    return Bound("D2", _NAME, "upper", outward_log(log_of(value * slack), "upper"), _STATEMENT, _SOURCE, _ASSUMPTIONS)


def _concentration(kernel: Tiled) -> float:
    """`max_i p₍₁₎(1 − p₍₁₎ + p₍₂₎)` over the rows of `P`."""
    inverse = kernel.inverse
    top = torch.zeros(*inverse.shape[:2], 2, dtype=inverse.dtype, device=inverse.device)
    for b in kernel.blocks():
        seen = torch.cat([top[b.heads, b.rows], b.weights], -1)
        top[b.heads, b.rows] = seen.topk(2, -1).values
    p = top * inverse
    return float((p[..., 0] * (1 - p[..., 0] + p[..., 1])).max())
