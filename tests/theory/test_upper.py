"""Upper bounds as a type: every operation is at least the exact result, and NaN is never a small number."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.theory.upper import Upper

SIZES = st.floats(0, 1e150, allow_nan=False)
WHOLE = st.lists(SIZES, min_size=1, max_size=9)


def exact(x: float) -> Fraction:
    return Fraction(x)


@given(SIZES, SIZES)
def test_results_are_no_smaller_than_exact_ones(a: float, b: float):
    for one in (Upper(a), Upper(torch.tensor([a], dtype=torch.float64))):
        assert exact(float(one + b)) >= exact(a) + exact(b)
        assert exact(float(one * b)) >= exact(a) * exact(b)
        assert exact(float(one.sqrt())) ** 2 >= exact(a)
        assert float(one.max(b)) == max(a, b)
        assert float(one.min(b)) == min(a, b)
        if b > 0 and math.isfinite(quotient := float(one / b)):
            assert exact(quotient) * exact(b) >= exact(a)


@given(WHOLE)
def test_sums_and_lengths_are_no_smaller_than_exact_ones(entries: list[float]):
    one = Upper(torch.tensor(entries, dtype=torch.float64))
    assert exact(float(one.sum())) >= sum(map(exact, entries))
    assert exact(float(one.length())) ** 2 >= sum(exact(x) ** 2 for x in entries)
    assert exact(float(one @ one)) >= sum(exact(x) ** 2 for x in entries) or float(one @ one) == math.inf


@given(SIZES, SIZES)
def test_results_are_within_a_few_units(a: float, b: float):
    for found, true in ((Upper(a) + b, a + b), (Upper(a) * b, a * b), (Upper(a).sqrt(), math.sqrt(a))):
        assert true <= found.value <= true * (1 + 1e-15) + 1e-320


@pytest.mark.parametrize("as_tensor", [False, True])
def test_no_number_is_infinity(as_tensor: bool):
    def bound(x: float) -> Upper:
        return Upper(torch.tensor(x, dtype=torch.float64) if as_tensor else x)

    for wrong in (math.nan, -1.0):
        for found in (bound(wrong), bound(1.0) + wrong, bound(1.0) * wrong, bound(1.0).max(wrong), bound(wrong).sqrt()):
            assert float(found) == math.inf
        assert float(bound(1.0) / wrong) == math.inf
    assert float(bound(1e300) * 1e300) == math.inf
    assert float(bound(0.0) / 0.0) == math.inf


def test_a_proved_zero_stays_and_an_underflow_is_none():
    for zero in (Upper(0.0), Upper(torch.zeros(2, dtype=torch.float64)).amax()):
        assert float(zero * math.inf) == float(zero + 0.0) == float(zero.sqrt()) == float(zero / 2.0) == 0
    assert float(Upper(1e-200) * 1e-200) > 0
    assert float(Upper(torch.tensor([1e-200], dtype=torch.float64)) @ torch.tensor([1e-200], dtype=torch.float64)) > 0


def test_sides_and_shapes():
    m = torch.rand(3, 4, dtype=torch.float64)
    one = Upper(m)
    assert bool(((2.0 + one).value > m + 2).all())
    assert bool(((m * one).value > m * m).all())
    assert (one @ m.mT).value.shape == (3, 3)
    assert one[None, 1:].map(lambda t: t.mT).value.shape == (1, 4, 2)
    assert one.sum((0, 1)).value.shape == ()
    assert one[:, :0].amax().value.tolist() == [0, 0, 0]
    assert repr(Upper(1.0)) == "Upper(1.0)"
