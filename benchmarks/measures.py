"""Large measures: time and extra peak memory of push-forward and local constant, each size in a process of its own."""

import itertools
import multiprocessing
import time
from typing import Any

import torch

TITLE = "A measure in R^64 (one head, float32)"
WIDTH = 64


def run(quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    for n in (1000, 2000) if quick else (5000, 10_000, 20_000):
        with context.Pool(1) as pool:
            rows.append(pool.apply(_measure, (n,)))
    return rows


def _measure(n: int) -> dict[str, Any]:
    from benchmarks.long import _peak
    from howsmooth.maps import Attention
    from howsmooth.measures.measure import Measure
    from howsmooth.solve import Options, solve_moving
    from howsmooth.theory.blocks import block_norms

    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=random) / WIDTH**0.5 for _ in range(4)]
    attn = Attention(weights[0], weights[1], weights[2], weights[3])
    mu = Measure(torch.randn(n, WIDTH, generator=random), torch.softmax(torch.randn(n, generator=random).double(), 0))
    _check(attn, mu)
    before = _peak(reset=True)
    times = [time.perf_counter()]
    attn(mu)
    times.append(time.perf_counter())
    moved, operator, *_ = solve_moving(attn, mu, Options())
    times.append(time.perf_counter())
    split = block_norms(operator, above=moved.value)
    times.append(time.perf_counter())
    push, move, own = (b - a for a, b in itertools.pairwise(times))
    return {
        "n": n,
        "push s": push,
        "moving s": move,
        "splitting s": own,
        "extra peak GiB": (_peak() - before) / 2**30,
        "weights would take GiB": n * n * 4 / 2**30,
        "moving": moved.value,
        "splitting": float(split.value.max()),
    }


def _check(attn, mu) -> None:
    """The constant of a few atoms against the Jacobian of every atom halved."""
    from benchmarks.harness import agree
    from howsmooth.measures.measure import Measure
    from howsmooth.verbs import lipschitz

    few = Measure(mu.points[:3].double(), mu.mass[:3] / mu.mass[:3].sum())
    halves, root = few.split(), few.split().mass.sqrt()
    on = attn.to(torch.float64).on(halves)
    jacobian = torch.func.jacrev(lambda x: on.value(x[None])[0])(halves.points)
    jacobian = jacobian * root[:, None, None, None] / root[:, None]
    truth = float(torch.linalg.matrix_norm(jacobian.flatten(2).flatten(0, 1), 2))
    agree("constant at a measure", lipschitz(attn, few).value, truth, 1e-6)
