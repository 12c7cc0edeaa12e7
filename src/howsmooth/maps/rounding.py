"""How far a product with a Jacobian, computed in floating point, can be from the exact one: proved, not measured.

docs/explanation/theory.md, Propositions 2.6 (every product) and 2.7 (one product). Worst cases throughout: lengths of vectors
and norms of matrices stand for everything finer. What depends on the point is known for every item and head by itself.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.tiled import Tiled
from howsmooth.spectral.matrices import spectral_norm
from howsmooth.spectral.operator import Rounded, Rounding

if TYPE_CHECKING:
    from howsmooth.maps.jacobian import AttentionJacobian, NormJacobian

_LIBRARY = 4  # units in the last place by which exp, tanh and a square root may be off
_NEAR = 0.1  # share of a norm's divisor by which what enters may be off; past it nothing is proved
_GONE = 800.0  # a logit so far below the largest of its row has weight zero
_SMALLEST = torch.finfo(torch.float64).tiny  # more than underflow takes from a row

Heads = Float[Tensor, "batch heads"]
Vectors = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, (…, batch, heads, n, ·)


def attention_rounding(J: "AttentionJacobian", point: "Point") -> Rounding | None:
    """What is proved of all products with the Jacobian of an attention layer."""
    layer, unit, group = J.layer, torch.finfo(J.dtype).eps / 2, J.layer.heads // J.layer.kv_heads
    turn = 1.0 if layer.rotary is None else layer.rotary.gain
    (q, k, v), gains, along = point.reaches, [], torch.zeros_like(point.paths)
    for w, reach, phases in ((layer.w_q, q, turn), (layer.w_k, k, turn), (layer.w_v, v, 1.0)):
        own = 1.0 if w is None else _norm(w)
        sums = 0.0 if w is None else _gamma(max(w.shape) + 2, unit) * _frobenius(w) / max(own, 1e-300)
        gains.append(own * reach.steep * phases)
        along = along.maximum((1 + sums) * (1 + reach.along) * (1 + 8 * unit) - 1)
    along, step = (1 + along) * (1 + point.sums) - 1, 1 + point.paths
    # attention spreads a key or value by the root of what is paid to it, in each head that shares it
    paid = min(float(J.in_shape[0]), 1.01 * layer.heads * float(J.kernel.attention_received().max()))
    share, twice = math.sqrt(paid * group), 2 * abs(layer.scale) * v.length
    # through queries, keys and values: each is shared by the heads, which are the worst for one of them each
    sizes = torch.stack([twice * k.length * gains[0], twice * q.length * share * gains[1], share * gains[2]])
    size, fixed, error = (float((sizes * s).amax((1, 2)).sum()) for s in (step, step - 1, step * along))
    if layer.w_o is not None:
        out, own = _norm(layer.w_o), _gamma(max(layer.w_o.shape), unit) * _frobenius(layer.w_o)
        size, error, fixed = out * size, out * error + own * (size + error), out * fixed
    return Rounding(size, error, fixed, float(point.moved.max())) if math.isfinite(error + fixed) else None


def attention_errors(
    J: "AttentionJacobian",
    point: "Point",
    v: tuple[Tensor, Float[Tensor, "probes batch n"]],
    projected: Vectors,
    vectors: Vectors,
    t: Float[Tensor, "probes batch n o_width"],
) -> Float[Tensor, "probes batch n"]:
    """By how much each row of one product is off.

    v: what was multiplied, and how far its rows are off.  projected, vectors: its queries, keys and values before and after
    norms and phases.  t: what the heads made of them, side by side.
    """
    layer, unit, group = J.layer, torch.finfo(J.dtype).eps / 2, J.layer.heads // J.layer.kv_heads
    turn = 1.0 if layer.rotary is None else layer.rotary.gain
    paths = ((1 + point.paths) * (1 + point.sums) - 1)[..., None]
    entered, off_entered = _lengths(v[0])[..., None, :], v[1][..., None, :]
    sides = (layer.w_q, J.q_slope, turn, 1), (layer.w_k, J.k_slope, turn, group), (layer.w_v, None, 1.0, group)
    ends = []  # (probes, batch, heads, n): by how much a path along this direction is off, as a share of its other factors
    for (w, slope, phases, shared), reach, before, after in zip(sides, point.reaches, projected, vectors, strict=True):
        off, length = off_entered, _shared(_lengths(after), shared, -2)
        if w is not None:
            sums, own = _gamma(max(w.shape) + 2, unit), _shared(_by_head(w, layer.heads // shared), shared, 0)[:, None]
            off = own * (sums * entered + (1 + sums) * off) + _SMALLEST
        if slope is not None:
            share = ((1 + reach.fixed) * (1 + reach.along) - 1)[..., None]
            off = _shared(_steep(slope), shared, -2) * (share * _shared(_lengths(before), shared, -2) + off) + _SMALLEST
        off = phases * (1 + 8 * unit) * off + 8 * unit * length
        ends.append(paths * length + (1 + 2 * paths) * off)
    (q, k, value), (dq, dk, dv) = (r.length[..., None] for r in point.reaches), ends
    inner = abs(layer.scale) * (k * dq + q * dk.amax(-1, keepdim=True)) + _SMALLEST
    off = 2 * value * inner + dv.amax(-1, keepdim=True) + _SMALLEST  # of the heads' outputs
    if layer.attention_mask is not None:
        off = off * layer.attention_mask[:, None]
    if layer.w_o is None:
        return off.norm(dim=-2)
    out, sums = _by_head(layer.w_o.mT, layer.heads)[:, None], _gamma(max(layer.w_o.shape) + 2, unit)
    summed = sums * _lengths(t.unflatten(-1, (layer.heads, -1))).transpose(-1, -2)
    return (out * ((1 + sums) * off + summed)).sum(-2) + _SMALLEST


class _RowReach(NamedTuple):
    """Queries, keys or values of every head of the layer.

    length: of the longest.  off: by how much one is off, as a share of that.  steep: the norm of the derivative of a norm on
    them, 1 without.  along, fixed: by how much products with that are off, and by how much it is itself, as a share of it.
    """

    length: Heads
    off: Heads
    steep: Heads
    along: Heads
    fixed: Heads


class Point(NamedTuple):
    """What is known at the point of a layer.

    reaches: of queries, keys and values.  paths: by how much a path through the layer with the stored numbers is off, as a
    share of its length.  sums: what the sums of a product add to it.  moved: by how much an output of the layer is off.
    """

    reaches: tuple[_RowReach, _RowReach, _RowReach]
    paths: Heads
    sums: float
    moved: Float[Tensor, " batch"]


def attention_point(J: "AttentionJacobian", moved: Float[Tensor, " batch"]) -> Point | None:
    """What rounding does at the point of an attention layer on tiles of weights; nothing for fused kernels, whose sums are not
    plain floating point.

    Nothing either for a norm over all heads or for kinds other than softmax, of which it is not derived.
    moved: by how much a token is off.
    """
    layer, kernel = J.layer, J.kernel
    if not isinstance(kernel, Tiled) or not layer.kind.traits.softmax or J.tokens is None or layer.coupled:
        return None
    batch, heads, n, m = kernel.shape
    a, c, group = layer.head_width, kernel.v.shape[-1], heads // layer.kv_heads
    unit = torch.finfo(J.dtype).eps / 2
    x, turn = _lengths(J.tokens).amax(-1), 1.0 if layer.rotary is None else layer.rotary.gain
    q = _reach(kernel.q.unflatten(0, (batch, heads)), layer.w_q, layer.b_q, 1, J.q_slope, x, moved, turn, unit)
    k = _reach(kernel.k.unflatten(0, (batch, heads)), layer.w_k, layer.b_k, group, J.k_slope, x, moved, turn, unit)
    v = _reach(kernel.v.unflatten(0, (batch, heads)), layer.w_v, layer.b_v, group, None, x, moved, 1.0, unit)
    logit = abs(layer.scale) * q.length * k.length
    off = logit * ((1 + q.off) * (1 + k.off) * (1 + _gamma(a + 2, unit)) - 1)  # by how much a logit is off
    if layer.softcap is not None:
        off = off + 2 * _LIBRARY * unit * logit.clamp_max(layer.softcap)
    if (bias := kernel.scores.mask.bias) is not None:
        gone = float((logit + off).max()) + float(kernel.largest.abs().max()) + _GONE  # what is so low or high hides a key
        added = torch.where(bias.abs() <= gone, bias.double().abs(), 0.0).amax((-2, -1))
        off = off + 2 * unit * (logit + off + added)
    raised = logit + off
    if (sink := layer.kind.traits.sink) is not None:
        raised = raised.maximum(sink.double().abs().minimum(raised + _GONE))
    # a weight, as a share of it: exp, and the sum it is divided by, one term longer with a sink
    weight = (2 * (off + 2 * unit * raised) + _gamma(m + 1 + 4 * _LIBRARY, unit)).clamp_max(700.0).expm1()
    mean = v.off + weight + _gamma(m + 2, unit)  # an output, as a share of the longest value
    # a path through the layer: slopes of norms, a weight, an entry of dS, a value less the output; and all sums on it
    paths = (1 + weight) * (1 + q.off) * (1 + k.off) * (1 + v.off + mean) - 1
    if layer.softcap is not None:
        paths = paths + (2 * off / layer.softcap + 4 * _LIBRARY * unit) * (1 + paths)
    paths = (1 + q.fixed + k.fixed) * (1 + paths) - 1
    sums = _gamma(2 * a + c + max(n, m) + group + 24, unit)
    outputs = (mean * v.length).norm(dim=-1)
    if layer.w_o is not None:
        wide = _gamma(max(layer.w_o.shape) + 2, unit)
        outputs = _frobenius(layer.w_o) * ((1 + wide) * outputs + wide * v.length.norm(dim=-1))
    outputs = outputs + 0 if layer.b_o is None else outputs + 2 * unit * _longest(layer.b_o)
    return Point((q, k, v), paths, sums, outputs)


def _reach(
    rows: Float[Tensor, "batch heads n _"],
    w: Tensor | None,
    b: Tensor | None,
    group: int,
    slope: "NormJacobian | None",
    x: Float[Tensor, " batch"],
    moved: Float[Tensor, " batch"],
    turn: float,
    unit: float,
) -> _RowReach:
    """rows: as computed.  w, b: of the projection, for `group` heads at a time.  slope: of a norm after it.  x: the longest
    token.  moved: by how much tokens are off.  turn: of the phases."""
    heads = rows.shape[1] // group
    length = _lengths(rows).amax(-1) / turn  # before the phases
    off = moved[:, None].expand_as(length)
    if w is not None:
        sums, own = _gamma(max(w.shape) + 2, unit), _shared(_by_head(w, heads), group, 0)
        shift = 0.0 if b is None else _shared(_by_head(b, heads), group, 0)
        off = (1 + sums) * own * off + sums * (own * x[:, None] + shift)
    steep, along, fixed = torch.ones_like(length), torch.zeros_like(length), torch.zeros_like(length)
    if slope is not None:
        norm = _NormRounding.of(slope, off.unflatten(1, (heads, group)).amax(-1), unit)
        steep, along, fixed, off = (_shared(t, group, 1) for t in (norm.steep, norm.along, norm.fixed, norm.moved))
    off = off + 8 * unit * length
    length = length + off
    return _RowReach(turn * length, off / torch.where(length > 0, length, 1.0), steep, along, fixed)


def norm_rounding(J: "NormJacobian", moved: float) -> Rounding | None:
    """What is proved of all products with the Jacobian of a norm.  moved: by how much a token is off."""
    off = torch.full(J.scale.shape[:-2], moved, dtype=torch.float64, device=J.device)
    norm = _NormRounding.of(J, off, torch.finfo(J.dtype).eps / 2)
    size = float(norm.steep.max())
    known = Rounding(size, size * float(norm.along.max()), size * float(norm.fixed.max()), float(norm.moved.max()))
    return known if math.isfinite(known.fixed) else None


def norm_errors(J: "NormJacobian", v: Rounded) -> tuple[Tensor | None, Tensor | None]:
    """By how much each row of one product with the Jacobian of a norm is off, and by how much the norm's outputs are."""
    if v.off is None or v.moved is None:
        return None, None
    norm = _NormRounding.of(J, v.moved, torch.finfo(J.dtype).eps / 2)
    share = (1 + norm.fixed) * (1 + norm.along) - 1
    return _steep(J) * (share[..., None] * _lengths(v.vector) + v.off) + _SMALLEST, norm.moved


class _NormRounding(NamedTuple):
    """What is known at the point of a norm: of an item, or of the heads of one.

    steep: bounds the norm of the derivative.  along, fixed: by how much products with it are off, and by how much it is
    itself, as a share of it.  moved: by how much an output is off. All infinite where an input is off by much of its spread.
    """

    steep: Tensor
    along: Tensor
    fixed: Tensor
    moved: Tensor

    @classmethod
    def of(cls, J: "NormJacobian", moved: Tensor, unit: float) -> "_NormRounding":
        """moved: by how much an input is off."""
        d, steep, near = J.unit.shape[-1], _steep(J).amax(-1), moved / J.scale.double()[..., 0].amin(-1)
        root = d**0.5  # no normalised vector is longer
        longest = float(J.norm.weight.double().abs().max()) * root + (0.0 if J.norm.bias is None else _longest(J.norm.bias))
        own = 4 * _gamma(d + 12, unit) * (1 + J.offset.double().reshape(-1, *[1] * (steep.ndim - 1)))
        along, fixed = torch.full_like(steep, 2 * _gamma(3 * d + 32, unit)), own + 2 * near / root
        out = steep * moved / 3 + own * longest
        return cls(steep, *(torch.where((near < _NEAR) & (own < _NEAR), t, torch.inf) for t in (along, fixed, out)))


def _steep(J: "NormJacobian") -> Tensor:
    """A bound on the norm of each row's derivative, and on that of the same with a divisor that is a little off."""
    return 4 * J.norm.weight.double().abs().max() / J.scale.double()[..., 0]


def _gamma(count: int, unit: float) -> float:
    """`γ_m = m u/(1 − m u)`: the relative error of a sum of `m` products, in any order."""
    return count * unit / (1 - count * unit) if count * unit < 0.5 else math.inf


def _frobenius(w: Tensor) -> float:
    """The Frobenius norm, rounded up."""
    return float(w.double().norm()) * (1 + 1e-9)


def _by_head(w: Tensor, heads: int) -> Float[Tensor, " heads"]:
    """The Frobenius norm of each head's rows, rounded up."""
    parts = w.double().unflatten(0, (heads, -1))
    return torch.linalg.vector_norm(parts, dim=tuple(range(1, parts.ndim))) * (1 + 1e-9)


def _norm(w: Tensor) -> float:
    """The largest singular value, rounded up."""
    return float(spectral_norm(w.double())) * (1 + 1e-9)


def _shared(t: Tensor, group: int, dim: int) -> Tensor:
    """What belongs to keys and values, once for every head that shares them."""
    return t if group == 1 else t.repeat_interleave(group, dim)


def _lengths(rows: Float[Tensor, "*axes n _"]) -> Float[Tensor, "*axes n"]:
    """The length of every row, rounded up."""
    return rows.double().norm(dim=-1) * (1 + 1e-9)


def _longest(rows: Tensor) -> float:
    """The longest row, rounded up."""
    return float(_lengths(rows).max())
