"""Sets: projections stay inside and put, tangents do not leave, and a norm's ellipsoid is what the norm gives."""

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.search.sets import Ball, BallAround, Ellipsoid
from howsmooth.settings import Per
from howsmooth.theory.around import Neighbourhood
from howsmooth.theory.scaled import norm_radius
from problems.layers import gaussian

WEIGHT, BIAS = gaussian(5, seed=1), gaussian(5, seed=2)
SETS = {
    "ball": Ball(1.5),
    "layer norm": Ellipsoid(hs.LayerNorm(WEIGHT, BIAS)),
    "rms norm": Ellipsoid(hs.RMSNorm(WEIGHT)),
    "around": BallAround(gaussian(3, 5, seed=3), 0.7),
}


@pytest.mark.parametrize("name", SETS)
def test_projection_and_samples_are_inside(name):
    space = SETS[name]
    z = space.project(5 * gaussian(6, 3, 5, seed=4))
    assert torch.allclose(space.project(z), z, rtol=1e-12, atol=1e-12)
    for inside in (z, space.sample(6, 3, 5, torch.Generator().manual_seed(0))):
        assert torch.allclose(space.project(inside), inside, rtol=1e-12, atol=1e-12)
        assert float(space.tokens(inside).norm(dim=-1).max()) <= space.reach


@pytest.mark.parametrize("name", SETS)
def test_tangent_steps_leave_to_second_order_only(name):
    space = SETS[name]
    z = space.project(5 * gaussian(4, 3, 5, seed=5))
    g = gaussian(4, 3, 5, seed=6)
    along = space.tangent(z, g)
    for t in (1e-3, 1e-4):
        moved = z + t * along
        left = (space.project(moved) - moved).flatten(1).norm(dim=-1)
        assert float(left.max()) < 20 * t**2
    moved = z + 1e-3 * z  # straight outward of a sphere around zero
    if name != "around":
        assert float((space.project(moved) - moved).norm()) > 1e-4


def test_points_inside_a_ball_may_move_anywhere():
    z = 0.1 * gaussian(2, 3, 5, seed=0)
    g = gaussian(2, 3, 5, seed=1)
    assert torch.equal(Ball(10.0).tangent(z, g), g)
    assert torch.equal(Ball(10.0).project(z), z)


@pytest.mark.parametrize("kind", [hs.LayerNorm, hs.RMSNorm])
def test_ellipsoid_is_what_the_norm_maps_onto(kind):
    norm = kind(WEIGHT, BIAS, eps=0.0)
    x = gaussian(1, 7, 5, seed=7)
    z = (norm(x) - BIAS) / WEIGHT
    space = Ellipsoid(norm)
    assert torch.allclose(space.project(z), z, atol=1e-12)
    assert torch.allclose(space.tokens(space.project(z)), norm(x), atol=1e-12)
    assert space.reach == norm_radius(norm)


def test_centre_of_an_ellipsoid_projects_onto_it():
    space = Ellipsoid(hs.LayerNorm(WEIGHT))
    z = space.project(torch.ones(1, 2, 5, dtype=torch.float64))
    assert torch.allclose(z.norm(dim=-1), torch.full((1, 2), 5**0.5, dtype=torch.float64))


@pytest.mark.parametrize("radius", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_bad_radius(radius):
    with pytest.raises(BadInputError, match="expected a finite radius > 0"):
        Ball(radius)
    with pytest.raises(BadInputError, match="expected a finite radius > 0"):
        BallAround(torch.zeros(2, 2), radius)


def test_bad_sets():
    with pytest.raises(BadInputError, match="LayerNorm or RMSNorm"):
        Ellipsoid(torch.nn.LayerNorm(4))  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="a few points"):
        Ellipsoid(hs.LayerNorm(torch.ones(2)))
    with pytest.raises(BadInputError, match="one input"):
        BallAround(torch.zeros(2, 2, 2), 1.0)
    with pytest.raises(BadInputError, match="finite tokens"):
        BallAround(torch.full((2, 2), torch.nan), 1.0)


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_a_neighbourhood_is_never_left(per: Per):
    random = torch.Generator().manual_seed(0)
    x = 100 * torch.randn(4, 3, generator=random, dtype=torch.float64)
    area = Neighbourhood.of(x, 1e-3, per)
    space = BallAround(x, 1e-3, per)
    z = space.project(area.point + torch.randn(6, 4, 3, generator=random, dtype=torch.float64))
    step = z - area.point
    assert bool((step.norm(dim=-1) <= area.radii).all())
    assert bool((step.flatten(1).norm(dim=-1) <= area.far).all())
    assert 0 < float((space.along(step) - area.point).norm(dim=-1).max()) <= 1.001e-3
    inside = area.point + 1e-4 * torch.eye(4, 3, dtype=torch.float64)
    assert torch.allclose(space.project(inside), inside, rtol=0, atol=1e-13)
    assert float(space.tangent(z[:1], step[:1]).norm()) < 1e-3 * float(step[0].norm())
