"""Measures: what they keep, drop, split and merge, and what they refuse."""

import math
from dataclasses import replace

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.measures import Gaussian
from problems.layers import gaussian

X = gaussian(5, 2, seed=0)
NAN, INF = float("nan"), float("inf")


def test_weights_are_equal_unless_given():
    assert hs.Measure(X).mass.tolist() == pytest.approx([0.2] * 5)
    assert hs.Measure(X.float(), torch.full((5,), 0.2)).mass.dtype == torch.float64


def test_atoms_without_mass_are_dropped():
    mu = hs.Measure(X, torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25]), torch.linspace(0, 1, 5))
    assert len(mu) == 3
    assert torch.equal(mu.points, X[[0, 2, 4]])
    assert mu.positions is not None
    assert mu.positions.tolist() == [0.0, 0.5, 1.0]


def test_atoms_are_put_in_the_order_of_their_positions():
    mu = hs.Measure(X, torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]).double(), torch.tensor([0.5, 0.0, 0.5, 1.0, 0.25]))
    assert mu.positions is not None
    assert mu.positions.tolist() == [0.0, 0.25, 0.5, 0.5, 1.0]
    assert torch.equal(mu.points, X[[1, 4, 0, 2, 3]])
    assert mu.ends().tolist() == [1, 2, 4, 4, 5]


def test_tokens_have_positions_when_masked():
    assert hs.Measure.from_tokens(X).positions is None
    positions = hs.Measure.from_tokens(X, causal=True).positions
    assert positions is not None
    assert positions.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("atom", [None, 0, 3])
@pytest.mark.parametrize("placed", [False, True])
def test_merging_undoes_splitting(parts, atom, placed):
    mu = hs.Measure(X, torch.softmax(gaussian(5, seed=1), 0), torch.linspace(0, 1, 5) if placed else None)
    longer = mu.split(atom, parts)
    assert len(longer) == 5 + (parts - 1) * (5 if atom is None else 1)
    again = longer.merge()
    assert torch.equal(again.points, mu.points)
    assert again.mass.tolist() == pytest.approx(mu.mass.tolist(), rel=1e-14)
    assert hs.wasserstein(longer, mu).upper == pytest.approx(0, abs=1e-7)


def test_atoms_at_other_positions_are_not_merged():
    same = X[[0, 0, 0]]
    assert len(hs.Measure(same).merge()) == 1
    assert len(hs.Measure(same, None, torch.tensor([0.0, 0.5, 0.5])).merge()) == 2
    assert len(hs.Measure(same, None, torch.tensor([0.0, 0.5, 0.5])).merge(0.1)) == 2


def test_merging_near_atoms_keeps_their_centre():
    mu = hs.Measure(torch.tensor([[0.0], [0.1], [0.2], [5.0]]), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    near = mu.merge(0.11)
    assert near.mass.tolist() == pytest.approx([0.6, 0.4])
    assert near.points[0].item() == pytest.approx((0.2 * 0.1 + 0.3 * 0.2) / 0.6)
    assert near.mean.tolist() == pytest.approx(mu.mean.tolist())
    assert len(mu.merge(0.05)) == 4


def test_samples_that_are_equal_are_one_atom():
    mu = hs.Measure(X[[0, 1, 0, 0]]).merge()
    assert mu.mass.tolist() == pytest.approx([0.75, 0.25])


def test_density_on_a_grid():
    axes = [torch.linspace(-7, 9, 81).double(), torch.linspace(-7, 9, 51).double()]
    mu = hs.Measure.from_density(lambda x: torch.exp(-((x - 1) ** 2).sum(-1) / 2), axes)
    assert len(mu) == 81 * 51
    assert mu.mean.tolist() == pytest.approx([1, 1], abs=1e-6)
    assert float(mu.mass @ (mu.points[:, 0] - 1) ** 2) == pytest.approx(1, abs=1e-5)


def test_density_on_an_uneven_grid_counts_the_width_of_cells():
    axis = torch.cat([torch.linspace(0, 0.1, 50)[:-1], torch.linspace(0.1, 1, 50)]).double()
    mu = hs.Measure.from_density(lambda x: torch.ones(len(x)), [axis])
    assert float(mu.mean) == pytest.approx(0.5, abs=1e-9)


def test_small_things():
    mu = hs.Measure(3 * X / X.norm(dim=-1, keepdim=True))
    assert mu.radius == pytest.approx(3)
    assert mu.width == 2
    assert repr(mu) == "Measure(5 atoms in R^2)"
    assert repr(hs.Measure.from_tokens(X, causal=True)) == "Measure(5 atoms in R^2, with positions)"
    assert repr(Gaussian(X[0], torch.eye(2))) == "Gaussian(in R^2)"
    for one in (mu, Gaussian(X[0], torch.eye(2))):
        assert (one == one) is True
        assert (one == replace(one)) is False


@pytest.mark.parametrize("args", [(torch.float32,), ("cpu", torch.float32), (None, torch.float32)], ids=str)
def test_moved_as_a_tensor_is(args):
    mu = hs.Measure.from_tokens(X.double(), causal=True).to(*args)
    assert mu.points.dtype == torch.float32
    assert mu.mass.dtype == torch.float64
    assert mu.to("cpu").points.dtype == torch.float32
    assert mu.to(dtype=torch.float64, device=torch.device("cpu")).points.dtype == torch.float64


ONE = torch.full((5,), 0.2).double()
PLACED, NORMAL = hs.Measure.from_tokens(X, causal=True), Gaussian(X[0], torch.eye(2))
BAD = {
    "no such place": lambda: hs.Measure(X).to("attic"),
    "a whole precision": lambda: hs.Measure(X).to(torch.int64),
    "negative weight": lambda: hs.Measure(X, torch.tensor([1.2, -0.2, 0.0, 0.0, 0.0])),
    "nan weight": lambda: hs.Measure(X, torch.tensor([NAN, 1.0, 0.0, 0.0, 0.0])),
    "infinite weight": lambda: hs.Measure(X, torch.tensor([INF, 1.0, 0.0, 0.0, 0.0])),
    "too much": lambda: hs.Measure(X, 1.3 * ONE),
    "too little": lambda: hs.Measure(X, (1 - 1e-5) * ONE),
    "no mass": lambda: hs.Measure(X, 0 * ONE),
    "weights of another length": lambda: hs.Measure(X, ONE[:4]),
    "integer weights": lambda: hs.Measure(X, torch.ones(5).long()),
    "weights as a list": lambda: hs.Measure(X, [0.2] * 5),  # pyright: ignore[reportArgumentType]
    "no atoms": lambda: hs.Measure(X[:0]),
    "no dimension": lambda: hs.Measure(X[:, :0]),
    "a vector of points": lambda: hs.Measure(X[0]),
    "integer points": lambda: hs.Measure(X.long()),
    "points as a list": lambda: hs.Measure([[0.0]]),  # pyright: ignore[reportArgumentType]
    "nan point": lambda: hs.Measure(X * NAN),
    "position above 1": lambda: hs.Measure(X, None, torch.linspace(0, 1.1, 5)),
    "negative position": lambda: hs.Measure(X, None, torch.linspace(-0.1, 1, 5)),
    "nan position": lambda: hs.Measure(X, None, torch.full((5,), NAN)),
    "positions of another length": lambda: hs.Measure(X, None, torch.linspace(0, 1, 4)),
    "integer positions": lambda: hs.Measure(X, None, torch.arange(5)),
    "ends without positions": lambda: hs.Measure(X).ends(),
    "other number of points": lambda: hs.Measure(X).moved(X[:3]),
    "no parts": lambda: hs.Measure(X).split(parts=0),
    "no such atom": lambda: hs.Measure(X).split(5),
    "negative tol": lambda: hs.Measure(X).merge(-1.0),
    "nan tol": lambda: hs.Measure(X).merge(NAN),
    "no axes": lambda: hs.Measure.from_density(lambda x: x[:, 0], []),
    "a falling axis": lambda: hs.Measure.from_density(lambda x: x[:, 0], [torch.linspace(1, 0, 5)]),
    "a negative density": lambda: hs.Measure.from_density(lambda x: -x[:, 0], [torch.linspace(0, 1, 5)]),
    "a density of zero": lambda: hs.Measure.from_density(lambda x: 0 * x[:, 0], [torch.linspace(0, 1, 5)]),
    "a density of other shape": lambda: hs.Measure.from_density(lambda x: x, [torch.linspace(0, 1, 5)]),
    "p below one": lambda: hs.wasserstein(hs.Measure(X), hs.Measure(X), p=0.5),
    "infinite p": lambda: hs.wasserstein(hs.Measure(X), hs.Measure(X), p=INF),
    "tokens for a measure": lambda: hs.wasserstein(X, X),  # pyright: ignore[reportArgumentType]
    "other dimensions": lambda: hs.wasserstein(hs.Measure(X), hs.Measure(X[:, :1])),
    "positions on one side": lambda: hs.wasserstein(hs.Measure(X), hs.Measure.from_tokens(X, causal=True)),
    "no such method": lambda: hs.wasserstein(hs.Measure(X), hs.Measure(X), method="best"),  # pyright: ignore[reportArgumentType]
    "a line in the plane": lambda: hs.wasserstein(hs.Measure(X), hs.Measure(X), method="line"),
    "conditional without positions": lambda: hs.wasserstein(hs.Measure(X), hs.Measure(X), method="conditional"),
    "exact with positions": lambda: hs.wasserstein(PLACED, PLACED, method="exact"),
    "Gaussians, p = 1": lambda: hs.wasserstein(NORMAL, NORMAL, p=1),
    "Gaussians of other dimensions": lambda: hs.wasserstein(Gaussian(X[0], torch.eye(2)), Gaussian(X[0, :1], torch.eye(1))),
    "covariance not symmetric": lambda: Gaussian(X[0], torch.tensor([[1.0, 1.0], [0.0, 1.0]])),
    "negative covariance": lambda: Gaussian(X[0], -torch.eye(2)),
    "covariance of other shape": lambda: Gaussian(X[0], torch.eye(3)),
    "nan covariance": lambda: Gaussian(X[0], NAN * torch.eye(2)),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_in_one_sentence(name):
    with pytest.raises(BadInputError, match=r"^expected [^\n]* got [^\n]*[^.]$") as caught:
        BAD[name]()
    assert len(str(caught.value)) < 250


def test_a_wrong_sum_says_by_how_much():
    with pytest.raises(BadInputError, match=r"got 1\.3\d*, 0\.3 too much"):
        BAD["too much"]()
    with pytest.raises(BadInputError, match=r"9.99e-06 too little"):
        BAD["too little"]()


def test_rounded_weights_are_accepted_and_made_exact():
    for m in (3, 1000, 100_000):
        w = torch.softmax(gaussian(m, seed=m), 0).float()
        mu = hs.Measure(gaussian(m, 1, seed=0), w)
        assert math.fsum(mu.mass.tolist()) == pytest.approx(1, abs=1e-15)
