"""What a layer contributes to a bound over a ball: norms of its weights, rounded up."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import Attention
from howsmooth.theory.radius import norm_radius
from howsmooth.theory.turn import Turn, turn_of
from howsmooth.theory.weights import norm, outputs_of, slack, split, up

__all__ = ["Constants", "constants", "norm_radius"]

# Gram matrices past this width are not diagonalised: the bound that needs them is left out.
_LARGEST_GRAM = 2048


@final
@dataclass(frozen=True, eq=False)
class Constants:
    """The norms of a layer, head by head, in float64, each rounded up (docs/bounds.md §3.1).

    a: `‖A_h‖₂` with `A_h = τ W_kᵀ W_q`, so that logits are `⟨A x_i + c, x_j⟩` up to a constant in j.
    query_shift: `|c_h|`, `c_h = τ W_kᵀ b_q`.  key_shift: `|τ W_qᵀ b_k|`, which matters under a soft-cap only.
    v: `‖V_h‖₂`, `V_h = W_o^h W_v^h`.  w_v, w_o: `‖W_v^h‖₂`, `‖W_o^h‖₂`.
    cross: `‖V_hᵀ V_k‖₂`.  stacked: `‖[V_1 … V_H]‖₂`, and the same with every `V_h` divided by its norm; infinite when too
    large to compute.  bias_range: the most a logit bias varies over the keys of one query.
    turn: what norms and phases make of queries and keys, where the layer has them; `a` and the shifts then speak of its
    weights alone.
    """

    layer: Attention
    turn: Turn | None
    a: tuple[float, ...]
    query_shift: tuple[float, ...]
    key_shift: tuple[float, ...]
    v: tuple[float, ...]
    w_v: tuple[float, ...]
    w_o: tuple[float, ...]
    cross: Float[Tensor, "heads heads"]
    stacked: tuple[float, float]
    bias_range: float

    @property
    def heads(self) -> int:
        return len(self.a)

    @cached_property
    def core(self) -> Float[Tensor, "heads m m"]:
        """`A_h` on a space of at most 2·(head width) dimensions outside which it vanishes on both sides."""
        return self._reduced[0]

    @cached_property
    def core_shift(self) -> Float[Tensor, "heads m"]:
        """`c_h` in the same coordinates; it has no component outside them."""
        return self._reduced[1]

    @cached_property
    def core_basis(self) -> Float[Tensor, "heads d m"]:
        return self._reduced[2]

    @cached_property
    def _reduced(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _, b_q, _ = split(self.layer)
        heads, head, d = q.shape
        if 2 * head < d:
            basis = torch.linalg.qr(torch.cat([k.mT, q.mT], -1))[0]  # (heads, d, 2·head)
        else:
            basis = torch.eye(d, dtype=torch.float64, device=q.device).expand(heads, d, d)
        kb = self.layer.scale * (k @ basis)
        return kb.mT @ (q @ basis), (kb.mT @ b_q[..., None])[..., 0], basis

    @cached_property
    def value_maps(self) -> Float[Tensor, "heads d_out d"]:
        """`V_h`, formed."""
        _, _, v, _, _ = split(self.layer)
        return outputs_of(self.layer) @ v


@torch.no_grad()
def constants(layer: Attention) -> Constants:
    """The norms of a layer.

    >>> constants(Attention.from_matrices(3 * torch.eye(2), torch.eye(2))).a[0]  # doctest: +ELLIPSIS
    3.00000000000...
    """
    q, k, v, b_q, b_k = split(layer)
    scale = layer.scale
    # ‖τ W_kᵀ W_q‖ = |τ| ‖R_k R_qᵀ‖ with W_kᵀ = Q_k R_k: nothing d × d is formed unless a head is that wide
    a = abs(scale) * norm(_triangle(k) @ _triangle(q).mT)
    outputs = outputs_of(layer) @ _triangle(v).mT  # (heads, d_out, r): V_h up to an isometry of its input
    v_norm = norm(outputs)
    heads, width = len(q), layer.width
    cross = torch.diag(v_norm.square())
    if heads > 1:
        i, j = torch.triu_indices(heads, heads, 1)
        pairs = norm(outputs[i].mT @ outputs[j])
        cross[i, j] = pairs
        cross[j, i] = pairs
    flat = outputs.transpose(0, 1).flatten(1)  # (d_out, heads·r)
    unit = (outputs / v_norm.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]).transpose(0, 1).flatten(1)
    return Constants(
        layer,
        turn_of(layer),
        a=up(a, width),
        query_shift=up((scale * k.mT @ b_q[..., None]).norm(dim=(-2, -1)), width),
        key_shift=up((scale * q.mT @ b_k[..., None]).norm(dim=(-2, -1)), width),
        v=up(v_norm, width),
        w_v=up(norm(v), width),
        w_o=up(norm(outputs_of(layer)), width),
        cross=cross.cpu() * slack(width),
        stacked=(_stacked(flat), _stacked(unit)),
        bias_range=_bias_range(layer),
    )


def _triangle(w: Float[Tensor, "heads r d"]) -> Float[Tensor, "heads k r"]:
    """`R` of `wᵀ = Q R`: `w` up to an isometry of its input."""
    return torch.linalg.qr(w.mT, mode="r")[1]


def _stacked(flat: Float[Tensor, "d_out width"]) -> float:
    if min(flat.shape) > _LARGEST_GRAM:
        return math.inf
    gram = flat @ flat.mT if flat.shape[0] <= flat.shape[1] else flat.mT @ flat
    return max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0) ** 0.5 * slack(max(flat.shape))


def _bias_range(layer: Attention) -> float:
    if layer.bias is None:
        return 0.0
    bias = layer.bias.double()
    spread = bias.amax(-1) - bias.amin(-1)  # −inf hides a key: an infinite range, NaN where it hides all of them
    return float(torch.where(spread.isnan(), torch.inf, spread).max())
