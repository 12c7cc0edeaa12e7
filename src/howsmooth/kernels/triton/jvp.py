"""Fused product with the Jacobian: `do = T v + P dv − r(T) o` with `T = P ∘ τ(dq kᵀ + q dkᵀ)`, one or two probes at a time."""

import triton
import triton.language as tl

from howsmooth.kernels.triton.logits import (
    accumulate,
    across,
    columns,
    dot,
    finish,
    kernel,
    own_rows,
    padded,
    plain,
    put,
    split,
    stats,
    tile,
    weigh,
)


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
    n, m, batch, heads, group, d, d_v, window, step, scale, cap, factor, one,
    q_item, q_head, q_row, k_item, k_head, k_row, v_item, v_head, v_row, bias_item, bias_head, bias_row,
    dq_probe, dq_item, dq_head, dq_row, dk_probe, dk_item, dk_head, dk_row, dv_probe, dv_item, dv_head, dv_row,
    o_item, o_head, o_row, out_probe, out_item, out_head, out_row,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    PAD: tl.constexpr = False, RAGGED: tl.constexpr = False, PRECISION: tl.constexpr = "tf32",
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
    i_g, i_item, i_head, i_kv, i_probe, i0 = own_rows(heads, group, step, BM)
    i_probe *= 2 if TWO else 1
    i = i0 + tl.arange(0, BM)
    c, c_v = tl.arange(0, D), tl.arange(0, DV)
    m_rows, kv_heads = padded(m, PACKED), heads // group
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
    b_top, b_lse = stats(LSE, i_g, padded(n, PACKED), i, RAGGED)
    edges = columns(i0, m, window, BM, BN, CAUSAL, WINDOW)
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
                b_s, i[:, None], j[None, :], n, m, window, scale, cap, p_bias, bias_row, p_keys,
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
        p_dlse = DLSE + (i_probe * batch * heads + i_g) * 2 * n + i
        tl.store(p_dlse, tl.zeros([BM], tl.float32), mask=i < n)  # the largest logit counts as a constant
        tl.store(p_dlse + n, b_row, mask=i < n)
    put(OUT, at_out, b_out, i0, n, out_row, c_v, d_v, BM)
    if TWO:
        p_scales += 3 * batch
        b_out = b_acc2 * tl.load(p_scales + 1) - (b_row2 * tl.load(p_scales + 2))[:, None] * b_o
        put(OUT, at_out + out_probe, b_out, i0, n, out_row, c_v, d_v, BM)
