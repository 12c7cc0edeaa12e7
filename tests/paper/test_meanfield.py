"""The worst two Diracs, and the limit of many tokens."""

import math

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.paper.meanfield import (
    convergence_table,
    gaussian_convergence,
    two_diracs,
    worst_clusters,
    worst_measure,
    worst_two_diracs,
)

KNOWN = {1.0: 3.069, 1.5: 18.18, 2.0: 165.8, 2.5: 2329, 3.0: 50898, 3.5: 1753671}
ONE = torch.ones(1, 1, dtype=torch.float64)


@pytest.fixture(scope="module")
def rows():
    return [worst_measure(-1.0, radius) for radius in KNOWN]


def test_the_search_reaches_the_known_constants(rows):
    for row in rows:
        assert row.value >= 0.99 * KNOWN[row.radius]
        assert row.value <= 1.001 * KNOWN[row.radius]  # nothing better is known


def test_the_measures_found_have_these_constants(rows):
    attn = hs.Attention.from_matrices(-ONE, ONE)
    for row in rows:
        odds = torch.tensor([row.log_odds, 0.0], dtype=torch.float64)
        measure = hs.Measure(torch.tensor([[row.x], [row.y]], dtype=torch.float64), torch.softmax(odds, 0))
        assert measure.radius <= row.radius * (1 + 1e-12)
        est = hs.lipschitz(attn, measure)
        assert est.value == pytest.approx(row.value, rel=1e-8)
        assert est.split == row.split


def test_bounds_hold_on_both_sides(rows):
    for row in rows:
        assert row.value >= row.B5
        for upper in ("B4", "B8m", "B12m"):
            assert row.value <= getattr(row, upper)


@pytest.mark.parametrize("alpha", [-3.0, -0.25, 0.5, 2.0])
@pytest.mark.parametrize("radius", [0.3, 2.0])
def test_the_search_beats_random_measures(alpha, radius):
    best = worst_two_diracs(alpha, radius)[0]
    random = torch.Generator().manual_seed(0)
    x, y = radius * (2 * torch.rand(2, 20_000, generator=random, dtype=torch.float64) - 1)
    odds = 2 * abs(alpha) * radius**2 * torch.randn(20_000, generator=random, dtype=torch.float64)
    assert float(torch.maximum(*two_diracs(alpha, x, y, odds)).max()) <= best * (1 + 1e-9)


def test_only_the_sign_of_a_number_matters():
    """`A = α` at x is `A = ±1` at `√|α| x`."""
    x, y, odds = torch.randn(3, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    four, one = two_diracs(-4.0, x, y, odds), two_diracs(-1.0, 2 * x, 2 * y, odds)
    assert torch.allclose(four[0], one[0], rtol=1e-12)
    assert torch.allclose(four[1], one[1], rtol=1e-12)


def test_tiny_masses_keep_their_digits():
    one = torch.ones((), dtype=torch.float64)
    far = float(torch.maximum(*two_diracs(-1.0, -20 * one, 20 * one, -800 * one)))
    assert math.isfinite(far)
    assert far > 1e100


def test_convergence_to_the_limit():
    rows = gaussian_convergence(-1.0, 2.0, (8, 32, 128), 3)
    errors = {n: next(r.error for r in rows if r.tokens == "grid" and r.n == n) for n in (8, 32, 128)}
    assert errors[32] < errors[8] / 8
    assert errors[128] < errors[32] / 8
    samples = [r for r in rows if r.tokens == "samples"]
    assert len(samples) == 9
    means = {(row["tokens"], row["n"]): row["mean error"] for row in convergence_table(rows)}
    assert list(means) == [(kind, n) for kind in ("grid", "samples") for n in (8, 32, 128)]
    assert means["grid", 32] == errors[32]
    assert sum(r.error for r in samples if r.n == 128) < sum(r.error for r in samples if r.n == 8)
    for r in rows:
        assert r.value == max(r.moved, r.split)


def test_worst_clusters_grow_until_they_reach_the_limit():
    rows = worst_clusters(-1.0, 1.5, [2, 8, 32, 128, 512, 4096])
    values = [r.value for r in rows]
    assert values == sorted(values)
    assert all(r.value <= r.limit * (1 + 1e-9) for r in rows)
    assert rows[1].value < 0.6 * rows[1].limit
    assert rows[-1].value > 0.999 * rows[-1].limit
    attn = hs.Attention.from_matrices(-ONE, ONE)
    tokens = torch.tensor([[-1.5]] + 7 * [[1.5]]).double()
    assert hs.lipschitz(attn, tokens).value <= rows[1].value * (1 + 1e-12)


@pytest.mark.parametrize(
    "question",
    [
        lambda: worst_measure(-1.0, 0.0),
        lambda: worst_measure(0.0, 1.0),
        lambda: worst_measure(float("nan"), 1.0),
        lambda: worst_clusters(-1.0, 1.0, [1]),
        lambda: gaussian_convergence(-1.0, 1.0, [1, 8], 2),
        lambda: gaussian_convergence(-1.0, 1.0, [], 2),
    ],
)
def test_refused(question):
    with pytest.raises(BadInputError, match=r"^expected [^\n]* got "):
        question()
