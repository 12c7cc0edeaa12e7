"""Deterministic bounds at a point, at GPT-2's size, against two products with JᵀJ."""

from typing import Any

import torch

import howsmooth as hs
from benchmarks.harness import WrongAnswerError, side_by_side
from benchmarks.layers import WIDTH, gpt2_layer
from howsmooth.theory.at_point.table import operator_bound

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
        bounds = operator_bound(operator)
        if bounds is None or float(bounds) < measured.lower:
            raise WrongAnswerError("a bound lies below the measured constant; no time is reported")
        seconds, pairs = side_by_side(
            [
                lambda operator=operator: operator_bound(operator),
                lambda operator=operator, v=v: (operator.gram(v), operator.gram(v)),
            ],
            repeat=3,
        )
        rows.append(
            {
                "n": n,
                "mask": "causal" if causal else "full",
                "trace/two pairs": seconds / pairs,
                "trace/L": float(bounds) / measured.value,
                "certificate/L": hs.lipschitz(layer, x).upper / measured.value,
            }
        )
    return rows
