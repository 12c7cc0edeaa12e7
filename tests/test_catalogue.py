"""The table of bounds."""

import json
import math

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import HowSmoothError

EYE = torch.eye(2).double()
REPULSIVE = hs.Attention.from_matrices(-EYE, EYE)
TOKENS = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()


def test_ends_enclose_what_is_attained_in_the_ball():
    table = hs.bounds(REPULSIVE, n=32, radius=2.0)
    tokens = torch.cat([torch.tensor([[-2.0, 0.0]]), torch.tensor([[2.0, 0.0]]).repeat(31, 1)]).double()
    attained = hs.lipschitz(REPULSIVE, tokens).value
    assert table.upper is not None
    assert table.lower is not None
    assert (table.lower.log_value or 0) <= (table.upper.log_value or 0)
    assert math.log(attained) <= (table.upper.log_value or 0)
    assert table.lower.id not in {"B5", "B16"}  # those speak of some number of tokens, not of 32


def test_every_upper_bound_at_a_point_is_above_the_measured_constant():
    table = hs.bounds(REPULSIVE, TOKENS)
    assert table.measured == pytest.approx(hs.lipschitz(REPULSIVE, TOKENS).value, rel=1e-9)
    rows = [b for b in table if b.side == "upper" and b.log_value is not None]
    assert rows
    assert min(b.log_value or 0 for b in rows) >= math.log(table.measured or 0)


def test_softmax_alone_is_not_a_bound_on_the_layer():
    assert not hs.bounds(REPULSIVE, TOKENS).by_id("D4").applies


def test_rows_that_do_not_apply_say_why_and_have_no_number():
    for row in hs.bounds(REPULSIVE, n=32, radius=2.0):
        assert (row.value is None) == (row.reason is not None)


def test_huge_radius_has_finite_logarithms_and_json_without_infinity():
    table = hs.bounds(REPULSIVE, n=1024, radius=40.0)
    assert table.by_id("B4").value == math.inf
    assert math.isfinite(table.by_id("B4").log_value or math.inf)
    json.dumps(table.to_dict(), allow_nan=False)
    assert "10^" in str(table)


def test_slices_and_lookups():
    table = hs.bounds(REPULSIVE, n=4, radius=1.0)
    assert len(table[:3]) == 3
    assert table[0] is table.by_id(table[0].id)
    with pytest.raises(HowSmoothError, match="got 'B99'"):
        table.by_id("B99")


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({}, "n=None"),
        ({"n": 4}, "radius=None"),
        ({"n": 4, "radius": -1.0}, "-1"),
        ({"n": 0, "radius": 1.0}, "0"),
        ({"n": 4, "radius": math.nan}, "nan"),
        ({"x": TOKENS, "n": 4}, "both"),
    ],
)
def test_bad_questions(options, got):
    with pytest.raises(HowSmoothError, match="expected") as caught:
        hs.bounds(REPULSIVE, **options)
    assert got in str(caught.value)


def test_only_attention_has_bounds():
    with pytest.raises(HowSmoothError, match="got LayerNorm"):
        hs.bounds(hs.LayerNorm(torch.ones(2)), n=4, radius=1.0)  # pyright: ignore[reportArgumentType]
