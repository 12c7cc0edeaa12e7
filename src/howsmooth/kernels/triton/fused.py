"""Attention on fused kernels: O(n · d) memory, every product one pass over the logits."""

import copy
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, final

import torch
import triton
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import FINER, AttentionKernel, Keys, Offsets, Outputs, Precision, Queries, Scores, Values
from howsmooth.kernels.kinds import Kind, Sigmoid, Softmax
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.tiled import Blocked
from howsmooth.kernels.triton import blocks, operands
from howsmooth.kernels.triton.backward import vjp_columns, vjp_rows
from howsmooth.kernels.triton.compiling import compiling, in_parallel, launch, soon
from howsmooth.kernels.triton.forward import forward, jvp, received
from howsmooth.kernels.triton.logits import Kernel
from howsmooth.kernels.triton.operands import ROWS, TOP, Packed, pack, padded_length, whole

WIDEST_HEAD = 256
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
        self, q: Queries, k: Keys, v: Values, scores: Scores, precision: Precision = "half", *, offset: Offsets | None = None
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
        self._packed = Packed.of(q, k, v, scores.scale)
        bias = _bias(self.scores, batch, heads, n, m)
        # over items, heads and rows; without a bias another tensor stands in its place, never read
        self._bias, self._strides = (self._packed.q.hi, (0, 0, 0)) if bias is None else (bias, bias.stride()[:3])
        self._options = {
            "D": self._packed.q.hi.shape[-1],
            "DV": self._packed.v.hi.shape[-1],
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
        self._packed = self._packed.reduced(self._s_passes, self._passes)

    def _numbers_of_keys(self, kind: Kind) -> Tensor:
        """What is added to the logits of every key in units of log 2, (batch·kv_heads, padded m); else something never read."""
        batch, _, kv_heads, _, m, _, _ = self._shape
        if not self._options["KEYS"]:
            return self._packed.q.hi
        keys = torch.zeros(batch, kv_heads, padded_length(m), device=self._packed.q.hi.device)
        if self._offset is not None:
            keys[..., :m] += self._offset
        if (shift := kind.shift(self.scores.mask, m)) is not None:
            keys += shift.to(keys)[:, None, None] if isinstance(shift, Tensor) else shift
        keys[..., m:] = -torch.inf  # what is not there weighs nothing
        return keys.mul_(_LOG2E).flatten(0, 1)

    def _even_out(self) -> None:
        """One unit for the weights of all rows: a power of two above the largest. Another for their slopes, below `2^−|s|`."""
        lse = self._lse[:, 1]
        attending = lse.isfinite()
        largest = float(lse.masked_fill(~attending, -torch.inf).max())
        if not math.isfinite(largest):
            return
        self._rho = math.ceil(largest)
        lse.masked_fill_(attending, self._rho)
        nearest = max(0.0, float(self._low.min()), -float(self._high.max()))  # to zero, of all logits
        flatter = 2.0 ** min(_FLATTEST, max(0, math.floor(nearest) + self._rho))
        kappa_jvp, kappa_vjp = (flatter * kappa for kappa in (self._packed.kappa_jvp, self._packed.kappa_vjp))
        self._packed = replace(self._packed, kappa_jvp=kappa_jvp, kappa_vjp=kappa_vjp)

    def _compile_ahead(self) -> None:
        """Compile what the products of this problem will take, side by side; what its lower end will take, meanwhile."""
        mask, kv_heads, options = self.scores.mask, self._shape[2], self._options
        scores = Scores(1.0, self.scores.softcap and 1.0, Mask(mask.causal, mask.window and 1))
        signature = _Signature(
            self.inputs[0].device, tuple(t.dtype for t in self.inputs), self._shape[5:], self._shape[1] > kv_heads, scores,
            options["SIGMOID"], self._sink is not None, self._offset is not None, options["BIAS"],
            self.precision, self._promote,
        )  # fmt: skip
        if signature not in _COMPILED:
            _COMPILED[signature] = None
            in_parallel(signature.try_out)
        elif (under_way := _COMPILED[signature]) is not None:
            under_way.join()
        finest = replace(signature, precision="strict", promote=True)
        if self.heavy and finest not in _COMPILED:
            _COMPILED[finest] = soon(finest.try_out)

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
        s_q, s_k, s_v = self._packed.scales
        finer._packed = replace(self._packed, q=whole(q, self.scores.scale * s_q), k=whole(k, s_k))
        if finer.precision == "strict":
            finer._passes, finer._promote = 3, True
            finer._packed = replace(finer._packed, v=whole(v, s_v, self._packed.width_v))
        if q.is_cuda:
            finer._compile_ahead()
        return finer

    @property
    def heavy(self) -> bool:
        batch, heads, _, n, m = self._shape[:5]
        mask = self.scores.mask
        visible = min(m, mask.window * (1 if mask.causal else 2)) if mask.window else m / 2 if mask.causal else m
        return batch * heads * n * visible > _HEAVY

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
        # the first rows of a causal mask attend to few keys and weigh most: they are taken whole, others stand for their like
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
        visible = torch.cat([mask.visible(run, slice(0, m), rows.device) for run in runs])
        hidden = torch.zeros(visible.shape, dtype=torch.float64, device=rows.device).masked_fill_(~visible, -torch.inf)[
            None, None
        ]
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
        """Read off the logarithms of the rows' sums, which are to base 2 and infinite where no key is visible."""
        if self._options["SIGMOID"]:
            return max(abs(x) for x in self.logit_range())
        if self.scores.mask.bias is None and self._sink is None:
            return 0.0
        return math.log(2) * float(self._lse.masked_fill(~self._lse.isfinite(), 0.0).sum(1).abs().max())

    def attention_received(self):
        batch, heads, kv_heads, _, m, _, _ = self._shape
        sums = torch.empty(batch * kv_heads, padded_length(m), device=self._o.device)
        at, options = self._packed, {name: value for name, value in self._options.items() if name != "DV"}
        self._launch(
            received, blocks.pick_received(options["D"], self._s_passes), (at.q.hi, at.k.hi, self._bias, self._lse, sums),
            (*at.q.strides[1:], *at.k.strides[1:], *self._strides), S_PASSES=self._s_passes, **options,
        )  # fmt: skip
        return sums[:, :m].unflatten(0, (batch, kv_heads)).sum(1) * (2.0**self._rho / heads)

    def logit_range(self, below=None):
        if below is not None:
            return super().logit_range(below)
        low, high = math.log(2) * float(self._low.min()), math.log(2) * float(self._high.max())
        return (low, high) if low <= high else (0.0, 0.0)

    def _launch(
        self, kernel: Kernel, b: blocks.Blocks, tensors: tuple, strides: tuple, probes=1, step=1, factor=1.0, **options: Any
    ) -> None:
        """probes: that share no weights.  step: one block of rows in so many.  factor: what the kernel says."""
        batch, heads, kv_heads, n, m, d, d_v = self._shape
        count, items = triton.cdiv(padded_length(n) // ROWS, step) * (ROWS // b.rows), batch * heads
        if kernel in (vjp_columns, received):
            count, items = padded_length(m) // b.cols, batch * kv_heads
        s_q, s_k, _ = self._packed.scales
        launch(
            kernel.packed, (count, items, probes), *tensors,
            n, m, batch, heads, heads // kv_heads, d, d_v, self.scores.mask.window or 0, self.scores.mask.first, step,
            1 / (s_q * s_k), self.scores.softcap or 1.0, factor, 1.0, *strides,
            BM=b.rows, BN=b.cols, Q_LO=self._packed.q.lo, K_LO=self._packed.k.lo, KEYS_P=self._keys, **options,
            num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip

    def _product(self, kernel: Kernel, name: blocks.Name, probes: int, tensors: tuple, strides: tuple, **options: Any) -> None:
        """Run a kernel of a product with so many probes, two beside each other where that can be."""
        at, two = self._packed, probes % 2 == 0 and self._passes == 1
        self._launch(
            kernel, self._blocks(name, max(self._passes, self._s_passes), two),
            (at.q.hi, at.k.hi, at.v.hi, *tensors), (*at.strides, *self._strides, *strides), probes // 2 if two else probes,
            PACKED=True, PASSES=self._passes, S_PASSES=self._s_passes, TWO=two, PROMOTE=self._promote,
            V_LO=at.v.lo, **self._options, **options,
        )  # fmt: skip

    def _blocks(self, kernel: blocks.Name, passes: int, two: bool = False) -> blocks.Blocks:
        return blocks.pick(kernel, max(self._options["D"], self._options["DV"]), passes, two, self.scores.mask.causal)

    def _forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Outputs; of every row the log-sum-exp, in two parts, that of the products' own logits, the least and top logit."""
        batch, heads, _, n, _, _, d_v = self._shape
        at, rows, device = self._packed, padded_length(n), self._packed.q.hi.device
        out = torch.empty(batch, n, heads, d_v, device=device).transpose(1, 2)
        lse = torch.empty(batch * heads, 2, rows, device=device)
        low, high = (torch.empty(batch * heads, rows, device=device) for _ in range(2))
        both = self._s_passes == 1 and not self._options["SIGMOID"]
        coarse = torch.empty_like(lse) if both else lse
        self._launch(
            forward, self._blocks("forward", 3), (at.q.hi, at.k.hi, at.v.hi, self._bias, out, lse),
            (*at.strides, *self._strides, *out.stride()[:3]), factor=1 / at.scales[2],
            PACKED=True, PASSES=3, COARSE=both, SINK=self._sink is not None, **self._options,
            V_LO=at.v.lo, SINK_P=self._sink, COARSE_LSE=coarse, LOW=low, HIGH=high,
        )  # fmt: skip
        return out, lse, coarse, low, high

    def jvp(self, dq: Queries, dk: Keys, dv: Values, doffset: Offsets | None = None, *, step: int = 1) -> Outputs:
        """step: one block of rows in so many, the others are zero."""
        batch, heads, kv_heads, n, m, _, d_v = self._shape
        at, probes = self._packed, dq.shape[0]
        count, keyed = probes * batch, self._offset is not None
        scales = torch.empty(7 * count, device=dq.device)
        largest = scales if not keyed else torch.zeros(count, device=dq.device)
        if doffset is not None:
            largest = torch.linalg.vector_norm(doffset, torch.inf, dim=(2, 3), dtype=torch.float32)
        launch(
            operands.jvp_scales, (1,), *(operands.largest(t) for t in (dq, dk, dv)), largest,
            scales, count, self.scores.scale, *at.scales, at.kappa_jvp, 2.0 ** (SHIFT - self._rho),
            COUNT=triton.next_power_of_2(count), TOP=TOP, KEYS=keyed,
        )  # fmt: skip
        p_dq, p_dk, p_dv = (
            pack(t, scales[i * count : (i + 1) * count], self._passes, width=width)[0]
            for i, (t, width) in enumerate(((dq, 0), (dk, 0), (dv, at.width_v)))
        )
        dkeys = scales
        if keyed:  # derivatives of the numbers of keys, times γ
            dkeys = torch.zeros(probes, batch, kv_heads, padded_length(m), device=dq.device)
            if doffset is not None:
                dkeys[..., :m] = doffset * scales[6 * count :].reshape(probes, batch, 1, 1)
        out = (torch.zeros if step > 1 else torch.empty)(probes, batch, n, heads, d_v, device=dq.device).transpose(2, 3)
        self._product(
            jvp, "jvp", probes, (p_dq.hi, p_dk.hi, p_dv.hi, self._bias, self._o, self._lse, out, None),
            (*p_dq.strides, *p_dk.strides, *p_dv.strides, *self._o.stride()[:3], *out.stride()[:4]),
            step=step, DQ_LO=p_dq.lo, DK_LO=p_dk.lo, DV_LO=p_dv.lo, DKEYS=dkeys, SCALES=scales[3 * count :],
        )  # fmt: skip
        return out

    def vjp(self, g: Outputs) -> tuple[Queries, Keys, Values]:
        return self.vjp_and_offset(g)[:3]

    def vjp_and_offset(self, g):
        batch, heads, kv_heads, n, m, d, d_v = self._shape
        at, probes, count = self._packed, len(g), len(g) * batch
        scales = torch.empty(4 * count, device=g.device)
        launch(
            operands.vjp_scales, (1,), operands.largest(g), scales, count, self.scores.scale, *at.scales,
            at.kappa_vjp, 2.0 ** (SHIFT - self._rho), COUNT=triton.next_power_of_2(count), TOP=TOP,
        )  # fmt: skip
        p_g, delta = pack(g, scales[:count], self._passes, dot=self._o, dot_scale=at.scales[2], width=at.width_v)
        dq = torch.empty(probes, batch, n, heads, d, device=g.device).transpose(2, 3)
        dk, dv = (torch.empty(probes, batch, m, kv_heads, size, device=g.device).transpose(2, 3) for size in (d, d_v))
        keyed = self._offset is not None
        dkeys = torch.empty(probes, batch, kv_heads, padded_length(m), device=g.device) if keyed else scales
        more = {"factor": at.kappa_vjp, "G_LO": p_g.lo, "SCALES": scales[count:]}
        self._product(
            vjp_columns, "columns", probes, (p_g.hi, self._bias, self._lse, delta, dk, dv),
            (*p_g.strides, *dk.stride()[:4], *dv.stride()[:4]), DKEYS=dkeys, **more,
        )  # fmt: skip
        self._product(
            vjp_rows, "rows", probes, (p_g.hi, self._bias, None, self._lse, delta, dq),
            (*p_g.strides, 0, 0, 0, *dq.stride()[:4]), **more,
        )  # fmt: skip
        return dq, dk, dv, at.scales[0] * dkeys[..., :m] if keyed else None


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
