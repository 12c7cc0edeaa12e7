"""Long inputs: time and extra peak memory of one causal jvp + vjp pair, each length in a process of its own."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

TITLE = "One causal pair at long length (12 heads × 64, float32)"


def run(quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    for n in (2048, 4096) if quick else (4096, 8192, 16384):
        with context.Pool(1) as pool:
            row = pool.apply(_measure, (n, n <= 4096))
        last = rows[-1]["pair s"] if rows else None
        row["growth"] = row["pair s"] / last if last else "–"
        rows.append(row)
    return rows


@torch.no_grad()
def _measure(n: int, check: bool) -> dict[str, Any]:
    from benchmarks.harness import agree
    from benchmarks.layers import WIDTH, gpt2_layer, plain

    layer, x = gpt2_layer(n, causal=True)
    operator = layer.linearize(x[None])[1]
    v = torch.randn(1, 1, n, WIDTH, generator=torch.Generator().manual_seed(1))
    # a prefix sees the same tokens under a causal mask, so its plain derivative checks the long one
    head = min(n, 512)
    f = plain(layer, head)
    truth = torch.func.jvp(f, (x[:head],), (v[0, 0, :head],))[1]
    image = operator.jvp(v)
    agree("jvp", float((image[0, 0, :head] - truth).norm() / truth.norm()) + 1, 1.0, 1e-4)
    left, right = (image * image).sum().item(), (operator.vjp(image) * v).sum().item()
    agree("vjp", right, left, 1e-4)
    del image, truth
    before = _peak(reset=True)
    times = []
    for _ in range(3 if check else 2):
        start = time.perf_counter()
        operator.vjp(operator.jvp(v))
        times.append(time.perf_counter() - start)
    return {
        "n": n,
        "pair s": min(times),
        "extra peak GiB": (_peak() - before) / 2**30,
        "weights would take GiB": 12 * n * n * 4 / 2**31,
    }


def _peak(reset: bool = False) -> int:
    """Peak resident bytes; after a reset, since now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
