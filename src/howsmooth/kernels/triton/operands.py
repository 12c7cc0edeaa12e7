"""Operands of the fused kernels: half precision, scaled by powers of two, padded to whole blocks.

float16 has as many bits as tf32 but little range, so every operand is first brought to `[2¹¹, 2¹²)` by a power of two, which
is exact. `lo` is what rounding took away: `hi + lo` has 22 bits, and the three products `hi·hi + hi·lo + lo·hi` are float32's.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.triton.compiling import launch

TOP = 12  # scaled operands stay below 2¹²
ROWS = 128  # lengths are padded to a multiple of this, so every block of rows or columns is whole


@dataclass(frozen=True)
class PackedTensor:
    """A packed tensor, (probes, batch, heads, padded n, padded d)."""

    hi: Tensor
    lo: Tensor  # `hi` again where there is one pass only

    @property
    def strides(self) -> tuple[int, ...]:
        """Over probes, items, heads and rows."""
        return self.hi.stride()[:4]


def padded_length(n: int) -> int:
    return ROWS * math.ceil(n / ROWS)


def padded_width(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def value_width(d: int, d_v: int) -> int:
    """The padded width of values beside keys of width `d`: a quarter of theirs at least.

    Compiled by Triton 3.6, kernels for keys of 256 entries and values of 16 or 32 read where they may not.
    """
    return max(padded_width(d_v), padded_width(d) // 4)


def power(size: float, top: int = TOP) -> float:
    """The power of two that brings `size` into `[2^(top−1), 2^top)`; 1 for zero."""
    return 2.0 ** max(-100, min(100, top - math.frexp(size)[1])) if size > 0 else 1.0


def largest(t: Float[Tensor, "probes batch heads n d"]) -> Float[Tensor, "probes batch"]:
    """The largest entry of each item, in absolute value."""
    return torch.linalg.vector_norm(t, torch.inf, dim=(2, 3, 4), dtype=torch.float32)


@dataclass(frozen=True)
class Packed:
    """Queries, keys and values, packed with one scale for each, and what keeps the products there in range.

    kappa_jvp, kappa_vjp: keep `2¹⁴ P ∘ κ dS` in range, whatever directions they are multiplied by.
    """

    q: PackedTensor
    k: PackedTensor
    v: PackedTensor
    scales: tuple[float, float, float]
    kappa_jvp: float
    kappa_vjp: float

    @property
    def width_v(self) -> int:
        """The padded width of values."""
        return self.v.hi.shape[-1]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, tau: float) -> "Packed":
        """tau: what multiplies the logits, which the queries carry."""
        entries = [torch.linalg.vector_norm(t, torch.inf, dtype=torch.float32) for t in (q, k, v)]
        rows = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).max() for t in (q, k, v)]
        sizes = [size * factor for size, factor in zip(torch.stack(entries + rows).tolist(), 2 * (abs(tau), 1, 1), strict=True)]
        s_q, s_k, s_v = scales = power(sizes[0]), power(sizes[1]), power(sizes[2])
        # |dq̂| ≤ √d 2¹², |dk̂| ≤ √d 2¹², and |ĝ·(v̂ − ô)| ≤ 2 √d_v 2¹² max|v̂|
        d, d_v = (padded_width(t.shape[-1]) for t in (q, v))
        kappa_jvp = power(d**0.5 * 2.0**TOP * (s_q * sizes[3] + s_k * sizes[4]), top=1)
        kappa_vjp = power(d_v**0.5 * 2.0**TOP * 2 * s_v * sizes[5], top=1)
        width = value_width(q.shape[-1], v.shape[-1])
        return cls(whole(q, tau * s_q), whole(k, s_k), whole(v, s_v, width), scales, kappa_jvp, kappa_vjp)

    @property
    def strides(self) -> tuple[int, ...]:
        """Over items, heads and rows of each."""
        return (*self.q.strides[1:], *self.k.strides[1:], *self.v.strides[1:])

    def reduced(self, s_passes: int, passes: int) -> "Packed":
        """Without what products never read, whose logits and whose other products take so many passes."""
        q, k = (t if s_passes == 3 else PackedTensor(t.hi, t.hi) for t in (self.q, self.k))
        return replace(self, q=q, k=k, v=self.v if passes == 3 else PackedTensor(self.v.hi, self.v.hi))


def whole(t: Float[Tensor, "batch heads n d"], scale: float, width: int = 0) -> PackedTensor:
    """Queries, keys or values times a scale, in both parts."""
    return pack(t[None], torch.full(t[None].shape[:2], scale, device=t.device), 3, width=width)[0]


def pack(
    t: Float[Tensor, "probes batch heads n d"],
    scale: Float[Tensor, "probes batch"],
    passes: int,
    dot: Float[Tensor, "batch heads n d"] | None = None,
    dot_scale: float = 1.0,
    width: int = 0,
) -> tuple[PackedTensor, Tensor]:
    """`scale · t` in half precision, zero in the padding; with `dot`, also the row sums of `scale · t ∘ dot_scale · dot`.

    width: padded, if more than `t` needs.
    """
    probes, batch, heads, n, d = t.shape
    if t.stride(-1) != 1:
        t = t.contiguous()
    if dot is not None and dot.stride(-1) != 1:
        dot = dot.contiguous()
    rows, width = padded_length(n), max(width, padded_width(d))
    hi = torch.empty(probes, batch, heads, rows, width, dtype=torch.float16, device=t.device)
    lo = torch.empty_like(hi) if passes == 3 else hi
    sums = torch.empty(probes * batch * heads, rows, dtype=torch.float32, device=t.device) if dot is not None else scale
    other = t if dot is None else dot
    block = min(ROWS, max(16, 8192 // width))
    launch(
        _pack, (rows // block, probes * batch * heads), t, other, scale, hi, lo, sums,
        *t.stride()[:4], *(other.stride()[-4:-1]),
        batch, heads, n, d, rows, dot_scale,
        WIDTH=width, BLOCK=block, PASSES=passes, DOT=dot is not None,
    )  # fmt: skip
    return PackedTensor(hi, lo), sums


_STRIDES = ("t_probe", "t_item", "t_head", "t_row", "o_item", "o_head", "o_row")


@triton.jit(do_not_specialize=["SCALE", "SUMS", *_STRIDES, "batch", "heads", "n", "d", "rows"])
def _pack(
    T, OTHER, SCALE, HI, LO, SUMS,
    t_probe, t_item, t_head, t_row, o_item, o_head, o_row,
    batch, heads, n, d, rows, dot_scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(1).to(tl.int64)
    i_head = i_g % heads
    i_item = (i_g // heads) % batch
    i_probe = i_g // (heads * batch)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, WIDTH)
    inside = (i[:, None] < n) & (c[None, :] < d)
    p_t = T + i_probe * t_probe + i_item * t_item + i_head * t_head + i[:, None].to(tl.int64) * t_row + c[None, :]
    b_t = tl.load(p_t, mask=inside, other=0.0).to(tl.float32)
    b_x = b_t * tl.load(SCALE + i_probe * batch + i_item)
    b_hi = b_x.to(tl.float16)
    p_out = i_g * rows * WIDTH + i[:, None] * WIDTH + c[None, :]
    tl.store(HI + p_out, b_hi)
    if PASSES == 3:
        tl.store(LO + p_out, (b_x - b_hi.to(tl.float32)).to(tl.float16))
    if DOT:
        p_o = OTHER + i_item * o_item + i_head * o_head + i[:, None].to(tl.int64) * o_row + c[None, :]
        b_o = tl.load(p_o, mask=inside, other=0.0).to(tl.float32)
        tl.store(SUMS + i_g * rows + i, tl.sum(b_x * b_o, 1) * dot_scale)


@triton.jit
def _power(size, TOP: tl.constexpr):
    """`power` on the chip: the exponent is read off the bits."""
    exponent = ((size.to(tl.int32, bitcast=True) >> 23) & 255) - 126
    exponent = tl.minimum(tl.maximum(TOP - exponent, -100), 100)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(size > 0, scale, 1.0)


@triton.jit(do_not_specialize=["count"])
def jvp_scales(
    DQ, DK, DV, DKEYS, OUT, count, tau, s_q, s_k, s_v, kappa, shift,
    COUNT: tl.constexpr, TOP: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """From the sizes of `dq, dk, dv` of every item what multiplies them, then κ and what undoes it all, then γ: README.md.

    DKEYS: the size of what is added to dS for a key.  shift: what weights are multiplied by.
    """
    i = tl.arange(0, COUNT)
    inside = i < count
    b_dq = tl.load(DQ + i, mask=inside, other=0.0) * tl.abs(tau)
    b_dk = tl.load(DK + i, mask=inside, other=0.0)
    b_dv = tl.load(DV + i, mask=inside, other=0.0)
    b_gamma = tl.minimum(_power(b_dq, TOP) * s_k, _power(b_dk, TOP) * s_q)
    b_gamma = tl.minimum(b_gamma, 1e30)
    LARGEST: tl.constexpr = 1.2676506002282294e30  # 2¹⁰⁰: products of scales stay in range
    b_room = tl.where(b_dv > 0, _power(b_dv, TOP), LARGEST) / s_v
    b_kappa = tl.minimum(kappa, tl.minimum(b_room, LARGEST) / b_gamma)
    if KEYS:  # two terms of dS: each at most half
        b_dkeys = tl.load(DKEYS + i, mask=inside, other=0.0)
        b_kappa = tl.where(b_dkeys > 0, tl.minimum(0.5 * b_kappa, _power(b_gamma * b_dkeys, 0)), b_kappa)
        tl.store(OUT + 6 * count + i, b_gamma, mask=inside)
    b_unit = b_gamma * b_kappa
    tl.store(OUT + i, tau * b_gamma / s_k, mask=inside)
    tl.store(OUT + count + i, b_gamma / s_q, mask=inside)
    tl.store(OUT + 2 * count + i, b_unit * s_v, mask=inside)
    p_undo = OUT + 3 * count + 3 * i
    tl.store(p_undo, b_kappa, mask=inside)
    tl.store(p_undo + 1, 1 / (b_unit * s_v) / shift, mask=inside)
    tl.store(p_undo + 2, 1 / b_unit / shift, mask=inside)


@triton.jit(do_not_specialize=["count"])
def vjp_scales(G, OUT, count, tau, s_q, s_k, s_v, kappa, shift, COUNT: tl.constexpr, TOP: tl.constexpr):
    """From the size of `g` of every item what multiplies it, then what undoes it in `dq, dk, dv`."""
    i = tl.arange(0, COUNT)
    inside = i < count
    b_g = _power(tl.load(G + i, mask=inside, other=0.0), TOP)
    b_undo = 1 / (b_g * (s_v * kappa)) / shift
    tl.store(OUT + i, b_g, mask=inside)
    p_undo = OUT + count + 3 * i
    tl.store(p_undo, tau * b_undo / s_k, mask=inside)
    tl.store(p_undo + 1, b_undo / s_q, mask=inside)
    tl.store(p_undo + 2, 1 / b_g / shift, mask=inside)
