"""The upper end's formulas: a root that is a root, and the figures of docs/theory.md §2."""

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
    upper = certificate.from_one_start(RITZ, BETA, rarity(delta))
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
        assert tail == pytest.approx(delta, rel=1e-9)


def test_rarer_starts_reach_higher():
    bounds = torch.stack([certificate.from_one_start(RITZ, BETA, rarity(d)) for d in (0.5, 0.1, 1e-3, 1e-6, 1e-12)])
    assert bool((bounds.diff(dim=0) > 0).all())


@pytest.mark.parametrize("delta", [1e-6, 0.1])
def test_root_equals_a_scan(delta: float):
    upper = certificate.from_one_start(RITZ, BETA, rarity(delta))
    steps = torch.logspace(-14, 2, 100_001, dtype=torch.float64)  # of λ − θ_1, each 1.00037 times the last
    for i in range(len(RITZ)):
        at = RITZ[i].max() + steps
        product = ((at[:, None] - RITZ[i]) / BETA[i]).prod(-1)
        first = int((product >= math.exp(float(rarity(delta)[i]))).int().argmax())
        assert steps[first - 1] <= float(upper[i] - RITZ[i].max()) <= steps[first]


@pytest.mark.parametrize(
    ("steps", "limit", "block", "size", "delta"),
    [(66, 200, 1, 786_432, 1e-6), (30, 100, 2, 600, 1e-6), (12, 50, 3, 40, 0.1)],
)
def test_block_formula(steps: int, limit: int, block: int, size: int, delta: float):
    eps = ((math.log(1.648 * size**0.5) + math.log(limit / delta) / block) / (2 * steps - 1)) ** 2
    theta = torch.tensor([1.0, 4.0], dtype=torch.float64)
    upper = certificate.from_block(theta, steps, limit, block, size, delta)
    assert torch.allclose(upper, theta / (1 - eps), rtol=1e-14)


@pytest.mark.parametrize(("steps", "width"), [(66, 0.02), (133, 0.005)])
def test_block_formula_gives_the_figures_of_the_theory(steps: int, width: float):
    def reach(k: int) -> float:
        return float(certificate.from_block(torch.ones(1).double(), k, 200, 1, 786_432, 1e-6)) ** 0.5 - 1

    assert reach(steps) == pytest.approx(width, rel=0.05)


def test_block_formula_is_infinite_until_it_says_something():
    theta = torch.ones(2, dtype=torch.float64)
    root = math.log(1.648 * math.sqrt(1000)) + math.log(100 / 1e-6) / 2
    last = math.floor((root + 1) / 2)  # 2k − 1 ≤ root
    assert bool(certificate.from_block(theta, last, 100, 2, 1000, 1e-6).isinf().all())
    assert bool(certificate.from_block(theta, last + 1, 100, 2, 1000, 1e-6).isfinite().all())
