"""Distances against closed forms, each other, and the axioms."""

import itertools
import math
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import NoConvergenceError
from howsmooth.measures import Gaussian, Measure
from howsmooth.measures.transport import Distance, entropic_ends, wasserstein
from problems.layers import gaussian
from problems.measures import random_measure


def free(m: int, seed: int, d: int = 2) -> hs.Measure:
    mu = random_measure(m, seed, d)
    return hs.Measure(mu.points, mu.mass)


def test_diracs():
    mu, nu = hs.Measure(torch.zeros(1, 2)), hs.Measure(torch.tensor([[3.0, 4.0]]))
    for p in (1, 1.5, 2, 7):
        assert wasserstein(mu, nu, p).value == pytest.approx(5)


@pytest.mark.parametrize("p", [1, 2, 3.5])
def test_equal_masses_are_an_assignment(p):
    x, y = gaussian(5, 2, seed=0), gaussian(5, 2, seed=1)
    cost = torch.cdist(x, y) ** p
    best = min(float(cost[torch.arange(5), torch.tensor(order)].mean()) for order in itertools.permutations(range(5)))
    d = wasserstein(hs.Measure(x), hs.Measure(y), p)
    assert d.method == "exact"
    assert d.upper == pytest.approx(best ** (1 / p), rel=1e-12)
    assert d.lower == pytest.approx(d.upper, rel=1e-9)
    assert float(d) == d.value == d.lower


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_line_is_the_exact_method(p, seed):
    mu, nu = free(7, seed, d=1), free(9, seed + 90, d=1)
    line = wasserstein(mu, nu, p)
    assert line.method == "line"
    assert line.value == pytest.approx(wasserstein(mu, nu, p, method="exact").value, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_axioms(seed):
    mu, nu, xi = free(6, seed), free(8, seed + 10), free(5, seed + 20)
    ab, bc, ac = wasserstein(mu, nu).value, wasserstein(nu, xi).value, wasserstein(mu, xi).value
    assert wasserstein(nu, mu).value == pytest.approx(ab, rel=1e-12)
    assert ac <= ab + bc + 1e-12
    assert wasserstein(mu, mu).upper == pytest.approx(0, abs=1e-12)
    shift = torch.tensor([1.0, -2.0]).double()
    assert wasserstein(mu, mu.moved(mu.points + shift)).value == pytest.approx(5**0.5, rel=1e-12)
    scaled = wasserstein(mu.moved(3 * mu.points), nu.moved(3 * nu.points)).value
    assert scaled == pytest.approx(3 * ab, rel=1e-9)
    assert wasserstein(mu.split(2, 3), nu.split()).value == pytest.approx(ab, rel=1e-9)
    assert wasserstein(mu, nu, 1).value <= ab * (1 + 1e-12)


@pytest.mark.parametrize("step", [1e-3, 1e-6, 1e-9])
def test_small_moves_keep_their_digits(step):
    x, e = gaussian(40, 3, seed=0), step * gaussian(40, 3, seed=1)
    d = wasserstein(hs.Measure(x), hs.Measure(x + e))
    true = float(e.square().sum(-1).mean().sqrt())
    assert d.upper == pytest.approx(true, rel=1e-6)
    assert d.value <= true * (1 + 1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_entropic_ends_hold_and_are_near(p):
    mu, nu = free(150, 0), free(120, 7)
    exact = wasserstein(mu, nu, p).value
    d = wasserstein(mu, nu, p, method="entropic")
    assert d.method == "entropic"
    assert d.lower <= exact * (1 + 1e-12)
    assert exact <= d.upper * (1 + 1e-12)
    assert d.upper <= 1.1 * d.lower


def test_entropic_ends_hold_at_every_temperature(monkeypatch):
    mu, nu = free(60, 0), free(50, 7)
    exact = wasserstein(mu, nu).value ** 2
    for levels in (1, 2, 5):
        monkeypatch.setattr("howsmooth.measures.transport._LEVELS", levels)
        monkeypatch.setattr("howsmooth.measures.transport._TILE", 400)
        low, high = entropic_ends(mu.points, mu.mass, nu.points, nu.mass, 2, 1e-3)
        assert low <= exact <= high


def test_large_supports_go_to_the_entropic_method(monkeypatch):
    monkeypatch.setattr("howsmooth.measures.transport._EXACT", 10)
    assert wasserstein(free(20, 0), free(20, 1)).method == "entropic"
    same = wasserstein(free(20, 0), free(20, 0))
    assert same.lower == 0


def test_a_simplex_that_stops_early_is_refused(monkeypatch):
    monkeypatch.setattr("howsmooth.measures.transport._STEPS", 1)
    with pytest.raises(NoConvergenceError, match=r"^expected .* got "):
        wasserstein(free(30, 0), free(30, 1))


def test_gaussians():
    eye = torch.eye(3).double()
    assert wasserstein(Gaussian(torch.zeros(3), eye), Gaussian(torch.ones(3), 4 * eye)).value == pytest.approx(6**0.5)
    root = gaussian(3, 3, seed=0)
    mu = Gaussian(torch.zeros(3), root @ root.mT)
    nu = Gaussian(torch.zeros(3), root @ root.mT * (1 + 1e-9) ** 2)
    assert wasserstein(mu, nu).value == pytest.approx(1e-9 * float(root.norm()), rel=1e-5)
    flat = Gaussian(torch.zeros(3), torch.diag(torch.tensor([1.0, 0.0, 0.0])))
    assert wasserstein(flat, Gaussian(torch.zeros(3), 0 * eye)).value == pytest.approx(1)


def test_gaussians_formula():
    a, b = gaussian(4, 4, seed=0), gaussian(4, 4, seed=1)
    s, t = a @ a.mT, b @ b.mT
    values, vectors = torch.linalg.eigh(s)
    half = (vectors * values.sqrt()) @ vectors.mT
    inner = torch.linalg.eigvalsh(half @ t @ half).clamp_min(0).sqrt().sum()
    truth = float((s.trace() + t.trace() - 2 * inner + 4).sqrt())
    distance = wasserstein(Gaussian(torch.zeros(4), s), Gaussian(torch.ones(4), t)).value
    assert distance == pytest.approx(truth, rel=1e-10)


def test_samples_of_gaussians_come_near_the_closed_form():
    mu, nu = Gaussian(torch.zeros(1), torch.eye(1)), Gaussian(torch.ones(1), 4 * torch.eye(1))
    d = wasserstein(hs.Measure(mu.sample(4000)), hs.Measure(nu.sample(4000, seed=1))).value
    assert d == pytest.approx(wasserstein(mu, nu).value, rel=0.05)


def test_conditional_of_sequences_matches_token_by_token():
    x, y = gaussian(6, 3, seed=0), gaussian(6, 3, seed=1)
    d = wasserstein(hs.Measure.from_tokens(x, causal=True), hs.Measure.from_tokens(y, causal=True))
    assert d.method == "conditional"
    assert d.value == pytest.approx(float((x - y).square().sum(-1).mean().sqrt()), rel=1e-12)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("d", [1, 2])
def test_conditional_is_the_mean_over_slices(p, d):
    s = torch.tensor([0.25, 0.25, 0.25, 0.75, 0.75, 1.0]).double()
    a = torch.tensor([0.1, 0.2, 0.1, 0.3, 0.1, 0.2], dtype=torch.float64)
    b = torch.tensor([0.3, 0.05, 0.05, 0.2, 0.2, 0.2], dtype=torch.float64)
    x, y = gaussian(6, d, seed=0), gaussian(6, d, seed=1)
    total = 0.0
    for at in (0.25, 0.75, 1.0):
        i = s == at
        theta = float(a[i].sum())
        total += theta * wasserstein(hs.Measure(x[i], a[i] / theta), hs.Measure(y[i], b[i] / theta), p).value ** p
    assert wasserstein(hs.Measure(x, a, s), hs.Measure(y, b, s), p).value == pytest.approx(total ** (1 / p), rel=1e-9)


@pytest.mark.parametrize("change", ["position", "mass", "count"])
def test_other_first_marginals_are_infinitely_far(change):
    x = gaussian(4, 2, seed=0)
    s = torch.tensor([0.25, 0.5, 0.75, 1.0]).double()
    mu = hs.Measure(x, None, s)
    other = {
        "position": hs.Measure(x, None, s * 0.99),
        "mass": hs.Measure(x, torch.tensor([0.26, 0.24, 0.25, 0.25]).double(), s),
        "count": hs.Measure(x[:3], None, s[:3]),
    }[change]
    d = wasserstein(mu, other)
    assert math.isinf(d.lower)
    assert math.isinf(d.value)
    assert d.to_dict()["value"] is None


def test_splitting_an_atom_leaves_the_conditional_distance_alone():
    mu = random_measure(6, 0)
    nu = mu.moved(mu.points + 0.3 * gaussian(6, 3, seed=9))
    assert wasserstein(mu.split(), nu).value == pytest.approx(wasserstein(mu, nu).value, rel=1e-9)


def test_distance_as_data():
    d = wasserstein(free(3, 0), free(3, 1))
    assert set(d.to_dict()) == {"value", "lower", "upper", "p", "method"}


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-100, 1e100, 1e200, 1e300])
@pytest.mark.parametrize("method", ["exact", "entropic", "line", "conditional", "gaussian"])
def test_a_distance_scales_with_its_points_at_any_size(method: Any, size: float):
    """Squares of such distances leave the range of float64, the distances do not."""
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 1 if method == "line" else 3, generator=random, dtype=torch.float64) for _ in range(2))

    def distance(factor: float) -> Distance:
        if method == "gaussian":
            spread = torch.zeros(3, 3, dtype=torch.float64)
            return wasserstein(Gaussian(factor * x[0], spread), Gaussian(factor * y[0], spread))
        ordered = method == "conditional"
        mu, nu = (Measure.from_tokens(factor * t, ordered) for t in (x, y))
        return wasserstein(mu, nu, method=method)

    one, other = distance(1.0), distance(size)
    assert other.lower / size == pytest.approx(one.lower, rel=1e-12)
    assert other.upper / size == pytest.approx(one.upper, rel=1e-12)


@pytest.mark.parametrize("p", [1, 2, 10, 100, 1e4])
@pytest.mark.parametrize("method", ["exact", "entropic", "line"])
def test_powers_that_vanish_leave_the_upper_end_above(method: Any, p: float):
    """Half the mass moves by 1e-4, beside a distance of 1: `(1e-4)^100` is no number of float64."""
    mu, nu = (Measure(torch.tensor([[end], [1.0]], dtype=torch.float64)) for end in (0.0, 1e-4))
    truth = 1e-4 * 0.5 ** (1 / p)
    found = wasserstein(mu, nu, p=p, method=method)
    assert found.lower <= truth * (1 + 1e-12)
    assert found.upper >= truth * (1 - 1e-12)
    if method != "entropic":
        assert found.upper == pytest.approx(truth, rel=1e-9)
