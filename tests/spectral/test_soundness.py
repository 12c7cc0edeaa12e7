"""The interval holds, over thousands of starts, spectra and stopping times."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from howsmooth.spectral import GolubKahan, Operator, certificate
from marks import first
from problems.spectra import SPECTRA, Diagonal, rotated, shuffled, spectrum

STOPS = [(0.3, None), (0.1, None), (1e-2, None), (1e-3, None), (1e-3, 0.2), (1e-3, 0.02)]
EARLY = [(0.3, None), (0.1, None), (1e-2, None), (1e-3, 0.5), (1e-3, 0.2)]


def ends(operator: Operator, solver: GolubKahan, stop: tuple[float, float | None], seed: int) -> tuple[Tensor, Tensor]:
    """Both ends for every item, widened by what the precision of the products allows; `lower` is attained."""
    solutions = solver.solve(operator, stop[0], stop[1], [seed] * operator.batch)
    upper = torch.tensor([s.upper for s in solutions], dtype=torch.float64)
    image = operator.jvp(torch.stack([s.direction for s in solutions])[None])[0]
    noise = operator.noise
    return image.flatten(1).norm(dim=-1).double() * (1 - noise), upper * (1 + noise)


def misses(operator: Operator, sigma: float, solver: GolubKahan, stop: tuple[float, float | None], seed: int) -> int:
    """How many upper ends are too low. A lower end is never too high."""
    lower, upper = ends(operator, solver, stop, seed)
    assert bool((lower <= sigma).all())
    return int((upper < sigma).sum())


def allowed(trials: int, delta: float) -> float:
    """Four standard deviations over the mean: a sound bound goes past it once in 30 000."""
    return trials * delta + 4 * math.sqrt(trials * delta * (1 - delta))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first([torch.float64, torch.float32]), ids=str)
@pytest.mark.parametrize("name", SPECTRA)
def test_interval_holds_every_time(name: str, dtype: torch.dtype):
    """10 spectra × 5 sizes × 6 stops × 8 orders × 2 precisions: 4 800 runs with δ = 1e-6."""
    for seed, (n, stop) in enumerate(itertools.product((20, 63, 200, 700, 2000), STOPS)):
        values = spectrum(name, n)
        operator = shuffled(values, 8, seed, dtype)
        sigma = float(values[0].to(dtype))
        assert misses(operator, sigma, GolubKahan(), stop, seed) == 0, (n, stop)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (64, 64)])
@pytest.mark.parametrize("name", SPECTRA)
def test_interval_holds_between_random_bases(name: str, shape: tuple[int, int]):
    values = spectrum(name, min(shape))
    for seed, stop in enumerate(STOPS):
        operator = rotated(values, *shape, seed=100 * seed, batch=4)
        assert misses(operator, float(values[0]), GolubKahan(), stop, seed) == 0, stop


@pytest.mark.slow
@pytest.mark.parametrize("name", ["isolated", "clustered", "flat", "slow", "square root"])
def test_interval_fails_no_more_often_than_it_says(name: str):
    """δ = 0.1 over 5 stops × 2 seeds × 60 orders of one spectrum."""
    values, solver = spectrum(name, 300), GolubKahan(delta=0.1)
    runs = list(itertools.product(EARLY, range(2)))
    failed = [misses(shuffled(values, 60, seed, torch.float64), 1.0, solver, stop, seed) for stop, seed in runs]
    assert sum(failed) <= allowed(60 * len(runs), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first([torch.float64, torch.float32]), ids=str)
@pytest.mark.parametrize("kind", ["second", "orthogonal", "opposite", "zero", "exact"])
def test_a_bad_guess_never_costs_the_certificate(kind: str, dtype: torch.dtype):
    """A guess that is the second singular vector, or has nothing of the first, leaves both error rates as they were."""
    n, batch = 200, 50
    for name, stop in itertools.product(("isolated", "clustered", "flat", "near-invariant"), EARLY[::2]):
        values = spectrum(name, n)
        random = torch.Generator().manual_seed(7)
        order = torch.rand(batch, n, generator=random).argsort(-1)
        diagonal = values[order].to(dtype)
        by_size = diagonal.argsort(-1, descending=True)
        guesses = torch.zeros(batch, n, dtype=dtype)
        if kind == "second":
            guesses.scatter_(1, by_size[:, 1:2], 1.0)
        elif kind == "orthogonal":
            guesses = torch.randn(batch, n, generator=random).to(dtype).scatter(1, by_size[:, :1], 0.0)
        elif kind in ("exact", "opposite"):
            guesses.scatter_(1, by_size[:, :1], 1.0 if kind == "exact" else -1.0)
        operator = Diagonal(diagonal, guesses)
        sigma = float(diagonal.max())
        assert misses(operator, sigma, GolubKahan(), stop, 3) == 0, (name, stop)
        assert misses(operator, sigma, GolubKahan(delta=0.1), stop, 3) <= allowed(batch, 0.1), (name, stop)


@pytest.mark.parametrize("name", ["flat", "slow", "clustered"])
def test_a_rarity_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch, name: str):
    values, runs = spectrum(name, 300), list(itertools.product(EARLY, range(2)))
    honest = certificate.log_rarity
    monkeypatch.setattr(certificate, "log_rarity", lambda *args: honest(*args) - 4)
    solver = GolubKahan(delta=0.1)
    failed = [misses(shuffled(values, 60, seed, torch.float64), 1.0, solver, stop, seed) for stop, seed in runs]
    assert sum(failed) > allowed(60 * len(runs), 0.1)


def test_a_rate_that_is_too_small_is_caught():
    """With δ near one the bound is let off its promise, and does break it."""
    values = spectrum("slow", 300)
    failed = [misses(shuffled(values, 60, s), 1.0, GolubKahan(delta=0.999), (0.3, None), s) for s in range(4)]
    assert sum(failed) > 0
