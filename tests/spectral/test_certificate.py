"""The upper end's formulas: a root that is a root, and the figures of docs/explanation/theory.md §2."""

import math

import pytest
import torch
from torch import Tensor

from howsmooth.spectral import certificate

RITZ = torch.tensor([[0.1, 0.5, 0.9, 1.0], [0.0, 0.0, 1.0, 1.0], [1e-3, 2e-3, 3e-3, 5.0]], dtype=torch.float64)
BETA = torch.tensor([[0.3, 0.2, 0.1, 0.05], [0.4, 0.4, 1e-3, 1e-6], [1.0, 1e-2, 1e-2, 1e-7]], dtype=torch.float64)
# the root is sought on a log scale down to eps · θ: 60 halvings of at most 50 leave that, and rounding of λ − θ
ROOT = 1e-9


def rarity(delta: float, size: int = 1000, starts: float = 1.0) -> Tensor:
    return certificate.log_rarity(torch.full((len(RITZ),), starts, dtype=torch.float64), size, delta)


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.1, 0.5])
def test_growth_at_the_root_is_the_rarity(delta: float):
    upper = certificate.upper_end(RITZ, BETA, rarity(delta))
    assert bool((upper > RITZ.amax(-1)).all())
    # d(growth)/dλ ≤ k/(λ − θ_1), so an error in λ of eps·λ shows as k·eps·λ/(λ − θ_1)
    slack = ROOT + 4 * 2.3e-16 * upper / (upper - RITZ.amax(-1))
    assert bool(((certificate.log_growth(upper, RITZ, BETA) - rarity(delta)).abs() <= slack).all())


@pytest.mark.parametrize("delta", [1e-6, 0.1, 0.9])
def test_rarity_is_a_quantile(delta: float):
    """`rarity − starts · log √(2N/π)` is where minus the log of a product of uniform numbers lands with probability δ."""
    for starts in (1, 2, 5):
        x = float(rarity(delta, starts=starts)[0]) - starts * math.log(math.sqrt(2000 / math.pi))
        tail = math.exp(-x) * sum(x**j / math.factorial(j) for j in range(starts))
        share = 0.9 if starts == 1 else 0.1 / (starts * (starts - 1))  # they sum to one over all numbers of starts
        assert tail == pytest.approx(share * delta, rel=1e-9)


def test_rarer_starts_reach_higher():
    bounds = torch.stack([certificate.upper_end(RITZ, BETA, rarity(d)) for d in (0.5, 0.1, 1e-3, 1e-6, 1e-12)])
    assert bool((bounds.diff(dim=0) > 0).all())


@pytest.mark.parametrize("delta", [1e-6, 0.1])
def test_root_equals_a_scan(delta: float):
    upper = certificate.upper_end(RITZ, BETA, rarity(delta))
    steps = torch.logspace(-14, 2, 100_001, dtype=torch.float64)  # of λ − θ_1, each 1.00037 times the last
    for i in range(len(RITZ)):
        at = RITZ[i].max() + steps
        product = ((at[:, None] - RITZ[i]) / BETA[i]).prod(-1)
        first = int((product >= math.exp(float(rarity(delta)[i]))).int().argmax())
        assert steps[first - 1] <= float(upper[i] - RITZ[i].max()) <= steps[first]


@pytest.mark.parametrize(("steps", "width"), [(66, 0.02), (133, 0.005)])
def test_what_the_bound_that_reads_nothing_of_the_run_takes(steps: int, width: float):
    """Kuczyński & Woźniakowski's, (2.4) in docs/explanation/theory.md, at N = 786 432 and 200 steps at most."""
    root = (math.log(1.648 * math.sqrt(786_432)) + math.log(200 / 1e-6)) / (2 * steps - 1)
    assert (1 - root**2) ** -0.5 - 1 == pytest.approx(width, rel=0.05)
