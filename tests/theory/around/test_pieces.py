"""Pieces around an input: derivatives are right, remainders hold, and are not far too large."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from howsmooth.maps.scalars import SCALARS, Scalar, known_scalar
from howsmooth.theory.around.pieces import NormAround, softmax_remainder
from howsmooth.theory.upper import Upper

RANDOM = torch.Generator().manual_seed(0)


def _numbers(scalar: Scalar) -> Tensor:
    z = torch.linspace(-6.03, 6.01, 301, dtype=torch.float64)
    return z.abs() + 0.05 if scalar.domain == 0.0 else z


def _violations(scalar: Scalar) -> int:
    """Points at which a remainder or a change of slope is above its bound."""
    z, wrong = _numbers(scalar), 0
    for moved in (1e-6, 1e-3, 0.1, 1.0, 5.0):
        most = torch.minimum(torch.full_like(z, moved), 0.99 * z) if scalar.domain == 0.0 else torch.full_like(z, moved)
        low, high = scalar.remainder(z, most)
        turn = scalar.slope_change(z, most)
        for share in torch.linspace(-1, 1, 41, dtype=torch.float64):
            t = share * most
            rest = scalar.value(z + t) - scalar.value(z) - scalar.slope(z) * t
            room = 1e-13 * (1 + scalar.value(z + t).abs() + scalar.value(z).abs() + (scalar.slope(z) * t).abs())
            wrong += int(((rest < low - room) | (rest > high + room)).sum())
            wrong += int(((scalar.slope(z + t) - scalar.slope(z)).abs() > turn + 1e-12 * (1 + scalar.slope(z).abs())).sum())
    return wrong


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: s.name)
def test_scalar(scalar: Scalar):
    z = _numbers(scalar)
    slope = torch.func.vmap(torch.func.grad(scalar.value))(z)
    assert torch.allclose(slope, scalar.slope(z), rtol=1e-9, atol=1e-12)
    if scalar.kink is None:
        assert torch.allclose(torch.func.vmap(torch.func.grad(scalar.slope))(z), scalar.second(z), rtol=1e-8, atol=1e-12)
    assert _violations(scalar) == 0
    assert known_scalar(scalar.value) is scalar


def test_scalar_checker_fails_on_a_wrong_bound():
    tanh = next(s for s in SCALARS if s.name == "tanh")
    assert _violations(replace(tanh, bends=())) > 0
    assert _violations(replace(tanh, second=lambda x: 0.5 * tanh.second(x))) > 0


def test_the_third_derivative_of_the_tanh_form_of_gelu():
    """Its bound, between the points of a grid: what the fourth derivative can add is below what is left."""
    scalar = next(s for s in SCALARS if s.name == "tanh gelu")
    x = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    third = torch.func.vmap(torch.func.grad(scalar.second))(x).abs().max()
    fourth = torch.func.vmap(torch.func.grad(torch.func.grad(scalar.second)))(x).abs().max()
    assert third + 2 * fourth * 0.5e-3 < scalar.third


def test_unknown_scalars_stay_unknown():
    assert known_scalar(lambda x: torch.sin(x)) is None
    assert known_scalar(lambda x: x.sum()[None]) is None


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_norm(centred: bool, eps: float):
    d = 5

    def norm(t: Tensor) -> Tensor:
        u = t - t.mean(-1, keepdim=True) if centred else t
        return u / (u.square().mean(-1, keepdim=True) + eps).sqrt()

    best = 0.0
    for _ in range(60):
        x = torch.randn(d, generator=RANDOM, dtype=torch.float64)
        step = torch.randn(d, generator=RANDOM, dtype=torch.float64)
        step *= 10.0 ** -float(4 * torch.rand(1, generator=RANDOM)) / step.norm()
        u = x - x.mean() if centred else x
        scale, moved = (u.square().mean() + eps).sqrt(), step.norm()
        at, there = (torch.func.jacrev(norm)(t) for t in (x, x + step))
        rest = (norm(x + step) - norm(x) - at @ step).norm()
        around = NormAround(scale * (1 - 1e-15), Upper(moved), d, eps)
        bound = around.remainder.value
        assert rest <= bound + 1e-12
        assert torch.linalg.matrix_norm(there - at, 2) <= around.change.value + 1e-12
        assert torch.linalg.matrix_norm(there, 2) <= around.slope.value * (1 + 1e-12)
        best = max(best, float(rest / bound))
    assert best > 0.3  # not far too large


def test_softmax():
    best = 0.0
    for _ in range(60):
        n = int(torch.randint(1, 6, (1,), generator=RANDOM))
        logits = 4 * torch.randn(n, generator=RANDOM, dtype=torch.float64)
        moved = 10.0 ** (1.5 - 4 * torch.rand(n, generator=RANDOM, dtype=torch.float64))
        weights = torch.softmax(logits, -1)
        low, high, apart = softmax_remainder(weights, Upper(moved), -1)
        for _ in range(20):
            delta = moved * (2 * torch.rand(n, generator=RANDOM, dtype=torch.float64) - 1).sign()
            centre = (weights * delta).sum()
            delta = (delta - centre) * (moved / (delta - centre).abs().clamp_min(1e-300)).clamp_max(1).min()
            after = torch.softmax(logits + delta, -1)
            rest = after - weights - weights * (delta - (weights * delta).sum())
            assert bool((rest <= high + 1e-12).all())
            assert bool((rest >= low - 1e-12).all())
            assert bool(((after - weights).abs() <= apart.value + 1e-12).all())
            best = max(best, float((rest / high.clamp_min(1e-9)).max()))
    assert best > 0.3


def test_softmax_far_away_is_no_promise():
    weights = torch.tensor([0.2, 0.8, 0.0], dtype=torch.float64)
    low, high, apart = softmax_remainder(weights, Upper(torch.tensor([1e9, 1e9, 0.0], dtype=torch.float64)), -1)
    assert bool((apart.value[:2] >= 0.79).all())
    assert float(high[2]) < 1e-12
    assert math.isfinite(float(low.sum()))
