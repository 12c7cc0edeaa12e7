"""What the fused kernels share: one loader, products of one or three passes, logits of a block, blocks that a mask leaves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

# numbers that a kernel is not compiled anew for
_SIZES = ("n", "m", "batch", "heads", "group", "d", "d_v", "window", "first")
_STRIDES = tuple(f"{name}_{axis}" for name in ("bias", "o", "out", "out2") for axis in ("probe", "item", "head", "row"))


class Kernel(NamedTuple):
    """One kernel, compiled for packed operands, and for operands as they come, whose strides it is compiled for."""

    packed: Any
    native: Any


def kernel(*anew: str) -> Callable[[Callable[..., None]], Kernel]:
    """anew: sizes that the kernel of packed operands is compiled for."""

    def both(function: Callable[..., None]) -> Kernel:
        packed = [name for name in (*_SIZES, *_STRIDES, "step", "SCALES") if name not in anew]
        return Kernel(*(triton.jit(function, do_not_specialize=names) for names in (packed, _SIZES)))

    return both


@triton.jit
def own_rows(batch, heads, group, step, BM: tl.constexpr, DOCUMENTS: tl.constexpr = False):
    """Of a program with rows of its own: its head among those of all items, item, head, key head, probe, first row.

    The last rows come first, the longest under a causal mask; of their blocks of 128, every `step`-th.
    """
    PARTS: tl.constexpr = 128 // BM
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_g, i_probe = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if DOCUMENTS:
        i_g = i_g % (batch * heads)
    i_head = i_g % heads
    return i_g, i_g // heads, i_head, i_head // group, i_probe, i_block // PARTS * (128 * step) + i_block % PARTS * BM


@triton.jit
def own_columns(batch, heads, group, BN: tl.constexpr, DOCUMENTS: tl.constexpr = False):
    """Of a program with columns of its own: its key head among those of all items, item, key head, probe, first column."""
    i_g, i_probe = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_heads = heads // group
    if DOCUMENTS:
        i_g = i_g % (batch * kv_heads)
    return i_g, i_g // kv_heads, i_g % kv_heads, i_probe, tl.program_id(0) * BN


@triton.jit
def document(TABLE, heads):
    """Of a program of one document, of so many heads of all items: its first query, queries, its first key, keys."""
    p = TABLE + tl.program_id(1) // heads * 4
    return tl.load(p).to(tl.int64), tl.load(p + 1), tl.load(p + 2).to(tl.int64), tl.load(p + 3)


@triton.jit
def padded(n, PACKED: tl.constexpr):
    """How many rows or columns there is room for."""
    return tl.cdiv(n, 128) * 128 if PACKED else n


@triton.jit
def tile(
    P, P_LO, at, start, limit, stride, c, width,
    N: tl.constexpr, PASSES: tl.constexpr, PAD: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Rows `start … start + N − 1` of a matrix at `at`, the last one again past its end, (N, padded width), and their `lo`.

    Offsets inside a matrix have 32 bits: with 64 a product of an H200 takes up to half as long again.
    """
    r = tl.arange(0, N)
    if RAGGED:
        r = tl.minimum(r, limit - 1 - start)
    offsets = (start + r)[:, None] * stride + c[None, :]
    p = P + at + offsets
    b_hi = tl.load(p, mask=c[None, :] < width, other=0.0) if PAD else tl.load(p)
    b_lo = b_hi
    if PASSES == 3:
        b_lo = tl.load(P_LO + at + offsets)
    return b_hi, b_lo


@triton.jit
def plain(P, at, start, limit, stride, c, width, N: tl.constexpr, PAD: tl.constexpr, RAGGED: tl.constexpr):
    """A `tile` that is whole in one part."""
    return tile(P, P, at, start, limit, stride, c, width, N, 1, PAD, RAGGED)[0]


@triton.jit
def stat(P, n, i, other, RAGGED: tl.constexpr):
    """A number for each row."""
    return tl.load(P, mask=i < n, other=other) if RAGGED else tl.load(P)


@triton.jit
def stats(LSE, i_row, n_rows, n, i, RAGGED: tl.constexpr):
    """The largest logit of each row, and what the logarithm of its sum adds to it; (rows of all heads, 2, n_rows)."""
    p = LSE + i_row * 2 * n_rows + i
    return stat(p, n, i, 0.0, RAGGED), stat(p + n_rows, n, i, float("inf"), RAGGED)


@triton.jit
def put(P, at, b_x, start, limit, stride, c, width, N: tl.constexpr):
    """Write rows of a matrix."""
    r = tl.arange(0, N)
    p = P + (at + tl.cast(start, tl.int64) * stride) + r[:, None] * stride + c[None, :]
    tl.store(p, b_x.to(P.dtype.element_ty), mask=(r[:, None] < limit - start) & (c[None, :] < width))


@triton.jit
def split(b_x, b_like, PASSES: tl.constexpr):
    """A float32 block in the precision of another, and what is left of it."""
    b_hi = b_x.to(b_like.dtype)
    b_lo = b_hi
    if PASSES == 3:
        b_lo = (b_x - b_hi.to(tl.float32)).to(b_like.dtype)
    return b_hi, b_lo


@triton.jit
def dot(b_a, b_a_lo, b_b, b_b_lo, b_acc, PASSES: tl.constexpr, PRECISION: tl.constexpr):
    """`acc + a b`, small terms first. PRECISION: of float32 operands, whose products are tf32's, once or three times."""
    if PASSES == 3:
        b_acc = tl.dot(b_a_lo, b_b, b_acc)
        b_acc = tl.dot(b_a, b_b_lo, b_acc)
    return tl.dot(b_a, b_b, b_acc, input_precision=PRECISION)


@triton.jit
def across(b_a, b_a_lo, b_b, b_b_lo, PASSES: tl.constexpr, PRECISION: tl.constexpr):
    """`a bᵀ`."""
    b_zero = tl.zeros([b_a.shape[0], b_b.shape[0]], tl.float32)
    return dot(b_a, b_a_lo, tl.trans(b_b), tl.trans(b_b_lo), b_zero, PASSES, PRECISION)


@triton.jit
def accumulate(b_a, b_a_lo, b_b, b_b_lo, b_acc, one, PASSES: tl.constexpr, PRECISION: tl.constexpr, PROMOTE: tl.constexpr):
    """`acc + a b` for sums along a whole row or column.

    The chip cuts sums inside its matrix units short instead of rounding them, a shrinking of 2⁻²⁴ a time that long rows
    feel. PROMOTE adds block by block in float32; `one` is 1, which the compiler does not know and so cannot merge the two.
    """
    if PROMOTE:
        return b_acc + one * dot(b_a, b_a_lo, b_b, b_b_lo, tl.zeros(b_acc.shape, tl.float32), PASSES, PRECISION)
    return dot(b_a, b_a_lo, b_b, b_b_lo, b_acc, PASSES, PRECISION)


@triton.jit
def finish(
    b_s, i, j, n, m, window, first, scale, cap, P_BIAS, bias_row, P_KEYS,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, KEYS: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Logits in units of log 2 from `q·k`, the soft-cap's slope, and how that bends, `−2 tanh(s/c)/c`.

    `i` and `j` broadcast against each other. KEYS: a number for each key is added. EDGE: the mask cuts through the block.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    b_slope = b_s
    b_bend = b_s
    if CAP:
        b_s = b_s * scale
        b_e = tl.exp2(tl.abs(b_s) * (-2 * LOG2E / cap))
        b_t = tl.where(b_s < 0, -1.0, 1.0) * (1 - b_e) / (1 + b_e)  # tanh, from an exponential that cannot overflow
        b_slope = 4 * b_e / ((1 + b_e) * (1 + b_e))
        b_bend = -2 * b_t / cap
        b_s = b_t * (cap * LOG2E)
    else:
        b_s = b_s * (scale * LOG2E)
    if BIAS:
        p_bias = P_BIAS + tl.minimum(i, n - 1).to(tl.int64) * bias_row + tl.minimum(j, m - 1)
        b_bias = tl.load(p_bias).to(tl.float32)
        # only −∞ hides a key: the least finite number, which masks are filled with, must not become that in these units
        b_s += b_bias * tl.where(tl.abs(b_bias) < 2.3e38, LOG2E, 1.0)
    if EDGE:
        visible = j < m
        i = i + first
        if CAUSAL:
            visible = visible & (j <= i)
        if WINDOW:
            visible = visible & (i - j < window) & (j - i < window)
        b_s = tl.where(visible, b_s, float("-inf"))
    if KEYS:
        b_s += tl.load(P_KEYS + j)
    return b_s, b_slope, b_bend


@triton.jit
def weigh(b_s, b_top, b_lse, b_slope, CAP: tl.constexpr, SIGMOID: tl.constexpr):
    """Weights in units of `2^lse`, and their slope in logits before the soft-cap. `b_top` and `b_lse` broadcast against `b_s`.

    Softmax: `2^(s − top − lse)`, its own slope; the largest logit `top` is apart, for offsets that a whole row shares.
    Sigmoid: `2^−lse σ(s) = 1/(2^lse + e)` with one exponential `e = 2^(lse − s)`, kept below where it overflows; the slope is
    the weight times `σ(−s)`, which is the weight times `e`.
    """
    if SIGMOID:
        b_e = tl.exp2(tl.minimum(b_lse - b_s, 126.0))  # which hides NaN: logits are checked before
        b_root = tl.math.rsqrt(tl.exp2(b_lse) + b_e)
        b_w = b_root * b_root  # a division takes several instructions more
        b_own = b_w * (b_w * b_e)
        return b_w, b_slope * b_own if CAP else b_own
    b_w = tl.exp2(b_s - b_top - b_lse)
    return b_w, b_slope * b_w if CAP else b_w


@triton.jit
def columns(i0, m, window, first, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Columns that rows `i0 … i0 + BM − 1` attend to: start, then from where to where no mask is needed, then end."""
    i0 += first
    start = 0
    end = m
    whole_start = 0
    whole_end = m
    if CAUSAL:
        end = tl.minimum(end, i0 + BM)
        whole_end = tl.minimum(whole_end, i0 + 1)
    if WINDOW:
        start = tl.maximum(0, i0 - window + 1) // BN * BN
        end = tl.minimum(end, i0 + BM - 1 + window)
        whole_start = tl.maximum(0, i0 + BM - window)
        whole_end = tl.minimum(whole_end, i0 + window)
    return _ordered(start, whole_start, whole_end, end, BN)


@triton.jit
def rows(j0, n, window, first, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Rows that attend to columns `j0 … j0 + BN − 1`, as `columns`. Padding needs no mask: its `P` is zero or never read."""
    j0 -= first
    start = 0
    end = n
    whole_start = 0
    whole_end = tl.cdiv(n, BM) * BM
    if CAUSAL:
        start = tl.maximum(0, j0) // BM * BM
        whole_start = j0 + BN - 1
    if WINDOW:
        start = tl.maximum(start, tl.maximum(0, j0 - window + 1) // BM * BM)
        end = tl.minimum(end, j0 + BN - 1 + window)
        whole_start = tl.maximum(whole_start, tl.maximum(0, j0 + BN - window))
        whole_end = tl.minimum(whole_end, j0 + window)
    return _ordered(start, whole_start, whole_end, end, BM)


@triton.jit
def _ordered(start, whole_start, whole_end, end, N: tl.constexpr):
    """Edges in order, and those between which no mask is needed at whole blocks of N."""
    whole_start = tl.maximum(start, tl.cdiv(whole_start, N) * N)
    whole_end = tl.maximum(whole_start, whole_end // N * N)
    end = tl.maximum(end, start)
    whole_start = tl.minimum(whole_start, tl.cdiv(end, N) * N)
    whole_end = tl.minimum(whole_end, tl.cdiv(end, N) * N)
    return start, whole_start, whole_end, end
