"""Blocks and models around an input: no point inside is above a bound, and at small radii bounds are near what is attained."""

from dataclasses import replace

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadFunctionError, HowSmoothError
from howsmooth.program.reading import read_function
from howsmooth.theory.around import Certified, around_graph, expand
from problems.small_functions import Looked, bounds_within, case, examine, jacobian, points, refuted


@pytest.mark.parametrize("seed", [1, 4])
def test_sound(seed: int):
    looked = Looked()
    examine(case(seed), looked, lower=False)
    assert looked.points == 3 * 7
    assert looked.wrong == []


@pytest.mark.slow
@pytest.mark.weekly
def test_sound_on_many():
    looked = Looked()
    for seed in range(10, 24):
        examine(case(seed), looked, lower=seed % 4 == 0)
    assert looked.functions == 14
    assert looked.lower_ends > 2
    assert len(looked.kinds) > 20
    assert looked.wrong == []


@pytest.mark.parametrize("name", ["slope", "change", "moved_total", "moved", "entry", "expanded total", "scalar"])
def test_checker_fails_on_a_wrong_bound(name: str):
    c = replace(case(1), together=True, tokens=None)
    area = c.area(1e-7)
    right = bounds_within(Certified(c.whole, c.x), expand(c.graph, c.x, True), area)
    at = jacobian(c, c.x)
    inside = [(y, jacobian(c, y)) for y in points(c, area, at)]
    assert not any(refuted(c, right, at, *y) for y in inside)
    moved, around = right.moved, right.around
    wrong = {
        "slope": replace(right, around=replace(around, slope=0.5 * around.slope)),
        "change": replace(right, around=replace(around, change=1e-6 * around.change)),
        "moved_total": replace(right, around=replace(around, moved_total=0.5 * around.moved_total)),
        "moved": replace(right, around=replace(around, moved=0.01 * around.moved)),
        "entry": replace(right, moved=moved._replace(spread=0.01 * moved.spread)),
        "expanded total": replace(right, moved=moved._replace(total=0.5 * moved.total)),
        "scalar": replace(right, scalars=0.01 * right.scalars),
    }[name]
    assert any(why.startswith(name) for y in inside for why in refuted(c, wrong, at, *y))


def test_tends_to_the_constant_at_the_input():
    c = replace(case(2), together=False, tokens=None)
    norm = float(torch.linalg.matrix_norm(jacobian(c, c.x), 2))
    around = around_graph(Certified(c.whole, c.x), c.area(1e-9 * float(c.x.norm())))
    assert norm <= around.slope <= 1.001 * norm
    assert around_graph(Certified(c.whole, c.x), c.area(0.0)).moved_total == 0


def test_composition_of_maps_within():
    random = torch.Generator().manual_seed(0)
    layer = hs.Attention(*(torch.randn(4, 4, generator=random).double() for _ in range(4)), heads=2)
    norm = hs.LayerNorm(torch.ones(4).double())
    x = torch.randn(3, 4, generator=random).double()
    near = hs.lipschitz(layer @ norm, x, within=1e-3)
    assert near.lower <= near.upper <= 1.5 * hs.lipschitz(layer @ norm, x).upper
    assert near.point is not None
    assert float((near.point - x).norm(dim=-1).max()) <= 1e-3 * (1 + 1e-9)


def test_refusals():
    x = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(BadFunctionError, match="reads a number off"):
        read_function(lambda t: t * 2 if t.sum() > 0 else t, x)
    with pytest.raises(BadFunctionError, match="expected linear operations"):
        expand(read_function(lambda t: torch.sort(t, -1)[0] * 1.0, x + torch.arange(3)), x + torch.arange(3), True)
    with pytest.raises(BadFunctionError, match="expected attention layers"):
        Certified(read_function(lambda t: torch.softmax(t, -1), x), x)
    with pytest.raises(BadFunctionError, match="does not"):
        read_function(lambda t: torch.ones(2), x)
    with pytest.raises(HowSmoothError, match="composition of them"):
        hs.lipschitz(lambda t: t, x, within=0.1)


def test_an_output_that_cancels_is_recorded():
    """What rounding leaves of it differs between two ways to the same number."""
    x = torch.full((1, 3), 0.1, dtype=torch.float64)
    graph = read_function(lambda t: (t * 3 + 1e3 - 1e3) - t * 3, x, truth=lambda t: t * 0.0 + 1e-14)
    assert graph(x).shape == x.shape
    with pytest.raises(BadFunctionError, match="miss by"):
        read_function(lambda t: (t * 3 + 1e3 - 1e3) - t * 3, x, truth=lambda t: t * 0.0 + 1e-6)
