"""Fused forward pass: outputs and the log-sum-exp of every row, in units of log 2."""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import ANY, accumulate, columns, dot, finish, first_row, keyed, load, split, weigh


@triton.jit(do_not_specialize=[*ANY, "group"])
def forward(
    Q, Q_LO, K, K_LO, V, V_LO, BIAS_P, KEYS_P, SINK_P, OUT, LSE, COARSE_LSE, LOW, HIGH,
    n, m, n_rows, m_rows, heads, group, d_v, window, step, scale, out_scale, cap, one,
    bias_item, bias_head, bias_row, out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    COARSE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    KEYS: tl.constexpr, SIGMOID: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head: the online softmax, and the range of logits, in three passes: this runs once.

    LSE: (rows of all heads, 2, n), the largest logit of a row and what the logarithm of the sum adds to it.
    COARSE: beside it the log-sum-exp of logits in one pass, so that the rows of `P` which products make of those sum to one.
    KEYS: numbers for every key.  SINK: a logit of every head that rows have seen before their first key.
    SIGMOID: weights are sigmoids; LSE takes zero and the largest `min(s, 0)` of a row, no less than the logarithm of its
    largest weight, but no less than −100 either, so that a power of two undoes it.
    """
    LEAST: tl.constexpr = -100.0
    i_g = tl.program_id(1).to(tl.int64)
    i_head = i_g % heads
    i_item = i_g // heads
    i_kv = i_item * (heads // group) + i_head // group
    i0 = first_row(step, BM)
    i = i0 + tl.arange(0, BM)
    c = tl.arange(0, D)
    c_v = tl.arange(0, DV)
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    b_q, b_q_lo = load(Q, Q_LO, i_g * n_rows * D + i[:, None] * D + c[None, :], 3)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_low = tl.full([BM], float("inf"), tl.float32)
    b_high = b_max
    b_sum = tl.zeros([BM], tl.float32)
    b_coarse_max, b_coarse_sum = b_max, b_sum
    if SINK:
        b_max = b_sum + tl.load(SINK_P + i_head)
        b_coarse_max, b_coarse_sum = b_max, b_sum + 1
        b_sum += 16384
    b_acc = tl.zeros([BM, DV], tl.float32)
    start, whole_start, whole_end, end = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
        high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
        for j0 in tl.range(low, high, BN):
            j = j0 + tl.arange(0, BN)
            b_k, b_k_lo = load(K, K_LO, i_kv * m_rows * D + j[None, :] * D + c[:, None], 3)
            b_s = dot(b_q, b_q_lo, b_k, b_k_lo, tl.zeros([BM, BN], tl.float32), 3)
            b_s, _ = finish(
                b_s, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row,
                CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
            )  # fmt: skip
            b_s = keyed(b_s, KEYS_P + i_kv * m_rows, j[None, :], KEYS)
            if COARSE:
                b_c = dot(b_q, b_q, b_k, b_k, tl.zeros([BM, BN], tl.float32), 1)
                b_c, _ = finish(
                    b_c, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row,
                    CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
                )  # fmt: skip
                b_c = keyed(b_c, KEYS_P + i_kv * m_rows, j[None, :], KEYS)
                b_top = tl.maximum(b_coarse_max, tl.max(b_c, 1))
                b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
                b_coarse_sum = b_coarse_sum * tl.exp2(b_coarse_max - b_base) + tl.sum(tl.exp2(b_c - b_base[:, None]), 1)
                b_coarse_max = b_top
            b_top = tl.max(b_s, 1)
            b_high = tl.maximum(b_high, b_top)
            b_new = tl.maximum(b_max, tl.minimum(tl.maximum(b_top, LEAST), 0.0) if SIGMOID else b_top)
            b_low = tl.minimum(b_low, tl.min(tl.where(b_s == float("-inf"), float("inf"), b_s), 1))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_shrink = tl.exp2(b_max - b_base)
            if SIGMOID:
                b_p, _ = weigh(b_s, b_s, b_base[:, None] - 14, b_s, False, True)
            else:
                b_p = tl.exp2(b_s - b_base[:, None] + 14)
            b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
            b_max = b_new
            b_v, b_v_lo = load(V, V_LO, i_kv * m_rows * DV + j[:, None] * DV + c_v[None, :], 3)
            b_p, b_p_lo = split(b_p, 3)
            b_acc = accumulate(b_p, b_p_lo, b_v, b_v_lo, b_acc * b_shrink[:, None], one, 3, True)
    seen = b_sum > 0
    if SIGMOID:
        b_sum = 16384 * tl.exp2(-tl.where(b_max == float("-inf"), 0.0, b_max))
        seen = b_high > float("-inf")
    b_sum = tl.where(seen, b_sum, 1.0)
    b_acc = tl.where(seen[:, None], b_acc * out_scale / b_sum[:, None], 0.0)
    # rows without a visible key, and padding, get P = exp2(s − ∞) = 0
    seen = seen & (i < n)
    b_lse = b_max if SIGMOID else tl.log2(b_sum) - 14
    b_top = tl.zeros([BM], tl.float32) if SIGMOID else tl.where(seen, b_max, 0.0)
    at_row = i_g * 2 * n_rows + i
    tl.store(LSE + at_row, b_top)
    tl.store(LSE + at_row + n_rows, tl.where(seen, b_lse, float("inf")))
    if COARSE:
        b_lse = tl.log2(tl.where(seen, b_coarse_sum, 1.0))
        tl.store(COARSE_LSE + at_row, tl.where(seen, b_coarse_max, 0.0))
        tl.store(COARSE_LSE + at_row + n_rows, tl.where(seen, b_lse, float("inf")))
    tl.store(LOW + i_g * n_rows + i, tl.where(i < n, b_low, float("inf")))
    tl.store(HIGH + i_g * n_rows + i, tl.where(i < n, b_high, float("-inf")))
    p_out = OUT + i_item * out_item + i_head * out_head + i[:, None].to(tl.int64) * out_row + c_v[None, :]
    tl.store(p_out, b_acc, mask=(i[:, None] < n) & (c_v[None, :] < d_v))
