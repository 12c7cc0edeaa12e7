"""Fused products with the transposed Jacobian, and with the Hessian of `⟨g, o⟩`: for each, a kernel that owns columns and one
that owns rows, which write each entry once. Derivation: ../README.md.
"""

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
    stat,
    stats,
    tile,
    weigh,
)


@triton.jit
def _column_probe(
    b_dk, b_dv, b_col, b_p, b_p_lo, b_slope, b_dp, b_delta, b_q, b_q_lo, b_g, b_g_lo, kappa, one,
    PASSES: tl.constexpr, PRECISION: tl.constexpr, PROMOTE: tl.constexpr, PACKED: tl.constexpr, MOVE: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """What one block of `Pᵀ` adds to `dv = Pᵀ g`, `dk = dSᵀ q` and the column sums of `dS` of one probe."""
    b_dv = accumulate(b_p, b_p_lo, b_g, b_g_lo, b_dv, one, PASSES, PRECISION, PROMOTE)
    if ROW:
        b_dp -= b_delta[None, :]
    b_ds = b_slope * (b_dp * kappa if PACKED else b_dp)
    if MOVE:
        b_col += tl.sum(b_ds, 1)
    b_ds, b_ds_lo = split(b_ds, b_q, PASSES)
    return accumulate(b_ds, b_ds_lo, b_q, b_q_lo, b_dk, one, PASSES, PRECISION, PROMOTE), b_dv, b_col


@kernel("group")
def vjp_columns(
    Q, K, V, G, BIAS_P, LSE, DELTA, OUT, OUT2,
    n, m, batch, heads, group, d, d_v, window, first, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    g_probe, g_item, g_head, g_row, out_probe, out_item, out_head, out_row, out2_probe, out2_item, out2_head, out2_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr = False, RAGGED: tl.constexpr = False, PRECISION: tl.constexpr = "tf32",
    DOCUMENTS: tl.constexpr = False,
    PACKED: tl.constexpr = False, PASSES: tl.constexpr = 1, S_PASSES: tl.constexpr = 1, KEYS: tl.constexpr = False,
    SIGMOID: tl.constexpr = False, TWO: tl.constexpr = False, PROMOTE: tl.constexpr = False,
    Q_LO=None, K_LO=None, V_LO=None, G_LO=None, KEYS_P=None, DKEYS=None, SCALES=None,
):  # fmt: skip
    """`dk = τ (P ∘ (g vᵀ − δ))ᵀ q` and `dv = Pᵀ g` of one block of columns, over the query heads that share them.

    PACKED: SCALES of dq, dk, dv; factor is κ.
    KEYS: numbers for every key, whose gradients go to `DKEYS` in the units of `dk` and `q̂`; a sigmoid's do not move.
    """
    MOVE: tl.constexpr = KEYS and not SIGMOID
    SHIFT: tl.constexpr = 14 if PACKED else 0
    i_g, i_item, i_kv, i_probe, j0 = own_columns(batch, heads, group, BN, DOCUMENTS)
    i_probe *= 2 if TWO else 1
    j = j0 + tl.arange(0, BN)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    n_rows, m_rows = padded(n, PACKED), padded(m, PACKED)
    next_row = batch * heads * n_rows.to(tl.int64)
    if DOCUMENTS:
        q0, n, k0, m = document(BIAS_P, batch * (heads // group))
        first = m - n
        if j0 >= m:
            return
        Q += q0 * q_row
        G += q0 * g_row
        LSE += q0
        DELTA += q0
        K += k0 * k_row
        V += k0 * v_row
        OUT += k0 * out_row
        OUT2 += k0 * out2_row
    if PACKED:
        q_row, k_row, v_row, g_row = D, D, DV, DV
    p_keys = KEYS_P + i_g * m_rows if KEYS else BIAS_P
    b_k, b_k_lo = tile(K, K_LO, i_item * k_item + i_kv * k_head, j0, m, k_row, c, d, BN, S_PASSES, PAD, RAGGED)
    b_v, b_v_lo = tile(V, V_LO, i_item * v_item + i_kv * v_head, j0, m, v_row, c_v, d_v, BN, PASSES, PAD, RAGGED)
    b_dk = tl.zeros([BN, D], tl.float32)
    b_dv = tl.zeros([BN, DV], tl.float32)
    b_col = tl.zeros([BN], tl.float32)
    if TWO:
        b_dk2, b_dv2, b_col2 = b_dk, b_dv, b_col
    edges = rows(j0, n, window, first, BM, BN, CAUSAL, WINDOW)
    for i_sub in range(group):
        i_head = i_kv * group + i_sub
        i_row = i_item * heads + i_head
        at_q = i_item * q_item + i_head * q_head
        at_g = i_probe * g_probe + i_item * g_item + i_head * g_head
        p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
        p_delta = DELTA + i_probe * next_row + i_row * n_rows
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3 if WINDOW else 2):
            for i0 in tl.range(edges[phase], edges[phase + 1], BM):
                i = i0 + tl.arange(0, BM)
                b_q, b_q_lo = tile(Q, Q_LO, at_q, i0, n, q_row, c, d, BM, S_PASSES, PAD, RAGGED)
                b_g, b_g_lo = tile(G, G_LO, at_g, i0, n, g_row, c_v, d_v, BM, PASSES, PAD, RAGGED)
                b_top, b_lse = stats(LSE, i_row, n_rows, n, i, RAGGED)
                b_delta = stat(p_delta + i, n, i, 0.0, RAGGED)
                b_s = across(b_k, b_k_lo, b_q, b_q_lo, S_PASSES, PRECISION)
                b_dp = across(b_v, b_v_lo, b_g, b_g_lo, PASSES, PRECISION)
                b_s, b_slope, _ = finish(
                    b_s, i[None, :], j[:, None], n, m, window, first, scale, cap, p_bias, bias_row, p_keys,
                    CAUSAL, WINDOW, BIAS, CAP, KEYS, EDGE=phase != 1,
                )  # fmt: skip
                b_w, b_slope = weigh(b_s, b_top[None, :], b_lse[None, :] - SHIFT, b_slope, CAP, SIGMOID)
                b_p, b_p_lo = split(b_w, b_g, PASSES)
                b_dk, b_dv, b_col = _column_probe(
                    b_dk, b_dv, b_col, b_p, b_p_lo, b_slope, b_dp, b_delta, b_q, b_q_lo, b_g, b_g_lo, factor, one,
                    PASSES, PRECISION, PROMOTE, PACKED, MOVE, not SIGMOID,
                )  # fmt: skip
                if TWO:
                    b_g, b_g_lo = tile(G, G_LO, at_g + g_probe, i0, n, g_row, c_v, d_v, BM, PASSES, PAD, RAGGED)
                    b_dp = across(b_v, b_v_lo, b_g, b_g_lo, PASSES, PRECISION)
                    b_delta = tl.load(p_delta + next_row + i)
                    b_dk2, b_dv2, b_col2 = _column_probe(
                        b_dk2, b_dv2, b_col2, b_p, b_p_lo, b_slope, b_dp, b_delta, b_q, b_q_lo, b_g, b_g_lo, factor, one,
                        PASSES, PRECISION, PROMOTE, PACKED, MOVE, not SIGMOID,
                    )  # fmt: skip
    p_scales = SCALES + (i_probe * batch + i_item) * 3 if PACKED else BIAS_P
    p_dkeys = DKEYS + ((i_probe * batch + i_item) * (heads // group) + i_kv) * m_rows + j if MOVE else BIAS_P
    at_k = i_probe * out_probe + i_item * out_item + i_kv * out_head
    at_v = i_probe * out2_probe + i_item * out2_item + i_kv * out2_head
    unit = tl.load(p_scales + 1) if PACKED else scale
    if MOVE:
        tl.store(p_dkeys, b_col * unit)
    put(OUT, at_k, b_dk * unit, j0, m, out_row, c, d, BN)
    put(OUT2, at_v, b_dv * tl.load(p_scales + 2) if PACKED else b_dv, j0, m, out2_row, c_v, d_v, BN)
    if TWO:
        unit = tl.load(p_scales + 3 * batch + 1)
        if MOVE:
            tl.store(p_dkeys + batch * (heads // group) * m_rows.to(tl.int64), b_col2 * unit)
        put(OUT, at_k + out_probe, b_dk2 * unit, j0, m, out_row, c, d, BN)
        put(OUT2, at_v + out2_probe, b_dv2 * tl.load(p_scales + 3 * batch + 2), j0, m, out2_row, c_v, d_v, BN)


@triton.jit
def _row_probe(
    b_dq, b_slope, b_dp, b_delta, b_k, b_k_lo, kappa, one,
    PASSES: tl.constexpr, PRECISION: tl.constexpr, PROMOTE: tl.constexpr, PACKED: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """What one block of `P` adds to `dq = dS k` of one probe. ROW: rows have a term of their own."""
    if ROW:
        b_dp -= b_delta[:, None]
    b_ds, b_ds_lo = split(b_slope * (b_dp * kappa if PACKED else b_dp), b_k, PASSES)
    return accumulate(b_ds, b_ds_lo, b_k, b_k_lo, b_dq, one, PASSES, PRECISION, PROMOTE)


@kernel()
def vjp_rows(
    Q, K, V, G, BIAS_P, OLD, LSE, DELTA, OUT,
    n, m, batch, heads, group, d, d_v, window, first, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    g_probe, g_item, g_head, g_row, o_item, o_head, o_row, out_probe, out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr = False, RAGGED: tl.constexpr = False, PRECISION: tl.constexpr = "tf32",
    DOCUMENTS: tl.constexpr = False,
    PACKED: tl.constexpr = False, PASSES: tl.constexpr = 1, S_PASSES: tl.constexpr = 1, KEYS: tl.constexpr = False,
    SIGMOID: tl.constexpr = False, TWO: tl.constexpr = False, PROMOTE: tl.constexpr = False,
    Q_LO=None, K_LO=None, V_LO=None, G_LO=None, KEYS_P=None, SCALES=None,
):  # fmt: skip
    """`dq = τ (P ∘ (g vᵀ − δ)) k` of one block of rows of one head.

    PACKED: `δ = r(g ∘ o)` was made with the operands; else it is made here, for the columns' kernel, which runs after it.
    """
    SHIFT: tl.constexpr = 14 if PACKED else 0
    i_g, i_item, i_head, i_kv, i_probe, i0 = own_rows(batch, heads, group, 1, BM, DOCUMENTS)
    i_probe *= 2 if TWO else 1
    i = i0 + tl.arange(0, BM)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    n_rows = padded(n, PACKED)
    next_row = batch * heads * n_rows.to(tl.int64)
    if DOCUMENTS:
        q0, n, k0, m = document(BIAS_P, batch * heads)
        first = m - n
        if i0 >= n:
            return
        Q += q0 * q_row
        G += q0 * g_row
        OLD += q0 * o_row
        OUT += q0 * out_row
        LSE += q0
        DELTA += q0
        K += k0 * k_row
        V += k0 * v_row
    if PACKED:
        q_row, k_row, v_row, g_row = D, D, DV, DV
    at_k, at_v = i_item * k_item + i_kv * k_head, i_item * v_item + i_kv * v_head
    at_g = i_probe * g_probe + i_item * g_item + i_head * g_head
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    p_keys = KEYS_P + (i_item * (heads // group) + i_kv) * padded(m, PACKED) if KEYS else BIAS_P
    p_delta = DELTA + i_probe * next_row + i_g * n_rows + i
    b_q, b_q_lo = tile(Q, Q_LO, i_item * q_item + i_head * q_head, i0, n, q_row, c, d, BM, S_PASSES, PAD, RAGGED)
    b_g, b_g_lo = tile(G, G_LO, at_g, i0, n, g_row, c_v, d_v, BM, PASSES, PAD, RAGGED)
    if PACKED:
        b_delta = tl.load(p_delta)
    else:
        b_o = plain(OLD, i_item * o_item + i_head * o_head, i0, n, o_row, c_v, d_v, BM, PAD, RAGGED)
        b_delta = tl.sum(b_g.to(tl.float32) * b_o.to(tl.float32), 1)
        tl.store(p_delta, b_delta, mask=i < n)
    b_dq = tl.zeros([BM, D], tl.float32)
    if TWO:
        b_dq2 = b_dq
        b_g2, b_g2_lo = tile(G, G_LO, at_g + g_probe, i0, n, g_row, c_v, d_v, BM, PASSES, PAD, RAGGED)
        b_delta2 = tl.load(p_delta + next_row)
    b_top, b_lse = stats(LSE, i_g, n_rows, n, i, RAGGED)
    edges = columns(i0, m, window, first, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        for j0 in tl.range(edges[phase], edges[phase + 1], BN):
            j = j0 + tl.arange(0, BN)
            b_k, b_k_lo = tile(K, K_LO, at_k, j0, m, k_row, c, d, BN, S_PASSES, PAD, RAGGED)
            b_v, b_v_lo = tile(V, V_LO, at_v, j0, m, v_row, c_v, d_v, BN, PASSES, PAD, RAGGED)
            b_s = across(b_q, b_q_lo, b_k, b_k_lo, S_PASSES, PRECISION)
            b_dp = across(b_g, b_g_lo, b_v, b_v_lo, PASSES, PRECISION)
            b_s, b_slope, _ = finish(
                b_s, i[:, None], j[None, :], n, m, window, first, scale, cap, p_bias, bias_row, p_keys,
                CAUSAL, WINDOW, BIAS, CAP, KEYS, EDGE=phase != 1,
            )  # fmt: skip
            _, b_slope = weigh(b_s, b_top[:, None], b_lse[:, None] - SHIFT, b_slope, CAP, SIGMOID)
            b_dq = _row_probe(
                b_dq, b_slope, b_dp, b_delta, b_k, b_k_lo, factor, one, PASSES, PRECISION, PROMOTE, PACKED, not SIGMOID
            )
            if TWO:
                b_dp = across(b_g2, b_g2_lo, b_v, b_v_lo, PASSES, PRECISION)
                b_dq2 = _row_probe(
                    b_dq2, b_slope, b_dp, b_delta2, b_k, b_k_lo, factor, one, PASSES, PRECISION, PROMOTE, PACKED, not SIGMOID
                )
    at = i_probe * out_probe + i_item * out_item + i_head * out_head
    p_scales = SCALES + (i_probe * batch + i_item) * 3 if PACKED else BIAS_P
    put(OUT, at, b_dq * (tl.load(p_scales) if PACKED else scale), i0, n, out_row, c, d, BM)
    if TWO:
        put(OUT, at + out_probe, b_dq2 * tl.load(p_scales + 3 * batch), i0, n, out_row, c, d, BM)


@triton.jit
def _parts(b_p, b_slope, b_bend, b_du, b_rho, b_dp, b_dp2, scale, CAP: tl.constexpr):
    """`P'`, `P ∘ G` and `C` of README.md, the last two with the soft-cap's slope; row statistics come broadcast."""
    b_du *= scale
    if CAP:
        b_moved = b_du * b_slope - b_rho
        return b_p * b_moved, b_p * b_slope * b_dp, b_p * b_slope * (b_moved * b_dp + b_dp2 + b_bend * b_du * b_dp)
    b_moved = b_p * (b_du - b_rho)
    return b_moved, b_p * b_dp, b_moved * b_dp + b_p * b_dp2


@kernel()
def hvp_rows(
    Q, K, V, DQ, DK, DV_P, G, BIAS_P, OLD, DO, LSE, DLSE, DELTA, DELTA2, OUT,
    n, m, batch, heads, group, d, d_v, window, first, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    g_probe, g_item, g_head, g_row, o_item, o_head, o_row, do_probe, do_item, do_head, do_row,
    out_probe, out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """`τ(C k + (P ∘ G) dk)` of one block of rows, `δ = r(g ∘ o)` and `δ' = r(g ∘ do)` for the columns' kernel, run next."""
    i_g, i_item, i_head, i_kv, i_probe, i0 = own_rows(batch, heads, group, 1, BM, DOCUMENTS)
    n_rows = n
    if DOCUMENTS:
        q0, n, k0, m = document(BIAS_P, batch * heads)
        first = m - n
        if i0 >= n:
            return
        Q += q0 * q_row
        DQ += q0 * dq_row
        G += q0 * g_row
        OLD += q0 * o_row
        DO += q0 * do_row
        OUT += q0 * out_row
        LSE += q0
        DLSE += q0
        DELTA += q0
        DELTA2 += q0
        K += k0 * k_row
        V += k0 * v_row
        DK += k0 * dk_row
        DV_P += k0 * dv_row
    i = i0 + tl.arange(0, BM)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    at_k, at_v = i_item * k_item + i_kv * k_head, i_item * v_item + i_kv * v_head
    at_dq = i_probe * dq_probe + i_item * dq_item + i_head * dq_head
    at_dk = i_probe * dk_probe + i_item * dk_item + i_kv * dk_head
    at_dv = i_probe * dv_probe + i_item * dv_item + i_kv * dv_head
    at_g = i_probe * g_probe + i_item * g_item + i_head * g_head
    at_do = i_probe * do_probe + i_item * do_item + i_head * do_head
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    b_q = plain(Q, i_item * q_item + i_head * q_head, i0, n, q_row, c, d, BM, PAD, RAGGED)
    b_dq = plain(DQ, at_dq, i0, n, dq_row, c, d, BM, PAD, RAGGED)
    b_g = plain(G, at_g, i0, n, g_row, c_v, d_v, BM, PAD, RAGGED)
    b_o = plain(OLD, i_item * o_item + i_head * o_head, i0, n, o_row, c_v, d_v, BM, PAD, RAGGED)
    b_do = plain(DO, at_do, i0, n, do_row, c_v, d_v, BM, PAD, RAGGED)
    b_delta = tl.sum(b_g.to(tl.float32) * b_o.to(tl.float32), 1)
    b_delta2 = tl.sum(b_g.to(tl.float32) * b_do.to(tl.float32), 1)
    row0 = (i_probe * batch * heads + i_g) * n_rows
    tl.store(DELTA + row0 + i, b_delta, mask=i < n)
    tl.store(DELTA2 + row0 + i, b_delta2, mask=i < n)
    b_top, b_lse = stats(LSE, i_g, n_rows, n, i, RAGGED)
    b_rho = stat(DLSE + 2 * row0 + n_rows + i, n, i, 0.0, RAGGED)
    b_hq = tl.zeros([BM, D], tl.float32)
    edges = columns(i0, m, window, first, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        for j0 in tl.range(edges[phase], edges[phase + 1], BN):
            j = j0 + tl.arange(0, BN)
            b_k = plain(K, at_k, j0, m, k_row, c, d, BN, PAD, RAGGED)
            b_dk = plain(DK, at_dk, j0, m, dk_row, c, d, BN, PAD, RAGGED)
            b_v = plain(V, at_v, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
            b_dv = plain(DV_P, at_dv, j0, m, dv_row, c_v, d_v, BN, PAD, RAGGED)
            b_s, b_slope, b_bend = finish(
                across(b_q, b_q, b_k, b_k, 1, PRECISION), i[:, None], j[None, :], n, m, window, first, scale, cap,
                p_bias, bias_row, BIAS_P, CAUSAL, WINDOW, BIAS, CAP, False, EDGE=phase != 1,
            )  # fmt: skip
            b_p, _ = weigh(b_s, b_top[:, None], b_lse[:, None], b_s, False, False)
            b_du = across(b_dq, b_dq, b_k, b_k, 1, PRECISION)
            b_du = dot(b_q, b_q, tl.trans(b_dk), b_dk, b_du, 1, PRECISION)
            b_dp = across(b_g, b_g, b_v, b_v, 1, PRECISION) - b_delta[:, None]
            b_dp2 = across(b_g, b_g, b_dv, b_dv, 1, PRECISION) - b_delta2[:, None]
            _, b_first, b_second = _parts(b_p, b_slope, b_bend, b_du, b_rho[:, None], b_dp, b_dp2, scale, CAP)
            b_hq = dot(b_second.to(b_k.dtype), b_k, b_k, b_k, b_hq, 1, PRECISION)
            b_hq = dot(b_first.to(b_k.dtype), b_dk, b_dk, b_dk, b_hq, 1, PRECISION)
    at = i_probe * out_probe + i_item * out_item + i_head * out_head
    put(OUT, at, b_hq * scale, i0, n, out_row, c, d, BM)


@kernel()
def hvp_columns(
    Q, K, V, DQ, DK, DV_P, G, BIAS_P, LSE, DLSE, DELTA, DELTA2, OUT, OUT2,
    n, m, batch, heads, group, d, d_v, window, first, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    g_probe, g_item, g_head, g_row, out_probe, out_item, out_head, out_row, out2_probe, out2_item, out2_head, out2_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """`τ(Cᵀ q + (P ∘ G)ᵀ dq)` and `P'ᵀ g` of one block of columns, over the query heads that share them."""
    i_g, i_item, i_kv, i_probe, j0 = own_columns(batch, heads, group, BN, DOCUMENTS)
    n_rows = n
    if DOCUMENTS:
        q0, n, k0, m = document(BIAS_P, batch * (heads // group))
        first = m - n
        if j0 >= m:
            return
        Q += q0 * q_row
        DQ += q0 * dq_row
        G += q0 * g_row
        LSE += q0
        DLSE += q0
        DELTA += q0
        DELTA2 += q0
        K += k0 * k_row
        V += k0 * v_row
        DK += k0 * dk_row
        DV_P += k0 * dv_row
        OUT += k0 * out_row
        OUT2 += k0 * out2_row
    j = j0 + tl.arange(0, BN)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    at_dk = i_probe * dk_probe + i_item * dk_item + i_kv * dk_head
    at_dv = i_probe * dv_probe + i_item * dv_item + i_kv * dv_head
    b_k = plain(K, i_item * k_item + i_kv * k_head, j0, m, k_row, c, d, BN, PAD, RAGGED)
    b_v = plain(V, i_item * v_item + i_kv * v_head, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
    b_dk = plain(DK, at_dk, j0, m, dk_row, c, d, BN, PAD, RAGGED)
    b_dv = plain(DV_P, at_dv, j0, m, dv_row, c_v, d_v, BN, PAD, RAGGED)
    b_hk = tl.zeros([BN, D], tl.float32)
    b_hv = tl.zeros([BN, DV], tl.float32)
    edges = rows(j0, n, window, first, BM, BN, CAUSAL, WINDOW)
    for i_sub in range(group):
        i_head = i_kv * group + i_sub
        i_row = i_item * heads + i_head
        at_q = i_item * q_item + i_head * q_head
        at_dq = i_probe * dq_probe + i_item * dq_item + i_head * dq_head
        at_g = i_probe * g_probe + i_item * g_item + i_head * g_head
        p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
        row0 = (i_probe * batch * heads + i_row) * n_rows
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3 if WINDOW else 2):
            for i0 in tl.range(edges[phase], edges[phase + 1], BM):
                i = i0 + tl.arange(0, BM)
                b_q = plain(Q, at_q, i0, n, q_row, c, d, BM, PAD, RAGGED)
                b_dq = plain(DQ, at_dq, i0, n, dq_row, c, d, BM, PAD, RAGGED)
                b_g = plain(G, at_g, i0, n, g_row, c_v, d_v, BM, PAD, RAGGED)
                b_top, b_lse = stats(LSE, i_row, n_rows, n, i, RAGGED)
                b_rho = stat(DLSE + 2 * row0 + n_rows + i, n, i, 0.0, RAGGED)
                b_delta = stat(DELTA + row0 + i, n, i, 0.0, RAGGED)
                b_delta2 = stat(DELTA2 + row0 + i, n, i, 0.0, RAGGED)
                b_s, b_slope, b_bend = finish(
                    across(b_k, b_k, b_q, b_q, 1, PRECISION), i[None, :], j[:, None], n, m, window, first, scale, cap,
                    p_bias, bias_row, BIAS_P, CAUSAL, WINDOW, BIAS, CAP, False, EDGE=phase != 1,
                )  # fmt: skip
                b_p, _ = weigh(b_s, b_top[None, :], b_lse[None, :], b_s, False, False)
                b_du = across(b_k, b_k, b_dq, b_dq, 1, PRECISION)
                b_du = dot(b_dk, b_dk, tl.trans(b_q), b_q, b_du, 1, PRECISION)
                b_dp = across(b_v, b_v, b_g, b_g, 1, PRECISION) - b_delta[None, :]
                b_dp2 = across(b_dv, b_dv, b_g, b_g, 1, PRECISION) - b_delta2[None, :]
                b_moved, b_first, b_second = _parts(b_p, b_slope, b_bend, b_du, b_rho[None, :], b_dp, b_dp2, scale, CAP)
                b_hv = dot(b_moved.to(b_g.dtype), b_g, b_g, b_g, b_hv, 1, PRECISION)
                b_hk = dot(b_second.to(b_q.dtype), b_q, b_q, b_q, b_hk, 1, PRECISION)
                b_hk = dot(b_first.to(b_q.dtype), b_dq, b_dq, b_dq, b_hk, 1, PRECISION)
    at = i_probe * out_probe + i_item * out_item + i_kv * out_head
    put(OUT, at, b_hk * scale, j0, m, out_row, c, d, BN)
    put(OUT2, i_probe * out2_probe + i_item * out2_item + i_kv * out2_head, b_hv, j0, m, out2_row, c_v, d_v, BN)
