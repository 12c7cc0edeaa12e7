"""Launches of `sdpa`'s kernels: no packing, and no number read off the device."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from howsmooth.kernels.tensors import heads_last
from howsmooth.kernels.triton import blocks, native_first, native_second
from howsmooth.kernels.triton.compiling import launch
from howsmooth.kernels.triton.operands import padded_width


class _Problem:
    """Sizes, strides and options that all kernels share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: Sequence[Any]):
        scale, softcap, causal, window = how
        (self.batch, self.heads, self.n, self.d), (self.kv_heads, self.m), self.d_v = q.shape, k.shape[1:3], v.shape[-1]
        self.q, self.k, self.v = (_rows(t) for t in (q, k, v))
        self.bias, bias_strides = self.q, (0, 0, 0)
        if bias is not None:
            bias = _rows(bias)
            self.bias = bias
            bias_strides = tuple(s if size > 1 else 0 for s, size in zip(bias.stride()[:3], bias.shape[:3], strict=True))
        self.numbers = (self.heads, self.heads // self.kv_heads, self.d, self.d_v, window or 0, scale, softcap or 1.0)
        self.strides = (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *bias_strides)
        width, width_v = padded_width(self.d), padded_width(self.d_v)
        self.causal = bool(causal)
        self.single = q.dtype == torch.float32
        tf32 = self.single and torch.get_float32_matmul_precision() != "highest"
        self.options = {
            "D": width,
            "DV": width_v,
            "PAD": width != self.d or width_v != self.d_v,
            "RAGGED": self.n % 128 > 0 or self.m % 128 > 0,  # some block is not whole
            "PRECISION": "tf32" if tf32 or not self.single else "tf32x3",
            "CAUSAL": self.causal,
            "WINDOW": window is not None,
            "BIAS": bias is not None,
            "CAP": softcap is not None,
        }

    def run(self, kernel: Any, name: blocks.Native, probes: int, by_rows: bool, *args: Any, first: tuple[int, ...]) -> None:
        """first: the lengths, with the batch where a kernel counts probes."""
        b = blocks.pick_native(name, max(self.options["D"], self.options["DV"]), self.single, self.causal)
        if by_rows:
            grid = (triton.cdiv(self.n, b.rows), self.batch * self.heads, probes)
        else:
            grid = (triton.cdiv(self.m, b.cols), self.batch * self.kv_heads, probes)
        tensors = [t for t in args if isinstance(t, Tensor)]
        strides = [s for t in args if not isinstance(t, Tensor) for s in t]
        launch(
            kernel, grid, *tensors, *first, *self.numbers, *self.strides, *strides,
            BM=b.rows, BN=b.cols, **self.options, num_warps=b.warps, num_stages=b.stages,
        )  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: Sequence[Any]) -> tuple[Tensor, Tensor]:
    p = _Problem(q, k, v, bias, how)
    out = heads_last((*q.shape[:-1], p.d_v), q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    p.run(
        native_first.forward, "forward", 1, True, p.q, p.k, p.v, p.bias, out, lse, out.stride()[:3], first=(p.n, p.m)
    )  # fmt: skip
    return out, lse


def jvp(q, k, v, bias, o, lse, dq, dk, dv, how: Sequence[Any]) -> tuple[Tensor, Tensor]:
    p = _Problem(q, k, v, bias, how)
    o, dq, dk, dv = (_rows(t) for t in (o, dq, dk, dv))
    out = heads_last((*dq.shape[:-1], p.d_v), q)
    dlse = torch.empty(dq.shape[:-1], dtype=torch.float32, device=q.device)
    p.run(
        native_first.jvp, "jvp", _probes(dq), True,
        p.q, p.k, p.v, dq, dk, dv, p.bias, o, lse, out, dlse,
        *(_strides(t) for t in (dq, dk, dv)), o.stride()[:3], _strides(out), first=(p.n, p.m, p.batch),
    )  # fmt: skip
    return out, dlse


def vjp(q, k, v, bias, o, lse, g, how: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    p = _Problem(q, k, v, bias, how)
    o, g = _rows(o), _rows(g)
    lead, first = g.shape[:-4], (p.n, p.m, p.batch)
    dq, dk, dv = (heads_last((*lead, *t.shape), q) for t in (q, k, v))
    delta = torch.empty(g.shape[:-1], dtype=torch.float32, device=q.device)
    p.run(
        native_first.vjp_rows, "rows", _probes(g), True,
        p.q, p.k, p.v, g, p.bias, o, lse, delta, dq, _strides(g), o.stride()[:3], _strides(dq), first=first,
    )  # fmt: skip
    p.run(
        native_first.vjp_columns, "columns", _probes(g), False,
        p.q, p.k, p.v, g, p.bias, lse, delta, dk, dv, _strides(g), _strides(dk), _strides(dv), first=first,
    )  # fmt: skip
    return dq, dk, dv


def hvp(q, k, v, bias, o, lse, dq, dk, dv, do, dlse, g, how: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    p = _Problem(q, k, v, bias, how)
    o, dq, dk, dv, do, g = (_rows(t) for t in (o, dq, dk, dv, do, g))
    dlse = dlse.contiguous()
    lead, first = g.shape[:-4], (p.n, p.m, p.batch)
    hq, hk, hv = (heads_last((*lead, *t.shape), q) for t in (q, k, v))
    delta, delta2 = (torch.empty(g.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    along, strides = (dq, dk, dv, g, p.bias), [_strides(t) for t in (dq, dk, dv, g)]
    p.run(
        native_second.hvp_rows, "hvp_rows", _probes(g), True,
        p.q, p.k, p.v, *along, o, do, lse, dlse, delta, delta2, hq, *strides, o.stride()[:3], _strides(do), _strides(hq),
        first=first,
    )  # fmt: skip
    p.run(
        native_second.hvp_columns, "hvp_columns", _probes(g), False,
        p.q, p.k, p.v, *along, lse, dlse, delta, delta2, hk, hv, *strides, _strides(hk), _strides(hv), first=first,
    )  # fmt: skip
    return hq, hk, hv


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _probes(t: Tensor) -> int:
    return len(t) if t.ndim == 5 else 1


def _strides(t: Tensor) -> tuple[int, ...]:
    """Over probes, items, heads and rows."""
    return t.stride()[:4] if t.ndim == 5 else (0, *t.stride()[:3])
