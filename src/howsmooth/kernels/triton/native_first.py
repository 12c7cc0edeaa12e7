"""Forward, jvp and vjp on operands as they come, each product in one launch or two: for `sdpa`, where nothing is packed first.

Products take half-precision operands as they are and float32 ones as tf32, once or three times (PRECISION).
"""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import columns, finish, rows

# numbers that a kernel is not compiled anew for
ANY = ("n", "m", "batch", "heads", "group", "d", "d_v", "window")


@triton.jit
def tile(P, start, limit, stride, c, width, N: tl.constexpr, PAD: tl.constexpr, RAGGED: tl.constexpr):
    """Rows `start … start + N − 1` of a matrix, the last one again past its end, (N, padded width)."""
    r = tl.arange(0, N)
    if RAGGED:
        r = tl.minimum(r, limit - 1 - start)
    p = P + tl.cast(start, tl.int64) * stride + r[:, None] * stride + c[None, :]
    if PAD:
        return tl.load(p, mask=c[None, :] < width, other=0.0)
    return tl.load(p)


@triton.jit
def stat(P, n, i, other, RAGGED: tl.constexpr):
    """A number per row."""
    return tl.load(P, mask=i < n, other=other) if RAGGED else tl.load(P)


@triton.jit
def stats(LSE, i_row, n, i, RAGGED: tl.constexpr):
    """Both parts of the log-sum-exp of each row, (rows, 2, n): the largest logit, and what the sum beside it adds."""
    p = LSE + i_row * 2 * n + i
    return stat(p, n, i, 0.0, RAGGED), stat(p + n, n, i, float("inf"), RAGGED)


@triton.jit
def put(P, b_x, start, limit, stride, c, width, N: tl.constexpr):
    """Write rows of a matrix."""
    r = tl.arange(0, N)
    p = P + tl.cast(start, tl.int64) * stride + r[:, None] * stride + c[None, :]
    tl.store(p, b_x.to(P.dtype.element_ty), mask=(r[:, None] < limit - start) & (c[None, :] < width))


@triton.jit
def dot(b_a, b_b, b_acc, PRECISION: tl.constexpr):
    return tl.dot(b_a, b_b, b_acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=[*ANY])
def forward(
    Q, K, V, BIAS_P, OUT, LSE, n, m, heads, group, d, d_v, window, scale, cap,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head, by the online softmax."""
    i_g = tl.program_id(1).to(tl.int64)
    i_head, i_item = i_g % heads, i_g // heads
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = i0 + tl.arange(0, BM)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    p_k = K + i_item * k_item + i_head // group * k_head
    p_v = V + i_item * v_item + i_head // group * v_head
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    b_q = tile(Q + i_item * q_item + i_head * q_head, i0, n, q_row, c, d, BM, PAD, RAGGED)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DV], tl.float32)
    start, whole_start, whole_end, end = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
        high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
        for j0 in tl.range(low, high, BN):
            j = j0 + tl.arange(0, BN)
            b_k = tile(p_k, j0, m, k_row, c, d, BN, PAD, RAGGED)
            b_s = dot(b_q, tl.trans(b_k), tl.zeros([BM, BN], tl.float32), PRECISION)
            b_s, _ = finish(
                b_s, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row,
                CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
            )  # fmt: skip
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_shrink = tl.exp2(b_max - b_base)
            b_p = tl.exp2(b_s - b_base[:, None])
            b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
            b_max = b_new
            b_v = tile(p_v, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
            b_acc = dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], PRECISION)
    lost = b_sum == 0  # no key is seen: zero, and P = exp2(s − ∞) = 0 in every product
    b_sum = tl.where(lost, 1.0, b_sum)
    # apart: beside an offset that the whole row shares, the sum would have no digits left
    tl.store(LSE + i_g * 2 * n + i, tl.where(lost, 0.0, b_max), mask=i < n)
    tl.store(LSE + i_g * 2 * n + n + i, tl.where(lost, float("inf"), tl.log2(b_sum)), mask=i < n)
    put(OUT + i_item * out_item + i_head * out_head, b_acc / b_sum[:, None], i0, n, out_row, c_v, d_v, BM)


@triton.jit(do_not_specialize=[*ANY])
def jvp(
    Q, K, V, DQ, DK, DV_P, BIAS_P, OLD, LSE, OUT, DLSE,
    n, m, batch, heads, group, d, d_v, window, scale, cap,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    o_item, o_head, o_row, out_probe, out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """`do = T v + P dv − r(T) o` and `dℓ = r(T)` with `T = P ∘ τ(dq kᵀ + q dkᵀ)`, for one block of rows of one head."""
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
    b_top, b_sum = stats(LSE, i_g, n, i, RAGGED)
    b_row = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DV], tl.float32)
    start, whole_start, whole_end, end = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
        high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
        for j0 in tl.range(low, high, BN):
            j = j0 + tl.arange(0, BN)
            b_k = tl.trans(tile(p_k, j0, m, k_row, c, d, BN, PAD, RAGGED))
            b_dk = tl.trans(tile(p_dk, j0, m, dk_row, c, d, BN, PAD, RAGGED))
            b_s = dot(b_q, b_k, tl.zeros([BM, BN], tl.float32), PRECISION)
            b_ds = dot(b_dq, b_k, tl.zeros([BM, BN], tl.float32), PRECISION)
            b_ds = dot(b_q, b_dk, b_ds, PRECISION)
            b_s, b_slope = finish(
                b_s, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row,
                CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
            )  # fmt: skip
            b_p = tl.exp2(b_s - b_top[:, None] - b_sum[:, None])
            b_t = b_p * (b_ds * scale)
            if CAP:
                b_t *= b_slope
            b_row += tl.sum(b_t, 1)
            b_v = tile(p_v, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
            b_acc = dot(b_t.to(b_v.dtype), b_v, b_acc, PRECISION)
            b_dv = tile(p_dv, j0, m, dv_row, c_v, d_v, BN, PAD, RAGGED)
            b_acc = dot(b_p.to(b_dv.dtype), b_dv, b_acc, PRECISION)
    b_o = tile(OLD + i_item * o_item + i_head * o_head, i0, n, o_row, c_v, d_v, BM, PAD, RAGGED).to(tl.float32)
    p_dlse = DLSE + (i_probe * batch * heads + i_g) * 2 * n + i
    tl.store(p_dlse, tl.zeros([BM], tl.float32), mask=i < n)  # the largest logit counts as a constant
    tl.store(p_dlse + n, b_row, mask=i < n)
    p_out = OUT + i_probe * out_probe + i_item * out_item + i_head * out_head
    put(p_out, b_acc - b_row[:, None] * b_o, i0, n, out_row, c_v, d_v, BM)


@triton.jit(do_not_specialize=[*ANY])
def vjp_rows(
    Q, K, V, G, BIAS_P, OLD, LSE, DELTA, DQ,
    n, m, batch, heads, group, d, d_v, window, scale, cap,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    g_probe, g_item, g_head, g_row, o_item, o_head, o_row, dq_probe, dq_item, dq_head, dq_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """`dq = τ (P ∘ (g vᵀ − δ)) k` of one block of rows, and `δ = r(g ∘ o)` for the columns' kernel, which runs after it."""
    i_g, i_probe = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_head, i_item = i_g % heads, i_g // heads
    i_kv = i_head // group
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = i0 + tl.arange(0, BM)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    p_k, p_v = K + i_item * k_item + i_kv * k_head, V + i_item * v_item + i_kv * v_head
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    b_q = tile(Q + i_item * q_item + i_head * q_head, i0, n, q_row, c, d, BM, PAD, RAGGED)
    b_g = tile(G + i_probe * g_probe + i_item * g_item + i_head * g_head, i0, n, g_row, c_v, d_v, BM, PAD, RAGGED)
    b_o = tile(OLD + i_item * o_item + i_head * o_head, i0, n, o_row, c_v, d_v, BM, PAD, RAGGED)
    b_delta = tl.sum(b_g.to(tl.float32) * b_o.to(tl.float32), 1)
    tl.store(DELTA + (i_probe * batch * heads + i_g) * n + i, b_delta, mask=i < n)
    b_top, b_sum = stats(LSE, i_g, n, i, RAGGED)
    b_dq = tl.zeros([BM, D], tl.float32)
    start, whole_start, whole_end, end = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
        high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
        for j0 in tl.range(low, high, BN):
            j = j0 + tl.arange(0, BN)
            b_k = tile(p_k, j0, m, k_row, c, d, BN, PAD, RAGGED)
            b_v = tile(p_v, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
            b_s = dot(b_q, tl.trans(b_k), tl.zeros([BM, BN], tl.float32), PRECISION)
            b_dp = dot(b_g, tl.trans(b_v), tl.zeros([BM, BN], tl.float32), PRECISION)
            b_s, b_slope = finish(
                b_s, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row,
                CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
            )  # fmt: skip
            b_ds = tl.exp2(b_s - b_top[:, None] - b_sum[:, None]) * (b_dp - b_delta[:, None])
            if CAP:
                b_ds *= b_slope
            b_dq = dot(b_ds.to(b_k.dtype), b_k, b_dq, PRECISION)
    put(DQ + i_probe * dq_probe + i_item * dq_item + i_head * dq_head, b_dq * scale, i0, n, dq_row, c, d, BM)


@triton.jit(do_not_specialize=[*ANY])
def vjp_columns(
    Q, K, V, G, BIAS_P, LSE, DELTA, DK, DV_P,
    n, m, batch, heads, group, d, d_v, window, scale, cap,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    g_probe, g_item, g_head, g_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAD: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """`dk = τ (P ∘ (g vᵀ − δ))ᵀ q` and `dv = Pᵀ g` of one block of columns, over the query heads that share them."""
    i_g, i_probe = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_heads = heads // group
    i_item, i_kv = i_g // kv_heads, i_g % kv_heads
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    b_k = tile(K + i_item * k_item + i_kv * k_head, j0, m, k_row, c, d, BN, PAD, RAGGED)
    b_v = tile(V + i_item * v_item + i_kv * v_head, j0, m, v_row, c_v, d_v, BN, PAD, RAGGED)
    b_dk = tl.zeros([BN, D], tl.float32)
    b_dv = tl.zeros([BN, DV], tl.float32)
    start, whole_start, whole_end, end = rows(j0, n, window, BM, BN, CAUSAL, WINDOW)
    for i_sub in range(group):
        i_head = i_kv * group + i_sub
        i_row = i_item * heads + i_head
        p_q = Q + i_item * q_item + i_head * q_head
        p_g = G + i_probe * g_probe + i_item * g_item + i_head * g_head
        p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
        p_delta = DELTA + (i_probe * batch * heads + i_row) * n
        for phase in tl.static_range(0 if CAUSAL or WINDOW else 1, 3 if WINDOW else 2):
            low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
            high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
            for i0 in tl.range(low, high, BM):
                i = i0 + tl.arange(0, BM)
                b_q = tile(p_q, i0, n, q_row, c, d, BM, PAD, RAGGED)
                b_g = tile(p_g, i0, n, g_row, c_v, d_v, BM, PAD, RAGGED)
                b_top, b_sum = stats(LSE, i_row, n, i, RAGGED)
                b_delta = stat(p_delta + i, n, i, 0.0, RAGGED)
                b_s = dot(b_k, tl.trans(b_q), tl.zeros([BN, BM], tl.float32), PRECISION)
                b_dp = dot(b_v, tl.trans(b_g), tl.zeros([BN, BM], tl.float32), PRECISION)
                b_s, b_slope = finish(
                    b_s, i[None, :], j[:, None], n, m, window, scale, cap, p_bias, bias_row,
                    CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
                )  # fmt: skip
                b_p = tl.exp2(b_s - b_top[None, :] - b_sum[None, :])
                b_dv = dot(b_p.to(b_g.dtype), b_g, b_dv, PRECISION)
                b_ds = b_p * (b_dp - b_delta[None, :])
                if CAP:
                    b_ds *= b_slope
                b_dk = dot(b_ds.to(b_q.dtype), b_q, b_dk, PRECISION)
    put(DK + i_probe * dk_probe + i_item * dk_item + i_kv * dk_head, b_dk * scale, j0, m, dk_row, c, d, BN)
    put(DV_P + i_probe * dv_probe + i_item * dv_item + i_kv * dv_head, b_dv, j0, m, dv_row, c_v, d_v, BN)
