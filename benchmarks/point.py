"""Deterministic bounds at a point, at GPT-2's size: the trace form against two pairs, the exact form against a solve."""

from typing import Any

import torch

import howsmooth as hs
from benchmarks.harness import WrongAnswerError, side_by_side
from benchmarks.layers import WIDTH, gpt2_layer
from howsmooth.theory.point import point_bounds, trace_bound

TITLE = "Deterministic bounds at a point, n = 1024: cost and distance from L"


@torch.no_grad()
def run(quick: bool) -> list[dict[str, Any]]:
    n = 256 if quick else 1024
    rows = []
    for causal in (False, True):
        layer, x = gpt2_layer(n, causal)
        operator = layer.linearize(x[None])[1]
        v = torch.randn(1, 1, n, WIDTH, generator=torch.Generator().manual_seed(1))
        measured = hs.lipschitz(layer, x, certify=0.02)
        trace = float(trace_bound(operator))
        exact = point_bounds(layer, x, exact=True)[-1].value or 0.0
        if min(trace, exact) < measured.lower:
            raise WrongAnswerError("a bound lies below the measured constant; no time is reported")
        bound, pairs, solve = side_by_side(
            [
                lambda operator=operator: trace_bound(operator),
                lambda operator=operator, v=v: (operator.gram(v), operator.gram(v)),
                lambda layer=layer, x=x: hs.lipschitz(layer, x),
            ],
            repeat=3,
        )
        full = side_by_side([lambda layer=layer, x=x: point_bounds(layer, x, exact=True)], repeat=1)[0]
        rows.append(
            {
                "n": n,
                "mask": "causal" if causal else "full",
                "trace/two pairs": bound / pairs,
                "exact/solve": full / solve,
                "trace/L": trace / measured.value,
                "exact/L": exact / measured.value,
                "certificate/L": hs.lipschitz(layer, x).upper / measured.value,
            }
        )
    return rows
