"""The trace form: how large the parts of a head's Jacobian are, with traces of covariances for their norms.

A head's Jacobian has three parts, `P ⊗ W_v`, a block diagonal `B_i W_q` and a part through the keys. Their sizes come from the
norm of `P` and from covariances of values and keys under each row of `P`. Numbers are those of docs/point-bounds.md.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from howsmooth.kernels.tiled import Block, Tiled
from howsmooth.maps import AttentionJacobian
from howsmooth.theory.heads import Geometry, Tokens
from howsmooth.theory.perron import STEPS, along, down, perron_bound, received, tiled_bound, weights_norm

# Power steps: every number of them gives a bound, and these cost about two products with `JᵀJ` altogether.
_HEAD_STEPS = 4  # on the weights of each of several heads
_START_STEPS = 2  # on a matrix like that of block norms
_BLOCK_STEPS = 2  # and on it
_SHORT, _SHORT_STEPS = 256, 8  # tokens up to which one head may take more of them


class Sizes(NamedTuple):
    """What is known of each head, (batch·heads,): `‖P‖`, `max ‖B_i W_q‖`, the norm of the key part, of the whole Jacobian."""

    p: Tensor
    beta: Tensor
    key: Tensor
    block: Tensor


def trace_sizes(operator: AttentionJacobian, geometry: Geometry, t: Tokens) -> Sizes:
    """Theorem 4.3 with traces for norms, and Theorem 4.4.

    Block norms are about `P_ij (ν + a_i √spread_i)`, whose top vector is a cheap start for them.
    """
    kernel = operator.kernel.tiled()
    capped = kernel.scores.softcap is not None
    v2, k2 = t.v.square().sum(-1, keepdim=True), t.k.square().sum(-1, keepdim=True)
    if capped:
        spread = _spread(_products(kernel, t.inverse, v2)[..., 0], t.o, t)
        spread_k = _products(kernel, t.inverse, k2, capped=True)[..., 0]
    else:
        moments = _products(kernel, t.inverse, torch.cat([v2, k2, t.k], -1))
        spread = _spread(moments[..., 0], t.o, t)
        spread_k = _spread(moments[..., 1], moments[..., 2:], t)
    beta = abs(operator.layer.scale) * (spread * spread_k).sqrt() * t.chi
    key = (received(kernel, t.inverse, spread * t.a.square(), capped=capped).sqrt() * t.kappa).amax(-1)
    p, w = weights_norm(kernel, t.inverse, STEPS if operator.layer.heads == 1 else _HEAD_STEPS)
    nu = geometry.nu.to(beta.dtype).repeat(operator.batch)[:, None]  # (g, 1)
    rows = (nu + t.a * spread.sqrt() * t.kappa.amax(-1, keepdim=True)) * t.inverse
    start = tiled_bound(kernel, lambda b: b.weights, rows, beta, w, _START_STEPS)[1]
    if t.y is not None:
        return Sizes(p, beta.amax(-1), key, _one_head(kernel, float(geometry.nu[0]), t, t.y, beta, start))
    whole, keys_alone = _many_heads(kernel, nu, t, beta, start)
    return Sizes(p, beta.amax(-1), torch.minimum(key.double(), keys_alone), whole)


def _products(kernel: Tiled, inverse: Tensor, w: Tensor, *, capped: bool = False) -> Tensor:
    """`P w` for columns (g, m, c); `capped`: with `P` times the soft-cap's slope."""
    image = w.new_zeros(*inverse.shape, w.shape[-1])
    for b in kernel.blocks():
        image[b.heads, b.rows] += torch.bmm(b.slope if capped else b.weights, w[b.heads, b.cols])
    return image.mul_(inverse[..., None])


def _spread(second: Tensor, mean: Tensor, t: Tokens) -> Tensor:
    """`Σ_j P_ij |v_j|² − |o_i|²` with what rounding may hide of it, zero for queries that see nothing."""
    return torch.where(t.inverse > 0, (second - mean.square().sum(-1)).clamp_min(0) + t.noise * second, 0.0)


def _one_head(kernel: Tiled, nu: float, t: Tokens, y: Tensor, beta: Tensor, start: Tensor) -> Tensor:
    """`‖N‖₂` of the matrix of block norms, each the smaller of two bounds (Theorem 4.4)."""
    unit = y / t.a.clamp_min(torch.finfo(t.a.dtype).tiny)[..., None]
    base = unit.square().sum(-1, keepdim=True) + nu**2
    shift = (t.o * y).sum(-1, keepdim=True)
    distance = _distances(t)
    capped = kernel.scores.softcap is not None

    def tile(b: Block) -> Tensor:
        e = distance(b).mul_(t.a[b.heads, b.rows, None])
        cross = torch.bmm(y[b.heads, b.rows], t.v[b.heads, b.cols].mT).sub_(shift[b.heads, b.rows]).mul_(2)
        if capped:
            apart = b.weights.square() * base[b.heads, b.rows] + b.weights * b.slope * cross + (b.slope * e).square()
            return torch.minimum(apart.clamp_min_(0).sqrt_(), b.weights * nu + b.slope * e)
        apart = cross.addcmul_(e, e).add_(base[b.heads, b.rows]).clamp_min_(0).sqrt_()
        return torch.minimum(apart, e.add_(nu)).mul_(b.weights)

    steps = _SHORT_STEPS if beta.shape[1] <= _SHORT else _BLOCK_STEPS
    return tiled_bound(kernel, tile, t.inverse, beta, start, steps)[0]


def _many_heads(kernel: Tiled, nu: Tensor, t: Tokens, beta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """`‖ν P + E + diag β‖₂` and `‖E‖₂`, `E_ij = P_ij a_i κ_j |v_j − o_i|`: the simpler bound on each block (Theorem 4.4)."""
    g = len(beta)
    distance = _distances(t)
    a = t.a * t.inverse

    def forward(w: Tensor) -> Tensor:
        mean, moved, alone = torch.zeros_like(beta), torch.zeros_like(beta), torch.zeros_like(beta)
        whole, keys = t.kappa * w[:g], t.kappa * w[g:]
        for b in kernel.blocks():
            e = distance(b).mul_(b.slope)
            mean[b.heads, b.rows] += along(b.weights, w[:g][b.heads, b.cols])
            moved[b.heads, b.rows] += along(e, whole[b.heads, b.cols])
            alone[b.heads, b.rows] += along(e, keys[b.heads, b.cols])
        return torch.cat([nu * t.inverse * mean + a * moved + beta * w[:g], a * alone])

    def backward(z: Tensor) -> Tensor:
        whole, by_whole, by_keys = beta * z[:g], torch.zeros_like(beta), torch.zeros_like(beta)
        mean, moved, alone = nu * t.inverse * z[:g], a * z[:g], a * z[g:]
        for b in kernel.blocks():
            e = distance(b).mul_(b.slope)
            whole[b.heads, b.cols] += down(mean[b.heads, b.rows], b.weights)
            by_whole[b.heads, b.cols] += down(moved[b.heads, b.rows], e)
            by_keys[b.heads, b.cols] += down(alone[b.heads, b.rows], e)
        return torch.cat([whole + t.kappa * by_whole, t.kappa * by_keys])

    bound, _ = perron_bound(forward, backward, torch.cat([start, start]), _BLOCK_STEPS)
    return bound[:g], bound[g:]


def _distances(t: Tokens) -> Callable[[Block], Tensor]:
    """What makes tiles of `|v_j − o_i|`, from above where rounding hides them."""
    v2, o2 = t.v.square().sum(-1)[:, None], t.o.square().sum(-1)
    o2 = (o2 * (1 + t.noise) + t.noise * v2.amax(-1))[..., None]
    minus_2o = -2 * t.o

    def tile(b: Block) -> Tensor:
        squares = torch.bmm(minus_2o[b.heads, b.rows], t.v[b.heads, b.cols].mT)
        return squares.add_(v2[b.heads, :, b.cols]).add_(o2[b.heads, b.rows]).clamp_min_(0).sqrt_()

    return tile
