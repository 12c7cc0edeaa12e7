"""Launches of `sdpa`'s kernels: no packing, and no number read off the device."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from howsmooth.kernels.tensors import heads_last, whole_float32
from howsmooth.kernels.triton import blocks
from howsmooth.kernels.triton.backward import hvp_columns, hvp_rows, vjp_columns, vjp_rows
from howsmooth.kernels.triton.compiling import Launch
from howsmooth.kernels.triton.forward import forward as forward_rows
from howsmooth.kernels.triton.forward import jvp as jvp_rows
from howsmooth.kernels.triton.operands import padded_width

_KERNELS: dict[blocks.Native, Any] = {
    "forward": forward_rows.native,
    "jvp": jvp_rows.native,
    "rows": vjp_rows.native,
    "columns": vjp_columns.native,
    "hvp_rows": hvp_rows.native,
    "hvp_columns": hvp_columns.native,
}

_GRID = 65535  # a launch takes no more heads of all items and documents


class _Launches:
    """Operands as kernels read them, and what a launch depends on besides."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: Sequence[Any]):
        *how, self.documents, max_q, max_k, _, _ = how
        self.q, self.k, self.v = _rows(q), _rows(k), _rows(v)
        self.bias, bias_strides = self.q if self.documents is None else self.documents, (0, 0, 0)
        if bias is not None:
            self.bias = _adjacent(bias)
            bias_strides = tuple(s if size > 1 else 0 for s, size in zip(self.bias.stride()[:3], bias.shape[:3], strict=True))
        self.strides = (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *bias_strides)
        precise = q.dtype == torch.float32 and whole_float32()
        longest = (q.shape[-2], k.shape[-2]) if self.documents is None else (max_q, max_k)
        self.given = (q.shape, k.shape, v.shape[-1], q.dtype, precise, bias is not None, tuple(how), longest)

    def run(self, name: blocks.Native, probes: int, tensors: tuple[Tensor, ...], strides: tuple[int, ...]) -> None:
        """strides: those that not all kernels have."""
        if self.documents is None:
            _launch(name, probes, self.strides + strides, *self.given, None)(*tensors)
            return
        for part in self.documents.split(max(1, _GRID // (self.q.shape[0] * self.q.shape[1]))):
            given = (part if t is self.bias else t for t in tensors)
            _launch(name, probes, self.strides + strides, *self.given, len(part))(*given)

    def empty(self, *shape: int) -> Tensor:
        """Room for an answer, whose heads lie beside each other; NaN where documents may leave tokens out."""
        out = heads_last(shape, self.q)
        return out if self.documents is None else out.fill_(torch.nan)


@functools.lru_cache(maxsize=1024)
def _launch(
    name: blocks.Native, probes: int, strides, q, k, d_v: int, dtype, precise: bool, biased: bool, how, longest, documents
) -> Launch:
    """Sizes and options of a kernel, for queries and keys of these shapes; documents: how many, none longer than `longest`."""
    (batch, heads, n, d), (kv_heads, m), (scale, softcap, causal, window, first) = q, k[1:3], how
    # one width for both: compiled by Triton 3.6, keys padded to 32 entries beside values padded to 16 come out wrong
    width, single = max(padded_width(d), padded_width(d_v)), dtype == torch.float32
    b = blocks.pick_native(name, width, single, causal)
    by_columns = name in ("columns", "hvp_columns")
    count, items = (-(-longest[1] // b.cols), kv_heads) if by_columns else (-(-longest[0] // b.rows), heads)
    items *= batch * (documents or 1)
    numbers = (n, m, batch, heads, heads // kv_heads, d, d_v, window or 0, first, 1, scale, softcap or 1.0, 1.0, 1.0)
    options = {
        "D": width,
        "DV": width,
        "BM": b.rows,
        "BN": b.cols,
        "PAD": width != d or width != d_v,
        "RAGGED": documents is not None or n % 128 > 0 or m % 128 > 0,  # some block is not whole
        "PRECISION": "tf32x3" if precise else "tf32",
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "BIAS": biased,
        "CAP": softcap is not None,
        "DOCUMENTS": documents is not None,
        "num_warps": b.warps,
        "num_stages": b.stages,
    }
    return Launch(_KERNELS[name], (count, items, probes), (*numbers, *strides), options)


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: Sequence[Any]) -> tuple[Tensor, Tensor]:
    p = _Launches(q, k, v, bias, how)
    out = p.empty(*q.shape[:-1], v.shape[-1])
    lse = torch.empty((*q.shape[:2], 2, q.shape[2]), dtype=torch.float32, device=q.device)
    p.run("forward", 1, (p.q, p.k, p.v, p.bias, out, lse), out.stride()[:3])
    return out, lse


def jvp(q, k, v, bias, o, lse, dq, dk, dv, how: Sequence[Any]) -> tuple[Tensor, Tensor]:
    p = _Launches(q, k, v, bias, how)
    o, dq, dk, dv = _rows(o), _rows(dq), _rows(dk), _rows(dv)
    out = p.empty(*dq.shape[:-1], v.shape[-1])
    dlse = torch.empty((*dq.shape[:-2], 2, dq.shape[-2]), dtype=torch.float32, device=q.device)
    tensors = (p.q, p.k, p.v, dq, dk, dv, p.bias, o, lse, out, dlse)
    p.run("jvp", _probes(dq), tensors, (*_strides(dq, dk, dv), *o.stride()[:3], *_strides(out)))
    return out, dlse


def vjp(q, k, v, bias, o, lse, g, how: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    p = _Launches(q, k, v, bias, how)
    o, g = _rows(o), _rows(g)
    dq, dk, dv = (p.empty(*g.shape[:-4], *t.shape) for t in (q, k, v))
    delta = torch.empty(g.shape[:-1], dtype=torch.float32, device=q.device)
    at = (p.q, p.k, p.v, g, p.bias)
    p.run("rows", _probes(g), (*at, o, lse, delta, dq), (*_strides(g), *o.stride()[:3], *_strides(dq)))
    p.run("columns", _probes(g), (*at, lse, delta, dk, dv), _strides(g, dk, dv))
    return dq, dk, dv


def hvp(q, k, v, bias, o, lse, dq, dk, dv, do, dlse, g, how: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    p = _Launches(q, k, v, bias, how)
    o, dq, dk, dv, do, g = (_rows(t) for t in (o, dq, dk, dv, do, g))
    dlse = dlse.contiguous()
    hq, hk, hv = (p.empty(*g.shape[:-4], *t.shape) for t in (q, k, v))
    delta, delta2 = (torch.empty(g.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    at, strides, rows = (p.q, p.k, p.v, dq, dk, dv, g, p.bias), _strides(dq, dk, dv, g), (lse, dlse, delta, delta2)
    p.run("hvp_rows", _probes(g), (*at, o, do, *rows, hq), (*strides, *o.stride()[:3], *_strides(do, hq)))
    p.run("hvp_columns", _probes(g), (*at, *rows, hk, hv), strides + _strides(hk, hv))
    return hq, hk, hv


def _rows(t: Tensor) -> Tensor:
    """Rows of adjacent entries that begin less than 2³¹ entries apart, copied where they are not."""
    return t.contiguous() if t.shape[-2] * t.stride(-2) >= 2**31 else _adjacent(t)


def _adjacent(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _probes(t: Tensor) -> int:
    return len(t) if t.ndim == 5 else 1


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of each, over probes, items, heads and rows."""
    return tuple(s for t in tensors for s in (t.stride()[:4] if t.ndim == 5 else (0, *t.stride()[:3])))
