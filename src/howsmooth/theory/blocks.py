"""What a token does to its own output while all other tokens, and its own keys and values, stay: the splitting blocks.

`S_i = ∂f_i/∂x_i` through the query alone. It is the part of the Jacobian that survives when copies of token `i` move in
opposite directions (docs/explanation/meanfield.md §5.3). For attention `S_i = Σ_h W_o^h B_i^h W_q^h` with
`B_i^h = τ Σ_j Q_ij (v_j − o_i) k_jᵀ`, and the slope of `q_i` for `W_q^h` where queries are normalised and turned; a norm
contributes its derivative; blocks of a composition are multiplied.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.kernels.kinds.kind import counts_tokens
from howsmooth.kernels.tensors import float32_products
from howsmooth.kernels.tiled import Tiled
from howsmooth.maps import Attention, AttentionJacobian, NormJacobian
from howsmooth.maps.atoms import AtomJacobian, CountedAttention
from howsmooth.spectral import Composed, DenseSVD, GolubKahan, Operator, Weighted, spectral_norm
from howsmooth.spectral.dense import SMALL
from howsmooth.theory.at_point.heads import inverse_rows, vector_errors
from howsmooth.theory.at_point.slopes import query_slopes
from howsmooth.theory.upper import ROUNDINGS, Upper, largest_entry, lengths, no_nan

_FEATURES = 2**23  # products of values and keys kept at once
_NUMBERS = {"cpu": 2**21, "cuda": 2**26}  # entries of blocks worked on at once: what a cache holds, what keeps a GPU busy
_BASIS = 64  # vectors kept for a block that goes through products
_WIDTH, _DELTA = 0.02, 1e-6  # where blocks are too wide to decompose: the interval asked for, and how likely one is missed


class BlockNorms(NamedTuple):
    """`lower_i ≤ ‖S_i‖ ≤ upper_i`, float64.

    value: what is attained, as evaluated.  lower: less what rounding explains.  confidence: with which all upper ends hold
    together, 1 where decomposed.
    """

    value: Float[Tensor, "batch n"]
    lower: Float[Tensor, "batch n"]
    upper: Float[Tensor, "batch n"]
    confidence: float


@torch.no_grad()
@float32_products()
def block_norms(operator: Operator, above: float = 0.0) -> BlockNorms:
    """Lower and upper bounds on the norms of all blocks of a linearised map.

    Blocks of width up to 256 are decomposed, so both ends are exact to rounding; wider ones go through products.
    above: tokens whose cheap bound (Proposition 5.6) is not larger are left at `[0, that bound]`.
    """
    sizes = block_sizes(operator)
    batch, n = sizes.bound.shape
    d, d_out = operator.in_shape[-1], operator.out_shape[-1]
    dense = min(d, d_out) <= SMALL
    value, lower, upper = torch.zeros_like(sizes.bound), torch.zeros_like(sizes.bound), sizes.bound.clone()
    step = max(1, _NUMBERS.get(operator.device.type, _NUMBERS["cpu"]) // (batch * (d * d_out if dense else _BASIS * d)))
    used = False
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        size = sizes.bound[:, rows]
        if bool((size <= above).all()):
            continue
        blocks = splitting_blocks(operator, rows)
        slack = (ROUNDINGS * torch.finfo(operator.dtype).eps * (d + n) ** 0.5 + operator.noise) * sizes.terms[:, rows]
        if dense:
            matrices = blocks.dense().double()
            if not bool(matrices.isfinite().all()):
                raise NoConvergenceError("expected finite splitting blocks, got NaN or infinity; rescale the map")
            low = high = spectral_norm(matrices).unflatten(0, (batch, -1))
        else:
            solutions = GolubKahan(delta=_DELTA / (batch * n)).solve(blocks, 0.1 * _WIDTH, _WIDTH, [0] * blocks.batch)
            low, high = size.new_tensor([(s.value, s.upper) for s in solutions]).T.unflatten(1, (batch, -1))
            used = True
        value[:, rows], lower[:, rows] = low, (low - slack).clamp_min(0.0)
        upper[:, rows] = torch.fmin(torch.maximum(high + slack, low), torch.maximum(size, low))
    return BlockNorms(value, lower, no_nan(upper), 1 - _DELTA if used else 1.0)


@torch.no_grad()
@float32_products()
def block_direction(operator: Operator, token: int) -> tuple[Float[Tensor, " d"], float]:
    """The unit direction that `S_token` stretches most, and by how much, for an operator of one input."""
    block = splitting_blocks(operator, slice(token, token + 1))
    solver = DenseSVD() if min(block.in_size, block.out_size) <= SMALL else GolubKahan()
    v = solver.solve(block, 1e-6, None, [0])[0].direction.reshape(1, 1, *block.in_shape).to(block.dtype)
    v = v / v.norm()
    return v.flatten(), float(block.jvp(v).norm())


@torch.no_grad()
def splitting_blocks(operator: Operator, rows: slice) -> Operator:
    """The blocks of the tokens in `rows`: a batch of maps from (1, d) to (1, d_out), items before tokens."""
    if isinstance(operator, Weighted):
        return splitting_blocks(operator.operator, rows)
    if isinstance(operator, Composed):
        return Composed(splitting_blocks(operator.outer, rows), splitting_blocks(operator.inner, rows))
    if isinstance(operator, NormJacobian):
        unit, scale = (t[:, rows].flatten(0, 1)[:, None] for t in (operator.unit, operator.scale))
        return NormJacobian(operator.norm, unit, scale, operator.offset.repeat_interleave(len(unit) // operator.batch))
    if isinstance(operator, AtomJacobian):
        return FormedBlocks(_formed(operator)[:, rows].flatten(0, 1))
    attention = _attention(operator)
    if attention.layer.kind.traits.balancing is not None:
        return splitting_blocks(_balanced(attention), rows)
    blocks = _through_queries(attention, rows) if attention.layer.kind.traits.plain else _query_columns(attention, rows)
    return QueryBlocks(attention.layer, blocks.flatten(0, 1), _norm_at(attention, rows))


class BlockSizes(NamedTuple):
    """bound: no less than `‖S_i‖`.  terms: the size of what was added up to form `S_i`, whose rounding it carries."""

    bound: Float[Tensor, "batch n"]
    terms: Float[Tensor, "batch n"]


@torch.no_grad()
def block_sizes(operator: Operator) -> BlockSizes:
    """Upper bounds on `‖S_i‖` by one product: Proposition 5.6; `max|α|/s_i` for a norm, the product for a composition."""
    if isinstance(operator, Weighted):
        return block_sizes(operator.operator)
    if isinstance(operator, Composed):
        outer, inner = block_sizes(operator.outer), block_sizes(operator.inner)
        (b, u), (a, t) = ((Upper(bound), Upper(terms)) for bound, terms in (outer, inner))
        return BlockSizes((b * a).value, (u * a + b * t).value)
    if isinstance(operator, NormJacobian):
        bound = operator.norm.weight.double().abs().max() / operator.scale.double()[..., 0]
        return BlockSizes(bound, bound)
    if isinstance(operator, AtomJacobian):
        return _equal(lengths(_formed(operator).flatten(2)).double())
    attention = _attention(operator)
    if attention.layer.kind.traits.balancing is not None:
        return block_sizes(_balanced(attention))
    return _spreads(attention) if attention.layer.kind.traits.plain else _equal(_query_norms(attention))


def _equal(bound: Float[Tensor, "batch n"]) -> BlockSizes:
    """Blocks that were formed: what they are made of is no larger than the largest of them."""
    bound = no_nan(bound * (1 + 1e-9))
    return BlockSizes(bound, bound + bound.amax(-1, keepdim=True))


def _attention(operator: Operator) -> AttentionJacobian:
    if isinstance(operator, AttentionJacobian):
        why = counts_tokens(operator.layer.kind)
        if why is not None:
            got = f"{operator.layer.kind!r}: {why}"
            raise BadInputError(f"expected a kind of attention whose tokens can be split, got {got}; move tokens only")
        return operator
    raise BadInputError(
        f"expected the Jacobian of a map of this package, got {type(operator).__name__}; pass a function instead"
    )


def _balanced(operator: AttentionJacobian) -> AtomJacobian:
    """Sinkhorn attention on tokens as on atoms of one mass, whose columns are within reach."""
    layer, x = operator.layer, operator.tokens
    kept = [name for name in ("window", "bias", "rotary", "attention_mask") if getattr(layer, name) is not None]
    if kept or x is None:
        raise BadInputError(
            f"expected Sinkhorn attention without {kept[0] if kept else 'precision to spare'} for splitting a token, got one; "
            "what its columns are then is not derived"
        )
    n = x.shape[1]
    mass = torch.full((n,), 1 / n, dtype=torch.float64, device=x.device)
    return AtomJacobian(CountedAttention(layer, mass), x)


def _formed(operator: AtomJacobian) -> Float[Tensor, "batch n d_out d"]:
    """All blocks, by products with every unit vector at all tokens at once: what queries do is block diagonal."""
    n, d = operator.in_shape
    probes = torch.eye(d, dtype=operator.dtype, device=operator.device)[:, None, None].expand(-1, operator.batch, n, -1)
    return operator.queries().jvp(probes).permute(1, 2, 3, 0)


def _query_columns(operator: AttentionJacobian, rows: slice) -> Float[Tensor, "batch rows heads d_v d_h"]:
    """`B_i^h R_i` of any kind whose rows do not hang on each other: a kernel's products with unit vectors as queries."""
    layer = operator.layer
    blocks = torch.stack([t[:, :, :, rows] for t in _columns(operator)], -1)  # (batch, parts, heads, rows, d_v, part)
    if layer.rotary is not None:
        batch, parts, heads, _, d_v, _ = blocks.shape
        turned = layer.rotary.at(rows).turn(blocks.transpose(3, 4).flatten(1, 3), back=True)  # (batch, ·, rows, part)
        blocks = turned.unflatten(1, (parts, heads, d_v)).transpose(3, 4)
    return blocks.permute(0, 3, 2, 4, 1, 5).flatten(-2)


def _columns(operator: AttentionJacobian) -> Iterator[Float[Tensor, "batch parts heads n d_v"]]:
    """What every head does along one entry after the other of its queries, those of each part by themselves."""
    q, k, v = operator.kernel.inputs
    parts = operator.layer.kind.parts
    still = torch.zeros_like(k)[None], torch.zeros_like(v)[None]
    for entry in range(q.shape[-1]):
        images = []
        for part in range(parts):
            dq = torch.zeros_like(q).unflatten(1, (-1, parts))
            dq[:, :, part, :, entry] = 1.0
            images.append(operator.kernel.jvp(dq.flatten(1, 2)[None], *still)[0])  # (batch, heads, n, d_v)
        yield torch.stack(images, 1)


def _query_norms(operator: AttentionJacobian) -> Float[Tensor, "batch n"]:
    """`Σ_h ‖W_o^h‖ ‖B_i^h‖_F` times the slope of queries."""
    squares = sum(t.double().square().sum(-1).sum(1) for t in _columns(operator))  # (batch, heads, n)
    assert isinstance(squares, Tensor)
    w, slope = operator.layer.by_head(), operator.q_slope
    if operator.layer.kind.parts > 1 and slope is not None:  # norms over parts of a head: the steepest of them
        steep = slope.norm.weight.double().abs().max() / slope.scale.double()[..., 0].amin((1, 2))[:, None, None]
        slopes = steep * spectral_norm(w.q)[:, None] * operator.layer.heads**0.5
    else:
        slopes = query_slopes(operator)
    return (squares.sqrt() * spectral_norm(w.o)[:, None] * slopes).sum(1)


@final
class FormedBlocks(Operator):
    """Matrices, a batch of maps from (1, d) to (1, d_out)."""

    def __init__(self, matrices: Float[Tensor, "tokens d_out d"]):
        self._matrices = matrices
        self.batch = len(matrices)
        self.in_shape, self.out_shape = (1, matrices.shape[2]), (1, matrices.shape[1])
        self.dtype, self.device = matrices.dtype, matrices.device

    def jvp(self, v):
        return v @ self._matrices.mT

    def vjp(self, u):
        return u @ self._matrices

    def select(self, items):
        return FormedBlocks(self._matrices[items])


@final
class QueryBlocks(Operator):
    """`W_o blockdiag_h(B_i^h) D N_i W_q`, a batch with one item per token, `D N_i` the slope of a norm on queries."""

    def __init__(self, layer: Attention, blocks: Float[Tensor, "tokens heads d_v d_h"], norm: NormJacobian | None = None):
        self._layer, self._blocks, self._norm = layer, blocks, norm
        self.batch = len(blocks)
        self.in_shape, self.out_shape = (1, layer.width), (1, layer.out_width)
        self.dtype, self.device = blocks.dtype, blocks.device

    def jvp(self, v):
        q = v @ self._layer.w_q.mT  # (probes, tokens, 1, q_width)
        if self._norm is not None:
            q = self._norm.jvp(q.unflatten(-1, (-1, self._norm.in_shape[-1]))).flatten(-2)
        q = q.unflatten(-1, (self._layer.heads, -1))  # (probes, tokens, 1, heads, d_h)
        o = torch.einsum("thvk,ptihk->ptihv", self._blocks, q).flatten(-2)
        return o if self._layer.w_o is None else o @ self._layer.w_o.mT

    def vjp(self, u):
        o = (u if self._layer.w_o is None else u @ self._layer.w_o).unflatten(-1, (self._layer.heads, -1))
        q = torch.einsum("thvk,ptihv->ptihk", self._blocks, o).flatten(-2)
        if self._norm is not None:
            q = self._norm.vjp(q.unflatten(-1, (-1, self._norm.in_shape[-1]))).flatten(-2)
        return q @ self._layer.w_q

    def select(self, items):
        return QueryBlocks(self._layer, self._blocks[items], None if self._norm is None else self._norm.select(items))


def _norm_at(operator: AttentionJacobian, rows: slice) -> NormJacobian | None:
    """The slope of the norm on queries at some tokens, one item each, (1, heads, head width) or (1, 1, all heads)."""
    slope = operator.q_slope
    if slope is None:
        return None
    unit, scale = (t[:, None] if t.ndim == 3 else t for t in (slope.unit, slope.scale))  # (batch, heads or 1, n, ·)
    unit, scale = (t[:, :, rows].transpose(1, 2).flatten(0, 1)[:, None] for t in (unit, scale))
    return NormJacobian(slope.norm, unit, scale, slope.offset.repeat_interleave(len(unit) // slope.batch))


def _through_queries(operator: AttentionJacobian, rows: slice) -> Float[Tensor, "batch rows heads d_v d_h"]:
    """`B_i^h R_i` from moments of values and keys, measured from their means so that little cancels; `R_i` the phases."""
    kernel, inverse = operator.kernel.tiled(), inverse_rows(operator)
    batch, heads, _, m = kernel.shape
    v, k, o = _centred(kernel)
    d_v, d_h = v.shape[-1], k.shape[-1]
    step = max(1, _FEATURES // (d_v * d_h))
    blocks = v.new_zeros(batch * heads, rows.stop - rows.start, d_v, d_h)
    for g in range(batch * heads):
        weights = kernel.row_slopes(g, rows) * inverse[g, rows, None]  # (rows, m)
        second = weights.new_zeros(len(weights), d_v * d_h)
        for start in range(0, m, step):
            cols = slice(start, min(start + step, m))
            second += weights[:, cols] @ (v[g, cols, :, None] * k[g, cols, None, :]).flatten(1)
        first = weights @ k[g]
        blocks[g] = operator.layer.scale * (second.unflatten(1, (d_v, d_h)) - o[g, rows, :, None] * first[:, None])
    if operator.layer.rotary is not None:  # every row of a block is a vector like a query
        rotary = operator.layer.rotary.at(rows)
        turned = blocks.unflatten(0, (batch, heads)).transpose(2, 3).flatten(1, 2)  # (batch, heads · d_v, rows, d_h)
        blocks = rotary.turn(turned, back=True).unflatten(1, (heads, d_v)).transpose(2, 3).flatten(0, 1)
    return blocks.unflatten(0, (batch, heads)).transpose(1, 2)


def _spreads(operator: AttentionJacobian) -> BlockSizes:
    layer, kernel, inverse = operator.layer, operator.kernel.tiled(), inverse_rows(operator)
    batch, heads, n, m = kernel.shape
    v, k, o = _centred(kernel)
    v_size, k_size = (largest_entry(t) for t in (v, k))  # taken out, so that squares stay in range
    v, k, o = v / v_size, k / k_size, o / v_size
    moments = v.new_zeros(len(v), n, 2 + v.shape[-1])
    columns = torch.cat([v.square().sum(-1, keepdim=True), k.square().sum(-1, keepdim=True), v], -1)
    total = torch.zeros_like(inverse)
    for b in kernel.blocks():
        moments[b.heads, b.rows] += torch.bmm(b.slope, columns[b.heads, b.cols])
        total[b.heads, b.rows] += b.slope.sum(-1)
    moments, total = (moments * inverse[..., None]).double(), (total * inverse).double()
    o = o.double()
    # Σ Q |v − o|² = Σ Q |v|² − 2 o·Σ Q v + |o|² Σ Q, with what rounding may hide of it
    near = moments[..., 0] - 2 * (o * moments[..., 2:]).sum(-1) + o.square().sum(-1) * total
    noise = ROUNDINGS * torch.finfo(operator.dtype).eps * math.sqrt(layer.width + m)
    far = (moments[..., 0].sqrt() + o.norm(dim=-1) * total.sqrt()).square()
    near, far, keys = (near.clamp_min(0) + noise * far).sqrt(), far.sqrt(), moments[..., 1].sqrt()
    # values and keys were rounded before their means were taken off, and a soft-cap's slope where it is near zero
    errors, parts = vector_errors(operator), ((kernel.v, v_size), (kernel.k, k_size))
    long_v, long_k = (lengths(t.double()).amax(-1, keepdim=True) / size for t, size in parts)
    long_v, long_k = long_v + errors.v[:, None] / (noise * v_size), long_k + errors.k[:, None] / (noise * k_size)
    cut = (noise if kernel.scores.softcap is None else 1.0) * long_v * long_k
    bound = (near + 2 * noise * long_v) * (keys + noise * long_k) + 2 * noise * cut
    terms = far * keys + 2 * long_v * keys + far * long_k + 2 * cut
    out = spectral_norm(layer.by_head().o)[:, None] * v_size
    gain = abs(layer.scale) * (query_slopes(operator) * k_size) * out  # (batch, heads, n)
    bound, terms = ((torch.where(inverse > 0, t, 0.0).unflatten(0, (batch, heads)) * gain).sum(1) for t in (bound, terms))
    return BlockSizes(no_nan(bound * (1 + noise)), no_nan(terms))


def _centred(kernel: Tiled) -> tuple[Tensor, Tensor, Tensor]:
    """Values, keys and outputs measured from the mean value and key; under a soft-cap keys stay as they are."""
    value = kernel.v.mean(1, keepdim=True)
    key = kernel.k.mean(1, keepdim=True) if kernel.scores.softcap is None else torch.zeros_like(kernel.k[:, :1])
    return kernel.v - value, kernel.k - key, kernel.o - value
