"""The bound ladder."""

import math

import pytest
import torch

import howsmooth as hs
from howsmooth.paper.ball import attained, crossover, ladder
from howsmooth.theory import Bound

ATTENTION = hs.Attention.from_matrices(-torch.eye(1).double(), torch.eye(1).double())


@pytest.fixture(scope="module")
def rows():
    return ladder(ATTENTION, 1.5)


@pytest.mark.slow
def test_upper_bounds_never_cross_lower_ones_at_the_same_n(rows):
    for n in {n for n, _ in rows}:
        upper = min(b.log_value for m, b in rows if m == n and b.side == "upper")
        lower = [b.log_value for m, b in rows if m == n and b.side == "lower" and not b.mean_field]
        assert max(lower, default=-1e9) <= upper


def test_crossover_is_where_the_best_upper_bound_stops_growing():
    rows = [(n, Bound("B", "some bound", "upper", min(n, 5.0), "", "", "")) for n in (1, 3, 5, 7, 9)]
    assert crossover(rows) == 5
    assert crossover(rows[:2]) is None


def test_the_square_root_regime_ends_where_theory_says(rows):
    """At `A = −I`, `R = 1.5` the mean-field regime starts near `n = e^{2R²} = 90`."""
    cross = crossover(rows)
    assert cross is not None
    assert 20 <= cross <= 400


@pytest.mark.slow
def test_what_is_attained_lies_below_every_upper_bound_and_grows_like_the_square_root():
    measured = attained(ATTENTION, 3.0)
    rows = ladder(ATTENTION, 3.0, list(measured))
    for n, value in measured.items():
        assert math.log(value) <= min(b.log_value for m, b in rows if m == n and b.side == "upper" and b.log_value is not None)
    assert measured[128] / measured[8] == pytest.approx((127 / 7) ** 0.5, rel=0.01)  # far below n = e^{2R²}


def test_rotations_have_no_real_eigenvalue_and_show_nothing():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    assert attained(hs.Attention.from_matrices(turn, torch.eye(2).double()), 1.0) == {}
