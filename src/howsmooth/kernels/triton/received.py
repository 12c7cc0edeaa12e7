"""Fused column sums of `P`: how much each key is attended to."""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import ANY, dot, finish, keyed, load, rows, stats, weigh


@triton.jit(do_not_specialize=[*ANY, "group"])
def received(
    Q, Q_LO, K, K_LO, BIAS_P, KEYS_P, LSE, OUT,
    n, m, n_rows, m_rows, heads, group, window, scale, cap, bias_item, bias_head, bias_row,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, S_PASSES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    KEYS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One block of columns of one key head, summed over the rows of the query heads that share it.

    KEYS: numbers for every key. SIGMOID: weights are sigmoids in units of `2^lse`, not softmax's.
    """
    i_g = tl.program_id(1).to(tl.int64)
    kv_heads = heads // group
    i_item = i_g // kv_heads
    i_kv = i_g % kv_heads
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    c = tl.arange(0, D)
    b_k, b_k_lo = load(K, K_LO, i_g * m_rows * D + j[:, None] * D + c[None, :], S_PASSES)
    b_sum = tl.zeros([BN], tl.float32)
    start, whole_start, whole_end, end = rows(j0, n, window, BM, BN, CAUSAL, WINDOW)
    for i_sub in range(group):
        i_head = i_kv * group + i_sub
        i_q = i_item * heads + i_head
        p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3 if WINDOW else 2):
            low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
            high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
            for i0 in tl.range(low, high, BM):
                i = i0 + tl.arange(0, BM)
                b_q, b_q_lo = load(Q, Q_LO, i_q * n_rows * D + i[:, None] * D + c[None, :], S_PASSES)
                b_top, b_lse = stats(LSE, i_q, n_rows, i)
                b_s = dot(b_k, b_k_lo, tl.trans(b_q), tl.trans(b_q_lo), tl.zeros([BN, BM], tl.float32), S_PASSES)
                b_s, _ = finish(
                    b_s, i[None, :], j[:, None], n, m, window, scale, cap, p_bias, bias_row,
                    CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
                )  # fmt: skip
                b_s = keyed(b_s, KEYS_P + i_g * m_rows, j[:, None], KEYS)
                b_w, _ = weigh(b_s, b_top[None, :], b_lse[None, :], b_s, False, SIGMOID)
                b_sum += tl.sum(b_w, 1)
    tl.store(OUT + i_g * m_rows + j, b_sum, mask=j < m)
