"""Predictions of a local constant beside what exact transport does to perturbed measures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Map
from howsmooth.measures import Measure, wasserstein
from howsmooth.verbs import lipschitz


@final
@dataclass(frozen=True)
class Check:
    """One size of perturbation.

    predicted: the local constant.  ratio: `W₂(F(μ), F(ν))/W₂(μ, ν)` with ν moved by ε along the direction found.
    random: the largest such ratio over random perturbations of the same size, splitting included.
    """

    epsilon: float
    predicted: float
    ratio: float
    random: float
    split: bool

    @property
    def error(self) -> float:
        """How far the ratio is from the prediction, relative to it."""
        return abs(self.ratio - self.predicted) / self.predicted if self.predicted else abs(self.ratio)


def verify(
    f: Map, measure: Measure, epsilons: Sequence[float] = (1e-2, 1e-3, 1e-4), *, trials: int = 10, seed: int = 0
) -> list[Check]:
    """Perturbations of size ε of a measure, along the one found and random ones (docs/explanation/meanfield.md, Theorem 5.2).

    The ratio along the direction found agrees with the prediction to O(ε), and no random one exceeds it by more. Atoms are
    merged first, distances are exact (the conditional one where there are positions), work is done in float64.
    """
    if not epsilons or not all(isinstance(e, float) and 0 < e < 1 for e in epsilons):
        raise BadInputError(f"expected sizes of perturbation between 0 and 1, got {list(epsilons)!r}; try 1e-2, 1e-3, 1e-4")
    mu = measure.to(torch.float64).merge()
    estimate = lipschitz(f, mu, tol=1e-9)
    generator = torch.Generator().manual_seed(seed)
    checks = []
    for epsilon in epsilons:
        best = _ratio(f, mu, along(mu, estimate.direction, epsilon, estimate.split))
        tried = [_ratio(f, mu, scattered(mu, epsilon, generator)) for _ in range(trials)]
        checks.append(Check(epsilon, estimate.value, best, max(tried, default=0.0), estimate.split))
    return checks


def along(mu: Measure, direction: Tensor, epsilon: float, split: bool) -> Measure:
    """Atoms moved by ε along a displacement whose longest row is one, or half of each along it and half against it."""
    step = epsilon * direction / direction.norm(dim=-1).max().clamp_min(torch.finfo(direction.dtype).tiny)
    if not split:
        return mu.moved(mu.points + step)
    doubled = mu.split(parts=2)
    signs = torch.tensor([1.0, -1.0], dtype=step.dtype, device=step.device).repeat(len(mu))[:, None]
    return doubled.moved(doubled.points + signs * step.repeat_interleave(2, 0))


def scattered(mu: Measure, epsilon: float, generator: torch.Generator) -> Measure:
    """Every atom cut into one to three unequal parts that move by up to ε in random directions: a random coupling."""
    parts = torch.randint(1, 4, (len(mu),), generator=generator)
    index = torch.repeat_interleave(torch.arange(len(mu)), parts).to(mu.points.device)
    share = torch.rand(len(index), generator=generator, dtype=torch.float64).add_(0.05).to(mu.points.device)
    total = torch.zeros(len(mu), dtype=torch.float64, device=share.device).index_add_(0, index, share)
    step = torch.randn(len(index), mu.width, generator=generator, dtype=torch.float64).to(mu.points)
    step = epsilon * step / step.norm(dim=-1).max()
    positions = None if mu.positions is None else mu.positions[index]
    return Measure(mu.points[index] + step, (mu.mass / total)[index] * share, positions)


def _ratio(f: Map, mu: Measure, nu: Measure) -> float:
    before = wasserstein(mu, nu).upper
    return wasserstein(f(mu), f(nu)).upper / before if before else 0.0
