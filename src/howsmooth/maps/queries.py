"""What a token does to its own output while all other tokens, and its own keys and values, stay: the splitting blocks.

`S_i = ∂f_i/∂x_i` through the query alone. It is the part of the Jacobian that survives when copies of token `i` move in
opposite directions (docs/meanfield.md §5.3). For attention `S_i = Σ_h W_o^h B_i^h W_q^h` with
`B_i^h = τ Σ_j Q_ij (v_j − o_i) k_jᵀ`; a norm contributes its derivative; blocks of a composition are multiplied.
"""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tiled import Tiled
from howsmooth.kernels.tiles import Tile
from howsmooth.maps.attention import Attention
from howsmooth.maps.jacobian import AttentionJacobian, NormJacobian
from howsmooth.maps.operator import Composed, Operator, Weighted

_FEATURES = 2**23  # products of values and keys kept at once


@torch.no_grad()
def own(operator: Operator, rows: slice) -> Operator:
    """The blocks `S_i` of the tokens in `rows`, as a batch of maps from (1, d) to (1, d_out), items before tokens.

    operator: what `linearize` gives. Weights on tokens do not change the blocks.
    """
    if isinstance(operator, Weighted):
        return own(operator.operator, rows)
    if isinstance(operator, Composed):
        return Composed(own(operator.outer, rows), own(operator.inner, rows))
    if isinstance(operator, NormJacobian):
        unit, scale = (t[:, rows].flatten(0, 1)[:, None] for t in (operator.unit, operator.scale))
        return NormJacobian(operator.norm, unit, scale)
    if isinstance(operator, AttentionJacobian):
        return QueryBlocks(operator.layer, _through_queries(operator, rows).flatten(0, 1))
    raise BadInputError(
        f"expected the Jacobian of a map of this package, got {type(operator).__name__}; pass a function instead"
    )


class Sizes(NamedTuple):
    """bound: `‖S_i‖` from above.  terms: the size of what was added up to form `S_i`, whose rounding it carries."""

    bound: Float[Tensor, "batch n"]
    terms: Float[Tensor, "batch n"]


@torch.no_grad()
def own_sizes(operator: Operator) -> Sizes:
    """Upper bounds on `‖S_i‖` at the cost of a product (Proposition 5.6).

    `Σ_h |τ| ‖W_o^h‖ ‖W_q^h‖ (Σ_j Q_ij |v_j − o_i|² · Σ_j Q_ij |k_j − κ|²)^½` for attention, `max|α|/s_i` for a norm, the
    product for a composition.
    """
    if isinstance(operator, Weighted):
        return own_sizes(operator.operator)
    if isinstance(operator, Composed):
        outer, inner = own_sizes(operator.outer), own_sizes(operator.inner)
        return Sizes(outer.bound * inner.bound, outer.terms * inner.bound + outer.bound * inner.terms)
    if isinstance(operator, NormJacobian):
        bound = operator.norm.weight.double().abs().max() / operator.scale.double()[..., 0]
        return Sizes(bound, bound)
    if isinstance(operator, AttentionJacobian):
        return _spreads(operator)
    raise BadInputError(
        f"expected the Jacobian of a map of this package, got {type(operator).__name__}; pass a function instead"
    )


@final
class QueryBlocks(Operator):
    """`W_o blockdiag_h(B_i^h) W_q`, a batch with one item per token."""

    def __init__(self, layer: Attention, blocks: Float[Tensor, "tokens heads d_v d_h"]):
        self._layer, self._blocks = layer, blocks
        self.batch = len(blocks)
        self.in_shape, self.out_shape = (1, layer.width), (1, layer.out_width)
        self.dtype, self.device = blocks.dtype, blocks.device

    def jvp(self, v):
        q = (v @ self._layer.w_q.mT).unflatten(-1, (self._layer.heads, -1))  # (probes, tokens, 1, heads, d_h)
        o = torch.einsum("thvk,ptihk->ptihv", self._blocks, q).flatten(-2)
        return o if self._layer.w_o is None else o @ self._layer.w_o.mT

    def vjp(self, u):
        o = (u if self._layer.w_o is None else u @ self._layer.w_o).unflatten(-1, (self._layer.heads, -1))
        return torch.einsum("thvk,ptihv->ptihk", self._blocks, o).flatten(-2) @ self._layer.w_q

    def select(self, items):
        return QueryBlocks(self._layer, self._blocks[items])


def _through_queries(operator: AttentionJacobian, rows: slice) -> Float[Tensor, "batch rows heads d_v d_h"]:
    """`B_i^h` from moments of values and keys, measured from their means so that little cancels."""
    layer, kernel = operator.layer, operator.kernel.tiled()
    batch, heads, _, m = kernel._shape
    v, k, o = _centred(kernel)
    inverse = _inverse(operator)
    d_v, d_h = v.shape[-1], k.shape[-1]
    step = max(1, _FEATURES // (d_v * d_h))
    blocks = v.new_zeros(batch * heads, rows.stop - rows.start, d_v, d_h)
    for g in range(batch * heads):
        weights = _rows(kernel, g, rows) * inverse[g, rows, None]  # (rows, m)
        second = weights.new_zeros(len(weights), d_v * d_h)
        for start in range(0, m, step):
            cols = slice(start, min(start + step, m))
            second += weights[:, cols] @ (v[g, cols, :, None] * k[g, cols, None, :]).flatten(1)
        first = weights @ k[g]
        blocks[g] = layer.scale * (second.unflatten(1, (d_v, d_h)) - o[g, rows, :, None] * first[:, None])
    return blocks.unflatten(0, (batch, heads)).transpose(1, 2)


def _spreads(operator: AttentionJacobian) -> Sizes:
    layer, kernel = operator.layer, operator.kernel.tiled()
    batch, heads = kernel._shape[:2]
    v, k, o = _centred(kernel)
    moments = v.new_zeros(*v.shape[:1], kernel._shape[2], 2 + v.shape[-1])
    columns = torch.cat([v.square().sum(-1, keepdim=True), k.square().sum(-1, keepdim=True), v], -1)
    total = v.new_zeros(*moments.shape[:2])
    for b in kernel._blocks():
        moments[b.heads, b.rows] += torch.bmm(b.slope, columns[b.heads, b.cols])
        total[b.heads, b.rows] += b.slope.sum(-1)
    inverse = _inverse(operator)
    moments, total = (moments * inverse[..., None]).double(), (total * inverse).double()
    o = o.double()
    # Σ Q |v − o|² = Σ Q |v|² − 2 o·Σ Q v + |o|² Σ Q, with what rounding may hide of it
    near = moments[..., 0] - 2 * (o * moments[..., 2:]).sum(-1) + o.square().sum(-1) * total
    noise = 16 * torch.finfo(operator.dtype).eps * math.sqrt(layer.width + kernel._shape[-1])
    far = (moments[..., 0].sqrt() + o.norm(dim=-1) * total.sqrt()).square()
    near = near.clamp_min(0) + noise * far
    gain = _norms(layer.w_q, heads)
    gain = gain if layer.w_o is None else gain * _norms(layer.w_o.mT, heads)
    bound, terms = (
        (abs(layer.scale) * (spread * moments[..., 1]).sqrt().unflatten(0, (batch, heads)) * gain[:, None]).sum(1)
        for spread in (near, far)
    )
    return Sizes(bound * (1 + noise), terms)


def _norms(w: Float[Tensor, "rows d"], heads: int) -> Float[Tensor, " heads"]:
    return torch.linalg.matrix_norm(w.double().unflatten(0, (heads, -1)), 2)


def _centred(kernel: Tiled) -> tuple[Tensor, Tensor, Tensor]:
    """Values, keys and outputs measured from the mean value and key; under a soft-cap keys stay as they are."""
    value = kernel._v.mean(1, keepdim=True)
    key = kernel._k.mean(1, keepdim=True) if kernel.scores.softcap is None else torch.zeros_like(kernel._k[:, :1])
    return kernel._v - value, kernel._k - key, kernel._o - value


def _inverse(operator: AttentionJacobian) -> Float[Tensor, "g n"]:
    """`1/z_i`, zero for queries that see nothing or that are padding."""
    inverse, mask = operator.kernel.tiled()._inverse[..., 0], operator.layer.attention_mask
    return inverse if mask is None else inverse * mask.repeat_interleave(operator.layer.heads, 0)


def _rows(kernel: Tiled, g: int, rows: slice) -> Float[Tensor, "rows m"]:
    """Rows of `P̂` of one head times the soft-cap's slope."""
    s, slope = kernel._logits(slice(g, g + 1), Tile(rows, slice(0, kernel._shape[3]), partial=True))
    weights = s.sub_(kernel._largest[g : g + 1, rows, None]).exp_()
    return (weights if slope is None else weights * slope)[0]
