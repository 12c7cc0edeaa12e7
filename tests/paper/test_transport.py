"""Predictions against transport: exact distances before and after."""

import math

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


def circle(n: int) -> tuple[hs.Attention, hs.Measure, torch.Tensor]:
    """A layer, the uniform law on a circle as `n` atoms, and the tangent field that turns the circle in itself, (n, 2)."""
    A = torch.tensor([[-1.5405, -0.2945], [1.2544, 2.1869]], dtype=torch.float64)
    V = torch.tensor([[0.0939, 1.2381], [-1.3459, 0.5119]], dtype=torch.float64)
    angle = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    points = 1.163 * torch.stack([angle.cos(), angle.sin()], -1)
    return hs.Attention.from_matrices(A, V), hs.Measure(points), torch.stack([-angle.sin(), angle.cos()], -1)


def without(field: torch.Tensor) -> torch.Tensor:
    """The projection that takes a field off, (n·d, n·d)."""
    unit = field.flatten() / field.norm()
    return torch.eye(len(unit), dtype=unit.dtype) - torch.outer(unit, unit)


def test_at_a_law_without_atoms_transport_sees_gradients_only():
    """Theorem 5.5: normal fields are free, tangential ones are derivatives along the curve; one field is missing."""
    f, mu, turning = circle(300)
    image, operator = f.linearize(mu.points[None])
    T = operator.dense()[0]
    along_image = (T @ turning.flatten()).reshape(-1, 2)  # T of the turning field turns the image in itself
    steps = image[0].roll(-1, 0) - image[0].roll(1, 0)
    assert float((along_image * steps).sum() / (along_image.norm() * steps.norm())) > 1 - 1e-6
    seen = without(along_image) @ T @ without(turning)
    assert float(torch.linalg.matrix_norm(T, 2)) == pytest.approx(2.78779, abs=1e-5)
    assert float(torch.linalg.matrix_norm(seen, 2)) == pytest.approx(2.57896, abs=1e-5)

    def moved_by(matrix: torch.Tensor, step: float) -> float:
        """The ratio of distances along a matrix's best field: `step` is large beside the distance of two atoms, 0.024."""
        best = torch.linalg.svd(matrix)[2][0].reshape(-1, 2)
        nu = mu.moved(mu.points + step * best * len(mu) ** 0.5)
        return hs.wasserstein(f(mu), f(nu)).upper / hs.wasserstein(mu, nu).upper

    assert moved_by(seen, 0.05) == pytest.approx(2.579, rel=1e-3)
    assert moved_by(T, 0.05) < 2.3
    # small beside that distance the atoms are atoms, and Theorem 5.2 rules
    assert moved_by(T, 1e-4) == pytest.approx(2.7878, rel=1e-3)


def test_the_constant_of_samples_of_a_density_is_that_of_all_fields():
    few, many = (hs.lipschitz(*circle(n)[:2]) for n in (40, 160))
    assert few.value == pytest.approx(many.value, rel=1e-4)
    assert many.value == pytest.approx(2.78779, abs=1e-4)
    assert not many.split


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
