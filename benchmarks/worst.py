"""Worst inputs over the ball: the default search against configurations, random inputs and a search twenty times as long."""

from typing import Any

import torch

import howsmooth as hs
from benchmarks.harness import WrongAnswerError
from howsmooth.search.ascent import pairs_at
from howsmooth.search.families import worst_configuration
from howsmooth.search.sets import Ball
from howsmooth.verbs import worst_case

TITLE = "Worst inputs at d = 4, n = 8, R = 2, random A and V: the default search / what it is compared with"
D, N, RADIUS = 4, 8, 2.0


def run(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for seed in range(5 if quick else 50):
        attn = random_head(seed)
        found = worst_case(attn, N, RADIUS)
        longer = worst_case(attn, N, RADIUS, restarts=20 * 32, seed=seed + 1).value
        configured = worst_configuration(attn, N, RADIUS).estimate.value
        random = best_of_random(attn, 2000, seed)
        if found.ratio is None or found.ratio > 1:
            raise WrongAnswerError(f"seed {seed}: L = {found.value} is above the bound {found.bound}; one of them is wrong")
        rows.append(
            {
                "seed": seed,
                "L": found.value,
                "of the bound": found.ratio,
                "/ configuration": found.value / configured,
                "/ 2000 random": found.value / random,
                "/ 20 times longer": found.value / max(longer, found.value),
            }
        )
    return rows


def random_head(seed: int) -> hs.Attention:
    random = torch.Generator().manual_seed(seed)
    return hs.Attention.from_matrices(*(torch.randn(D, D, generator=random, dtype=torch.float64) for _ in range(2)))


def best_of_random(attn: hs.Attention, count: int, seed: int) -> float:
    """The largest `L` of random inputs in the ball, half of them on its boundary."""
    x = Ball(RADIUS).sample(count, N, D, torch.Generator().manual_seed(seed))
    return float(pairs_at(attn, x, None, 0).value.max())
