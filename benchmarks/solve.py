"""Time to a relative accuracy of 1e-3 on σ: ours as shipped, against what a user would write."""

import math
import statistics
import time
from typing import Any

import torch

import howsmooth as hs
from benchmarks.harness import WrongAnswerError, agree, seconds
from benchmarks.layers import gpt2_layer, plain, small_layer
from benchmarks.rivals import full_jacobian, power_iteration, scipy_svds
from howsmooth.spectral import Operator

ACCURACY = 1e-3
TITLE = "Time to 1e-3 on the norm: ours with its own stopping rule and float64 check, power iteration stopped by an oracle"


def run(quick: bool) -> list[dict[str, Any]]:
    cases = [(256, False), (256, True)] if quick else [(256, False), (256, True), (1024, False), (1024, True)]
    rows = [_case(n, causal, seed) for n, causal in cases for seed in range(1 if quick else 3 if n == 256 else 10)]
    return [*rows, *_means(rows), _tiny()]


def _means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means over the seeds, by size and mask."""
    means = []
    for n, mask in dict.fromkeys((row["n"], row["mask"]) for row in rows):
        own = [row for row in rows if (row["n"], row["mask"]) == (n, mask)]
        names = [
            name for name, value in own[0].items() if isinstance(value, float | int) and name not in ("n", "seed", "svds/ours")
        ]
        numbers = {name: statistics.geometric_mean(row[name] for row in own) for name in names}
        means.append(own[0] | {"seed": "mean", "svds/ours": "–"} | numbers)
    return means


def _oracle_pairs(operator: Operator, truth: float) -> int:
    """Steps after which our solver is within the accuracy, as an oracle would stop it."""
    for steps in range(1, 100):
        (solution,) = hs.GolubKahan(max_steps=steps).solve(operator, 1e-9, None, [0])
        if abs(solution.value - truth) <= ACCURACY * truth:
            return steps
    raise WrongAnswerError("expected convergence within 100 steps; no time is reported")


@torch.no_grad()
def _case(n: int, causal: bool, seed: int) -> dict[str, Any]:
    layer, x = gpt2_layer(n, causal, seed)
    f = plain(layer, n)
    agree("the plain layer", float((f(x) - layer(x)).norm() / layer(x).norm() + 1), 1.0, 1e-5)
    truth = hs.lipschitz(layer, x, tol=1e-5, certify=0.005, seed=7)
    ours = hs.lipschitz(layer, x)
    agree("howsmooth", ours.value, truth.value, ACCURACY)
    before = seconds(lambda: hs.lipschitz(layer, x), repeat=3)
    start = time.perf_counter()
    value, steps = power_iteration(f, x, truth.value, ACCURACY, seed)
    power = time.perf_counter() - start
    agree("power iteration", value, truth.value, ACCURACY)
    after = seconds(lambda: hs.lipschitz(layer, x), repeat=3)
    steps_by_oracle = _oracle_pairs(layer.linearize(x[None])[1], truth.value)
    solver = hs.GolubKahan(max_steps=steps_by_oracle)
    by_oracle = seconds(lambda: solver.solve(layer.linearize(x[None])[1], 1e-9, None, [0]), repeat=3)
    arpack, products = math.nan, 0
    if n == 256 or seed == 0:
        start = time.perf_counter()
        value, products = scipy_svds(f, x, ACCURACY)
        arpack = time.perf_counter() - start
        agree("scipy svds", value, truth.value, ACCURACY)
    taken = (before + after) / 2
    return {
        "n": n,
        "mask": "causal" if causal else "full",
        "seed": seed,
        "ours s": taken,
        "pairs": ours.steps,
        "power s": power,
        "power pairs": steps,
        "power/ours": power / taken,
        "oracle pairs": steps_by_oracle,
        "power/ours, both by oracle": power / by_oracle,
        "svds/ours": arpack / taken if products else "–",
        "jacobian/ours": "does not fit",
    }


def _tiny() -> dict[str, Any]:
    """A size at which the whole Jacobian fits: n = 16, width 64."""
    layer, batch = small_layer(1, 16, 64, 4)
    x = batch[0]
    f = plain(layer, 16)
    truth = full_jacobian(f, x)
    ours = hs.lipschitz(layer, x)
    agree("howsmooth", ours.value, truth, ACCURACY)
    value, steps = power_iteration(f, x, truth, ACCURACY)
    agree("power iteration", value, truth, ACCURACY)
    taken = seconds(lambda: hs.lipschitz(layer, x))
    power = seconds(lambda: power_iteration(f, x, truth, ACCURACY))
    arpack = seconds(lambda: scipy_svds(f, x, ACCURACY))
    return {
        "n": 16,
        "mask": "full",
        "seed": 0,
        "ours s": taken,
        "pairs": ours.steps,
        "power s": power,
        "power pairs": steps,
        "power/ours": power / taken,
        "oracle pairs": "–",
        "power/ours, both by oracle": "–",
        "svds/ours": arpack / taken,
        "jacobian/ours": seconds(lambda: full_jacobian(f, x), repeat=2) / taken,
    }
