"""How fast the queries and keys of each token move with it, where they are normalised or turned (docs/point-bounds.md 4.13)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import Attention, LayerNorm, Operator, Rotary
from howsmooth.maps.jacobian import AttentionJacobian, NormJacobian
from howsmooth.theory.turn import plane_factors
from howsmooth.theory.weights import norm as matrix_norm
from howsmooth.theory.weights import slack


class Slopes(NamedTuple):
    """Keys and queries, (batch·heads, tokens, head width), and `‖∂q_i/∂x_i‖`, `‖∂k_j/∂x_j‖`, (batch·heads, tokens), from above.

    Factors have been moved between them: the keys are `k_j/f` where query slopes are of `f q_i`, the queries `q_i/f` where key
    slopes are of `f k_j`.
    """

    k: Tensor
    query: Tensor
    q: Tensor
    key: Tensor


def token_slopes(
    operator: AttentionJacobian, r_q: Float[Tensor, "heads r head"], r_k: Float[Tensor, "heads r head"]
) -> Slopes | None:
    """The slopes at the operator's tokens; nothing where queries and keys are affine in the tokens.

    r_q, r_k: `R` of `W_qᵀ = Q R` and of `W_kᵀ`, for every head, float64.
    """
    layer, kernel = operator.layer, operator.kernel.tiled()
    if layer.q_norm is None and layer.k_norm is None and layer.rotary is None:
        return None
    query = _moving(layer, operator.q_slope, r_q.mT, kernel._k, operator.batch)
    key = _moving(layer, operator.k_slope, r_k.mT, kernel._q, operator.batch)
    return Slopes(query[0], query[1], key[0], key[1])


class Pull:
    """Row vectors times `∂q_i/∂x_i`, or `∂k_j/∂x_j`, of one head: `t ↦ t R_i N_i' Wᵀ` in orthonormal coordinates of the tokens.

    triangle: `R` of `Wᵀ = E R`; the coordinates are those of `E`.
    """

    def __init__(self, operator: AttentionJacobian, g: int, *, keys: bool, triangle: Float[Tensor, "r head"]):
        layer = operator.layer
        item, head = divmod(g, layer.heads)
        slope = operator.k_slope if keys else operator.q_slope
        self._norm, self._rotary, self._triangle = None, None, triangle
        if isinstance(slope, NormJacobian):
            head = head // (layer.heads // layer.kv_heads) if keys else head
            self._norm, self._unit, self._scale = slope.norm, slope.unit[item, head], slope.scale[item, head]
        if layer.rotary is not None:
            rotary = layer.rotary
            self._rotary = rotary if rotary.cos.ndim == 2 else Rotary(rotary.cos[item], rotary.sin[item], rotary.interleaved)

    def __call__(self, t: Float[Tensor, "tokens rows head"], tokens: slice) -> Float[Tensor, "tokens rows r"]:
        if self._rotary is not None:
            there = Rotary(self._rotary.cos[tokens], self._rotary.sin[tokens], self._rotary.interleaved)
            t = there.turn(t.transpose(0, 1), back=True).transpose(0, 1)
        if self._norm is not None:
            unit = self._unit[tokens, None]
            t = self._norm.weight * t
            t = t - unit * (t * unit).mean(-1, keepdim=True)
            t = self._norm.center(t) / self._scale[tokens, None]
        return t @ self._triangle.mT


def _moving(
    layer: Attention,
    slope: Operator | None,
    w: Float[Tensor, "heads head r"],
    other: Float[Tensor, "g n head"],
    batch: int,
) -> tuple[Float[Tensor, "g n head"], Float[Tensor, "g n"]]:
    """The other side's vectors divided by `f`, and the slopes of this side times `f`, the better of two `f` for each head."""
    heads, head, _ = w.shape
    n = other.shape[1]
    norm = slope.norm if isinstance(slope, NormJacobian) else None
    ones = torch.ones(heads, head, dtype=torch.float64, device=w.device)
    rows = w.norm(dim=-1) if norm is None else norm.weight.double().abs().expand(heads, -1)
    gain = _gains(layer, batch, n).to(w.device)  # (batch, n)
    found = []
    for f in (ones, 1 / plane_factors(layer, rows)):
        if norm is None:
            size = matrix_norm(w * f[..., None])[None, :, None]
        else:
            assert isinstance(slope, NormJacobian)
            size = _normed(slope, w, f)
        size = (size * gain[:, None] * slack(layer.width)).flatten(0, 1)  # (g, n)
        vectors = other.double().unflatten(0, (batch, heads)) / f[:, None]
        found.append((vectors.flatten(0, 1), size))
    (plain, size), (scaled, other_size) = found
    better = (
        scaled.square().sum((-2, -1)) * other_size.square().amax(-1) < plain.square().sum((-2, -1)) * size.square().amax(-1)
    )[:, None]
    vectors = torch.where(better[..., None], scaled, plain)
    return vectors.to(other.dtype), torch.where(better, other_size, size).to(other.dtype)


def _normed(slope: NormJacobian, w: Float[Tensor, "heads head r"], f: Tensor) -> Float[Tensor, "batch heads n"]:
    """`‖f α (I − uuᵀ/d) C W‖/s` of every token: the projection is a contraction, or a term of rank one."""
    heads, head, _ = w.shape
    norm, unit, scale = slope.norm, slope.unit.double(), slope.scale.double()[..., 0]  # (batch, kv heads, n, …)
    group = heads // unit.shape[1]
    unit, scale = unit.repeat_interleave(group, 1), scale.repeat_interleave(group, 1)
    centred = w - w.mean(1, keepdim=True) if isinstance(norm, LayerNorm) else w
    alpha = norm.weight.double() * f  # (heads, head)
    triangle = torch.linalg.qr(centred.mT, mode="r")[1]  # (heads, r, head): C W up to an isometry
    contraction = (alpha.abs().amax(-1) * matrix_norm(triangle))[None, :, None]
    along = (unit @ triangle.mT).norm(dim=-1) * (alpha[:, None] * unit).norm(dim=-1) / head
    rank_one = matrix_norm(triangle * alpha[:, None])[None, :, None] + along
    # the token's own numbers carry the rounding of the working precision
    noise = 16 * torch.finfo(slope.dtype).eps * math.sqrt(head)
    return torch.minimum(contraction, rank_one) / scale * (1 + noise)


def _gains(layer: Attention, batch: int, n: int) -> Float[Tensor, "batch n"]:
    """By how much the phases of each token stretch: 1 up to the rounding of their tables."""
    if layer.rotary is None:
        return torch.ones(batch, n, dtype=torch.float64)
    cos, sin = layer.rotary.cos.double(), layer.rotary.sin.double()
    size = (cos.square() + sin.square()).amax(-1).sqrt()[..., :n].clamp_min(1.0) * (1 + 1e-15)
    return size.expand(batch, n)
