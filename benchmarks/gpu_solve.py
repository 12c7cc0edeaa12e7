"""Whole answers on a GPU: a causal layer of GPT-2's size, converged and certified, up to a million tokens."""

import time
from typing import Any

import torch

import howsmooth as hs
from benchmarks.harness import agree
from benchmarks.layers import gpt2_layer

TITLE = "Answers on a GPU (causal; 12 heads × 64, the last row one head × 64)"


def run(quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n in (1024, 4096) if quick else (1024, 16_384, 32_768, 65_536, 131_072):
        layer, x = gpt2_layer(n, causal=True)
        layer, x = layer.to("cuda", torch.float32), x.cuda()
        if n == 1024:
            truth = hs.lipschitz(layer.to(torch.float64), x.double(), tol=1e-6).value
            agree(f"n = {n}", hs.lipschitz(layer, x).value, truth, 1e-3)
        rows += [_row(layer, x, certify) for certify in (None, 0.02)]
    if not quick:
        random = torch.Generator().manual_seed(0)
        w_q, w_k, w_v, w_o = (0.125 * torch.randn(64, 64, generator=random) for _ in range(4))
        layer = hs.Attention(w_q, w_k, w_v, w_o, causal=True).to("cuda", torch.float32)
        rows.append(_row(layer, torch.randn(2**20, 64, generator=random).cuda(), None))
    return rows


def _row(layer: hs.Attention, x: torch.Tensor, certify: float | None) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = hs.lipschitz(layer, x, certify=certify)
    torch.cuda.synchronize()
    return {
        "n": len(x),
        "asked": "tol 1e-3" if certify is None else f"certify {certify}",
        "seconds": time.perf_counter() - start,
        "steps": found.steps,
        "lower": found.lower,
        "upper/lower": found.upper / found.lower,
        "status": found.status,
        "lower in": found.precision,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
    }
