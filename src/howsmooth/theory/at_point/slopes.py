"""How fast the queries and keys of a layer move with their tokens, where norms and phases act on them.

Numbers such as 4.13 are those of docs/explanation/point-bounds.md.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import Attention, AttentionJacobian, NormJacobian
from howsmooth.spectral import spectral_norm
from howsmooth.theory.scaled import by_heads, plane_factors, triangle
from howsmooth.theory.upper import ROUNDINGS, slack


class TokenSlopes(NamedTuple):
    """What queries and keys of the layer's tokens do to logits where they are normalised or turned (4.13).

    k: keys `k_j/f`.  query: upper bounds on `‖∂(f q_i)/∂x_i‖`.  by_k: `max 1/f`.
    q, key, by_q: the queries and the slopes of keys, with another `f`.
    """

    k: Tensor
    query: Tensor
    by_k: Tensor
    q: Tensor
    key: Tensor
    by_q: Tensor


def token_slopes(
    operator: AttentionJacobian, r_q: Float[Tensor, "heads r head"], r_k: Float[Tensor, "heads r head"]
) -> TokenSlopes | None:
    """The slopes at the operator's tokens, from `R` of `W_qᵀ = Q R` and of `W_kᵀ`; nothing where both are affine."""
    layer, kernel = operator.layer, operator.kernel.tiled()
    if layer.q_norm is None and layer.k_norm is None and layer.rotary is None:
        return None
    return TokenSlopes(
        *_scaled_sides(layer, operator.q_slope, r_q.mT, kernel.k, operator.batch, layer.w_q),
        *_scaled_sides(layer, operator.k_slope, r_k.mT, kernel.q, operator.batch, layer.w_k),
    )


def _scaled_sides(
    layer: Attention,
    slope: NormJacobian | None,
    w: Float[Tensor, "heads head r"],
    other: Float[Tensor, "g n head"],
    batch: int,
    whole: Tensor | None,
) -> tuple[Float[Tensor, "g n head"], Float[Tensor, "g n"], Float[Tensor, " g"]]:
    """Vectors of the other side over `f`, slopes of this side times `f`, and `max 1/f`.

    `q·k = (f q)·(k/f)` for every `f`, so each head may choose: no factor, or the one that evens out the rows of its weights.
    """
    heads, head, _ = w.shape
    n, ones = other.shape[1], w.new_ones(heads, head)
    rows = w.norm(dim=-1) if slope is None else by_heads(slope.norm.weight.double().abs(), heads, head)
    even, choices = plane_factors(layer, rows), []
    for f in (ones, 1 / even):
        size = _slopes(layer, slope, w, f, batch, n, whole).flatten(0, 1)  # (g, n)
        vectors = (other.double().unflatten(0, (batch, heads)) / f[:, None]).flatten(0, 1)
        choices.append((vectors, size, vectors.square().sum((-2, -1)) * size.square().amax(-1)))
    (plain, size, worth), (scaled, scaled_size, scaled_worth) = choices
    better = (scaled_worth < worth)[:, None]
    vectors = torch.where(better[..., None], scaled, plain)
    by = torch.where(better[:, 0], even.amax(-1).repeat(batch), 1.0)
    return vectors, torch.where(better, scaled_size, size), by


def query_slopes(operator: AttentionJacobian) -> Float[Tensor, "batch heads n"]:
    """Upper bounds on `‖∂q_i/∂x_i‖`, head by head and token by token."""
    layer = operator.layer
    w = triangle(layer.by_head().q)
    return _slopes(layer, operator.q_slope, w, w.new_ones(w.shape[:2]), operator.batch, operator.in_shape[0], layer.w_q)


def _slopes(
    layer: Attention,
    slope: NormJacobian | None,
    w: Float[Tensor, "heads head r"],
    f: Float[Tensor, "heads head"],
    batch: int,
    n: int,
    whole: Float[Tensor, "rows d"] | None,
) -> Float[Tensor, "batch heads n"]:
    """Upper bounds on `‖∂(f q_i)/∂x_i‖` (4.13): `w` the weights of queries, or of keys, up to an isometry of their input.

    whole: the weights of all heads, nothing for the identity.
    """
    gain = torch.ones(batch, n, dtype=torch.float64, device=w.device)  # of each token's phases: 1 up to their rounding
    if layer.rotary is not None:
        cos, sin = layer.rotary.cos.double(), layer.rotary.sin.double()
        gain = gain * (cos.square() + sin.square()).amax(-1).sqrt()[..., :n].clamp_min(1.0).to(w.device) * (1 + 1e-15)
    if slope is None:
        size = spectral_norm(w * f[..., None])[None, :, None]
    elif slope.norm.width == w.shape[1]:
        size = _normed(slope, w, f)
    else:
        size = _normed_together(slope, torch.eye(layer.width).to(w) if whole is None else whole.double(), f)
    return size * gain[:, None] * slack(layer.width)


def _normed_together(
    slope: NormJacobian, w: Float[Tensor, "rows d"], f: Float[Tensor, "heads head"]
) -> Float[Tensor, "batch heads n"]:
    """Upper bounds on `‖f_h α_h ((I − uuᵀ/m) C W)_h‖/s`, the slopes of a norm over all `m` entries of all heads (4.14).

    `u` is the normalised vector of a token and `s` what it was divided by, `α` the norm's weight, `C` its centring. A head
    keeps its rows of `C W` and its part of `u`; the projection adds a term of rank one, the part of `u` times `uᵀ C W/m`.
    """
    heads, head = f.shape
    norm, unit, scale = slope.norm, slope.unit.double(), slope.scale.double()[..., 0]  # (batch, n, rows), (batch, n)
    centred = norm.center(w.mT).mT  # C W
    alpha = by_heads(norm.weight.double(), heads, head) * f
    group = heads * head // norm.width
    own = centred.unflatten(0, (-1, head)).repeat_interleave(group, 0) * alpha[..., None]  # (heads, head, d)
    part = unit.unflatten(-1, (-1, head)).repeat_interleave(group, 2)  # (batch, n, heads, head)
    along = (unit @ centred).norm(dim=-1) / norm.width
    size = spectral_norm(own)[None, :, None] + ((alpha * part).norm(dim=-1) * along[..., None]).transpose(1, 2)
    noise = ROUNDINGS * torch.finfo(slope.dtype).eps * math.sqrt(norm.width)
    return size / scale[:, None] * (1 + noise)


def _normed(slope: NormJacobian, w: Float[Tensor, "heads head r"], f: Tensor) -> Float[Tensor, "batch heads n"]:
    """Upper bounds on `‖f α (I − uuᵀ/d) C W‖/s` of every token: the projection is a contraction, or a term of rank one."""
    heads, head, _ = w.shape
    norm, unit, scale = slope.norm, slope.unit.double(), slope.scale.double()[..., 0]  # (batch, kv heads, n, …)
    group = heads // unit.shape[1]
    unit, scale = unit.repeat_interleave(group, 1), scale.repeat_interleave(group, 1)
    alpha = norm.weight.double() * f  # (heads, head)
    small = triangle(norm.center(w.mT).mT).mT  # (heads, r, head): C W up to an isometry
    contraction = (alpha.abs().amax(-1) * spectral_norm(small))[None, :, None]
    along = (unit @ small.mT).norm(dim=-1) * (alpha[:, None] * unit).norm(dim=-1) / head
    rank_one = spectral_norm(small * alpha[:, None])[None, :, None] + along
    # the token's own numbers carry the rounding of the working precision
    noise = ROUNDINGS * torch.finfo(slope.dtype).eps * math.sqrt(head)
    return torch.minimum(contraction, rank_one) / scale * (1 + noise)
