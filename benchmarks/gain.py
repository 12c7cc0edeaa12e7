"""How often the interval of the mean gain holds, on random layers whose whole Jacobian is at hand, and what it costs."""

import math
from typing import Any

import torch
from tests.problems.layers import random_layer

import howsmooth as hs
from benchmarks.harness import WrongAnswerError

TITLE = "Mean gain: intervals at 95 % that hold, against the Frobenius norm of the dense Jacobian in float64"
CASES, CONFIDENCE = 2000, 0.95


def run(quick: bool, cases: int | None = None) -> list[dict[str, Any]]:
    cases = cases or (100 if quick else CASES)
    return [_row(16, cases)]


def _row(probes: int, cases: int) -> dict[str, Any]:
    held, errors, widths, ratios = 0, [], [], []
    for seed in range(cases):
        layer, x = random_layer(seed)
        found = hs.gain(layer, x, probes=probes, confidence=CONFIDENCE, solver=hs.GolubKahan())
        truth = float(hs.jacobian(layer.to(torch.float64), x.double()).dense().norm()) / math.sqrt(x.numel())
        assert found.lower is not None
        assert found.upper is not None
        held += found.lower <= truth <= found.upper
        errors.append(abs(found.value / truth - 1))
        widths.append((found.upper - found.lower) / truth)
        ratios.append(math.sqrt(x.numel() / found.stable_rank))
    if held < CONFIDENCE * cases:
        raise WrongAnswerError(f"gain: expected {CONFIDENCE:.0%} of {cases} intervals to hold, got {held}; nothing is reported")
    return {
        "probes": probes,
        "layers": cases,
        "held": held,
        "mean error": sum(errors) / cases,
        "worst error": max(errors),
        "mean width": sum(widths) / cases,
        "least L/gain": min(ratios),
        "largest L/gain": max(ratios),
    }
