"""Upper bounds on `‖D_x f‖₂` of an attention layer at one input, read off its attention weights.

A head's Jacobian has three parts, `P ⊗ W_v`, a block diagonal `B_i W_q` and a part through the keys. Their sizes come from the
norm of `P` and from covariances of values and keys under each row of `P`, with traces for norms; heads are put together through
the directions that their weights leave in common. Numbers such as 4.3 are those of docs/explanation/point-bounds.md.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.kinds.kind import check_softmax, not_softmax
from howsmooth.kernels.tensors import float32_products
from howsmooth.kernels.tiled import Block, Tiled
from howsmooth.maps import Attention, AttentionJacobian, NormJacobian
from howsmooth.maps.base import one_sequence
from howsmooth.spectral import Composed, Operator, spectral_norm
from howsmooth.theory.at_point.heads import (
    STEPS,
    Geometry,
    Tokens,
    along,
    down,
    perron_bound,
    received,
    rounding,
    tiled_bound,
    vector_errors,
    weights_norm,
)
from howsmooth.theory.bound import Bound, at_most, log_of
from howsmooth.theory.kinds.block_norms import point_of_kind
from howsmooth.theory.needs import BILINEAR, unmet
from howsmooth.theory.upper import ROUNDINGS, Upper, no_nan, product_norm, slack

_SOURCE = "howsmooth, docs/explanation/point-bounds.md"
_ASSUMES = "any layer of softmax attention: heads, groups, biases, masks, soft-cap, rotary phases, norms on queries and keys"

# Power steps: every number of them gives a bound, and these cost about two products with `JᵀJ` altogether.
_HEAD_STEPS = 4  # on the weights of each of several heads
_START_STEPS, _BLOCK_STEPS = 2, 2  # on a matrix like that of block norms, and on it
_SHORT, _SHORT_STEPS = 256, 8  # tokens up to which one head may take more of them


@torch.no_grad()
@float32_products()
def point_bounds(attn: Attention, x: Float[Tensor, "n d"]) -> list[Bound]:
    """Every bound on `‖D_x f‖₂` at the tokens `x`, the smallest of ours last.

    Work is done in the precision of `x` and the layer, and its rounding is covered as `operator_bound` says.

    >>> attn = Attention.from_matrices(torch.zeros(2, 2), torch.eye(2))
    >>> [(b.id, round(b.value, 2)) for b in point_bounds(attn, torch.zeros(3, 2))]
    [('D2', 1.0), ('D3', 1.0), ('D5', 1.0), ('D6', 1.0), ('D', 1.0)]
    """
    x = one_sequence(x)
    reason = not_softmax(attn.kind)
    own = [] if reason is None else point_of_kind(attn, attn.prepare(x))
    if reason is None:
        operator = attn.linearize(attn.prepare(x)[None])[1]
        assert isinstance(operator, AttentionJacobian)
        forms = trace_forms(operator)
        parts, blocks, coupled, best = (log_of(float(t)) for t in (*forms, forms.best))
        coupled = (
            "not for norms over all heads, whose slopes leave the directions of their own head" if attn.coupled else coupled
        )
    else:
        parts = blocks = coupled = reason
        best = own[-1].reason or log_of(own[-1].value or 0.0)
    claims = (
        ("D3", "three parts", "Σ_h ‖W_oW_v‖‖P‖ + max_i ‖W_oB_iW_q‖ + ‖key part‖", parts),
        ("D5", "block norms", "(‖Σ_h b_h O_hO_hᵀ‖ Σ_h b_h)^½, b_h = ‖(‖J_ij‖)_ij‖₂ of head h", blocks),
        ("D6", "coupled heads", "the parts of D3, heads through the input and output directions they share", coupled),
    )
    rows = [at_most(id, name, statement, _SOURCE, _ASSUMES, answer) for id, name, statement, answer in claims]
    last = at_most("D", "best at a point", "min(D3, D5, D6, D7)", _SOURCE, "any attention layer", best)
    return [yudin_bound(attn, x), *rows, *own, last]


@torch.no_grad()
def yudin_bound(attn: Attention, x: Float[Tensor, "n d"]) -> Bound:
    """D2: Yudin et al. 2025, *Pay Attention to Attention Distribution*, arXiv 2507.07814 (Proposition 4.10).

    `p₍₁₎ ≥ p₍₂₎` are the two largest weights of a row. Masks only change `P`, whose norm is the bound of Proposition 4.1.
    """
    reason = not_softmax(attn.kind) or unmet(attn, "one head", "no biases of logits", "no soft-cap", *BILINEAR)
    statement = "‖V‖ (‖P‖ + 2 ‖X‖² ‖A‖ max_i p₍₁₎(1 − p₍₁₎ + p₍₂₎))"
    assumes = "one head, q = W_q x and k = W_k x without biases, no soft-cap; A = τ W_kᵀ W_q, V = W_o W_v"
    answer = reason or log_of(_yudin_value(attn, x.double()))
    return at_most("D2", "Yudin et al. at a point", statement, "Yudin et al. 2025, arXiv 2507.07814", assumes, answer)


def _yudin_value(attn: Attention, x: Float[Tensor, "n d"]) -> float:
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
    return value * float(rounding(operator, vector_errors(operator))[0]) * slack(x.numel())


@torch.no_grad()
@float32_products()
def operator_bound(operator: Operator) -> Float[Tensor, " batch"] | None:
    """Upper bounds on the norms of a linearised map, (batch,) float64; nothing for operators that theory says nothing of.

    For attention the smallest of D3, D5, D6, at the cost of about two products with `JᵀJ`. Work is done in the precision of the
    operator on the tiles its kernel makes, in O(n · d) memory beyond the kernel's own, and the result covers the rounding of
    that precision (docs/explanation/point-bounds.md 4.9). For a norm Proposition 4.8, for a composition the product.
    """
    if isinstance(operator, AttentionJacobian):
        return trace_forms(operator, every=False).best if operator.kernel.scores.softmax else None
    if isinstance(operator, NormJacobian):
        smallest = operator.scale.double().flatten(1).amin(-1)
        slack = 1 + ROUNDINGS * torch.finfo(operator.dtype).eps * math.sqrt(operator.in_shape[-1])
        return no_nan(operator.norm.weight.double().abs().max() / smallest * slack)
    if isinstance(operator, Composed):
        outer = operator_bound(operator.outer)
        inner = None if outer is None else operator_bound(operator.inner)
        return None if outer is None or inner is None else (Upper(outer) * inner).value
    return None


class TraceForms(NamedTuple):
    """The bounds D3, D5, D6 of every item, (batch,) float64."""

    parts: Tensor
    blocks: Tensor
    coupled: Tensor

    @property
    def best(self) -> Tensor:
        return torch.stack(self).amin(0)


def trace_forms(operator: AttentionJacobian, *, every: bool = True) -> TraceForms:
    """Heads put together: plainly, through output directions, through input and output directions.

    every: all three of them; else one that cannot be the smallest may be left at a larger one.
    """
    check_softmax(operator.layer.kind, "bounds at a point")
    operator = operator.tiled()
    batch, heads, dtype = operator.batch, operator.layer.heads, operator.dtype
    geometry = Geometry.of(operator.layer)
    errors = vector_errors(operator)
    slack = rounding(operator, errors).unflatten(0, (batch, heads))
    tokens = Tokens.of(operator, geometry, errors)
    p, beta, key, block = (t.unflatten(0, (batch, heads)) for t in trace_sizes(operator, tokens))
    parts = geometry.nu * p + beta + key
    p, beta, key, parts, block = (no_nan(t * slack) for t in (p, beta, key, parts, torch.fmin(parts, block)))
    plain = parts.sum(-1)
    if heads == 1:
        return TraceForms(plain, block[:, 0], plain)
    if operator.layer.coupled:  # slopes leave the directions of their own head
        return TraceForms(plain, geometry.blocks(block, dtype), plain)
    coupled = geometry.coupled(p, beta, key, dtype)
    # ‖Σ b_h O_hO_hᵀ‖ is at least max b_h: often D5 cannot win
    if not every and bool((coupled.square() <= block.amax(-1) * block.sum(-1)).all()):
        return TraceForms(plain, plain, coupled)
    return TraceForms(plain, geometry.blocks(block, dtype), coupled)


class HeadSizes(NamedTuple):
    """What is known of each head, (batch·heads,) float64: `‖P‖`, `max ‖B_i W_q‖`, the norm of the key part, of the whole."""

    p: Tensor
    beta: Tensor
    key: Tensor
    block: Tensor


def trace_sizes(operator: AttentionJacobian, t: Tokens) -> HeadSizes:
    """Theorem 4.3 with traces for norms, and Theorem 4.4, started at the top vector of `P_ij (ν + a_i √spread_i)`."""
    kernel = operator.kernel.tiled()
    capped = kernel.scores.softcap is not None
    v2, k2 = t.v.square().sum(-1, keepdim=True), t.k.square().sum(-1, keepdim=True)
    if capped:
        spread = _spread(_products(kernel, t.inverse, v2)[..., 0], t.o, t, t.blur_v)
        spread_k = (_products(kernel, t.inverse, k2, capped=True)[..., 0].sqrt() + t.blur_k).square()
    else:
        moments = _products(kernel, t.inverse, torch.cat([v2, k2, t.k], -1))
        spread = _spread(moments[..., 0], t.o, t, t.blur_v)
        spread_k = _spread(moments[..., 1], moments[..., 2:], t, t.blur_k)
    beta = t.tau * (spread * spread_k).sqrt() * t.chi
    key = (received(kernel, t.inverse, spread * t.a.square(), capped=capped).sqrt() * t.kappa).amax(-1).double()
    p, w = weights_norm(kernel, t.inverse, STEPS if operator.layer.heads == 1 else _HEAD_STEPS)
    rows = (t.nu + t.a * spread.sqrt() * t.kappa.amax(-1, keepdim=True)) * t.inverse
    start = tiled_bound(kernel, lambda b: b.weights, rows, beta, w, _START_STEPS)[1]
    if t.y is None:
        whole, keys_alone = _many_heads(kernel, t, beta, start)
        key = torch.fmin(key, keys_alone)
    else:
        whole = _one_head(kernel, t, *t.y, beta, start)
    return HeadSizes(p, beta.amax(-1).double() * t.unit, key * t.unit, whole * t.unit)


def _products(kernel: Tiled, inverse: Tensor, w: Tensor, *, capped: bool = False) -> Tensor:
    """`P w` for columns (g, m, c); `capped`: with `P` times the soft-cap's slope."""
    image = w.new_zeros(*inverse.shape, w.shape[-1])
    for b in kernel.blocks():
        image[b.heads, b.rows] += torch.bmm(b.slope if capped else b.weights, w[b.heads, b.cols])
    return image.mul_(inverse[..., None])


def _spread(second: Tensor, mean: Tensor, t: Tokens, blur: Tensor) -> Tensor:
    """`Σ_j P_ij |v_j|² − |o_i|²` with what rounding may hide of it, zero for queries that see nothing."""
    square = mean.square().sum(-1)
    deviation = ((second - square).clamp_min(0) + t.noise * second + 2 * square.sqrt() * blur).sqrt() + blur
    return torch.where(t.inverse > 0, deviation.square(), 0.0)


def _one_head(kernel: Tiled, t: Tokens, unit: Tensor, y: Tensor, beta: Tensor, start: Tensor) -> Tensor:
    """`‖N‖₂` of the matrix of block norms, each the smaller of two bounds (Theorem 4.4)."""
    nu = t.nu[..., None]  # (g, 1, 1)
    base = unit.square().sum(-1, keepdim=True) + nu.square() + 4 * y.norm(dim=-1, keepdim=True) * t.blur_v[..., None]
    # the second bound for the `a` and `R_o W_v` that are known, and what may be missing from these
    blur = t.blur_w[..., None]
    missing = (t.blur_a / t.a.clamp_min(torch.finfo(t.a.dtype).tiny))[..., None]  # (g, n, 1)
    shift = (t.o * y).sum(-1, keepdim=True)
    distance = _distances(t)
    capped = kernel.scores.softcap is not None

    def tile(b: Block) -> Tensor:
        e = distance(b).mul_(t.a[b.heads, b.rows, None])
        cross = torch.bmm(y[b.heads, b.rows], t.v[b.heads, b.cols].mT).sub_(shift[b.heads, b.rows]).mul_(2)
        if capped:
            apart = b.weights.square() * base[b.heads, b.rows] + b.weights * b.slope * cross + (b.slope * e).square()
            apart = apart.clamp_min_(0).sqrt_().add_(b.slope * e * missing[b.heads, b.rows]).add_(b.weights * blur[b.heads])
            return torch.minimum(apart, b.weights * nu[b.heads] + b.slope * e)
        apart = cross.addcmul_(e, e).add_(base[b.heads, b.rows]).clamp_min_(0).sqrt_()
        apart.addcmul_(e, missing[b.heads, b.rows]).add_(blur[b.heads])
        return torch.minimum(apart, e.add_(nu[b.heads])).mul_(b.weights)

    steps = _SHORT_STEPS if beta.shape[1] <= _SHORT else _BLOCK_STEPS
    return tiled_bound(kernel, tile, t.inverse, beta, start, steps)[0]


def _many_heads(kernel: Tiled, t: Tokens, beta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
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
        return torch.cat([t.nu * t.inverse * mean + a * moved + beta * w[:g], a * alone])

    def backward(z: Tensor) -> Tensor:
        whole, by_whole, by_keys = beta * z[:g], torch.zeros_like(beta), torch.zeros_like(beta)
        mean, moved, alone = t.nu * t.inverse * z[:g], a * z[:g], a * z[g:]
        for b in kernel.blocks():
            e = distance(b).mul_(b.slope)
            whole[b.heads, b.cols] += down(mean[b.heads, b.rows], b.weights)
            by_whole[b.heads, b.cols] += down(moved[b.heads, b.rows], e)
            by_keys[b.heads, b.cols] += down(alone[b.heads, b.rows], e)
        return torch.cat([whole + t.kappa * by_whole, t.kappa * by_keys])

    bound, _ = perron_bound(forward, backward, torch.cat([start, start]), _BLOCK_STEPS)
    return bound[:g], bound[g:]


def _distances(t: Tokens) -> Callable[[Block], Tensor]:
    """A function that makes tiles of upper bounds on `|v_j − o_i|`, whatever rounding hides of them."""
    blur = 2 * t.blur_v[..., None]
    v2, o2 = t.v.square().sum(-1)[:, None], t.o.square().sum(-1)
    o2 = (o2 * (1 + t.noise) + t.noise * v2.amax(-1))[..., None]
    minus_2o = -2 * t.o

    def tile(b: Block) -> Tensor:
        squares = torch.bmm(minus_2o[b.heads, b.rows], t.v[b.heads, b.cols].mT)
        return squares.add_(v2[b.heads, :, b.cols]).add_(o2[b.heads, b.rows]).clamp_min_(0).sqrt_().add_(blur[b.heads])

    return tile
