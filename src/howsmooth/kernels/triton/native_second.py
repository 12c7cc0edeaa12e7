"""The Hessian of `⟨g, o⟩` times a direction, in two kernels that write each entry once. Derivation: ../README.md."""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import columns, finish, rows
from howsmooth.kernels.triton.native_first import ANY, dot, put, stat, stats, tile


@triton.jit
def _bent(b_raw, scale, cap):
    """`−2 tanh(s/c)/c` from `q·k`: how the soft-cap's slope bends."""
    LOG2E: tl.constexpr = 1.4426950408889634
    b_s = b_raw * scale
    b_e = tl.exp2(tl.abs(b_s) * (-2 * LOG2E / cap))
    return tl.where(b_s < 0, 2.0, -2.0) * (1 - b_e) / (1 + b_e) / cap


@triton.jit
def _parts(b_raw, b_p, b_slope, b_du, b_rho, b_pull, b_pull2, scale, cap, CAP: tl.constexpr):
    """`P'`, `P ∘ G` and `C` of README.md, the last two with the soft-cap's slope; row statistics come broadcast."""
    b_du *= scale
    if CAP:
        b_moved = b_du * b_slope - b_rho
        b_second = b_p * b_slope * (b_moved * b_pull + b_pull2 + _bent(b_raw, scale, cap) * b_du * b_pull)
        return b_p * b_moved, b_p * b_slope * b_pull, b_second
    b_moved = b_p * (b_du - b_rho)
    return b_moved, b_p * b_pull, b_moved * b_pull + b_p * b_pull2


@triton.jit(do_not_specialize=[*ANY])
def hvp_rows(
    Q, K, V, DQ, DK, DV_P, G, BIAS_P, OLD, DO, LSE, DLSE, DELTA, DELTA2, HQ,
    n, m, batch, heads, group, d, d_v, window, scale, cap,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    g_probe, g_item, g_head, g_row, o_item, o_head, o_row, do_probe, do_item, do_head, do_row,
    hq_probe, hq_item, hq_head, hq_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """`τ(C k + (P ∘ G) dk)` of one block of rows, `δ = r(g ∘ o)` and `δ' = r(g ∘ do)` for the columns' kernel, run next."""
    i_g, i_probe = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_head, i_item = i_g % heads, i_g // heads
    i_kv = i_head // group
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = i0 + tl.arange(0, BM)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    p_k, p_v = K + i_item * k_item + i_kv * k_head, V + i_item * v_item + i_kv * v_head
    p_dk = DK + i_probe * dk_probe + i_item * dk_item + i_kv * dk_head
    p_dv = DV_P + i_probe * dv_probe + i_item * dv_item + i_kv * dv_head
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    b_q = tile(Q + i_item * q_item + i_head * q_head, i0, n, q_row, c, d, BM, PAD, RAGGED)
    b_dq = tile(DQ + i_probe * dq_probe + i_item * dq_item + i_head * dq_head, i0, n, dq_row, c, d, BM, PAD, RAGGED)
    b_g = tile(G + i_probe * g_probe + i_item * g_item + i_head * g_head, i0, n, g_row, c_v, d_v, BM, PAD, RAGGED)
    b_o = tile(OLD + i_item * o_item + i_head * o_head, i0, n, o_row, c_v, d_v, BM, PAD, RAGGED)
    b_do = tile(DO + i_probe * do_probe + i_item * do_item + i_head * do_head, i0, n, do_row, c_v, d_v, BM, PAD, RAGGED)
    b_delta = tl.sum(b_g.to(tl.float32) * b_o.to(tl.float32), 1)
    b_delta2 = tl.sum(b_g.to(tl.float32) * b_do.to(tl.float32), 1)
    at_row = (i_probe * batch * heads + i_g) * n + i
    tl.store(DELTA + at_row, b_delta, mask=i < n)
    tl.store(DELTA2 + at_row, b_delta2, mask=i < n)
    b_top, b_sum = stats(LSE, i_g, n, i, RAGGED)
    b_rho = stat(DLSE + (i_probe * batch * heads + i_g) * 2 * n + n + i, n, i, 0.0, RAGGED)
    b_hq = tl.zeros([BM, D], tl.float32)
    start, whole_start, whole_end, end = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
        high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
        for j0 in tl.range(low, high, BN):
            j = j0 + tl.arange(0, BN)
            b_k = tile(p_k, j0, m, k_row, c, d, BN, PAD, RAGGED)
            b_dk = tile(p_dk, j0, m, dk_row, c, d, BN, PAD, RAGGED)
            b_v = tile(p_v, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
            b_dv = tile(p_dv, j0, m, dv_row, c_v, d_v, BN, PAD, RAGGED)
            b_raw = dot(b_q, tl.trans(b_k), tl.zeros([BM, BN], tl.float32), PRECISION)
            b_s, b_slope = finish(
                b_raw, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row,
                CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
            )  # fmt: skip
            b_p = tl.exp2(b_s - b_top[:, None] - b_sum[:, None])
            b_du = dot(b_dq, tl.trans(b_k), tl.zeros([BM, BN], tl.float32), PRECISION)
            b_du = dot(b_q, tl.trans(b_dk), b_du, PRECISION)
            b_pull = dot(b_g, tl.trans(b_v), tl.zeros([BM, BN], tl.float32), PRECISION) - b_delta[:, None]
            b_pull2 = dot(b_g, tl.trans(b_dv), tl.zeros([BM, BN], tl.float32), PRECISION) - b_delta2[:, None]
            _, b_first, b_second = _parts(b_raw, b_p, b_slope, b_du, b_rho[:, None], b_pull, b_pull2, scale, cap, CAP)
            b_hq = dot(b_second.to(b_k.dtype), b_k, b_hq, PRECISION)
            b_hq = dot(b_first.to(b_k.dtype), b_dk, b_hq, PRECISION)
    put(HQ + i_probe * hq_probe + i_item * hq_item + i_head * hq_head, b_hq * scale, i0, n, hq_row, c, d, BM)


@triton.jit(do_not_specialize=[*ANY])
def hvp_columns(
    Q, K, V, DQ, DK, DV_P, G, BIAS_P, LSE, DLSE, DELTA, DELTA2, HK, HV,
    n, m, batch, heads, group, d, d_v, window, scale, cap,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    g_probe, g_item, g_head, g_row, hk_probe, hk_item, hk_head, hk_row, hv_probe, hv_item, hv_head, hv_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """`τ(Cᵀ q + (P ∘ G)ᵀ dq)` and `P'ᵀ g` of one block of columns, over the query heads that share them."""
    i_g, i_probe = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_heads = heads // group
    i_item, i_kv = i_g // kv_heads, i_g % kv_heads
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    b_k = tile(K + i_item * k_item + i_kv * k_head, j0, m, k_row, c, d, BN, PAD, RAGGED)
    b_v = tile(V + i_item * v_item + i_kv * v_head, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
    b_dk = tile(DK + i_probe * dk_probe + i_item * dk_item + i_kv * dk_head, j0, m, dk_row, c, d, BN, PAD, RAGGED)
    b_dv = tile(DV_P + i_probe * dv_probe + i_item * dv_item + i_kv * dv_head, j0, m, dv_row, c_v, d_v, BN, PAD, RAGGED)
    b_hk = tl.zeros([BN, D], tl.float32)
    b_hv = tl.zeros([BN, DV], tl.float32)
    start, whole_start, whole_end, end = rows(j0, n, window, BM, BN, CAUSAL, WINDOW)
    for i_sub in range(group):
        i_head = i_kv * group + i_sub
        i_row = i_item * heads + i_head
        p_q = Q + i_item * q_item + i_head * q_head
        p_dq = DQ + i_probe * dq_probe + i_item * dq_item + i_head * dq_head
        p_g = G + i_probe * g_probe + i_item * g_item + i_head * g_head
        p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
        first = (i_probe * batch * heads + i_row) * n
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3 if WINDOW else 2):
            low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
            high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
            for i0 in tl.range(low, high, BM):
                i = i0 + tl.arange(0, BM)
                b_q = tile(p_q, i0, n, q_row, c, d, BM, PAD, RAGGED)
                b_dq = tile(p_dq, i0, n, dq_row, c, d, BM, PAD, RAGGED)
                b_g = tile(p_g, i0, n, g_row, c_v, d_v, BM, PAD, RAGGED)
                b_top, b_sum = stats(LSE, i_row, n, i, RAGGED)
                b_rho = stat(DLSE + 2 * first + n + i, n, i, 0.0, RAGGED)
                b_delta = stat(DELTA + first + i, n, i, 0.0, RAGGED)
                b_delta2 = stat(DELTA2 + first + i, n, i, 0.0, RAGGED)
                b_raw = dot(b_k, tl.trans(b_q), tl.zeros([BN, BM], tl.float32), PRECISION)
                b_s, b_slope = finish(
                    b_raw, i[None, :], j[:, None], n, m, window, scale, cap, p_bias, bias_row,
                    CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
                )  # fmt: skip
                b_p = tl.exp2(b_s - b_top[None, :] - b_sum[None, :])
                b_du = dot(b_k, tl.trans(b_dq), tl.zeros([BN, BM], tl.float32), PRECISION)
                b_du = dot(b_dk, tl.trans(b_q), b_du, PRECISION)
                b_pull = dot(b_v, tl.trans(b_g), tl.zeros([BN, BM], tl.float32), PRECISION) - b_delta[None, :]
                b_pull2 = dot(b_dv, tl.trans(b_g), tl.zeros([BN, BM], tl.float32), PRECISION) - b_delta2[None, :]
                b_moved, b_first, b_second = _parts(b_raw, b_p, b_slope, b_du, b_rho[None, :], b_pull, b_pull2, scale, cap, CAP)
                b_hv = dot(b_moved.to(b_g.dtype), b_g, b_hv, PRECISION)
                b_hk = dot(b_second.to(b_q.dtype), b_q, b_hk, PRECISION)
                b_hk = dot(b_first.to(b_q.dtype), b_dq, b_hk, PRECISION)
    put(HK + i_probe * hk_probe + i_item * hk_item + i_kv * hk_head, b_hk * scale, j0, m, hk_row, c, d, BN)
    put(HV + i_probe * hv_probe + i_item * hv_item + i_kv * hv_head, b_hv, j0, m, hv_row, c_v, d_v, BN)
