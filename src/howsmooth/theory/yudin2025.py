"""Yudin et al. 2025, "Pay Attention to Attention Distribution", arXiv 2507.07814: a bound at a point."""

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.kinds.kind import not_softmax
from howsmooth.maps import Attention, AttentionJacobian
from howsmooth.theory.bound import Bound, at_most, first_reason, log_of, product_norm, slack, spectral_norm
from howsmooth.theory.castin2024 import not_bilinear
from howsmooth.theory.heads import lost, rounding
from howsmooth.theory.perron import weights_norm


@torch.no_grad()
def yudin_bound(attn: Attention, x: Float[Tensor, "n d"]) -> Bound:
    """D2: Proposition 4.10 in docs/explanation/point-bounds.md, `p₍₁₎ ≥ p₍₂₎` the two largest weights of a row.

    Masks only change `P`, whose norm is the bound of Proposition 4.1. Float64.
    """
    biases = attn.b_q is not None or attn.b_k is not None
    reason = first_reason(
        (attn.heads > 1, f"stated for one head, this layer has {attn.heads}"),
        (biases, "stated for queries and keys linear in the tokens, this layer adds biases"),
        (attn.softcap is not None, "stated without a soft-cap"),
    )
    statement = "‖V‖ (‖P‖ + 2 ‖X‖² ‖A‖ max_i p₍₁₎(1 − p₍₁₎ + p₍₂₎))"
    assumes = "one head, q = W_q x and k = W_k x without biases, no soft-cap; A = τ W_kᵀ W_q, V = W_o W_v"
    answer = not_softmax(attn.kind) or reason or not_bilinear(attn) or log_of(_value(attn, x.double()))
    return at_most("D2", "Yudin et al. at a point", statement, "Yudin et al. 2025, arXiv 2507.07814", assumes, answer)


def _value(attn: Attention, x: Float[Tensor, "n d"]) -> float:
    operator = attn.linearize(x[None])[1]
    assert isinstance(operator, AttentionJacobian)
    layer, kernel = operator.layer, operator.kernel.tiled()
    w = layer.by_head()
    a, v = float(product_norm(w.k[0].mT, w.q[0], layer.scale)), float(product_norm(w.o[0], w.v[0]))
    tokens = x if layer.attention_mask is None else x[layer.attention_mask[0]]
    # more power steps than our own rows take: a published bound is shown at its best
    p_norm = float(weights_norm(kernel, kernel.inverse[..., 0], steps=30)[0])
    top = kernel.inverse.new_zeros(*kernel.inverse.shape[:2], 2)  # the two largest weights of every row
    for b in kernel.blocks():
        top[b.heads, b.rows] = torch.cat([top[b.heads, b.rows], b.weights], -1).topk(2, -1).values
    p = top * kernel.inverse
    concentration = float((p[..., 0] * (1 - p[..., 0] + p[..., 1])).max())
    size = float(spectral_norm(tokens))
    value = v * (p_norm + 2 * (a * size) * size * concentration)
    # matrix norms by LAPACK: a few roundings of their size
    return value * float(rounding(operator, lost(operator))[0]) * slack(x.numel())
