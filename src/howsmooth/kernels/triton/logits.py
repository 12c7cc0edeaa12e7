"""What the fused kernels share: products of one or three passes, logits of a block, and the blocks a mask leaves."""

import triton
import triton.language as tl

# numbers that a kernel is not compiled anew for: only padded lengths, multiples of 128, are left to the compiler
ANY = (
    "n", "m", "batch", "heads", "d", "d_v", "window", "step", "bias_item", "bias_head", "bias_row",
    "out_probe", "out_item", "out_head", "out_row", "o_item", "o_head", "o_row", "dq_probe", "dq_item", "dq_head", "dq_row",
    "dk_probe", "dk_item", "dk_head", "dk_row", "dv_probe", "dv_item", "dv_head", "dv_row",
    "t_probe", "t_item", "t_head", "t_row",
)  # fmt: skip


@triton.jit
def split(b_x, PASSES: tl.constexpr):
    """A float32 block as half-precision `hi`, and what is left of it."""
    b_hi = b_x.to(tl.float16)
    b_lo = b_hi
    if PASSES == 3:
        b_lo = (b_x - b_hi.to(tl.float32)).to(tl.float16)
    return b_hi, b_lo


@triton.jit
def dot(b_a, b_a_lo, b_b, b_b_lo, b_acc, PASSES: tl.constexpr):
    """`acc + a b`, small terms first."""
    if PASSES == 3:
        b_acc = tl.dot(b_a_lo, b_b, b_acc)
        b_acc = tl.dot(b_a, b_b_lo, b_acc)
    return tl.dot(b_a, b_b, b_acc)


@triton.jit
def accumulate(b_a, b_a_lo, b_b, b_b_lo, b_acc, one, PASSES: tl.constexpr, PROMOTE: tl.constexpr):
    """`acc + a b` for sums along a whole row or column.

    The chip cuts sums inside its matrix units short instead of rounding them, a shrinking of 2⁻²⁴ a time that long rows
    feel. PROMOTE adds block by block in float32; `one` is 1, which the compiler does not know and so cannot merge the two.
    """
    if PROMOTE:
        return b_acc + one * dot(b_a, b_a_lo, b_b, b_b_lo, tl.zeros(b_acc.shape, tl.float32), PASSES)
    return dot(b_a, b_a_lo, b_b, b_b_lo, b_acc, PASSES)


@triton.jit
def load(P_HI, P_LO, offsets, PASSES: tl.constexpr):
    b_hi = tl.load(P_HI + offsets)
    b_lo = b_hi
    if PASSES == 3:
        b_lo = tl.load(P_LO + offsets)
    return b_hi, b_lo


@triton.jit
def finish(
    b_s, i, j, n, m, window, scale, cap, P_BIAS, bias_row,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Logits in units of log 2 from `q̂·k̂`, and the soft-cap's slope. `i` and `j` broadcast against each other."""
    LOG2E: tl.constexpr = 1.4426950408889634
    b_slope = b_s
    if CAP:
        b_s = b_s * scale
        b_e = tl.exp2(tl.abs(b_s) * (-2 * LOG2E / cap))
        b_t = tl.where(b_s < 0, -1.0, 1.0) * (1 - b_e) / (1 + b_e)  # tanh, from an exponential that cannot overflow
        b_slope = 4 * b_e / ((1 + b_e) * (1 + b_e))
        b_s = b_t * (cap * LOG2E)
    else:
        b_s = b_s * (scale * LOG2E)
    if BIAS:
        p_bias = P_BIAS + tl.minimum(i, n - 1).to(tl.int64) * bias_row + tl.minimum(j, m - 1)
        b_bias = tl.load(p_bias).to(tl.float32)
        # only −∞ hides a key: the least finite number, which masks are filled with, must not become that in these units
        b_s += b_bias * tl.where(tl.abs(b_bias) < 2.3e38, LOG2E, 1.0)
    if EDGE:
        seen = j < m
        if CAUSAL:
            seen = seen & (j <= i)
        if WINDOW:
            seen = seen & (i - j < window) & (j - i < window)
        b_s = tl.where(seen, b_s, float("-inf"))
    return b_s, b_slope


@triton.jit
def keyed(b_s, P_KEYS, j, KEYS: tl.constexpr):
    """Logits with what is added for every key, in units of log 2."""
    if KEYS:
        b_s += tl.load(P_KEYS + j)
    return b_s


@triton.jit
def stats(LSE, i_row, n_rows, i):
    """The largest logit of each row, and what the logarithm of its sum adds to it."""
    p = LSE + i_row * 2 * n_rows + i
    return tl.load(p), tl.load(p + n_rows)


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
def first_row(step, BM: tl.constexpr):
    """Where a program's rows begin: the last first, the longest under a causal mask; every `step`-th 128 of them."""
    PARTS: tl.constexpr = 128 // BM
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    return i_block // PARTS * (128 * step) + i_block % PARTS * BM


@triton.jit
def columns(i0, m, window, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Columns that rows `i0 … i0 + BM − 1` see: start, then from where to where no mask is needed, then end."""
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
    whole_start = tl.maximum(start, tl.cdiv(whole_start, BN) * BN)
    whole_end = tl.maximum(whole_start, whole_end // BN * BN)
    end = tl.maximum(end, start)
    whole_start = tl.minimum(whole_start, tl.cdiv(end, BN) * BN)
    whole_end = tl.minimum(whole_end, tl.cdiv(end, BN) * BN)
    return start, whole_start, whole_end, end


@triton.jit
def rows(j0, n, window, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Rows that see columns `j0 … j0 + BN − 1`, as `columns`. Padding needs no mask: its `P` is zero or never read."""
    start = 0
    end = n
    whole_start = 0
    whole_end = tl.cdiv(n, BM) * BM
    if CAUSAL:
        start = j0 // BM * BM
        whole_start = j0 + BN - 1
    if WINDOW:
        start = tl.maximum(start, tl.maximum(0, j0 - window + 1) // BM * BM)
        end = tl.minimum(end, j0 + BN - 1 + window)
        whole_start = tl.maximum(whole_start, tl.maximum(0, j0 + BN - window))
        whole_end = tl.minimum(whole_end, j0 + window)
    whole_start = tl.maximum(start, tl.cdiv(whole_start, BM) * BM)
    whole_end = tl.maximum(whole_start, whole_end // BM * BM)
    end = tl.maximum(end, start)
    whole_start = tl.minimum(whole_start, tl.cdiv(end, BM) * BM)
    whole_end = tl.minimum(whole_end, tl.cdiv(end, BM) * BM)
    return start, whole_start, whole_end, end
