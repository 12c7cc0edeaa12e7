"""The search: never falls, never above the bound, never below what it started from, and near what brute force finds."""

import itertools
import math

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.search.ascent import ascend, pairs_at
from howsmooth.search.families import worst_configuration
from howsmooth.search.sets import Ball, BallAround, Ellipsoid
from howsmooth.verbs import worst_case
from marks import first
from problems.layers import gaussian


def random_head(seed: int, d: int = 4, **options) -> hs.Attention:
    random = torch.Generator().manual_seed(seed)
    A, V = (torch.randn(d, d, generator=random, dtype=torch.float64) for _ in range(2))
    return hs.Attention.from_matrices(A, V, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(range(8), 3))
def test_beats_configurations_and_random_inputs(seed):
    """All fifty seeds and the longer search: `python -m benchmarks worst`."""
    attn = random_head(seed)
    found = hs.worst_case(attn, n=8, radius=2.0, steps=60, restarts=16)
    x = Ball(2.0).sample(2000, 8, 4, torch.Generator().manual_seed(seed))
    assert found.value >= worst_configuration(attn, 8, 2.0).estimate.value
    assert found.value >= float(pairs_at(attn, x, None, 0).value.max())
    assert found.ratio is not None
    assert 0.1 < found.ratio <= 1
    assert all(a <= b for a, b in itertools.pairwise(found.trace))
    assert float(found.tokens.norm(dim=-1).max()) <= 2.0
    assert found.estimate.status == "dense"
    assert found.trace[-1] == pytest.approx(found.value, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "points"), [(2, 401), (3, 81)])
@pytest.mark.parametrize("radius", first([2.0, 1.0]))
@pytest.mark.parametrize("causal", [False, True])
def test_brute_force_on_a_line(n, points, radius, causal):
    attn = hs.Attention.from_matrices(-torch.eye(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64), causal=causal)
    line = torch.linspace(-radius, radius, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[line] * n).reshape(-1, n, 1)
    best = max(float(pairs_at(attn, part, None, 0).value.max()) for part in grid.split(20_000))
    assert worst_case(attn, n, radius, steps=60).value >= best * (1 - 1e-6)


def test_climbs_in_lock_step_as_alone():
    attn, space = random_head(1), Ball(2.0)
    starts = space.sample(3, 6, 4, torch.Generator().manual_seed(0))
    together = ascend(attn, space, starts, steps=12, keep=3)
    for i in range(3):
        alone = ascend(attn, space, starts[i : i + 1], steps=12, keep=1)
        assert float(together.value[i]) == pytest.approx(float(alone.value[0]), rel=1e-6)
    assert bool((together.value >= together.began).all())


def test_only_the_better_starts_go_on():
    attn, space = random_head(1), Ball(2.0)
    starts = space.sample(9, 6, 4, torch.Generator().manual_seed(0))
    short = ascend(attn, space, starts, steps=30, keep=1)
    assert int((short.value == short.value.max()).sum()) == 1
    assert float(short.value.max()) == short.trace[-1]
    assert len(short.trace) == 31


def test_ellipsoids_and_neighbourhoods():
    norm = hs.LayerNorm(gaussian(4, seed=1), gaussian(4, seed=2))
    found = worst_case(random_head(2), 6, over=Ellipsoid(norm), steps=20, restarts=8)
    assert norm.bias is not None
    z = (found.tokens - norm.bias) / norm.weight
    assert torch.allclose(z.mean(-1), torch.zeros(6, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(z.square().sum(-1), torch.full((6,), 4.0, dtype=torch.float64))
    assert found.ratio is not None
    assert found.ratio <= 1
    x = gaussian(6, 4, seed=3)
    near = worst_case(random_head(2), over=BallAround(x, 0.3), steps=20, restarts=4)
    assert float((near.tokens - x).norm()) <= 0.3
    assert near.value > hs.lipschitz(random_head(2), x).value
    assert near.best_configuration is None
    block = worst_case(lambda t: torch.tanh(t @ t.mT) @ t, over=BallAround(x, 0.3), steps=10, restarts=4)
    assert block.bound is None
    assert block.ratio is None
    assert block.status == "improved"


def test_compositions_and_large_layers():
    norm = hs.RMSNorm(torch.ones(8), eps=1e-2)
    w_q, w_k, w_v, w_o = (gaussian(8, 8, seed=s, dtype=torch.float32) / 8**0.5 for s in range(4))
    layer = hs.Attention(w_q, w_k, w_v, w_o, heads=2, causal=True)
    inside = worst_case(layer @ norm, 5, 2.0, steps=10, restarts=4)
    assert inside.bound is None
    large = worst_case(layer, 40, 4.0, steps=4, restarts=4)
    assert large.tokens.dtype == torch.float32
    assert large.ratio is not None
    assert large.ratio <= 1
    assert large.best_configuration is not None
    assert large.value >= 0.999 * large.best_configuration
    assert set(large.to_dict()) >= {"value", "tokens", "trace", "ratio", "note"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_search_is_where_the_layer_is():
    weights = [gaussian(32, 32, seed=s, dtype=torch.float32) / 32**0.5 for s in range(4)]
    layer, around = hs.Attention(*weights, heads=2, causal=True), BallAround(gaussian(40, 32, seed=9, dtype=torch.float32), 1.0)
    here, there = (worst_case(a, 40, 4.0, steps=3, restarts=4) for a in (layer, layer.to("cuda")))
    assert there.tokens.is_cuda
    assert there.value == pytest.approx(here.value, rel=0.02)
    near = worst_case(layer.to("cuda"), over=BallAround(around.x.to("cuda"), 1.0), steps=3, restarts=4)
    assert near.tokens.is_cuda
    assert near.value == pytest.approx(worst_case(layer, over=around, steps=3, restarts=4).value, rel=0.02)


def test_same_seed_same_answer():
    first, second = (worst_case(random_head(5), 5, 1.0, steps=10, restarts=6, seed=3) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert first.trace == second.trace


def test_a_search_that_cannot_improve_says_so():
    flat = hs.Attention.from_matrices(torch.zeros(3, 3), torch.eye(3))  # uniform attention: L = 1 everywhere
    found = worst_case(flat, 4, 1.0, steps=10, restarts=6)
    assert found.value == pytest.approx(1.0)
    assert found.status == "not improved"
    assert "no step improved" in found.note
    assert len(found.unimproved) >= 4
    asked = worst_case(random_head(0), 4, 1.0, steps=0, restarts=4)
    assert asked.status == "not improved"
    assert "no step was asked" in asked.note
    early = worst_case(random_head(0) @ hs.RMSNorm(torch.ones(4)), 8, 2.0, steps=4, restarts=4)
    assert "still climbing" in early.note


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((4, 0.0), {}, "radius > 0"),
        ((4, -2.0), {}, "radius > 0"),
        ((4, math.nan), {}, "radius > 0"),
        ((0, 1.0), {}, "at least 1"),
        ((2.5, 1.0), {}, "at least 1"),
        ((4,), {}, "either radius or over"),
        ((4, 1.0), {"over": Ball(1.0)}, "either radius or over"),
        ((4,), {"over": 3}, "Ball, Ellipsoid or BallAround"),
        ((4,), {"over": BallAround(torch.zeros(3, 4), 1.0)}, "n = 3"),
        ((None,), {"over": BallAround(torch.zeros(3, 5), 1.0)}, "width 4"),
        ((4,), {"over": Ellipsoid(hs.RMSNorm(torch.ones(5)))}, "width"),
        ((4, 1.0), {"steps": -1}, "steps, at least 0"),
        ((4, 1.0), {"restarts": 0}, "restarts, at least 1"),
    ],
)
def test_bad_input(arguments, options, sentence):
    with pytest.raises(BadInputError, match=sentence):
        worst_case(random_head(0), *arguments, **options)


def test_bad_functions():
    with pytest.raises(BadInputError, match="expected a map of the package"):
        worst_case(lambda x: x, 4, 1.0)
    with pytest.raises(BadInputError, match="expected a map or a function"):
        worst_case(3, over=BallAround(torch.zeros(2, 2), 1.0))  # type: ignore[arg-type]
