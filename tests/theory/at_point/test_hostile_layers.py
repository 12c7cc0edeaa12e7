"""No bound is refuted, or no number, on layers made to break one: at a point and over the ball."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import howsmooth as hs
from howsmooth.maps import Attention
from howsmooth.spectral import largest_eigenvalue, spectral_norm
from howsmooth.theory.at_point.table import point_bounds, trace_forms
from howsmooth.theory.bound import at_least, at_most, least_of, log_add, log_of
from howsmooth.theory.upper import lengths, no_nan, product_norm
from marks import first
from problems.hostile_layers import Tally, at_points, hostile, jacobians, largest_singular_value, over_ball
from problems.layers import LayerProblem, gaussian, turned_layers

F64 = torch.float64
LAYERS, PARTS, BALL_EVERY = 800, 4, 5  # some 5 400 inputs, 18 000 comparisons


@pytest.mark.slow
@pytest.mark.parametrize("part", first(range(PARTS)))
def test_no_bound_is_refuted(part: int):
    points, ball = Tally(), Tally()
    for seed in range(part, LAYERS, PARTS):
        case = hostile(seed)
        truth = at_points(case, points)
        if seed // PARTS % BALL_EVERY == 0:
            over_ball(case, truth, ball)
    assert points.wrong + ball.wrong == []
    assert points.inputs + ball.inputs >= 5000 / PARTS
    # infinity and refusals are for what overflows, not a way out
    assert points.infinite < 0.15 * points.upper
    assert points.refused < 0.05 * points.layers
    assert ball.lower > 0


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (153, "a head without values and with huge logits"),
        (196, "values that are all equal and tiny"),
        (1760, "values whose bias hides them"),
        (3726, "tokens in the kernel of large weights, float32"),
        (6976, "an output projection that takes the values away up to rounding"),
        (10720, "a head without values whose logits rounding spoils"),
    ],
)
def test_cases_that_refuted_a_bound(seed: int, what: str):
    tally = Tally()
    case = hostile(seed)
    over_ball(case, at_points(case, tally), tally)
    assert tally.wrong == [], what


def test_the_tally_catches_a_wrong_bound():
    case, tally = hostile(0), Tally()
    tally.above("right", 0.0, -1e-3, case)
    tally.below("right", -1e-3, 0.0, case)
    assert tally.wrong == []
    for bound in (-1e-6, math.nan, -math.inf):
        tally.above("wrong", bound, 0.0, case)
    for bound in (1e-6, math.nan, math.inf):
        tally.below("wrong", bound, 0.0, case)
    assert len(tally.wrong) == 6


@given(turned_layers())
def test_the_truth_is_the_derivative(problem: LayerProblem):
    layer = dataclasses.replace(problem.layer, attention_mask=None)
    truth = torch.as_tensor(jacobians(layer, problem.x).astype(np.float64))
    operator = layer.linearize(problem.x)[1]
    assert float((operator.dense() - truth).abs().max()) <= 1e-9 * (1 + float(truth.abs().max()))


def constant_killer(d: int) -> Attention:
    return Attention.from_matrices(0.3 * torch.eye(d, dtype=F64), torch.eye(d, dtype=F64) - 1 / d)


@pytest.mark.parametrize(
    "layer",
    [
        *(constant_killer(d) for d in (2, 3, 4, 16, 64)),
        Attention.from_matrices(torch.eye(2, dtype=F64), torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=F64)),
    ],
    ids=repr,
)
def test_values_that_kill_constants(layer: Attention):
    table = hs.bounds(layer, gaussian(4, layer.width, seed=0))
    assert table.measured is not None
    assert all(table.measured <= (r.value or 0.0) <= 4 * table.measured for r in table)


def test_logits_beyond_float32_give_infinity():
    A = 1e6 * torch.eye(3)
    layer = Attention.from_matrices(torch.stack([A, -A]), torch.eye(3).repeat(2, 1, 1))
    x = gaussian(4, 3, seed=0, dtype=torch.float32)
    rows = point_bounds(layer, 1e3 * x / x.norm(dim=-1, keepdim=True))
    assert [r.value for r in rows if r.applies] == [math.inf] * 4


@pytest.mark.parametrize("size", [1e-160, 1e-25, 1e25, 1e160])
@pytest.mark.parametrize("heads", [1, 2])
def test_bounds_scale_with_the_values(size: float, heads: int):
    dtype = torch.float32 if 1e-30 < size < 1e30 else F64
    A, V = (gaussian(heads, 3, 3, seed=s, dtype=dtype) for s in (0, 1))
    x = gaussian(5, 3, seed=2, dtype=dtype)
    one, scaled = (Attention.from_matrices(30 * A, V * c) for c in (1.0, size))
    for b, c in zip(point_bounds(one, x), point_bounds(scaled, x), strict=True):
        if b.value is not None:
            assert c.value == pytest.approx(b.value * size, rel=1e-3)  # power steps stop where they may
    for b, c in zip(*(hs.bounds(layer, n=5, radius=2.0) for layer in (one, scaled)), strict=True):
        if b.log_value is not None and b.log_value > -math.inf and c.log_value is not None:
            assert c.log_value == pytest.approx(b.log_value + math.log(size), abs=1e-4)


def test_values_far_from_the_origin_in_float32():
    """A bias of the values changes no derivative, but takes digits from them."""
    layer = Attention.from_matrices(3 * gaussian(3, 3, seed=0, dtype=torch.float32), torch.eye(3))
    shifted = dataclasses.replace(layer, b_v=torch.full((3,), 1e6))
    x = gaussian(1, 6, 3, seed=1, dtype=torch.float32)
    truth = float(largest_singular_value(layer, x)[0])
    for bound in trace_forms(shifted.linearize(x)[1]):
        assert float(bound) >= truth


def test_a_head_without_values_hides_no_other():
    """Its logits are far larger than the other head's, and it adds nothing."""
    eye = torch.eye(2, dtype=F64)
    layer = Attention.from_matrices(torch.stack([1e4 * eye, eye]), torch.stack([0 * eye, eye]))
    both, alone = (hs.bounds(f, n=8, radius=2.0) for f in (layer, Attention.from_matrices(eye, eye)))
    for id in ("B7", "B8", "B8m", "B12", "B12m"):
        log_value = alone.by_id(id).log_value
        assert log_value is not None
        assert both.by_id(id).log_value == pytest.approx(log_value, abs=1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("radius", [1e-200, 1e100, 1e153, 1e200, 1e308])
def test_any_radius_gives_a_table(radius: float, causal: bool):
    eye = torch.eye(2)
    layers = [Attention.from_matrices(A, V, causal=causal) for A in (eye, -eye, 0 * eye) for V in (eye, 0 * eye)]
    for layer in layers:
        table = hs.bounds(layer, n=5, radius=radius)
        assert not any(math.isnan(r.log_value or 0.0) for r in table)
        assert table.upper is not None
        assert table.upper.log_value is not None
        if bool(layer.w_v.any()):
            assert table.upper.log_value >= 0
        lower = [r.log_value for r in table if r.side == "lower" and not r.mean_field and r.log_value is not None]
        assert all(log_value <= table.upper.log_value for log_value in lower)
        json.dumps(table.to_dict(), allow_nan=False)


def test_weights_beyond_float64_are_refused():
    eye = torch.eye(2, dtype=F64)
    with pytest.raises(hs.HowSmoothError, match="range of float64"):
        hs.bounds(Attention(1e200 * eye, 1e200 * eye, eye), n=3, radius=1.0)


def test_no_number_becomes_no_bound():
    text = ("id", "name", "statement", "source", "assumptions")
    assert at_most(*text, math.nan).value == math.inf
    assert at_most(*text, -math.inf).value == 0
    assert at_most(*text, -800.0).value is not None
    assert (at_most(*text, -800.0).value or 0.0) > 0
    assert [at_least(*text, v).value for v in (math.nan, math.inf)] == [0, 0]
    assert math.isnan(log_of(math.nan))
    assert math.isnan(log_add(0.0, math.nan, 1.0))
    assert least_of(math.nan, 2.0, 3.0) == 2.0
    assert no_nan(torch.tensor([math.nan, 1.0])).tolist() == [math.inf, 1.0]


def test_norms_stay_in_range():
    m = gaussian(2, 3, 3, seed=0)
    truth = torch.linalg.matrix_norm(m @ m, 2)
    for size in (1e-200, 1e-150, 1.0, 1e150):
        torch.testing.assert_close(product_norm(m * size, m / size), truth)
        torch.testing.assert_close(lengths(m * size) / size, m.norm(dim=-1))
    m[0, 0, 0] = math.nan
    assert float(spectral_norm(m)[0]) == math.inf
    assert math.isfinite(float(spectral_norm(m)[1]))


def eigenvalue_cases() -> list[Tensor]:
    eye, ones = torch.eye(6, dtype=F64), torch.ones(6, 6, dtype=F64)
    single = torch.zeros(6, 6, dtype=F64)
    single[3, 3] = 1.0
    signs = torch.outer(*[torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=F64)] * 2)
    uneven = torch.diag(torch.logspace(-12, 0, 6).double())
    return [eye, ones, eye - ones / 6, single, signs, torch.block_diag(0.9 * eye, ones), uneven]


@pytest.mark.parametrize("m", eigenvalue_cases(), ids=range(len(eigenvalue_cases())))
@pytest.mark.parametrize("size", [1e-100, 1.0, 1e100])
def test_eigenvalue_bound_from_any_start(m: Tensor, size: float):
    truth = float(torch.linalg.eigvalsh(m)[-1]) * size
    assert truth * (1 - 1e-12) <= largest_eigenvalue(m * size, 0.0) <= 1.02 * truth


def test_eigenvalue_bound_of_no_number():
    m = torch.eye(3, dtype=F64)
    for entry in (math.nan, math.inf):
        m[0, 1] = entry
        assert largest_eigenvalue(m, 0.0) == math.inf
