"""The Hessian of `⟨g, o⟩` times a direction, in two kernels that write each entry once. Derivation: ../README.md."""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import (
    across,
    columns,
    dot,
    finish,
    kernel,
    own_columns,
    own_rows,
    plain,
    put,
    rows,
    stat,
    stats,
    weigh,
)


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
    n, m, batch, heads, group, d, d_v, window, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    g_probe, g_item, g_head, g_row, o_item, o_head, o_row, do_probe, do_item, do_head, do_row,
    out_probe, out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`τ(C k + (P ∘ G) dk)` of one block of rows, `δ = r(g ∘ o)` and `δ' = r(g ∘ do)` for the columns' kernel, run next."""
    i_g, i_item, i_head, i_kv, i_probe, i0 = own_rows(heads, group, 1, BM)
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
    first = (i_probe * batch * heads + i_g) * n
    tl.store(DELTA + first + i, b_delta, mask=i < n)
    tl.store(DELTA2 + first + i, b_delta2, mask=i < n)
    b_top, b_lse = stats(LSE, i_g, n, i, RAGGED)
    b_rho = stat(DLSE + 2 * first + n + i, n, i, 0.0, RAGGED)
    b_hq = tl.zeros([BM, D], tl.float32)
    edges = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        for j0 in tl.range(edges[phase], edges[phase + 1], BN):
            j = j0 + tl.arange(0, BN)
            b_k = plain(K, at_k, j0, m, k_row, c, d, BN, PAD, RAGGED)
            b_dk = plain(DK, at_dk, j0, m, dk_row, c, d, BN, PAD, RAGGED)
            b_v = plain(V, at_v, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
            b_dv = plain(DV_P, at_dv, j0, m, dv_row, c_v, d_v, BN, PAD, RAGGED)
            b_s, b_slope, b_bend = finish(
                across(b_q, b_q, b_k, b_k, 1, PRECISION), i[:, None], j[None, :], n, m, window, scale, cap,
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
    n, m, batch, heads, group, d, d_v, window, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    g_probe, g_item, g_head, g_row, out_probe, out_item, out_head, out_row, out2_probe, out2_item, out2_head, out2_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`τ(Cᵀ q + (P ∘ G)ᵀ dq)` and `P'ᵀ g` of one block of columns, over the query heads that share them."""
    i_g, i_item, i_kv, i_probe, j0 = own_columns(heads, group, BN)
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
    edges = rows(j0, n, window, BM, BN, CAUSAL, WINDOW)
    for i_sub in range(group):
        i_head = i_kv * group + i_sub
        i_row = i_item * heads + i_head
        at_q = i_item * q_item + i_head * q_head
        at_dq = i_probe * dq_probe + i_item * dq_item + i_head * dq_head
        at_g = i_probe * g_probe + i_item * g_item + i_head * g_head
        p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
        first = (i_probe * batch * heads + i_row) * n
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3 if WINDOW else 2):
            for i0 in tl.range(edges[phase], edges[phase + 1], BM):
                i = i0 + tl.arange(0, BM)
                b_q = plain(Q, at_q, i0, n, q_row, c, d, BM, PAD, RAGGED)
                b_dq = plain(DQ, at_dq, i0, n, dq_row, c, d, BM, PAD, RAGGED)
                b_g = plain(G, at_g, i0, n, g_row, c_v, d_v, BM, PAD, RAGGED)
                b_top, b_lse = stats(LSE, i_row, n, i, RAGGED)
                b_rho = stat(DLSE + 2 * first + n + i, n, i, 0.0, RAGGED)
                b_delta = stat(DELTA + first + i, n, i, 0.0, RAGGED)
                b_delta2 = stat(DELTA2 + first + i, n, i, 0.0, RAGGED)
                b_s, b_slope, b_bend = finish(
                    across(b_k, b_k, b_q, b_q, 1, PRECISION), i[None, :], j[:, None], n, m, window, scale, cap,
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
