"""Softmax attention on fused kernels: O(n · d) memory, every product one pass over the logits."""

import copy
import functools
import math
import os
from dataclasses import replace
from typing import final

import torch
import triton
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import Keys, Outputs, Precision, Queries, Scores, SoftmaxAttention, Values
from howsmooth.kernels.tiled import Blocked
from howsmooth.kernels.triton import blocks, forward, jvp, operands, vjp
from howsmooth.kernels.triton.operands import ROWS, TOP, Operand, pack, padded_length, padded_width, power

WIDEST = 256
_HEAVY = 2**32  # visible logits past which float64 costs more than all other products
SHIFT = 14  # weights are kept as 2¹⁴ P, so that half precision reaches down to 2⁻³⁸
_LONG = 2**15
_FINER: dict[Precision, Precision] = {"half": "mixed", "mixed": "strict"}
_SAMPLE = 8  # the error of products is measured on every eighth block of rows


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@final
class Fused(SoftmaxAttention):
    """Softmax attention whose weights never leave the chip.

    precision: `half`, one product of half-precision operands, which have as many bits as tf32's; `mixed`, logits in three
    products, the rest in one; `strict`, three products everywhere, as exact as float32.
    """

    def __init__(self, q: Queries, k: Keys, v: Values, scores: Scores, precision: Precision = "half"):
        if scores.mask.ends is not None:
            raise BadInputError("expected a mask by order for the fused kernels, got one by positions; use kernel='blocked'")
        super().__init__(q, k, v, scores, torch.float32)
        batch, heads, n, d = q.shape
        kv_heads, m = k.shape[1:3]
        self.precision: Precision = precision
        self._shape = (batch, heads, kv_heads, n, m, d, v.shape[-1])
        self._passes = 3 if precision == "strict" else 1
        self._s_passes = 1 if precision == "half" else 3
        # one scale per tensor; the queries carry the logits' scale
        tau = scores.scale
        entries = [torch.linalg.vector_norm(t, torch.inf, dtype=torch.float32) for t in (q, k, v)]
        rows = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).max() for t in (q, k, v)]
        self._s_q, self._s_k, self._s_v = (power(s) for s in _largest(entries, tau))
        lengths = _largest(rows, tau)
        q_row, k_row, v_row = (s * r for s, r in zip((self._s_q, self._s_k, self._s_v), lengths, strict=True))
        # κ keeps P̂ ∘ dS in range: |dq̂| ≤ √d 2¹², |dk̂| ≤ √d 2¹², and |ĝ·(v̂ − ô)| ≤ 2 √d_v 2¹² max|v̂|
        self._kappa_jvp = power(padded_width(d) ** 0.5 * 2.0**TOP * (q_row + k_row), top=1)
        self._kappa_vjp = power(padded_width(v.shape[-1]) ** 0.5 * 2.0**TOP * 2 * v_row, top=1)
        self._q = self._pack(q[None], tau * self._s_q, self._s_passes)
        self._k = self._pack(k[None], self._s_k, self._s_passes)
        self._v = self._pack(v[None], self._s_v, 3)
        bias = _bias(self.scores, batch, heads, n, m)
        # over items, heads and rows; without a bias another tensor stands in its place, never read
        self._bias, self._strides = (self._q.hi, (0, 0, 0)) if bias is None else (bias, bias.stride()[:3])
        self._options = {
            "D": self._q.hi.shape[-1],
            "DV": self._v.hi.shape[-1],
            "CAUSAL": scores.mask.causal,
            "WINDOW": scores.mask.window is not None,
            "BIAS": bias is not None,
            "CAP": scores.softcap is not None,
        }
        self._o, self._lse = self._forward(step=1)

    def _pack(self, t: Tensor, scale: float, passes: int) -> Operand:
        return pack(t, torch.full(t.shape[:2], scale, device=t.device), passes)[0]

    @property
    def output(self):
        return self._o

    def tiled(self) -> Blocked:
        q, k, v = (t.float() for t in self.inputs)
        return Blocked(q, k, v, self.scores)

    def select(self, items: Tensor) -> "Fused":
        q, k, v = (t[items] for t in self.inputs)
        return Fused(q, k, v, replace(self.scores, mask=self.scores.mask.select(items)), self.precision)

    @property
    def finer(self) -> Precision | None:
        return _FINER.get(self.precision)

    def refined(self) -> "Fused | None":
        return None if self.finer is None else Fused(*self.inputs, self.scores, self.finer)

    @property
    def heavy(self) -> bool:
        batch, heads, _, n, m = self._shape[:5]
        mask = self.scores.mask
        seen = min(m, mask.window * (1 if mask.causal else 2)) if mask.window else m / 2 if mask.causal else m
        return batch * heads * n * seen > _HEAVY

    @functools.cached_property
    def noise(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]  a property that is kept
        """The relative error of products, measured against strict ones on a sample of rows; of strict ones, float32's."""
        if self.precision == "strict":
            # sums on the chip are cut short, not rounded
            return torch.finfo(torch.float32).eps * (128 + 2 * self.largest_logit + self.lifted)
        random = torch.Generator(self._o.device).manual_seed(0)
        tangent = [
            torch.randn(1, *t.shape, generator=random, device=t.device) * t.float().square().mean().sqrt() for t in self.inputs
        ]
        strict = copy.copy(self)
        strict.precision, strict._passes, strict._s_passes = "strict", 3, 3
        q, k, _ = self.inputs
        strict._q = self._pack(q[None], self.scores.scale * self._s_q, 3)
        strict._k = self._pack(k[None], self._s_k, 3)
        strict._o, strict._lse = strict._forward(step=_SAMPLE)
        coarse, true = (f.jvp(*tangent, step=_SAMPLE).flatten(1) for f in (self, strict))
        size = true.norm()
        lost = torch.finfo(torch.float32).eps * self.lifted  # by both alike
        return float((coarse - true).norm() / size) + lost if bool(size > 0) else lost

    @property
    def lifted(self) -> float:
        """Read off the logarithms of the rows' sums, which are to base 2 and infinite where nothing is seen."""
        if self.scores.mask.bias is None:
            return 0.0
        return math.log(2) * float(self._lse.masked_fill(~self._lse.isfinite(), 0.0).abs().max())

    def attention_received(self):
        batch, heads, kv_heads, n, m, _, d_v = self._shape
        g = torch.zeros(1, batch, heads, n, d_v, device=self._o.device)
        g[..., 0] = 1.0
        return self.vjp(g, columns_only=True)[2][0, ..., 0].sum(1) / heads

    @property
    def _promote(self) -> bool:
        """Whether sums are taken out of the matrix units block by block: they shrink by 2⁻²⁴ for every sixteen terms."""
        return self._passes == 3 or max(self._shape[3:5]) > _LONG

    def _blocks(self, kernel: blocks.Name, two: bool = False) -> blocks.Blocks:
        width = max(self._q.hi.shape[-1], self._v.hi.shape[-1])
        return blocks.pick(kernel, width, max(self._passes, self._s_passes), two, self.scores.mask.causal)

    def _forward(self, step: int) -> tuple[Tensor, Tensor]:
        batch, heads, kv_heads, n, m, _, d_v = self._shape
        rows, cols = padded_length(n), padded_length(m)
        device = self._q.hi.device
        out = torch.empty(batch, n, heads, d_v, device=device).transpose(1, 2)
        lse = torch.empty(batch * heads, rows, device=device)
        b = self._blocks("forward")
        forward.forward[(triton.cdiv(rows // ROWS, step) * (ROWS // b.rows), batch * heads)](
            self._q.hi, self._q.lo, self._k.hi, self._k.lo, self._v.hi, self._v.lo, self._bias, out, lse,
            n, m, rows, cols, heads, heads // kv_heads, d_v, self.scores.mask.window or 0,
            1 / (self._s_q * self._s_k), 1 / self._s_v, self.scores.softcap or 1.0, 1.0,
            *self._strides, *out.stride()[:3],
            BM=b.rows, BN=b.cols, STEP=step, S_PASSES=self._s_passes, **self._options,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        return out, lse

    def jvp(self, dq: Queries, dk: Keys, dv: Values, *, step: int = 1) -> Outputs:
        """step: one block of rows in so many, the others are zero."""
        batch, heads, kv_heads, n, m, _, d_v = self._shape
        probes = dq.shape[0]
        rows, cols = padded_length(n), padded_length(m)
        count = probes * batch
        scales = torch.empty(6 * count, device=dq.device)
        operands.jvp_scales[(1,)](
            *(operands.largest(t) for t in (dq, dk, dv)), scales, count, self.scores.scale, self._s_q, self._s_k, self._s_v,
            self._kappa_jvp, COUNT=triton.next_power_of_2(count), TOP=TOP, SHIFT=2**SHIFT,
        )  # fmt: skip
        p_dq, p_dk, p_dv = (pack(t, scales[i * count : (i + 1) * count], self._passes)[0] for i, t in enumerate((dq, dk, dv)))
        undo = scales[3 * count :]
        out = torch.empty(probes, batch, n, heads, d_v, device=dq.device).transpose(2, 3)
        if step > 1:
            out.zero_()
        two = probes % 2 == 0 and self._passes == 1
        b = self._blocks("jvp", two)
        jvp.jvp[(triton.cdiv(rows // ROWS, step) * (ROWS // b.rows), batch * heads, probes // 2 if two else probes)](
            self._q.hi, self._q.lo, self._k.hi, self._k.lo, self._v.hi, self._v.lo,
            p_dq.hi, p_dq.lo, p_dk.hi, p_dk.lo, p_dv.hi, p_dv.lo, self._bias, self._lse, self._o, undo, out,
            n, m, rows, cols, batch, heads, heads // kv_heads, d_v, self.scores.mask.window or 0,
            1 / (self._s_q * self._s_k), self.scores.softcap or 1.0, 1.0,
            *self._strides, *self._o.stride()[:3], *out.stride()[:4],
            BM=b.rows, BN=b.cols, STEP=step, PASSES=self._passes, S_PASSES=self._s_passes, TWO=two,
            PROMOTE=self._promote, **self._options,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        return out

    def vjp(self, g: Outputs, *, columns_only: bool = False) -> tuple[Queries, Keys, Values]:
        """columns_only: only `dk` and `dv` are made; `dq` is left as it came from memory."""
        batch, heads, kv_heads, n, m, d, d_v = self._shape
        probes = g.shape[0]
        rows, cols = padded_length(n), padded_length(m)
        count = probes * batch
        scales = torch.empty(4 * count, device=g.device)
        operands.vjp_scales[(1,)](
            operands.largest(g), scales, count, self.scores.scale, self._s_q, self._s_k, self._s_v,
            self._kappa_vjp, COUNT=triton.next_power_of_2(count), TOP=TOP, SHIFT=2**SHIFT,
        )  # fmt: skip
        p_g, delta = pack(g, scales[:count], self._passes, dot=self._o, dot_scale=self._s_v)
        undo = scales[count:]
        dq = torch.empty(probes, batch, n, heads, d, device=g.device).transpose(2, 3)
        dk = torch.empty(probes, batch, m, kv_heads, d, device=g.device).transpose(2, 3)
        dv = torch.empty(probes, batch, m, kv_heads, d_v, device=g.device).transpose(2, 3)
        two = probes % 2 == 0 and self._passes == 1
        inputs = (
            self._q.hi, self._q.lo, self._k.hi, self._k.lo, self._v.hi, self._v.lo,
            p_g.hi, p_g.lo, self._bias, self._lse, delta, undo,
        )  # fmt: skip
        sizes = (n, m, rows, cols, batch, heads, heads // kv_heads)
        logits = (self.scores.mask.window or 0, 1 / (self._s_q * self._s_k), self._kappa_vjp, self.scores.softcap or 1.0, 1.0)
        options = {"PASSES": self._passes, "S_PASSES": self._s_passes, "TWO": two, "PROMOTE": self._promote, **self._options}
        grid = probes // 2 if two else probes
        b = self._blocks("columns", two)
        vjp.vjp_columns[(cols // b.cols, batch * kv_heads, grid)](
            *inputs, dk, dv, *sizes, d, d_v, *logits, *self._strides, *dk.stride()[:4], *dv.stride()[:4],
            BM=b.rows, BN=b.cols, **options, num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        if not columns_only:
            b = self._blocks("rows", two)
            vjp.vjp_rows[(rows // b.rows, batch * heads, grid)](
                *inputs, dq, *sizes, d, *logits, *self._strides, *dq.stride()[:4],
                BM=b.rows, BN=b.cols, **options, num_warps=b.warps, num_stages=b.stages,
            )  # fmt: skip
        return dq, dk, dv


def _largest(norms: list[Tensor], tau: float) -> tuple[float, float, float]:
    """Sizes of `q, k, v` on the host, that of `q` as `τq`."""
    size_q, size_k, size_v = torch.stack(norms).tolist()
    return abs(tau) * size_q, size_k, size_v


def _bias(scores: Scores, batch: int, heads: int, n: int, m: int) -> Tensor | None:
    """What is added to the logits, (batch, heads, n, m) without copies along axes it does not depend on."""
    mask = scores.mask
    bias = mask.bias
    if mask.keys is not None:
        hidden = torch.zeros(mask.keys.shape, device=mask.keys.device).masked_fill_(~mask.keys, -torch.inf)[:, None, None]
        bias = hidden if bias is None else bias + hidden
    return None if bias is None else bias.contiguous().expand(batch, heads, n, m)
