"""The bound ladder."""

import math

import pytest
import torch

import howsmooth as hs
from howsmooth.paper.ball import crossover, ladder, seen

ATTENTION = hs.Attention.from_matrices(-torch.eye(1).double(), torch.eye(1).double())


@pytest.fixture(scope="module")
def rows():
    return ladder(ATTENTION, 1.5)


@pytest.mark.slow
def test_upper_bounds_never_cross_lower_ones_at_the_same_n(rows):
    for n in {row["n"] for row in rows}:
        upper = min(row["log_value"] for row in rows if row["n"] == n and row["side"] == "upper")
        lower = [r["log_value"] for r in rows if r["n"] == n and r["side"] == "lower" and not r["mean_field"]]
        assert max(lower, default=-1e9) <= upper


def test_crossover_is_where_the_best_upper_bound_stops_growing():
    rows = [{"n": n, "side": "upper", "log_value": min(n, 5.0)} for n in (1, 3, 5, 7, 9)]
    assert crossover(rows) == 5
    assert crossover(rows[:2]) is None


def test_the_square_root_regime_ends_where_theory_says(rows):
    """At `A = −I`, `R = 1.5` the mean-field regime starts near `n = e^{2R²} = 90`."""
    cross = crossover(rows)
    assert cross is not None
    assert 20 <= cross <= 400


@pytest.mark.slow
def test_what_is_seen_lies_below_every_upper_bound_and_grows_like_the_square_root():
    measured = seen(ATTENTION, 3.0)
    rows = ladder(ATTENTION, 3.0, list(measured))
    for n, value in measured.items():
        assert math.log(value) <= min(r["log_value"] for r in rows if r["n"] == n and r["side"] == "upper")
    assert measured[128] / measured[8] == pytest.approx((127 / 7) ** 0.5, rel=0.01)  # far below n = e^{2R²}


def test_rotations_have_no_real_eigenvalue_and_show_nothing():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    assert seen(hs.Attention.from_matrices(turn, torch.eye(2).double()), 1.0) == {}
