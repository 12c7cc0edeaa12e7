"""One jvp + vjp pair on a GPU of the kinds with fused kernels, 12 heads × 64, against softmax's.

Every product is first compared with float64, tile by tile; nothing is timed before.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu import ERROR, HEADS, WIDTH, milliseconds
from benchmarks.harness import WrongAnswerError
from howsmooth.kernels import AttentionKernel, Mask, Scores, linearize
from howsmooth.kernels.kinds import L2, Cosine, Kind, Sigmoid, Softmax

TITLE = "One jvp + vjp pair on a GPU by kind of attention (12 heads × 64), against softmax's"


def run(quick: bool) -> list[dict[str, Any]]:
    rows = []
    kinds: dict[str, Kind] = {
        "softmax": Softmax(),
        "softmax with a sink": Softmax(torch.zeros(HEADS, device="cuda")),
        "sigmoid": Sigmoid(),
        "L2": L2(),
        "cosine": Cosine(),
    }
    for n in (1024, 4096) if quick else (4096, 16_384):
        for causal in (False, True):
            times = {name: _time(kind, n, causal) for name, kind in kinds.items()}
            for name, (ms, error) in times.items():
                ratio = ms / times["softmax"][0]
                rows.append(
                    {"n": n, "mask": "causal" if causal else "full", "kind": name, "error": error, "ms": ms, "ratio": ratio}
                )
    return rows


@torch.no_grad()
def _time(kind: Kind, n: int, causal: bool) -> tuple[float, float]:
    random = torch.Generator("cuda").manual_seed(n)
    normal = partial(torch.randn, 1, HEADS, n, WIDTH, generator=random, device="cuda")
    q, k, v, dq, dk, dv, g = (normal() for _ in range(7))
    scores = Scores(kind.scale(WIDTH), mask=Mask(causal=causal), kind=kind)
    ours = linearize(q, k, v, scores, "triton")
    truth = linearize(q.double(), k.double(), v.double(), scores, "blocked")
    along, out = (dq[None], dk[None], dv[None]), g[None]
    error = _error(ours, truth, along, out)
    if not error <= 2 * ERROR:
        raise WrongAnswerError(f"{kind!r}, n = {n}: expected products within {2 * ERROR:g}, got {error:.1e}; nothing is timed")
    return milliseconds(lambda: (ours.jvp(*along), ours.vjp(out)))[0], error


def _error(ours: AttentionKernel, truth: AttentionKernel, along: tuple, g: torch.Tensor) -> float:
    pairs = [(ours.jvp(*along), truth.jvp(*(t.double() for t in along)))]
    pairs += zip(ours.vjp(g), truth.vjp(g.double()), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)
