"""What a layer contributes to a bound over a ball: norms of its weights, rounded up, and the radius a norm in front fixes."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import Attention, LayerNorm, RMSNorm
from howsmooth.errors import BadInputError

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
    """

    layer: Attention
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
        q, k, _, b_q, _ = _split(self.layer)
        heads, head, d = q.shape
        if 2 * head < d:
            basis = torch.linalg.qr(torch.cat([k.mT, q.mT], -1))[0]  # (heads, d, 2·head)
        else:
            basis = torch.eye(d, dtype=torch.float64, device=q.device).expand(heads, d, d)
        kb = self.layer._scale * (k @ basis)
        return kb.mT @ (q @ basis), (kb.mT @ b_q[..., None])[..., 0], basis

    @cached_property
    def value_maps(self) -> Float[Tensor, "heads d_out d"]:
        """`V_h`, formed."""
        _, _, v, _, _ = _split(self.layer)
        return _outputs(self.layer) @ v


@torch.no_grad()
def constants(layer: Attention) -> Constants:
    """The norms of a layer.

    >>> constants(Attention.from_matrices(3 * torch.eye(2), torch.eye(2))).a[0]  # doctest: +ELLIPSIS
    3.00000000000...
    """
    q, k, v, b_q, b_k = _split(layer)
    scale = layer._scale
    # ‖τ W_kᵀ W_q‖ = |τ| ‖R_k R_qᵀ‖ with W_kᵀ = Q_k R_k: nothing d × d is formed unless a head is that wide
    a = abs(scale) * _norm(_triangle(k) @ _triangle(q).mT)
    outputs = _outputs(layer) @ _triangle(v).mT  # (heads, d_out, r): V_h up to an isometry of its input
    v_norm = _norm(outputs)
    heads, width = len(q), layer.width
    cross = torch.diag(v_norm.square())
    if heads > 1:
        i, j = torch.triu_indices(heads, heads, 1)
        pairs = _norm(outputs[i].mT @ outputs[j])
        cross[i, j] = pairs
        cross[j, i] = pairs
    flat = outputs.transpose(0, 1).flatten(1)  # (d_out, heads·r)
    unit = (outputs / v_norm.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]).transpose(0, 1).flatten(1)
    return Constants(
        layer,
        a=_up(a, width),
        query_shift=_up((scale * k.mT @ b_q[..., None]).norm(dim=(-2, -1)), width),
        key_shift=_up((scale * q.mT @ b_k[..., None]).norm(dim=(-2, -1)), width),
        v=_up(v_norm, width),
        w_v=_up(_norm(v), width),
        w_o=_up(_norm(_outputs(layer)), width),
        cross=cross.cpu() * _slack(width),
        stacked=(_stacked(flat), _stacked(unit)),
        bias_range=_bias_range(layer),
    )


@torch.no_grad()
def norm_radius(norm: LayerNorm | RMSNorm) -> float:
    """The largest length of a token that leaves a LayerNorm or RMSNorm, rounded up (docs/bounds.md §3.14).

    `α ⊙ u + β` with `|u|² ≤ d` (and `1·u = 0` after LayerNorm, which the multiplier `η` stands for) is at most

        |·|² ≤ λ d + |β|² + Σ_k (α_k β_k − η)²/(λ − α_k²)

    for every `λ` at which the quadratic form `λ − α²` is positive on these `u`, and equal to the least of these.

    >>> round(norm_radius(RMSNorm(torch.full((4,), 2.0))), 9)
    4.0
    """
    if not isinstance(norm, LayerNorm | RMSNorm):
        raise BadInputError(f"expected a LayerNorm or RMSNorm, got {type(norm).__name__}; give the radius as a number instead")
    alpha = norm.weight.double().cpu()
    beta = torch.zeros_like(alpha) if norm.bias is None else norm.bias.double().cpu()
    d, centred = alpha.numel(), isinstance(norm, LayerNorm)
    base = _centred_top(alpha.square()) if centred else float(alpha.square().max())
    scale = max(base, float(beta.square().sum()), 1e-300)

    def squared(log_gap: Tensor) -> Tensor:
        lam = base + scale * log_gap.exp()  # (m,)
        w = 1 / (lam[:, None] - alpha.square())
        ab = alpha * beta
        eta = (w * ab).sum(-1, keepdim=True) / w.sum(-1, keepdim=True) if centred else 0.0
        value = lam * d + beta.square().sum() + (w * (ab - eta).square()).sum(-1)
        negative = (w < 0).sum(-1)
        positive_form = (negative == 0) | ((negative == 1) & (w.sum(-1) < 0) & centred)
        return torch.where(positive_form & value.isfinite(), value, torch.inf)

    low, high, least = -34.0, 6.0, math.inf  # convex in λ, hence unimodal in its logarithm: refine a grid around its best point
    for _ in range(8):
        grid = torch.linspace(low, high, 33, dtype=torch.float64)
        values = squared(grid)
        least, best, step = min(least, float(values.min())), float(grid[values.argmin()]), (high - low) / 32
        low, high = best - step, best + step
    return least**0.5 * _slack(d)


def _centred_top(squares: Float[Tensor, " d"]) -> float:
    """The largest `Σ α_k² u_k²` over unit `u` with `1·u = 0`: the root of `Σ 1/(λ − α_k²)` between the top two squares."""
    if len(squares) == 1:
        return 0.0
    low, high = (float(x) for x in squares.topk(2).values.flip(0))
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if float((1 / (middle - squares)).sum()) > 0 else (low, middle)
    return high


def _split(layer: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Per query head, in float64: W_q, W_k, W_v, (heads, width, d), and b_q, b_k, (heads, width)."""
    kv_heads = layer._kv_heads
    group = layer.heads // kv_heads
    eye = torch.eye(layer.width, dtype=torch.float64, device=layer.w_q.device)
    w_k = eye if layer.w_k is None else layer.w_k.double()
    q = layer.w_q.double().unflatten(0, (layer.heads, -1))
    k = w_k.unflatten(0, (kv_heads, -1)).repeat_interleave(group, 0)
    v = layer.w_v.double().unflatten(0, (kv_heads, -1)).repeat_interleave(group, 0)
    b_q = q.new_zeros(q.shape[:2]) if layer.b_q is None else layer.b_q.double().unflatten(0, (layer.heads, -1))
    b_k = (
        k.new_zeros(k.shape[:2])
        if layer.b_k is None
        else layer.b_k.double().unflatten(0, (kv_heads, -1)).repeat_interleave(group, 0)
    )
    return q, k, v, b_q, b_k


def _outputs(layer: Attention) -> Float[Tensor, "heads d_out d_v"]:
    """`W_o^h`: the columns of the output projection that head h meets."""
    d_v = layer.w_v.shape[0] // layer._kv_heads
    if layer.w_o is None:
        eye = torch.eye(layer.heads * d_v, dtype=torch.float64, device=layer.w_v.device)
        return eye.unflatten(1, (layer.heads, d_v)).transpose(0, 1)
    return layer.w_o.double().unflatten(1, (layer.heads, d_v)).transpose(0, 1)


def _triangle(w: Float[Tensor, "heads r d"]) -> Float[Tensor, "heads k r"]:
    """`R` of `wᵀ = Q R`: `w` up to an isometry of its input."""
    return torch.linalg.qr(w.mT, mode="r")[1]


def _norm(m: Float[Tensor, "*batch r c"]) -> Float[Tensor, "*batch"]:
    return torch.linalg.matrix_norm(m, ord=2)


def _slack(size: int) -> float:
    """1 plus the relative error of a float64 norm of matrices of that size: products and a backward stable SVD."""
    return 1 + 64 * torch.finfo(torch.float64).eps * max(size, 16)


def _up(values: Tensor, size: int) -> tuple[float, ...]:
    return tuple(float(x) * _slack(size) for x in values.flatten())


def _stacked(flat: Float[Tensor, "d_out width"]) -> float:
    if min(flat.shape) > _LARGEST_GRAM:
        return math.inf
    gram = flat @ flat.mT if flat.shape[0] <= flat.shape[1] else flat.mT @ flat
    return max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0) ** 0.5 * _slack(max(flat.shape))


def _bias_range(layer: Attention) -> float:
    if layer.bias is None:
        return 0.0
    bias = layer.bias.double()
    spread = bias.amax(-1) - bias.amin(-1)  # −inf hides a key: an infinite range, NaN where it hides all of them
    return float(torch.where(spread.isnan(), torch.inf, spread).max())
