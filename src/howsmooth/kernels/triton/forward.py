"""Fused forward pass, column sums of the weights, and the product with the Jacobian."""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import (
    accumulate,
    across,
    columns,
    document,
    dot,
    finish,
    kernel,
    own_columns,
    own_rows,
    padded,
    plain,
    put,
    rows,
    split,
    stats,
    tile,
    weigh,
)


@kernel()
def forward(
    Q, K, V, BIAS_P, OUT, LSE,
    n, m, batch, heads, group, d, d_v, window, first, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr = False, RAGGED: tl.constexpr = False, PRECISION: tl.constexpr = "tf32",
    DOCUMENTS: tl.constexpr = False,
    PACKED: tl.constexpr = False, PASSES: tl.constexpr = 1, KEYS: tl.constexpr = False, SIGMOID: tl.constexpr = False,
    SINK: tl.constexpr = False, COARSE: tl.constexpr = False,
    Q_LO=None, K_LO=None, V_LO=None, KEYS_P=None, SINK_P=None, COARSE_LSE=None, LOW=None, HIGH=None,
):  # fmt: skip
    """One block of rows of one head, by the online softmax. factor: what outputs are multiplied by.

    DOCUMENTS: their table comes in the place of a bias.
    LSE: (rows of all heads, 2, n), the largest logit of a row and what the logarithm of the sum adds to it: in one number the
    sum would have no digits left beside an offset that the whole row shares.
    PACKED: weights are `2¹⁴ P`, and the least and the largest logit of each row go to LOW and HIGH.
    COARSE: beside LSE the log-sum-exp of logits in one pass, so that the rows of `P` which products make of those sum to one.
    KEYS: numbers for every key.  SINK: a logit of every head that rows start from, before their first key.
    SIGMOID: weights are sigmoids; LSE takes zero and the largest `min(s, 0)` of a row, no less than the logarithm of its
    largest weight, but no less than −100 either, so that a power of two undoes it.
    """
    LEAST: tl.constexpr = -100.0
    i_g, i_item, i_head, i_kv, i_probe, i0 = own_rows(batch, heads, group, 1, BM, DOCUMENTS)
    i = i0 + tl.arange(0, BM)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    n_rows = padded(n, PACKED)
    if DOCUMENTS:
        q0, n, k0, m = document(BIAS_P, batch * heads)
        first = m - n
        if i0 >= n:
            return
        Q += q0 * q_row
        OUT += q0 * out_row
        LSE += q0
        K += k0 * k_row
        V += k0 * v_row
    if PACKED:
        q_row, k_row, v_row = D, D, DV
    at_k, at_v = i_item * k_item + i_kv * k_head, i_item * v_item + i_kv * v_head
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    p_keys = KEYS_P + (i_item * (heads // group) + i_kv) * padded(m, PACKED) if KEYS else BIAS_P
    b_q, b_q_lo = tile(Q, Q_LO, i_item * q_item + i_head * q_head, i0, n, q_row, c, d, BM, PASSES, PAD, RAGGED)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_low, b_high = -b_max, b_max
    b_sum = tl.zeros([BM], tl.float32)
    b_coarse_max, b_coarse_sum = b_max, b_sum
    if SINK:
        b_max = b_sum + tl.load(SINK_P + i_head)
        b_coarse_max, b_coarse_sum = b_max, b_sum + 1
        b_sum += 16384
    b_acc = tl.zeros([BM, DV], tl.float32)
    edges = columns(i0, m, window, first, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        for j0 in tl.range(edges[phase], edges[phase + 1], BN):
            j = j0 + tl.arange(0, BN)
            b_k, b_k_lo = tile(K, K_LO, at_k, j0, m, k_row, c, d, BN, PASSES, PAD, RAGGED)
            b_s, _, _ = finish(
                across(b_q, b_q_lo, b_k, b_k_lo, PASSES, PRECISION), i[:, None], j[None, :], n, m, window, first, scale, cap,
                p_bias, bias_row, p_keys, CAUSAL, WINDOW, BIAS, CAP, KEYS, EDGE=phase != 1,
            )  # fmt: skip
            if COARSE:
                b_c, _, _ = finish(
                    across(b_q, b_q, b_k, b_k, 1, PRECISION), i[:, None], j[None, :], n, m, window, first, scale, cap,
                    p_bias, bias_row, p_keys, CAUSAL, WINDOW, BIAS, CAP, KEYS, EDGE=phase != 1,
                )  # fmt: skip
                b_top = tl.maximum(b_coarse_max, tl.max(b_c, 1))
                b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
                b_coarse_sum = b_coarse_sum * tl.exp2(b_coarse_max - b_base) + tl.sum(tl.exp2(b_c - b_base[:, None]), 1)
                b_coarse_max = b_top
            b_top = tl.max(b_s, 1)
            if PACKED:
                b_high = tl.maximum(b_high, b_top)
                b_low = tl.minimum(b_low, tl.min(tl.where(b_s == float("-inf"), float("inf"), b_s), 1))
            b_new = tl.maximum(b_max, tl.minimum(tl.maximum(b_top, LEAST), 0.0) if SIGMOID else b_top)
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_shrink = tl.exp2(b_max - b_base)
            if SIGMOID:
                b_p, _ = weigh(b_s, b_s, b_base[:, None] - 14, b_s, False, True)
            else:
                b_p = tl.exp2(b_s - b_base[:, None] + 14) if PACKED else tl.exp2(b_s - b_base[:, None])
            b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
            b_max = b_new
            b_v, b_v_lo = tile(V, V_LO, at_v, j0, m, v_row, c_v, d_v, BN, PASSES, PAD, RAGGED)
            b_p, b_p_lo = split(b_p, b_v, PASSES)
            b_acc = accumulate(b_p, b_p_lo, b_v, b_v_lo, b_acc * b_shrink[:, None], one, PASSES, PRECISION, PACKED)
    hidden = b_sum == 0
    if SIGMOID:
        b_sum = 16384 * tl.exp2(-tl.where(b_max == float("-inf"), 0.0, b_max))
        hidden = b_high == float("-inf")
    b_sum = tl.where(hidden, 1.0, b_sum)
    b_acc = tl.where(hidden[:, None], 0.0, b_acc * factor / b_sum[:, None])
    put(OUT, i_item * out_item + i_head * out_head, b_acc, i0, n, out_row, c_v, d_v, BM)
    # rows without a visible key, and padding, get P = exp2(s − ∞) = 0
    hidden = hidden | (i >= n)
    b_lse = b_max if SIGMOID else (tl.log2(b_sum) - 14 if PACKED else tl.log2(b_sum))
    b_top = tl.zeros([BM], tl.float32) if SIGMOID else tl.where(hidden, 0.0, b_max)
    at_row = i_g * 2 * n_rows + i
    inside = i < padded(n, PACKED)
    tl.store(LSE + at_row, b_top, mask=inside)
    tl.store(LSE + at_row + n_rows, tl.where(hidden, float("inf"), b_lse), mask=inside)
    if COARSE:
        tl.store(COARSE_LSE + at_row, tl.where(hidden, 0.0, b_coarse_max))
        b_lse = tl.log2(tl.where(hidden, 1.0, b_coarse_sum))
        tl.store(COARSE_LSE + at_row + n_rows, tl.where(hidden, float("inf"), b_lse))
    if PACKED:
        tl.store(LOW + i_g * n_rows + i, tl.where(i < n, b_low, float("inf")))
        tl.store(HIGH + i_g * n_rows + i, tl.where(i < n, b_high, float("-inf")))


@kernel()
def received(
    Q, K, BIAS_P, LSE, OUT,
    n, m, batch, heads, group, d, d_v, window, first, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, bias_item, bias_head, bias_row,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    S_PASSES: tl.constexpr, KEYS: tl.constexpr, SIGMOID: tl.constexpr,
    Q_LO=None, K_LO=None, KEYS_P=None,
):  # fmt: skip
    """Column sums of `P`, how much each key is attended to, of packed operands: of one block of columns of one key head,
    over the rows of the query heads that share it.

    KEYS: numbers for every key. SIGMOID: weights are sigmoids in units of `2^lse`, not softmax's.
    """
    i_g, i_item, i_kv, i_probe, j0 = own_columns(batch, heads, group, BN)
    j = j0 + tl.arange(0, BN)
    c = tl.arange(0, D)
    n_rows, m_rows = padded(n, True), padded(m, True)
    p_keys = KEYS_P + i_g * m_rows if KEYS else BIAS_P
    b_k, b_k_lo = tile(K, K_LO, i_item * k_item + i_kv * k_head, j0, m, D, c, d, BN, S_PASSES, False, False)
    b_sum = tl.zeros([BN], tl.float32)
    edges = rows(j0, n, window, first, BM, BN, CAUSAL, WINDOW)
    for i_sub in range(group):
        i_head = i_kv * group + i_sub
        at_q = i_item * q_item + i_head * q_head
        p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3 if WINDOW else 2):
            for i0 in tl.range(edges[phase], edges[phase + 1], BM):
                i = i0 + tl.arange(0, BM)
                b_q, b_q_lo = tile(Q, Q_LO, at_q, i0, n, D, c, d, BM, S_PASSES, False, False)
                b_top, b_lse = stats(LSE, i_item * heads + i_head, n_rows, n, i, False)
                b_s, _, _ = finish(
                    across(b_k, b_k_lo, b_q, b_q_lo, S_PASSES, "tf32"), i[None, :], j[:, None], n, m, window, first, scale, cap,
                    p_bias, bias_row, p_keys, CAUSAL, WINDOW, BIAS, CAP, KEYS, EDGE=phase != 1,
                )  # fmt: skip
                b_w, _ = weigh(b_s, b_top[None, :], b_lse[None, :], b_s, False, SIGMOID)
                b_sum += tl.sum(b_w, 1)
    tl.store(OUT + i_g * m_rows + j, b_sum, mask=j < m)


@triton.jit
def _tangent(
    b_q, b_q_lo, b_dq, b_dq_lo, b_k, b_k_lo, DK, DK_LO, at_dk, j0, m, dk_row, c, d, DKEYS,
    BN: tl.constexpr, PASSES: tl.constexpr, PRECISION: tl.constexpr, PAD: tl.constexpr, RAGGED: tl.constexpr,
    MOVE: tl.constexpr,
):  # fmt: skip
    """`dq kᵀ + q dkᵀ` on one block, and the derivatives of the numbers of keys."""
    b_dk, b_dk_lo = tile(DK, DK_LO, at_dk, j0, m, dk_row, c, d, BN, PASSES, PAD, RAGGED)
    b_ds = across(b_dq, b_dq_lo, b_k, b_k_lo, PASSES, PRECISION)
    b_ds = dot(b_q, b_q_lo, tl.trans(b_dk), tl.trans(b_dk_lo), b_ds, PASSES, PRECISION)
    if MOVE:
        b_ds += tl.load(DKEYS + j0 + tl.arange(0, BN))[None, :]
    return b_ds


@triton.jit
def _probe(
    b_acc, b_row, b_p, b_p_lo, b_slope, b_ds, b_v, b_v_lo, DV_P, DV_LO, at_dv, j0, m, dv_row, c_v, d_v, kappa, one,
    BN: tl.constexpr, PASSES: tl.constexpr, PRECISION: tl.constexpr, PROMOTE: tl.constexpr, PAD: tl.constexpr,
    RAGGED: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """What one block of `P` adds to one probe: `Σ_j t v + p dv` and, where rows have a term, `Σ_j t`, with `t = p ∘ dS`."""
    b_t = b_slope * (b_ds * kappa)
    if ROW:
        b_row += tl.sum(b_t, 1)
    b_t, b_t_lo = split(b_t, b_v, PASSES)
    b_acc = accumulate(b_t, b_t_lo, b_v, b_v_lo, b_acc, one, PASSES, PRECISION, PROMOTE)
    b_dv, b_dv_lo = tile(DV_P, DV_LO, at_dv, j0, m, dv_row, c_v, d_v, BN, PASSES, PAD, RAGGED)
    return accumulate(b_p, b_p_lo, b_dv, b_dv_lo, b_acc, one, PASSES, PRECISION, PROMOTE), b_row


@kernel()
def jvp(
    Q, K, V, DQ, DK, DV_P, BIAS_P, OLD, LSE, OUT, DLSE,
    n, m, batch, heads, group, d, d_v, window, first, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    o_item, o_head, o_row, out_probe, out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr = False, RAGGED: tl.constexpr = False, PRECISION: tl.constexpr = "tf32",
    DOCUMENTS: tl.constexpr = False,
    PACKED: tl.constexpr = False, PASSES: tl.constexpr = 1, S_PASSES: tl.constexpr = 1, KEYS: tl.constexpr = False,
    SIGMOID: tl.constexpr = False, TWO: tl.constexpr = False, PROMOTE: tl.constexpr = False,
    Q_LO=None, K_LO=None, V_LO=None, DQ_LO=None, DK_LO=None, DV_LO=None, KEYS_P=None, DKEYS=None, SCALES=None,
):  # fmt: skip
    """One block of rows of one head, for probe `z` or probes `2z, 2z + 1`; of native operands also `dℓ = r(T)`, to DLSE.

    PACKED: SCALES hold κ, 1/(2¹⁴ γ κ s_v), 1/(2¹⁴ γ κ) of every probe and item.
    KEYS: numbers for every key, and in `DKEYS` their derivatives times γ. SIGMOID: those do not move, and rows have no term of
    their own.
    """
    MOVE: tl.constexpr = KEYS and not SIGMOID
    SHIFT: tl.constexpr = 14 if PACKED else 0
    i_g, i_item, i_head, i_kv, i_probe, i0 = own_rows(batch, heads, group, step, BM, DOCUMENTS)
    i_probe *= 2 if TWO else 1
    i = i0 + tl.arange(0, BM)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    n_rows, m_rows, kv_heads = padded(n, PACKED), padded(m, PACKED), heads // group
    if DOCUMENTS:
        q0, n, k0, m = document(BIAS_P, batch * heads)
        first = m - n
        if i0 >= n:
            return
        Q += q0 * q_row
        DQ += q0 * dq_row
        OLD += q0 * o_row
        OUT += q0 * out_row
        LSE += q0
        DLSE += q0
        K += k0 * k_row
        V += k0 * v_row
        DK += k0 * dk_row
        DV_P += k0 * dv_row
    if PACKED:
        q_row, k_row, v_row, dq_row, dk_row, dv_row = D, D, DV, D, D, DV
    at_k, at_v = i_item * k_item + i_kv * k_head, i_item * v_item + i_kv * v_head
    at_dq = i_probe * dq_probe + i_item * dq_item + i_head * dq_head
    at_dk = i_probe * dk_probe + i_item * dk_item + i_kv * dk_head
    at_dv = i_probe * dv_probe + i_item * dv_item + i_kv * dv_head
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    p_keys = KEYS_P + (i_item * kv_heads + i_kv) * m_rows if KEYS else BIAS_P
    p_dkeys = DKEYS + ((i_probe * batch + i_item) * kv_heads + i_kv) * m_rows if MOVE else BIAS_P
    b_q, b_q_lo = tile(Q, Q_LO, i_item * q_item + i_head * q_head, i0, n, q_row, c, d, BM, S_PASSES, PAD, RAGGED)
    b_dq, b_dq_lo = tile(DQ, DQ_LO, at_dq, i0, n, dq_row, c, d, BM, PASSES, PAD, RAGGED)
    p_scales = SCALES + (i_probe * batch + i_item) * 3 if PACKED else BIAS_P
    kappa = tl.load(p_scales) if PACKED else scale
    b_acc = tl.zeros([BM, DV], tl.float32)
    b_row = tl.zeros([BM], tl.float32)
    if TWO:
        b_acc2, b_row2 = b_acc, b_row
        b_dq2, b_dq2_lo = tile(DQ, DQ_LO, at_dq + dq_probe, i0, n, dq_row, c, d, BM, PASSES, PAD, RAGGED)
        kappa2 = tl.load(p_scales + 3 * batch)
    b_top, b_lse = stats(LSE, i_g, n_rows, n, i, RAGGED)
    edges = columns(i0, m, window, first, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        for j0 in tl.range(edges[phase], edges[phase + 1], BN):
            j = j0 + tl.arange(0, BN)
            b_k, b_k_lo = tile(K, K_LO, at_k, j0, m, k_row, c, d, BN, S_PASSES, PAD, RAGGED)
            b_s = across(b_q, b_q_lo, b_k, b_k_lo, S_PASSES, PRECISION)
            b_ds = _tangent(
                b_q, b_q_lo, b_dq, b_dq_lo, b_k, b_k_lo, DK, DK_LO, at_dk, j0, m, dk_row, c, d, p_dkeys,
                BN, PASSES, PRECISION, PAD, RAGGED, MOVE,
            )  # fmt: skip
            b_s, b_slope, _ = finish(
                b_s, i[:, None], j[None, :], n, m, window, first, scale, cap, p_bias, bias_row, p_keys,
                CAUSAL, WINDOW, BIAS, CAP, KEYS, EDGE=phase != 1,
            )  # fmt: skip
            b_w, b_slope = weigh(b_s, b_top[:, None], b_lse[:, None] - SHIFT, b_slope, CAP, SIGMOID)
            b_v, b_v_lo = tile(V, V_LO, at_v, j0, m, v_row, c_v, d_v, BN, PASSES, PAD, RAGGED)
            b_p, b_p_lo = split(b_w, b_v, PASSES)
            b_acc, b_row = _probe(
                b_acc, b_row, b_p, b_p_lo, b_slope, b_ds, b_v, b_v_lo, DV_P, DV_LO, at_dv, j0, m, dv_row, c_v, d_v, kappa, one,
                BN, PASSES, PRECISION, PROMOTE, PAD, RAGGED, not SIGMOID,
            )  # fmt: skip
            if TWO:
                b_ds = _tangent(
                    b_q, b_q_lo, b_dq2, b_dq2_lo, b_k, b_k_lo, DK, DK_LO, at_dk + dk_probe, j0, m, dk_row, c, d,
                    p_dkeys + batch * kv_heads * m_rows.to(tl.int64), BN, PASSES, PRECISION, PAD, RAGGED, MOVE,
                )  # fmt: skip
                b_acc2, b_row2 = _probe(
                    b_acc2, b_row2, b_p, b_p_lo, b_slope, b_ds, b_v, b_v_lo, DV_P, DV_LO, at_dv + dv_probe, j0, m, dv_row,
                    c_v, d_v, kappa2, one, BN, PASSES, PRECISION, PROMOTE, PAD, RAGGED, not SIGMOID,
                )  # fmt: skip
    at_o, at_out = i_item * o_item + i_head * o_head, i_probe * out_probe + i_item * out_item + i_head * out_head
    b_o = plain(OLD, at_o, i0, n, o_row, c_v, d_v, BM, PAD or PACKED, RAGGED or PACKED)
    b_o = b_o.to(tl.float32)
    if PACKED:
        b_out = b_acc * tl.load(p_scales + 1) - (b_row * tl.load(p_scales + 2))[:, None] * b_o
    else:
        b_out = b_acc - b_row[:, None] * b_o
        p_dlse = DLSE + (i_probe * batch * heads + i_g) * 2 * n_rows + i
        tl.store(p_dlse, tl.zeros([BM], tl.float32), mask=i < n)  # the largest logit counts as a constant
        tl.store(p_dlse + n_rows, b_row, mask=i < n)
    put(OUT, at_out, b_out, i0, n, out_row, c_v, d_v, BM)
    if TWO:
        p_scales += 3 * batch
        b_out = b_acc2 * tl.load(p_scales + 1) - (b_row2 * tl.load(p_scales + 2))[:, None] * b_o
        put(OUT, at_out + out_probe, b_out, i0, n, out_row, c_v, d_v, BM)
