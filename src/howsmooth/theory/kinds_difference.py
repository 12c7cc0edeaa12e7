"""Differential attention over the ball: two softmax heads on one set of values (docs/explanation/kinds.md 8.9)."""

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from howsmooth.kernels.kinds import Softmax
from howsmooth.kernels.kinds.traits import TwoSoftmaxes
from howsmooth.maps import Attention
from howsmooth.theory.bound import Bound, at_most, first_reason, log_add, log_of
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.kinds_slopes import LAYER, SOURCE, through_outputs
from howsmooth.theory.ours import head_constant, heads_together


def difference(layer: Constants, n: int | None, radius: float) -> Bound:
    """F1, F1m: `ℓ = ℓ₁ + |λ|ℓ₂`, of softmax on the two halves; a norm behind multiplies by `1/√ε`."""
    attn = layer.layer
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
    return at_most(id, name, statement, f"{SOURCE} 8.9", f"every mask; soft-cap, {LAYER}", answer, mean_field=n is None)


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


_KEPT: "WeakKeyDictionary[Constants, tuple[Constants, Constants]]" = WeakKeyDictionary()


def halves(layer: Constants) -> tuple[Constants, Constants]:
    """Softmax attention on the first and on the second halves of queries and keys; made once."""
    if layer not in _KEPT:
        _KEPT[layer] = constants(_half(layer.layer, 0)), constants(_half(layer.layer, 1))
    return _KEPT[layer]


def _half(attn: Attention, index: int) -> Attention:
    w_k = torch.eye(attn.width, dtype=attn.w_q.dtype, device=attn.w_q.device) if attn.w_k is None else attn.w_k

    def part(t: Tensor, heads: int) -> Tensor:
        return t.unflatten(0, (heads, 2, -1))[:, index].flatten(0, 1)

    b_q, b_k = (None if t is None else part(t, heads) for t, heads in ((attn.b_q, attn.heads), (attn.b_k, attn.kv_heads)))
    w_q, w_k = part(attn.w_q, attn.heads), part(w_k, attn.kv_heads)
    return replace(attn, kind=Softmax(), w_q=w_q, w_k=w_k, b_q=b_q, b_k=b_k)
