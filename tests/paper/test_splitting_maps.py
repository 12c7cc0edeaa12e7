"""Where and how often splitting pays."""

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.paper.splitting_maps import frequency, map_table, random_layers, shares, splitting_map


def test_the_map_is_what_splitting_says():
    grids = splitting_map([-1.0, 1.0], [0.5, 0.9], extent=4.0, points=5)
    rows = [cells for grid in grids for cells in grid.cells()]
    assert len(rows) == 2 * 2 * 25
    for row in rows[::7]:
        if row["x"] == row["y"]:
            continue
        attn = hs.Attention.from_matrices(torch.full((1, 1), row["alpha"]).double(), torch.ones(1, 1).double())
        points = torch.tensor([[row["x"]], [row["y"]]], dtype=torch.float64)
        s = hs.splitting(attn, hs.Measure(points, torch.tensor([row["mass"], 1 - row["mass"]], dtype=torch.float64)))
        assert row["gain"] == pytest.approx(s.gain, rel=1e-8)


def test_negative_a_splits_and_positive_a_hardly_does():
    grids = splitting_map([-1.0, 1.0], [0.5, 0.9, 0.99], extent=12.0, points=61)
    largest = {a: max(float(g.gain.max()) for g in grids if g.alpha == a) for a in (-1.0, 1.0)}
    assert largest[-1.0] > 8
    assert largest[1.0] < 1.01
    table = map_table(grids)
    assert [row["case"] for row in table[:2]] == ["A = -1, mass 0.5", "A = -1, mass 0.9"]
    assert max(row["largest gain"] for row in table) == largest[-1.0]
    for row, grid in zip(table, grids, strict=True):
        cells = grid.cells()
        best = max(cells, key=lambda p: p["gain"])
        assert (row["x"], row["y"], row["largest gain"]) == (best["x"], best["y"], best["gain"])
        assert row["pays"] == sum(p["gain"] > 1 for p in cells) == round(grid.row().pays * row["points"])


def test_frequency_counts():
    cases = frequency(random_layers(3, lengths=(2, 5), logits=(1.0, 4.0), width=4, heads=2, seed=1))
    assert len(cases) == 12
    table = shares(cases)
    assert [s.label for s in table] == ["n=2, logits=1", "n=2, logits=4", "n=5, logits=1", "n=5, logits=4"]
    for s in table:
        gains = [c.answer.gain for c in cases if c.label == s.label]
        assert s.share == sum(g > 1 + 1e-9 for g in gains) / 3
        assert s.largest == max(gains)
    for c in cases:
        cells = c.cells()
        assert cells["gain"] == pytest.approx(cells["split"] / cells["moved"])
        assert set(cells) >= {"label", "n", "width", "pays", "certain", "token"}


def test_frequency_takes_any_map_and_measure():
    attn = hs.Attention.from_matrices(-torch.eye(1).double(), torch.eye(1).double())
    mu = hs.Measure(torch.tensor([[0.0], [4.0]]).double(), torch.tensor([15 / 16, 1 / 16]))
    cases = frequency([("a", attn, mu), ("b", attn, torch.ones(3, 1))])
    assert [c.answer.pays for c in cases] == [True, False]


def test_random_layers_have_the_logits_they_say():
    for _, layer, _ in random_layers(1, lengths=(4,), logits=(2.0,), width=64, seed=3):
        x = torch.randn(400, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        assert layer.w_k is not None
        spread = float(((x @ layer.w_q.mT) @ (x @ layer.w_k.mT).mT / 8).std())
        assert spread == pytest.approx(2, rel=0.3)


def test_a_share_of_nothing():
    assert shares([]) == []
    (case,) = frequency([("x", hs.Attention.from_matrices(-torch.eye(1), torch.eye(1)), torch.ones(3, 1))])
    assert shares([case])[0].largest == case.answer.gain


@pytest.mark.parametrize(
    "question",
    [
        lambda: splitting_map([], [0.5]),
        lambda: splitting_map([0.0], [0.5]),
        lambda: splitting_map([1.0], [1.5]),
        lambda: splitting_map([1.0], [0.5], extent=-1.0),
        lambda: splitting_map([1.0], [0.5], points=1),
        lambda: list(random_layers(0)),
        lambda: list(random_layers(1, width=3, heads=2)),
    ],
)
def test_refused(question):
    with pytest.raises(BadInputError, match=r"^expected [^\n]* got "):
        question()
