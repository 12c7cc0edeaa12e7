"""The table of bounds."""

import json
import math

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import HowSmoothError
from howsmooth.theory import Bound, ball_bounds, point_bounds

EYE = torch.eye(2).double()
REPULSIVE = hs.Attention.from_matrices(-EYE, EYE)
TOKENS = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()


def log_of(row: Bound | None) -> float:
    assert row is not None
    assert row.log_value is not None, row.reason
    return row.log_value


def test_ends_enclose_what_is_attained_in_the_ball():
    table = hs.bounds(REPULSIVE, n=32, radius=2.0)
    tokens = torch.cat([torch.tensor([[-2.0, 0.0]]), torch.tensor([[2.0, 0.0]]).repeat(31, 1)]).double()
    attained = hs.lipschitz(REPULSIVE, tokens).value
    assert log_of(table.lower) <= log_of(table.upper)
    assert math.log(attained) <= log_of(table.upper)
    assert table.lower is not None
    assert table.lower.id not in {"B5", "B16"}  # those speak of some number of tokens, not of 32


def test_every_upper_bound_at_a_point_is_above_the_measured_constant():
    table = hs.bounds(REPULSIVE, TOKENS)
    assert table.measured == pytest.approx(hs.lipschitz(REPULSIVE, TOKENS).value, rel=1e-9)
    rows = [b for b in table if b.side == "upper" and b.log_value is not None]
    assert rows
    assert table.measured is not None
    assert min(log_of(b) for b in rows) >= math.log(table.measured)


def test_every_row_carries_a_number_somewhere():
    """A row that never does belongs in the documentation."""
    tables = [hs.bounds(REPULSIVE, TOKENS)]
    tables += [hs.bounds(hs.Attention.from_matrices(-EYE, EYE, causal=causal), n=32, radius=2.0) for causal in (False, True)]
    said = {b.id for table in tables for b in table if b.applies}
    assert {b.id for table in tables for b in table} == said


def test_rows_that_do_not_apply_say_why_and_have_no_number():
    for row in hs.bounds(REPULSIVE, n=32, radius=2.0):
        assert (row.value is None) == (row.reason is not None)


def test_huge_radius_has_finite_logarithms_and_json_without_infinity():
    table = hs.bounds(REPULSIVE, n=1024, radius=40.0)
    assert table.by_id("B4").value == math.inf
    assert math.isfinite(log_of(table.by_id("B4")))
    json.dumps(table.to_dict(), allow_nan=False)
    assert "10^" in str(table)


def test_slices_and_lookups():
    table = hs.bounds(REPULSIVE, n=4, radius=1.0)
    assert len(table[:3]) == 3
    assert table[0] is table.by_id(table[0].id)
    with pytest.raises(HowSmoothError, match="got 'B99'"):
        table.by_id("B99")
    with pytest.raises(HowSmoothError, match="got Tensor"):
        table.by_id(torch.ones(2))  # pyright: ignore[reportArgumentType]


def test_products_are_exact_whatever_torch_was_told(monkeypatch):
    """A bound from operands of eleven bits could be below what it bounds; the setting matters on a GPU alone."""
    seen, norm = set(), torch.linalg.matrix_norm
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.linalg, "matrix_norm", lambda *a, **k: seen.add(torch.get_float32_matmul_precision()) or norm(*a, **k)
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        point_bounds(REPULSIVE, TOKENS)
        ball_bounds(REPULSIVE, 4, 1.0)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"highest"}


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
