"""Attention on fused kernels: O(n · d) memory, every product one pass over the logits."""

import copy
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import Thread
from typing import final

import torch
import triton
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import FINER, AttentionKernel, Keys, Offsets, Outputs, Precision, Queries, Scores, Values
from howsmooth.kernels.kinds import Kind, Sigmoid, Softmax
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.tiled import Blocked
from howsmooth.kernels.triton import blocks, forward, jvp, operands, received, vjp
from howsmooth.kernels.triton.compiling import compiling, in_parallel, launch, soon
from howsmooth.kernels.triton.operands import ROWS, TOP, Operand, pack, padded_length, padded_width, power, value_width

WIDEST = 256
_HEAVY = 2**28  # visible logits past which float64 costs more than all other products: about 0.1 s on an H200
SHIFT = 14  # weights are kept as 2¹⁴ P, so that half precision reaches down to 2⁻³⁸
_LONG = 2**15
_FLATTEST = 80  # slopes of sigmoids are kept in units of `2^−80` at least: smaller ones leave float32 soon
_LOG2E = math.log2(math.e)
_SAMPLE = 16, 512  # at most so many blocks of rows, and about so many rows, on which the error of products is measured


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@final
class Fused(AttentionKernel):
    """Attention by softmax, with or without a sink, or by sigmoids, whose weights never leave the chip.

    offset: of every key, added to its logits, as L2 attention has it.
    precision: `half`, one product of half-precision operands, which have as many bits as tf32's; `mixed`, logits in three
    products, the rest in one; `strict`, three products everywhere, as exact as float32.
    """

    _promote: bool  # sums are taken out of the matrix units block by block: they shrink by 2⁻²⁴ for every sixteen terms

    def __init__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        scores: Scores,
        precision: Precision = "half",
        *,
        offset: Offsets | None = None,
    ):
        if scores.mask.ends is not None:
            raise BadInputError("expected a mask by order for the fused kernels, got one by positions; use kernel='blocked'")
        kind = scores.kind
        sink, sigmoid = kind.traits.sink, kind.traits.logistic is not None
        if not kind.fused:
            raise BadInputError(f"expected softmax or sigmoids for the fused kernels, got {kind!r}; use kernel='blocked'")
        if offset is not None and (scores.softcap is not None or sigmoid):
            got = "sigmoids, whose keys stay" if sigmoid else "a soft-cap, which would bend it"
            raise BadInputError(f"expected plain softmax beside an offset of keys, got {got}; use kernel='blocked'")
        super().__init__(q, k, v, scores, torch.float32)
        self.check_range(q, k, offset, torch.float32)
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
        sizes = [size * factor for size, factor in zip(torch.stack(entries + rows).tolist(), 2 * (abs(tau), 1, 1), strict=True)]
        self._s_q, self._s_k, self._s_v = (power(s) for s in sizes[:3])
        lengths = sizes[3:]
        q_row, k_row, v_row = (s * r for s, r in zip((self._s_q, self._s_k, self._s_v), lengths, strict=True))
        # κ keeps P̂ ∘ dS in range: |dq̂| ≤ √d 2¹², |dk̂| ≤ √d 2¹², and |ĝ·(v̂ − ô)| ≤ 2 √d_v 2¹² max|v̂|
        self._kappa_jvp = power(padded_width(d) ** 0.5 * 2.0**TOP * (q_row + k_row), top=1)
        self._width_v = value_width(d, v.shape[-1])
        self._kappa_vjp = power(padded_width(v.shape[-1]) ** 0.5 * 2.0**TOP * 2 * v_row, top=1)
        self._q = self._pack(q[None], tau * self._s_q)
        self._k = self._pack(k[None], self._s_k)
        self._v = self._pack(v[None], self._s_v, self._width_v)
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
            "KEYS": offset is not None or sigmoid,
            "SIGMOID": sigmoid,
        }
        self._offset = offset
        self._keys = self._numbers_of_keys(kind)
        self._sink = None if sink is None else _LOG2E * sink.to(q.device, torch.float32)
        self._rho = 0  # weights are kept as 2^(14 − ρ) P: ρ is 0 for softmax, whose rows sum to one
        self._promote = self._passes == 3 or max(n, m) > _LONG
        if q.is_cuda and not compiling():
            self._compile_ahead()
        self._o, self._fine_lse, self._lse, self._low, self._high = self._forward()
        if sigmoid and not compiling():
            self._even_out()
        # what the products do not read
        self._q, self._k = (t if self._s_passes == 3 else Operand(t.hi, t.hi) for t in (self._q, self._k))
        self._v = self._v if self._passes == 3 else Operand(self._v.hi, self._v.hi)

    def _numbers_of_keys(self, kind: Kind) -> Tensor:
        """What is added to the logits of every key in units of log 2, (batch·kv_heads, padded m); else something never read."""
        batch, _, kv_heads, _, m, _, _ = self._shape
        if not self._options["KEYS"]:
            return self._q.hi
        keys = torch.zeros(batch, kv_heads, padded_length(m), device=self._q.hi.device)
        if self._offset is not None:
            keys[..., :m] += self._offset
        if (shift := kind.shift(self.scores.mask, m)) is not None:
            keys += shift.to(keys)[:, None, None] if isinstance(shift, Tensor) else shift
        keys[..., m:] = -torch.inf  # what is not there weighs nothing
        return keys.mul_(_LOG2E).flatten(0, 1)

    def _even_out(self) -> None:
        """One unit for the weights of all rows: a power of two above the largest. Another for their slopes, below `2^−|s|`."""
        lse = self._lse[:, 1]
        seen = lse.isfinite()
        largest = float(lse.masked_fill(~seen, -torch.inf).max())
        if not math.isfinite(largest):
            return
        self._rho = math.ceil(largest)
        lse.masked_fill_(seen, self._rho)
        nearest = max(0.0, float(self._low.min()), -float(self._high.max()))  # to zero, of all logits
        flatter = 2.0 ** min(_FLATTEST, max(0, math.floor(nearest) + self._rho))
        self._kappa_jvp, self._kappa_vjp = self._kappa_jvp * flatter, self._kappa_vjp * flatter

    def _compile_ahead(self) -> None:
        """Compile what the products of this problem will take, side by side; what its lower end will take, meanwhile."""
        signature = _Signature(
            device=self.inputs[0].device,
            dtypes=tuple(t.dtype for t in self.inputs),
            widths=(self._shape[5], self._shape[6]),
            grouped=self._shape[1] > self._shape[2],
            scores=Scores(1.0, self.scores.softcap and 1.0, Mask(self.scores.mask.causal, self.scores.mask.window and 1)),
            sigmoid=self._options["SIGMOID"],
            sunk=self._sink is not None,
            keyed=self._offset is not None,
            biased=self._options["BIAS"],
            precision=self.precision,
            promote=self._promote,
        )
        if signature not in _COMPILED:
            _COMPILED[signature] = None
            in_parallel(signature.try_out)
        elif (under_way := _COMPILED[signature]) is not None:
            under_way.join()
        finest = replace(signature, precision="strict", promote=True)
        if self.heavy and finest not in _COMPILED:
            _COMPILED[finest] = soon(finest.try_out)

    def _pack(self, t: Tensor, scale: float, width: int = 0) -> Operand:
        return pack(t, torch.full(t.shape[:2], scale, device=t.device), 3, width=width)[0]

    @property
    def output(self):
        return self._o

    def tiled(self) -> Blocked:
        q, k, v = (t.float() for t in self.inputs)
        tiled = Blocked(q, k, v, self.scores, offset=self._offset, trusted=True)  # it was checked here
        tiled.largest_logit = self.largest_logit
        return tiled

    def select(self, items: Tensor) -> "Fused":
        q, k, v = (t[items] for t in self.inputs)
        offset = None if self._offset is None else self._offset[items]
        return Fused(q, k, v, self.scores.select(items), self.precision, offset=offset)

    @property
    def coarse(self) -> bool:
        return self.precision == "half"

    @property
    def finer(self) -> Precision | None:
        return FINER.get(self.precision)

    def refined(self) -> "Fused | None":
        if self.finer is None:
            return None
        finer = copy.copy(self)  # outputs are exact in every precision; only operands of products have more bits
        vars(finer).pop("noise", None)
        q, k, v = self.inputs
        finer.precision, finer._s_passes, finer._lse = self.finer, 3, self._fine_lse
        finer._q, finer._k = self._pack(q[None], self.scores.scale * self._s_q), self._pack(k[None], self._s_k)
        if finer.precision == "strict":
            finer._passes, finer._promote, finer._v = 3, True, self._pack(v[None], self._s_v, self._width_v)
        if q.is_cuda:
            finer._compile_ahead()
        return finer

    @property
    def heavy(self) -> bool:
        batch, heads, _, n, m = self._shape[:5]
        mask = self.scores.mask
        seen = min(m, mask.window * (1 if mask.causal else 2)) if mask.window else m / 2 if mask.causal else m
        return batch * heads * n * seen > _HEAVY

    @functools.cached_property
    def noise(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]  a property that is kept
        """The relative error of products, measured against float64 on a sample of rows; of strict ones, float32's."""
        if self.precision == "strict":
            # sums on the chip are cut short, not rounded
            return torch.finfo(torch.float32).eps * (128 + 2 * self.largest_logit + self.lifted)
        random = torch.Generator(self._o.device).manual_seed(0)
        tangent = [
            torch.randn(1, *t.shape, generator=random, device=t.device) * t.float().square().mean().sqrt() for t in self.inputs
        ]
        if self._offset is not None:  # as large as the other terms of dS
            drawn = torch.randn(1, *self._offset.shape, generator=random, device=self._o.device)
            sizes = [t.float().square().mean().sqrt() for t in self.inputs[:2]]
            tangent.append(drawn * (abs(self.scores.scale) * self._shape[5] ** 0.5 * sizes[0] * sizes[1]))
        n = self._shape[3]
        step = math.ceil(padded_length(n) // ROWS / _SAMPLE[0])
        # the first rows of a causal mask see few keys and weigh most: they are taken whole, the others stand for their like
        starts = range(ROWS * step, n, ROWS * step)
        size = min(ROWS, _SAMPLE[1] // max(1, len(starts)))
        runs = [slice(0, min(n, ROWS)), *(slice(start, min(start + size, n)) for start in starts)]
        coarse = self.jvp(*tangent, step=step)[0]
        coarse = torch.cat([coarse[:, :, run] for run in runs], 2)
        weight = torch.ones(coarse.shape[2], dtype=torch.float64, device=coarse.device)
        weight[ROWS:] = (n - ROWS) / max(1, len(weight) - ROWS)
        error, whole = 0.0, 0.0
        for group, true in self._exact_rows(tangent, runs):
            error += float(((coarse[:, group] - true).square().sum((0, 1, 3)) * weight).sum())
            whole += float((true.square().sum((0, 1, 3)) * weight).sum())
        return math.sqrt(error / whole) if whole > 0 else 0.0

    def _exact_rows(self, tangent: list[Tensor], runs: list[slice]) -> Iterator[tuple[slice, Tensor]]:
        """Runs of rows of `jvp(*tangent)` in float64, the query heads of one key head at a time."""
        batch, heads, kv_heads, n, m, _, _ = self._shape
        mask = self.scores.mask
        rows = torch.cat([torch.arange(run.start, run.stop, device=self._o.device) for run in runs])
        seen = torch.cat([mask.visible(run, slice(0, m), rows.device) for run in runs])
        hidden = torch.zeros(seen.shape, dtype=torch.float64, device=seen.device).masked_fill_(~seen, -torch.inf)[None, None]
        (q, k, v), (dq, dk, dv, *moved) = self.inputs, (t[0] for t in tangent)
        for h in range(kv_heads):
            group, own = slice(h * heads // kv_heads, (h + 1) * heads // kv_heads), slice(h, h + 1)
            bias = hidden
            if mask.bias is not None:
                added = mask.bias[:, group if mask.bias.shape[1] > 1 else slice(None)]
                bias = bias + (added[:, :, rows] if mask.bias.shape[2] > 1 else added)
            kind = self.scores.kind
            if kind.traits.sink is not None:
                kind = Softmax(kind.traits.sink[group])
            scores = replace(self.scores, mask=Mask(keys=mask.keys, bias=bias), kind=kind)
            offset = None if self._offset is None else self._offset[:, own].double()
            at = (t.double() for t in (q[:, group, rows], k[:, own], v[:, own]))
            along = (t.double()[None] for t in (dq[:, group, rows], dk[:, own], dv[:, own], *(t[:, own] for t in moved)))
            yield group, Blocked(*at, scores, offset=offset).jvp(*along)[0]

    @property
    def lifted(self) -> float:
        """Read off the logarithms of the rows' sums, which are to base 2 and infinite where nothing is seen."""
        if self._options["SIGMOID"]:
            return max(abs(x) for x in self.logit_range())
        if self.scores.mask.bias is None and self._sink is None:
            return 0.0
        return math.log(2) * float(self._lse.masked_fill(~self._lse.isfinite(), 0.0).sum(1).abs().max())

    def attention_received(self):
        batch, heads, kv_heads, n, m, _, _ = self._shape
        rows, cols = padded_length(n), padded_length(m)
        sums = torch.empty(batch * kv_heads, cols, device=self._o.device)
        options = {k: v for k, v in self._options.items() if k != "DV"}
        b = blocks.pick_received(self._q.hi.shape[-1], self._s_passes)
        launch(
            received.received, (cols // b.cols, batch * kv_heads),
            self._q.hi, self._q.lo, self._k.hi, self._k.lo, self._bias, self._keys, self._lse, sums,
            n, m, rows, cols, heads, heads // kv_heads, self.scores.mask.window or 0,
            1 / (self._s_q * self._s_k), self.scores.softcap or 1.0, *self._strides,
            BM=b.rows, BN=b.cols, S_PASSES=self._s_passes, **options, num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        return sums[:, :m].unflatten(0, (batch, kv_heads)).sum(1) * (2.0**self._rho / heads)

    def logit_range(self, below=None):
        if below is not None:
            return super().logit_range(below)
        low, high = math.log(2) * float(self._low.min()), math.log(2) * float(self._high.max())
        return (low, high) if low <= high else (0.0, 0.0)

    def _blocks(self, kernel: blocks.Name, two: bool = False) -> blocks.Blocks:
        width = max(self._q.hi.shape[-1], self._v.hi.shape[-1])
        return blocks.pick(kernel, width, max(self._passes, self._s_passes), two, self.scores.mask.causal)

    def _forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Outputs; of every row the log-sum-exp, in two parts, that of the products' own logits, the least and top logit."""
        batch, heads, kv_heads, n, m, _, d_v = self._shape
        rows, cols = padded_length(n), padded_length(m)
        device = self._q.hi.device
        out = torch.empty(batch, n, heads, d_v, device=device).transpose(1, 2)
        lse = torch.empty(batch * heads, 2, rows, device=device)
        low, high = (torch.empty(batch * heads, rows, device=device) for _ in range(2))
        both = self._s_passes == 1 and not self._options["SIGMOID"]
        coarse = torch.empty_like(lse) if both else lse
        b = blocks.pick("forward", max(self._q.hi.shape[-1], self._v.hi.shape[-1]), 3, False, self.scores.mask.causal)
        launch(
            forward.forward, (rows // b.rows, batch * heads),
            self._q.hi, self._q.lo, self._k.hi, self._k.lo, self._v.hi, self._v.lo,
            self._bias, self._keys, self._q.hi if self._sink is None else self._sink, out, lse, coarse, low, high,
            n, m, rows, cols, heads, heads // kv_heads, d_v, self.scores.mask.window or 0, 1,
            1 / (self._s_q * self._s_k), 1 / self._s_v, self.scores.softcap or 1.0, 1.0,
            *self._strides, *out.stride()[:3],
            BM=b.rows, BN=b.cols, COARSE=both, SINK=self._sink is not None, **self._options,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        return out, lse, coarse, low, high

    def jvp(self, dq: Queries, dk: Keys, dv: Values, doffset: Offsets | None = None, *, step: int = 1) -> Outputs:
        """step: one block of rows in so many, the others are zero."""
        batch, heads, kv_heads, n, m, _, d_v = self._shape
        probes = dq.shape[0]
        rows, cols = padded_length(n), padded_length(m)
        count = probes * batch
        keyed = self._offset is not None
        scales = torch.empty(7 * count, device=dq.device)
        still = scales if not keyed else torch.zeros(count, device=dq.device)
        launch(
            operands.jvp_scales, (1,),
            *(operands.largest(t) for t in (dq, dk, dv)), still if doffset is None else _largest_number(doffset),
            scales, count, self.scores.scale, self._s_q, self._s_k, self._s_v, self._kappa_jvp, 2.0 ** (SHIFT - self._rho),
            COUNT=triton.next_power_of_2(count), TOP=TOP, KEYS=keyed,
        )  # fmt: skip
        p_dq, p_dk, p_dv = (
            pack(t, scales[i * count : (i + 1) * count], self._passes, width=width)[0]
            for i, (t, width) in enumerate(((dq, 0), (dk, 0), (dv, self._width_v)))
        )
        undo = scales[3 * count :]
        dkeys = self._moved_keys(doffset, scales[6 * count :], probes) if keyed else scales
        out = torch.empty(probes, batch, n, heads, d_v, device=dq.device).transpose(2, 3)
        if step > 1:
            out.zero_()
        two = probes % 2 == 0 and self._passes == 1
        b = self._blocks("jvp", two)
        launch(
            jvp.jvp,
            (triton.cdiv(rows // ROWS, step) * (ROWS // b.rows), batch * heads, probes // 2 if two else probes),
            self._q.hi, self._q.lo, self._k.hi, self._k.lo, self._v.hi, self._v.lo,
            p_dq.hi, p_dq.lo, p_dk.hi, p_dk.lo, p_dv.hi, p_dv.lo,
            self._bias, self._keys, dkeys, self._lse, self._o, undo, out,
            n, m, rows, cols, batch, heads, heads // kv_heads, d_v, self.scores.mask.window or 0, step,
            1 / (self._s_q * self._s_k), self.scores.softcap or 1.0, 1.0,
            *self._strides, *self._o.stride()[:3], *out.stride()[:4],
            BM=b.rows, BN=b.cols, PASSES=self._passes, S_PASSES=self._s_passes, TWO=two,
            PROMOTE=self._promote, **self._options,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        return out

    def _moved_keys(self, doffset: Tensor | None, gamma: Tensor, probes: int) -> Tensor:
        """Derivatives of the numbers of keys times γ, (probes·batch·kv_heads, padded m)."""
        batch, _, kv_heads, _, m, _, _ = self._shape
        moved = torch.zeros(probes, batch, kv_heads, padded_length(m), device=gamma.device)
        if doffset is not None:
            moved[..., :m] = doffset * gamma.reshape(probes, batch, 1, 1)
        return moved.flatten(0, 2)

    def vjp(self, g: Outputs) -> tuple[Queries, Keys, Values]:
        return self.vjp_and_offset(g)[:3]

    def vjp_and_offset(self, g):
        batch, heads, kv_heads, n, m, d, d_v = self._shape
        probes = g.shape[0]
        rows, cols = padded_length(n), padded_length(m)
        count = probes * batch
        scales = torch.empty(4 * count, device=g.device)
        launch(
            operands.vjp_scales, (1,),
            operands.largest(g), scales, count, self.scores.scale, self._s_q, self._s_k, self._s_v,
            self._kappa_vjp, 2.0 ** (SHIFT - self._rho), COUNT=triton.next_power_of_2(count), TOP=TOP,
        )  # fmt: skip
        p_g, delta = pack(g, scales[:count], self._passes, dot=self._o, dot_scale=self._s_v, width=self._width_v)
        undo = scales[count:]
        dq = torch.empty(probes, batch, n, heads, d, device=g.device).transpose(2, 3)
        dk = torch.empty(probes, batch, m, kv_heads, d, device=g.device).transpose(2, 3)
        dv = torch.empty(probes, batch, m, kv_heads, d_v, device=g.device).transpose(2, 3)
        dkeys = torch.empty(probes * batch * kv_heads, cols, device=g.device) if self._offset is not None else scales
        two = probes % 2 == 0 and self._passes == 1
        inputs = (
            self._q.hi, self._q.lo, self._k.hi, self._k.lo, self._v.hi, self._v.lo,
            p_g.hi, p_g.lo, self._bias, self._keys, self._lse, delta, undo,
        )  # fmt: skip
        sizes = (n, m, rows, cols, batch, heads, heads // kv_heads)
        logits = (self.scores.mask.window or 0, 1 / (self._s_q * self._s_k), self._kappa_vjp, self.scores.softcap or 1.0, 1.0)
        options = {"PASSES": self._passes, "S_PASSES": self._s_passes, "TWO": two, "PROMOTE": self._promote, **self._options}
        grid = probes // 2 if two else probes
        b = self._blocks("columns", two)
        launch(
            vjp.vjp_columns, (cols // b.cols, batch * kv_heads, grid),
            *inputs, dk, dv, dkeys, *sizes, d, d_v, *logits, *self._strides, *dk.stride()[:4], *dv.stride()[:4],
            BM=b.rows, BN=b.cols, **options, num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        b = self._blocks("rows", two)
        launch(
            vjp.vjp_rows, (rows // b.rows, batch * heads, grid),
            *inputs, dq, *sizes, d, *logits, *self._strides, *dq.stride()[:4],
            BM=b.rows, BN=b.cols, **options, num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip
        if self._offset is None:
            return dq, dk, dv, None
        return dq, dk, dv, self._s_q * dkeys.unflatten(0, (probes, batch, kv_heads))[..., :m]


def _largest_number(t: Tensor) -> Tensor:
    """The largest number of a key of each item, in absolute value."""
    return torch.linalg.vector_norm(t, torch.inf, dim=(2, 3), dtype=torch.float32)


def _bias(scores: Scores, batch: int, heads: int, n: int, m: int) -> Tensor | None:
    """What is added to the logits, (batch, heads, n, m) without copies along axes it does not depend on."""
    mask = scores.mask
    bias = mask.bias
    if mask.keys is not None:
        hidden = torch.zeros(mask.keys.shape, device=mask.keys.device).masked_fill_(~mask.keys, -torch.inf)[:, None, None]
        bias = hidden if bias is None else bias + hidden
    return None if bias is None else bias.contiguous().expand(batch, heads, n, m)


@dataclass(frozen=True)
class _Signature:
    """What kernels are compiled for: everything but lengths and numbers of heads."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, int]
    grouped: bool
    scores: Scores
    sigmoid: bool
    sunk: bool
    keyed: bool
    biased: bool
    precision: Precision
    promote: bool

    def try_out(self) -> None:
        """Every kernel of a problem of one token."""
        heads, (d, d_v) = 2 if self.grouped else 1, self.widths
        shapes = (1, heads, 1, d), (1, 1, 1, d), (1, 1, 1, d_v)
        q, k, v = (torch.ones(shape, dtype=dtype, device=self.device) for shape, dtype in zip(shapes, self.dtypes, strict=True))
        bias = torch.zeros(1, 1, 1, 1, device=self.device) if self.biased else None
        offset = torch.zeros(1, 1, 1, device=self.device) if self.keyed else None
        kind = Sigmoid() if self.sigmoid else Softmax(torch.zeros(heads, device=self.device) if self.sunk else None)
        scores = replace(self.scores, mask=replace(self.scores.mask, bias=bias), kind=kind)
        kernel = Fused(q, k, v, scores, self.precision, offset=offset)
        kernel._promote = self.promote
        kernel.jvp(*(t.float()[None] for t in (q, k, v)), None if offset is None else offset[None])
        kernel.attention_received()
        if self.precision != "strict":
            kernel.vjp(v.float().expand(1, heads, 1, d_v)[None])


_COMPILED: dict[_Signature, Thread | None] = {}  # with the thread that compiles it, where one does
