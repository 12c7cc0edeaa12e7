"""One jvp + vjp pair of every kind of attention against softmax's, and linear attention on far more tokens.

Every product is first compared with autodiff of the plain formula in float64; nothing is timed before.
"""

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import agree, side_by_side
from benchmarks.layers import HEADS, WIDTH
from howsmooth.kernels import AttentionKernel, Scores, linearize, plain_attention
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax

TITLE = "One jvp + vjp pair by kind of attention (12 heads × 64, float32, one thread, processor time), in turns with softmax's"
TOKENS, SHORT, LONG = 1024, 1500, 10_000
KINDS: dict[str, Kind] = {
    "softmax with a sink": Softmax(torch.zeros(HEADS)),
    "sigmoid": Sigmoid(),
    "L2": L2(),
    "cosine": Cosine(),
    "hard": Hard(),
    "differential": Differential(0.5),
    "Sinkhorn, 3 iterations": Sinkhorn(3),
    "linear": Linear(),
}


@torch.no_grad()
def run(quick: bool) -> list[dict[str, Any]]:
    repeat, threads = 3 if quick else 9, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _rows(repeat)
    finally:
        torch.set_num_threads(threads)


def _rows(repeat: int) -> list[dict[str, Any]]:
    kernels = {name: _checked(name, kind, TOKENS) for name, kind in {"softmax": Softmax(), **KINDS}.items()}
    pairs = {name: _pair(kernel) for name, kernel in kernels.items()}
    times = dict(zip(pairs, side_by_side(list(pairs.values()), repeat, time.process_time), strict=True))
    rows = [
        {
            "kind": name,
            "tokens": TOKENS,
            "pair s": time,
            "softmax's tokens": TOKENS,
            "softmax's s": times["softmax"],
            "ratio": time / times["softmax"],
        }
        for name, time in times.items()
    ]
    _checked("linear", Linear(), SHORT)  # the same code, at a length whose plain formula fits
    softmax, linear = _pair(_kernel(Softmax(), SHORT)), _pair(_kernel(Linear(), LONG))
    short, long = side_by_side([softmax, linear], repeat, time.process_time)
    far = {"kind": "linear", "tokens": LONG, "pair s": long, "softmax's tokens": SHORT, "softmax's s": short}
    return [*rows, far | {"ratio": long / short}]


def _inputs(kind: Kind, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(n)
    width = WIDTH // HEADS
    shapes = [(1, HEADS * p, n, width // p) for p in (kind.parts, kind.parts, 1)]
    q, k, v = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    return q, k, v


def _scores(kind: Kind) -> Scores:
    return Scores(kind.scale(WIDTH // HEADS // kind.parts), kind=kind)


def _kernel(kind: Kind, n: int, dtype: torch.dtype = torch.float32) -> AttentionKernel:
    return linearize(*_inputs(kind, n, dtype), _scores(kind))


def _directions(kernel: AttentionKernel) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(1)
    along = [torch.randn(1, *t.shape, generator=random).to(t) for t in kernel.inputs]
    return along, torch.randn(1, *kernel.output.shape, generator=random).to(kernel.output)


def _pair(kernel: AttentionKernel):
    along, g = _directions(kernel)
    return lambda: (kernel.jvp(*along), kernel.vjp(g))


def _checked(name: str, kind: Kind, n: int) -> AttentionKernel:
    """A kernel whose products agree with autodiff of the plain formula, in two of its heads.

    Hard attention is compared in float64: where two logits are within a rounding of float32, one may win in each precision.
    """
    kernel = _kernel(kind, n, torch.float64 if isinstance(kind, Hard) else torch.float32)
    along, g = _directions(kernel)
    forward, backward = kernel.jvp(*along)[0], kernel.vjp(g)
    for h in (0, HEADS - 1):
        own = slice(h * kind.parts, (h + 1) * kind.parts)
        part = Softmax(kind.sink[h : h + 1]) if isinstance(kind, Softmax) and kind.sink is not None else kind
        at = [t[:, s].double() for t, s in zip(kernel.inputs, (own, own, slice(h, h + 1)), strict=True)]
        moved = [t[0][:, s].double() for t, s in zip(along, (own, own, slice(h, h + 1)), strict=True)]

        def f(q: Tensor, k: Tensor, v: Tensor, part: Kind = part) -> Tensor:
            return plain_attention(q, k, v, _scores(part))

        image = torch.func.jvp(f, tuple(at), tuple(moved))[1]
        agree(f"{name}: jvp", 1 + float((forward[:, h : h + 1] - image).norm() / image.norm()), 1.0, 1e-4)
        pulled = torch.func.vjp(f, *at)[1](g[0][:, h : h + 1].double())
        size = max(float(t.norm()) for t in pulled)
        for got, truth, s in zip(backward, pulled, (own, own, slice(h, h + 1)), strict=True):
            agree(f"{name}: vjp", 1 + float((got[0][:, s] - truth).norm()) / size, 1.0, 1e-4)
    return _kernel(kind, n)
