"""Many sequences in one call against a loop over them."""

from typing import Any

import torch

import howsmooth as hs
from benchmarks.harness import agree, side_by_side
from benchmarks.layers import gpt2_layer, small_layer

TITLE = "A batch in one call against a loop"


def run(quick: bool) -> list[dict[str, Any]]:
    small, tokens = small_layer(64, 16, 64, 4)
    large, _ = gpt2_layer(64, causal=True)
    many = torch.randn(8 if quick else 32, 64, 768, generator=torch.Generator().manual_seed(1))
    return [_case(small, tokens, 5), _case(large, many, 2 if quick else 3)]


def _case(layer: hs.Attention, x: torch.Tensor, repeat: int) -> dict[str, Any]:
    together, apart = hs.lipschitz_batch(layer, x), [hs.lipschitz(layer, item) for item in x]
    for one, other in zip(together, apart, strict=True):
        agree("batch", one.value, other.value, 1e-4)
    batch, loop = side_by_side(
        [lambda: hs.lipschitz_batch(layer, x), lambda: [hs.lipschitz(layer, item) for item in x]],
        repeat,
    )
    return {
        "batch": len(x),
        "n": x.shape[1],
        "width": x.shape[2],
        "heads": layer.heads,
        "batch s": batch,
        "loop s": loop,
        "loop/batch": loop / batch,
    }
