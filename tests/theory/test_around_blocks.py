"""Blocks and models around an input: no point inside is above a bound, and at small radii bounds are near what is attained."""

from dataclasses import replace

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadFunctionError, HowSmoothError
from howsmooth.maps.recording import record
from howsmooth.theory.around import Neighbourhood
from howsmooth.theory.around_blocks import around_graph, scalar_changes
from howsmooth.theory.around_norms import Certified
from howsmooth.theory.around_values import expand
from problems.small_functions import Looked, case, examine, jacobian, points, refuted


@pytest.mark.parametrize("seed", [1, 4])
def test_sound(seed: int):
    looked = Looked()
    examine(case(seed), looked)
    assert looked.points > 0
    assert looked.wrong == []


@pytest.mark.slow
def test_sound_on_many():
    looked = Looked()
    for seed in range(10, 20):
        examine(case(seed), looked)
    assert looked.cases == 10
    assert looked.wrong == []


def test_checker_fails_on_a_wrong_bound():
    c = case(1)
    x = c.area.point
    small = replace(c, area=Neighbourhood.of(x, 1e-7, "sequence"))
    moved = expand(c.graph, x, True).at(torch.tensor([1e-7], dtype=torch.float64))
    certified = Certified(c.whole, x)
    around, scalars = around_graph(certified, small.area), scalar_changes(certified, small.area)
    at, inside = jacobian(c.f, x), points(small)
    right = (moved, around, scalars)
    assert not any(refuted(small, *right, at, y) for y in inside)
    for name, wrong in {
        "slope": (moved, replace(around, slope=0.5 * around.slope), scalars),
        "change": (moved, replace(around, change=1e-6 * around.change), scalars),
        "moved_total": (moved, replace(around, moved_total=0.5 * around.moved_total), scalars),
        "moved": (moved, replace(around, moved=0.01 * around.moved), scalars),
        "entry": (moved._replace(spread=0.01 * moved.spread), around, scalars),
        "expanded total": (moved._replace(total=0.5 * moved.total), around, scalars),
        "scalar": (moved, around, 0.01 * scalars),
    }.items():
        assert any(why.startswith(name) for y in inside for why in refuted(small, *wrong, at, y)), name


def test_tends_to_the_constant_at_the_input():
    c = case(2)
    x = c.area.point
    norm = float(torch.linalg.matrix_norm(jacobian(c.f, x), 2))
    around = around_graph(Certified(c.whole, x), Neighbourhood.of(x, 1e-9 * float(x.norm())))
    assert norm <= around.slope <= 1.001 * norm
    assert around_graph(Certified(c.whole, x), Neighbourhood.of(x, 0.0)).moved_total == 0


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
        record(lambda t: t * 2 if t.sum() > 0 else t, x)
    with pytest.raises(BadFunctionError, match="expected linear operations"):
        expand(record(lambda t: torch.sort(t, -1)[0] * 1.0, x + torch.arange(3)), x + torch.arange(3), True)
    with pytest.raises(BadFunctionError, match="expected attention layers"):
        Certified(record(lambda t: torch.softmax(t, -1), x), x)
    with pytest.raises(BadFunctionError, match="does not"):
        record(lambda t: torch.ones(2), x)
    with pytest.raises(HowSmoothError, match="expected a layer, a norm or a composition"):
        hs.lipschitz(lambda t: t, x, within=0.1)
