"""`hs.varlen` on a GPU: documents of 100 to 4 000 tokens against one sequence of the same work, pairs of a jvp and a vjp.

Answers are compared with float64, which takes documents one by one on tiles, before anything is timed. A rate is the number of
visible pairs of tokens over the time, so 1 is that of the one sequence.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from benchmarks.gpu import milliseconds
from benchmarks.gpu_sdpa import HEADS, WIDTH, apart, checked, replay

TITLE = "hs.varlen on a GPU, bf16, 12 heads × 64, pairs of a jvp and a vjp"
DOCUMENTS, SHORTEST, LONGEST = 32, 100, 4000
CHECKED = 512  # the longest document whose products are compared with float64


def run(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for documents in (DOCUMENTS,) if quick else (8, DOCUMENTS, 128):
        for causal in (False, True):
            row = _against_one(documents, causal)
            print(row, flush=True)
            rows.append(row)
    return rows


def _against_one(documents: int, causal: bool) -> dict[str, Any]:
    random = torch.Generator().manual_seed(documents)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (documents,), generator=random).tolist()
    short = [n * CHECKED // LONGEST + 1 for n in lengths]
    error = checked(_packed(short, causal), *_inputs(sum(short), packed=True))
    work, packed = sum(n * n for n in lengths), _inputs(sum(lengths), packed=True)
    n = round(work**0.5)
    one = _inputs(n, packed=False)
    f, whole = _packed(lengths, causal), partial(hs.sdpa, is_causal=causal)
    ours, theirs = milliseconds(lambda: apart(f, *packed))[0], milliseconds(lambda: apart(whole, *one))[0]
    row = {"documents": documents, "tokens": sum(lengths), "mask": "causal" if causal else "full", "error": error,
           "ours ms": ours, "one sequence of": n, "its ms": theirs, "rate/its": theirs / ours * work / n**2}  # fmt: skip
    ours, theirs = replay(lambda: apart(f, *packed)), replay(lambda: apart(whole, *one))
    compared = isinstance(ours, float) and isinstance(theirs, float)
    return row | {"replayed ms": ours, "rate/its, replayed": theirs / ours * work / n**2 if compared else "–"}


def _packed(lengths: list[int], causal: bool) -> Callable[..., Tensor]:
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device="cuda")
    window, longest = (-1, 0) if causal else (-1, -1), max(lengths)
    return lambda q, k, v: hs.varlen(q, k, v, starts, starts, longest, longest, window_size=window)


def _inputs(n: int, packed: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """A place, a direction, and a gradient."""
    random = torch.Generator("cuda").manual_seed(n)
    shape = (n, HEADS, WIDTH) if packed else (1, HEADS, n, WIDTH)
    tensors = [torch.randn(shape, generator=random, device="cuda").bfloat16() for _ in range(7)]
    return tuple(tensors[:3]), tuple(tensors[3:6]), tensors[6]
