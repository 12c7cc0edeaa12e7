"""Fused product with the Jacobian: `do = T v + P dv − r(T) o` with `T = P ∘ (dq kᵀ + q dkᵀ)`, one or two probes at a time."""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import ANY, accumulate, columns, dot, finish, first_row, keyed, load, split, stats, weigh


@triton.jit
def _probe(
    b_acc, b_row, b_p, b_p_lo, b_slope, b_q, b_q_lo, b_k, b_k_lo, b_v, b_v_lo, b_dq, b_dq_lo,
    DK, DK_LO, DV_P, DV_LO, DKEYS, at_k, at_v, kappa, one,
    PASSES: tl.constexpr, PROMOTE: tl.constexpr, MOVE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """What one block of `P` adds to one probe: `Σ_j t v + p dv` and, where rows have a term, `Σ_j t`, with `t = p ∘ dS`."""
    b_dk, b_dk_lo = load(DK, DK_LO, at_k, PASSES)
    b_ds = dot(b_dq, b_dq_lo, b_k, b_k_lo, tl.zeros(b_slope.shape, tl.float32), PASSES)
    b_ds = dot(b_q, b_q_lo, b_dk, b_dk_lo, b_ds, PASSES)
    if MOVE:
        b_ds += tl.load(DKEYS)[None, :]
    b_t = b_slope * (b_ds * kappa)
    if ROW:
        b_row += tl.sum(b_t, 1)
    b_t, b_t_lo = split(b_t, PASSES)
    b_acc = accumulate(b_t, b_t_lo, b_v, b_v_lo, b_acc, one, PASSES, PROMOTE)
    b_dv, b_dv_lo = load(DV_P, DV_LO, at_v, PASSES)
    return accumulate(b_p, b_p_lo, b_dv, b_dv_lo, b_acc, one, PASSES, PROMOTE), b_row


@triton.jit
def _write(OUT, OLD, SCALES, i_item, i_head, b_acc, b_row, i, c_v, n, d_v, out_probe, out_item, out_head, out_row,
           o_item, o_head, o_row, i_probe, batch):  # fmt: skip
    at = (i_probe * batch + i_item) * 3
    inside = (i[:, None] < n) & (c_v[None, :] < d_v)
    rows = i[:, None].to(tl.int64)
    b_o = tl.load(OLD + i_item * o_item + i_head * o_head + rows * o_row + c_v[None, :], mask=inside, other=0.0)
    b_out = b_acc * tl.load(SCALES + at + 1) - (b_row * tl.load(SCALES + at + 2))[:, None] * b_o
    p_out = OUT + i_probe * out_probe + i_item * out_item + i_head * out_head + rows * out_row + c_v[None, :]
    tl.store(p_out, b_out, mask=inside)


@triton.jit(do_not_specialize=[*ANY, "group", "SCALES"])
def jvp(
    Q, Q_LO, K, K_LO, V, V_LO, DQ, DQ_LO, DK, DK_LO, DV_P, DV_LO, BIAS_P, KEYS_P, DKEYS, LSE, OLD, SCALES, OUT,
    n, m, n_rows, m_rows, batch, heads, group, d_v, window, step, scale, cap, one,
    bias_item, bias_head, bias_row, o_item, o_head, o_row, out_probe, out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PASSES: tl.constexpr, S_PASSES: tl.constexpr, TWO: tl.constexpr, PROMOTE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    KEYS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head, for probe `z` or probes `2z, 2z + 1`. SCALES: κ, 1/(2¹⁴ γ κ s_v), 1/(2¹⁴ γ κ).

    KEYS: numbers for every key, and in `DKEYS` their derivatives times γ. SIGMOID: those do not move, and rows have no term of
    their own.
    """
    MOVE: tl.constexpr = KEYS and not SIGMOID
    i_g = tl.program_id(1).to(tl.int64)
    i_head = i_g % heads
    i_item = i_g // heads
    kv_heads = heads // group
    i_kv = i_item * kv_heads + i_head // group
    i_probe = tl.program_id(2).to(tl.int64) * (2 if TWO else 1)
    i0 = first_row(step, BM)
    i = i0 + tl.arange(0, BM)
    c = tl.arange(0, D)
    c_v = tl.arange(0, DV)
    p_bias = BIAS_P + i_item * bias_item + i_head * bias_head
    at_q = i_g * n_rows * D + i[:, None] * D + c[None, :]
    next_q = batch * heads * n_rows.to(tl.int64) * D
    next_k = batch * kv_heads * m_rows.to(tl.int64) * D
    next_v = batch * kv_heads * m_rows.to(tl.int64) * DV
    b_q, b_q_lo = load(Q, Q_LO, at_q, S_PASSES)
    b_dq, b_dq_lo = load(DQ, DQ_LO, at_q + i_probe * next_q, PASSES)
    kappa = tl.load(SCALES + (i_probe * batch + i_item) * 3)
    b_acc = tl.zeros([BM, DV], tl.float32)
    b_row = tl.zeros([BM], tl.float32)
    b_acc2 = b_acc
    b_row2 = b_row
    b_dq2, b_dq2_lo = b_dq, b_dq_lo
    kappa2 = kappa
    if TWO:
        b_dq2, b_dq2_lo = load(DQ, DQ_LO, at_q + (i_probe + 1) * next_q, PASSES)
        kappa2 = tl.load(SCALES + ((i_probe + 1) * batch + i_item) * 3)
    b_top, b_lse = stats(LSE, i_g, n_rows, i)
    start, whole_start, whole_end, end = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        low = start if phase == 0 else (whole_start if phase == 1 else whole_end)
        high = whole_start if phase == 0 else (whole_end if phase == 1 else end)
        for j0 in tl.range(low, high, BN):
            j = j0 + tl.arange(0, BN)
            at_k = i_kv * m_rows * D + j[None, :] * D + c[:, None]
            at_v = i_kv * m_rows * DV + j[:, None] * DV + c_v[None, :]
            b_k, b_k_lo = load(K, K_LO, at_k, S_PASSES)
            b_s = dot(b_q, b_q_lo, b_k, b_k_lo, tl.zeros([BM, BN], tl.float32), S_PASSES)
            b_s, b_slope = finish(
                b_s, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row,
                CAUSAL, WINDOW, BIAS, CAP, EDGE=phase != 1,
            )  # fmt: skip
            b_s = keyed(b_s, KEYS_P + i_kv * m_rows, j[None, :], KEYS)
            b_w, b_slope = weigh(b_s, b_top[:, None], b_lse[:, None] - 14, b_slope, CAP, SIGMOID)
            b_p, b_p_lo = split(b_w, PASSES)
            b_v, b_v_lo = load(V, V_LO, at_v, PASSES)
            b_acc, b_row = _probe(
                b_acc, b_row, b_p, b_p_lo, b_slope, b_q, b_q_lo, b_k, b_k_lo, b_v, b_v_lo, b_dq, b_dq_lo,
                DK, DK_LO, DV_P, DV_LO, DKEYS + (i_probe * batch * kv_heads + i_kv) * m_rows + j,
                at_k + i_probe * next_k, at_v + i_probe * next_v, kappa, one, PASSES, PROMOTE, MOVE, not SIGMOID,
            )  # fmt: skip
            if TWO:
                b_acc2, b_row2 = _probe(
                    b_acc2, b_row2, b_p, b_p_lo, b_slope, b_q, b_q_lo, b_k, b_k_lo, b_v, b_v_lo, b_dq2, b_dq2_lo,
                    DK, DK_LO, DV_P, DV_LO, DKEYS + ((i_probe + 1) * batch * kv_heads + i_kv) * m_rows + j,
                    at_k + (i_probe + 1) * next_k, at_v + (i_probe + 1) * next_v, kappa2, one,
                    PASSES, PROMOTE, MOVE, not SIGMOID,
                )  # fmt: skip
    _write(OUT, OLD, SCALES, i_item, i_head, b_acc, b_row, i, c_v, n, d_v, out_probe, out_item, out_head, out_row,
           o_item, o_head, o_row, i_probe, batch)  # fmt: skip
    if TWO:
        _write(OUT, OLD, SCALES, i_item, i_head, b_acc2, b_row2, i, c_v, n, d_v, out_probe, out_item, out_head, out_row,
               o_item, o_head, o_row, i_probe + 1, batch)  # fmt: skip
