"""How far a product with a Jacobian, computed in floating point, can be from the exact one: proved, not measured.

docs/explanation/theory.md, Proposition 2.6. Worst cases throughout: lengths of vectors and norms of matrices
stand for everything finer.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from howsmooth.kernels.kinds import Softmax
from howsmooth.kernels.tiled import Tiled
from howsmooth.maps.operator import Rounding

if TYPE_CHECKING:
    from howsmooth.maps.jacobian import AttentionJacobian, NormJacobian

_LIBRARY = 4  # units in the last place by which exp, tanh and a square root may be off


def attention_rounding(J: "AttentionJacobian") -> Rounding | None:
    """Of an attention layer on tiles of weights; nothing for fused kernels, whose sums are not plain floating point.

    Nothing either for a norm over all heads or for kinds other than softmax, of which it is not derived.
    """
    layer, kernel = J.layer, J.kernel
    slopes = J.q_slope, J.k_slope
    if not isinstance(kernel, Tiled) or not isinstance(layer.kind, Softmax) or J.tokens is None or layer.coupled:
        return None
    _, heads, n, m = kernel.shape
    a, c, group = layer.head_width, kernel.v.shape[-1], heads // layer.kv_heads
    unit = torch.finfo(J.dtype).eps / 2
    x, turn = _longest(J.tokens), 1.0 if layer.rotary is None else layer.rotary.gain
    q = _reach(kernel.q, layer.w_q, layer.b_q, heads, slopes[0], x, turn, unit)
    k = _reach(kernel.k, layer.w_k, layer.b_k, layer.kv_heads, slopes[1], x, turn, unit)
    v = _reach(kernel.v, layer.w_v, layer.b_v, layer.kv_heads, None, x, 1.0, unit)
    if q is None or k is None or v is None:
        return None
    scale = abs(layer.scale)
    logit = scale * q.length * k.length
    moved = logit * ((1 + q.off) * (1 + k.off) * (1 + _gamma(a + 2, unit)) - 1)  # by how much a logit is off
    if layer.softcap is not None:
        moved += 2 * _LIBRARY * unit * min(layer.softcap, logit)
    if (bias := kernel.scores.mask.bias) is not None:
        moved += 2 * unit * (logit + moved + float(bias.masked_fill(~bias.isfinite(), 0.0).abs().max()))
    sink = 0.0 if layer.kind.sink is None else float(layer.kind.sink.double().abs().max())
    # a weight, as a share of it: exp, and the sum it is divided by, one term longer with a sink
    raised = max(logit + moved, sink)
    weight = math.expm1(min(2 * (moved + 2 * unit * raised) + _gamma(m + 1 + 4 * _LIBRARY, unit), 700.0))
    mean = v.off + weight + _gamma(m + 2, unit)  # an output, as a share of the longest value
    # a path through the layer: a weight, an entry of dS, a value less the output; and all sums on it, either way
    off = (1 + weight) * (1 + max(q.off, k.off)) * (1 + v.off + mean) - 1
    if layer.softcap is not None:
        off += (2 * moved / layer.softcap + 4 * _LIBRARY * unit) * (1 + off)
    sums = _gamma(2 * a + c + max(n, m) + group + 24, unit)
    step = (1 + q.fixed + k.fixed) * (1 + off)  # the stored map's paths against the exact ones'
    along = (1 + max(q.along, k.along, v.along)) * (1 + sums) - 1
    # attention spreads a key or value by the root of what is paid to it, in each head that shares it
    paid = min(float(n), 1.01 * heads * float(kernel.attention_received().max()))
    share = math.sqrt(paid * group)
    size = 2 * scale * v.length * (k.length * q.gain + q.length * share * k.gain) + share * v.gain
    fixed, size = size * (step - 1), size * step
    error = size * along
    if layer.w_o is not None:
        out, own = _norm(layer.w_o), _gamma(max(layer.w_o.shape), unit) * _frobenius(layer.w_o)
        size, error, fixed = out * size, out * error + own * (size + error), out * fixed
    return Rounding(size, error, fixed) if math.isfinite(error + fixed) else None


def norm_rounding(J: "NormJacobian") -> Rounding:
    """Of LayerNorm and RMSNorm."""
    unit = torch.finfo(J.dtype).eps / 2
    size = 4 * float(J.norm.weight.abs().max()) / float(J.scale.min())
    off = size * _gamma(3 * J.unit.shape[-1] + 32, unit)
    return Rounding(size, 2 * off, 8 * off * (1 + float(J.offset)))


class _Reach(NamedTuple):
    """Queries, keys or values.

    length: of the longest.  off: by how much one is off, as a share of that.  gain: the norm of the derivative along the
    tokens.  along, fixed: by how much products with it are off, and by how much it is itself, as a share of it.
    """

    length: float
    off: float
    gain: float
    along: float
    fixed: float


def _reach(
    rows: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    heads: int,
    slope: "NormJacobian | None",
    x: float,
    turn: float,
    unit: float,
) -> _Reach | None:
    """rows: as computed.  w, b: of the projection.  slope: of a norm after it.  x: the longest token.  turn: of the phases."""
    gain, along, off, fixed = 1.0, 0.0, 0.0, 0.0  # of the tokens themselves
    if w is not None:
        sums = _gamma(max(w.shape) + 2, unit)
        gain, along = _norm(w), sums * _frobenius(w) / max(_norm(w), 1e-300)
        own = _longest(w.unflatten(0, (heads, -1)).flatten(1))
        off = sums * (own * x + (0.0 if b is None else _longest(b.unflatten(0, (heads, -1)))))
    length = _longest(rows) / turn  # before the phases
    if slope is not None:
        known = norm_rounding(slope)
        if not off < 0.1 * float(slope.scale.min()):
            return None
        off = 2 * known.size * off + 8 * _gamma(3 * rows.shape[-1] + 32, unit) * (1 + float(slope.offset)) * length
        if known.size:
            along, fixed = (1 + along) * (1 + known.error / known.size) - 1, known.fixed / known.size
        gain *= known.size
    off = off + 8 * unit * length
    length = length + off
    return _Reach(turn * length, off / length if length else 0.0, turn * gain, (1 + along) * (1 + 8 * unit) - 1, fixed)


def _gamma(count: int, unit: float) -> float:
    """`γ_m = m u/(1 − m u)`: the relative error of a sum of `m` products, in any order."""
    return count * unit / (1 - count * unit) if count * unit < 0.5 else math.inf


def _frobenius(w: Tensor) -> float:
    """The Frobenius norm, rounded up."""
    return float(w.double().norm()) * (1 + 1e-9)


def _norm(w: Tensor) -> float:
    """The largest singular value, rounded up."""
    return float(torch.linalg.matrix_norm(w.double(), 2)) * (1 + 1e-9)


def _longest(rows: Tensor) -> float:
    """The longest row, rounded up."""
    return float(rows.double().norm(dim=-1).max()) * (1 + 1e-9)
