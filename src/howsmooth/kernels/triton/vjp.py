"""Fused product with the transposed Jacobian, in two kernels that write each entry once: one owns columns, one owns rows."""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import (
    ANY,
    accumulate,
    columns,
    dot,
    finish,
    first_row,
    keyed,
    load,
    rows,
    split,
    stats,
    weigh,
)


@triton.jit
def _column_probe(
    b_dk, b_dv, b_col, b_p, b_p_lo, b_slope, b_q, b_q_lo, b_v, b_v_lo, G, G_LO, DELTA, at_g, at_row, kappa, one,
    PASSES: tl.constexpr, PROMOTE: tl.constexpr, MOVE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """What one block of `Pᵀ` adds to `dv = Pᵀ g`, `dk = dSᵀ q` and the column sums of `dS` of one probe."""
    b_g, b_g_lo = load(G, G_LO, at_g, PASSES)
    b_dv = accumulate(b_p, b_p_lo, b_g, b_g_lo, b_dv, one, PASSES, PROMOTE)
    b_dp = dot(b_v, b_v_lo, tl.trans(b_g), tl.trans(b_g_lo), tl.zeros(b_slope.shape, tl.float32), PASSES)
    if ROW:
        b_dp -= tl.load(DELTA + at_row)[None, :]
    b_ds = b_slope * (b_dp * kappa)
    if MOVE:
        b_col += tl.sum(b_ds, 1)
    b_ds, b_ds_lo = split(b_ds, PASSES)
    return accumulate(b_ds, b_ds_lo, b_q, b_q_lo, b_dk, one, PASSES, PROMOTE), b_dv, b_col


@triton.jit(do_not_specialize=[*ANY, "SCALES"])
def vjp_columns(
    Q, Q_LO, K, K_LO, V, V_LO, G, G_LO, BIAS_P, KEYS_P, LSE, DELTA, SCALES, DK, DV_P, DKEYS,
    n, m, n_rows, m_rows, batch, heads, group, d, d_v, window, scale, kappa, cap, one,
    bias_item, bias_head, bias_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PASSES: tl.constexpr, S_PASSES: tl.constexpr, TWO: tl.constexpr, PROMOTE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    KEYS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of one block of columns, summed over the query heads that share them. SCALES: of dq, dk, dv.

    KEYS: numbers for every key, whose gradients go to `DKEYS` in the units of `dk` and `q̂`; a sigmoid's do not move.
    """
    MOVE: tl.constexpr = KEYS and not SIGMOID
    i_g = tl.program_id(1).to(tl.int64)
    kv_heads = heads // group
    i_item = i_g // kv_heads
    i_kv = i_g % kv_heads
    i_probe = tl.program_id(2).to(tl.int64) * (2 if TWO else 1)
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    c = tl.arange(0, D)
    c_v = tl.arange(0, DV)
    b_k, b_k_lo = load(K, K_LO, i_g * m_rows * D + j[:, None] * D + c[None, :], S_PASSES)
    b_v, b_v_lo = load(V, V_LO, i_g * m_rows * DV + j[:, None] * DV + c_v[None, :], PASSES)
    b_dk = tl.zeros([BN, D], tl.float32)
    b_dv = tl.zeros([BN, DV], tl.float32)
    b_col = tl.zeros([BN], tl.float32)
    b_dk2 = b_dk
    b_dv2 = b_dv
    b_col2 = b_col
    start, whole_start, whole_end, end = rows(j0, n, window, BM, BN, CAUSAL, WINDOW)
    for i_sub in range(group):
        i_head = i_kv * group + i_sub
        i_q = i_item * heads + i_head
        i_row = i_probe * batch * heads + i_q
        p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3 if WINDOW else 2):
            low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
            high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
            for i0 in tl.range(low, high, BM):
                i = i0 + tl.arange(0, BM)
                b_q, b_q_lo = load(Q, Q_LO, i_q * n_rows * D + i[:, None] * D + c[None, :], S_PASSES)
                b_top, b_lse = stats(LSE, i_q, n_rows, i)
                b_s = dot(b_k, b_k_lo, tl.trans(b_q), tl.trans(b_q_lo), tl.zeros([BN, BM], tl.float32), S_PASSES)
                b_s, b_slope = finish(
                    b_s, i[None, :], j[:, None], n, m, window, scale, cap, p_bias, bias_row,
                    CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
                )  # fmt: skip
                b_s = keyed(b_s, KEYS_P + i_g * m_rows, j[:, None], KEYS)
                b_w, b_slope = weigh(b_s, b_top[None, :], b_lse[None, :] - 14, b_slope, CAP, SIGMOID)
                b_p, b_p_lo = split(b_w, PASSES)
                at_g = i_row * n_rows * DV + i[:, None] * DV + c_v[None, :]
                at_row = i_row * n_rows + i
                b_dk, b_dv, b_col = _column_probe(
                    b_dk, b_dv, b_col, b_p, b_p_lo, b_slope, b_q, b_q_lo, b_v, b_v_lo, G, G_LO, DELTA, at_g, at_row, kappa, one,
                    PASSES, PROMOTE, MOVE, not SIGMOID,
                )  # fmt: skip
                if TWO:
                    b_dk2, b_dv2, b_col2 = _column_probe(
                        b_dk2, b_dv2, b_col2, b_p, b_p_lo, b_slope, b_q, b_q_lo, b_v, b_v_lo, G, G_LO, DELTA,
                        at_g + batch * heads * n_rows.to(tl.int64) * DV, at_row + batch * heads * n_rows.to(tl.int64),
                        kappa, one, PASSES, PROMOTE, MOVE, not SIGMOID,
                    )  # fmt: skip
    p_dk = DK + i_item * dk_item + i_kv * dk_head + j[:, None].to(tl.int64) * dk_row + c[None, :]
    p_dv = DV_P + i_item * dv_item + i_kv * dv_head + j[:, None].to(tl.int64) * dv_row + c_v[None, :]
    inside = (j[:, None] < m) & (c[None, :] < d)
    inside_v = (j[:, None] < m) & (c_v[None, :] < d_v)
    at = (i_probe * batch + i_item) * 3
    tl.store(p_dk + i_probe * dk_probe, b_dk * tl.load(SCALES + at + 1), mask=inside)
    tl.store(p_dv + i_probe * dv_probe, b_dv * tl.load(SCALES + at + 2), mask=inside_v)
    p_keys = DKEYS + (i_probe * batch * kv_heads + i_g) * m_rows + j
    if MOVE:
        tl.store(p_keys, b_col * tl.load(SCALES + at + 1))
    if TWO:
        at += 3 * batch
        tl.store(p_dk + (i_probe + 1) * dk_probe, b_dk2 * tl.load(SCALES + at + 1), mask=inside)
        tl.store(p_dv + (i_probe + 1) * dv_probe, b_dv2 * tl.load(SCALES + at + 2), mask=inside_v)
        if MOVE:
            tl.store(p_keys + batch * kv_heads * m_rows.to(tl.int64), b_col2 * tl.load(SCALES + at + 1))


@triton.jit
def _row_probe(
    b_dq, b_slope, b_k, b_k_lo, b_v, b_v_lo, b_g, b_g_lo, b_delta, kappa, one,
    PASSES: tl.constexpr, PROMOTE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """What one block of `P` adds to `dq = dS k` of one probe. `b_v` is transposed. ROW: rows have a term of their own."""
    b_dp = dot(b_g, b_g_lo, b_v, b_v_lo, tl.zeros(b_slope.shape, tl.float32), PASSES)
    if ROW:
        b_dp -= b_delta[:, None]
    b_ds = b_slope * (b_dp * kappa)
    b_ds, b_ds_lo = split(b_ds, PASSES)
    return accumulate(b_ds, b_ds_lo, tl.trans(b_k), tl.trans(b_k_lo), b_dq, one, PASSES, PROMOTE)


@triton.jit(do_not_specialize=[*ANY, "group", "SCALES"])
def vjp_rows(
    Q, Q_LO, K, K_LO, V, V_LO, G, G_LO, BIAS_P, KEYS_P, LSE, DELTA, SCALES, DQ,
    n, m, n_rows, m_rows, batch, heads, group, d, window, scale, kappa, cap, one,
    bias_item, bias_head, bias_row, dq_probe, dq_item, dq_head, dq_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PASSES: tl.constexpr, S_PASSES: tl.constexpr, TWO: tl.constexpr, PROMOTE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    KEYS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """`dq` of one block of rows of one head."""
    i_g = tl.program_id(1).to(tl.int64)
    i_head = i_g % heads
    i_item = i_g // heads
    i_kv = i_item * (heads // group) + i_head // group
    i_probe = tl.program_id(2).to(tl.int64) * (2 if TWO else 1)
    i0 = first_row(1, BM)
    i = i0 + tl.arange(0, BM)
    c = tl.arange(0, D)
    c_v = tl.arange(0, DV)
    i_row = i_probe * batch * heads + i_g
    next_row = batch * heads * n_rows.to(tl.int64)
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    at_g = i_row * n_rows * DV + i[:, None] * DV + c_v[None, :]
    b_q, b_q_lo = load(Q, Q_LO, i_g * n_rows * D + i[:, None] * D + c[None, :], S_PASSES)
    b_g, b_g_lo = load(G, G_LO, at_g, PASSES)
    b_delta = tl.load(DELTA + i_row * n_rows + i)
    b_dq = tl.zeros([BM, D], tl.float32)
    b_dq2 = b_dq
    b_g2, b_g2_lo, b_delta2 = b_g, b_g_lo, b_delta
    if TWO:
        b_g2, b_g2_lo = load(G, G_LO, at_g + next_row * DV, PASSES)
        b_delta2 = tl.load(DELTA + (i_row * n_rows + next_row) + i)
    b_top, b_lse = stats(LSE, i_g, n_rows, i)
    start, whole_start, whole_end, end = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
        high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
        for j0 in tl.range(low, high, BN):
            j = j0 + tl.arange(0, BN)
            b_k, b_k_lo = load(K, K_LO, i_kv * m_rows * D + j[None, :] * D + c[:, None], S_PASSES)
            b_v, b_v_lo = load(V, V_LO, i_kv * m_rows * DV + j[None, :] * DV + c_v[:, None], PASSES)
            b_s = dot(b_q, b_q_lo, b_k, b_k_lo, tl.zeros([BM, BN], tl.float32), S_PASSES)
            b_s, b_slope = finish(
                b_s, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row,
                CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
            )  # fmt: skip
            b_s = keyed(b_s, KEYS_P + i_kv * m_rows, j[None, :], KEYS)
            _, b_slope = weigh(b_s, b_top[:, None], b_lse[:, None] - 14, b_slope, CAP, SIGMOID)
            b_dq = _row_probe(
                b_dq, b_slope, b_k, b_k_lo, b_v, b_v_lo, b_g, b_g_lo, b_delta, kappa, one, PASSES, PROMOTE, not SIGMOID
            )
            if TWO:
                b_dq2 = _row_probe(
                    b_dq2, b_slope, b_k, b_k_lo, b_v, b_v_lo, b_g2, b_g2_lo, b_delta2, kappa, one, PASSES, PROMOTE, not SIGMOID
                )
    p_dq = DQ + i_item * dq_item + i_head * dq_head + i[:, None].to(tl.int64) * dq_row + c[None, :]
    inside = (i[:, None] < n) & (c[None, :] < d)
    at = (i_probe * batch + i_item) * 3
    tl.store(p_dq + i_probe * dq_probe, b_dq * tl.load(SCALES + at), mask=inside)
    if TWO:
        tl.store(p_dq + (i_probe + 1) * dq_probe, b_dq2 * tl.load(SCALES + at + 3 * batch), mask=inside)
