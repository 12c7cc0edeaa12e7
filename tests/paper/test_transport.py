"""Predictions against transport: exact distances before and after."""

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.maps import Map
from problems.measures import KINDS, Bare, make, random_measure
from problems.transport import along, scattered, verify


def split_case(kind: str) -> tuple[hs.Attention, hs.Measure]:
    """Little mass far out, the rest near the origin, and `A < 0`: splitting the heavy atom wins."""
    d = 1 if kind == "line" else 2
    points = torch.zeros(2, d, dtype=torch.float64)
    points[1, 0] = 4.0
    positions = torch.tensor([0.5, 0.5]).double() if kind == "causal" else None
    eye = torch.eye(d, dtype=torch.float64)
    scale = torch.diag(torch.linspace(1, 0.3, d).double())  # one direction rules
    attn = hs.Attention.from_matrices(-eye, eye @ scale, causal=kind == "causal")
    return attn, hs.Measure(points, torch.tensor([15 / 16, 1 / 16]), positions)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_is_the_prediction_to_first_order(kind):
    f, mu = make(kind, 0), random_measure(5, 1)
    far, near = verify(f, mu, (1e-3, 1e-5), trials=5)
    assert near.error < 1e-3
    assert near.error < 0.05 * far.error + 1e-7
    for check in (far, near):
        assert check.random <= check.predicted * (1 + 200 * check.epsilon)


@pytest.mark.parametrize("kind", ["line", "plane", "causal"])
def test_where_splitting_wins(kind):
    f, mu = split_case(kind)
    far, near = verify(f, mu, (1e-3, 1e-5), trials=5)
    assert far.split
    assert near.split
    assert near.error < 1e-4
    assert near.error < 0.05 * far.error + 1e-7
    for check in (far, near):
        assert check.random <= check.predicted * (1 + 200 * check.epsilon)


def test_without_splitting_the_prediction_is_out_of_reach():
    """Whole atoms, moved at random, stay below the constant of moving; the checker would see a wrong prediction."""
    f, mu = split_case("line")
    s = hs.splitting(f, mu)
    estimate = s.moved
    nu = along(mu, estimate.direction, 1e-5, split=False)
    ratio = hs.wasserstein(f(mu), f(nu)).upper / hs.wasserstein(mu, nu).upper
    assert ratio == pytest.approx(s.moved.value, rel=1e-3)
    assert ratio < 0.5 * s.split.value


def test_a_wrong_map_is_found_out():
    """The derivative of one layer does not predict what another does."""
    f, g, mu = make("plain", 0), make("plain", 100), random_measure(5, 1)

    class Mixed(Bare):
        def on(self, measure):
            return Fixed(f.on(measure), g.on(measure))

    class Fixed(Bare):
        def __init__(self, value: Map, derivative: Map):
            self._value, self._derivative = value, derivative

        def linearize(self, x):
            return self._value.linearize(x)[0], self._derivative.linearize(x)[1]

    assert verify(Mixed(), mu, (1e-5,), trials=1)[0].error > 1e-2


def test_random_couplings_keep_masses_and_positions():
    mu = random_measure(6, 0)
    nu = scattered(mu, 1e-3, torch.Generator().manual_seed(0))
    assert hs.wasserstein(mu, nu).upper <= 1e-3
    assert len(nu) > 6


def test_refused():
    for epsilons in ((), (0.0,), (-1e-3,), (2.0,)):
        with pytest.raises(BadInputError, match=r"^expected sizes of perturbation between 0 and 1, got "):
            verify(make("plain", 0), random_measure(3, 0), epsilons)
