"""Top pairs against a dense decomposition: the pairs, what they leave, and the engine they are found with."""

import math

import pytest
import torch
from torch import Tensor

from howsmooth.errors import NoConvergenceError
from howsmooth.spectral import GolubKahan, Operator, TopPairs, Weighted, small, top_pairs
from howsmooth.spectral.dense import SMALL
from howsmooth.spectral.pairs import Deflated, norm_upper
from howsmooth.spectral.ritz import converged, krylov, orthonormal
from howsmooth.spectral.step import block_step, spanned
from problems.spectra import SPECTRA, Matrix, attention, orthogonal, rotated, shuffled, spectrum

EPS = torch.finfo(torch.float64).eps
WIDE, NARROW = SMALL + 4, 60  # too many rows to be decomposed, few enough columns for a quick truth


def check_pairs(operator: Operator, pairs: TopPairs, truth: Tensor) -> None:
    """Orthonormal directions, values that they attain and that no singular value of their number is below, and a sound rest.

    truth: the matrices, (batch, M, N).
    """
    slack = 1e3 * EPS * torch.linalg.svdvals(truth)[:, :1]
    for item in range(operator.batch):
        U, V = (t[:, item].flatten(1) for t in (pairs.left, pairs.right))
        room, value = float(slack[item]), pairs.value[:, item]
        J, one = truth[item], torch.eye(len(V), dtype=torch.float64)
        assert float((V @ V.T - one).abs().max()) < 1e-12
        assert float((U @ U.T - one).abs().max()) < 1e-12
        assert float((J @ V.T - U.T * value).abs().max()) <= room
        assert bool((value[:-1] >= value[1:]).all())
        assert bool((value <= torch.linalg.svdvals(J)[: len(value)] + room).all())
        if pairs.rest is not None:
            left = J - U.T @ (U @ J)
            assert float(torch.linalg.matrix_norm(left - (left @ V.T) @ V, 2)) <= float(pairs.rest[item])


@pytest.mark.parametrize("rows", [40, WIDE])
@pytest.mark.parametrize("name", SPECTRA)
def test_every_spectrum(name: str, rows: int):
    operator = rotated(spectrum(name, min(rows, NARROW)), rows, NARROW, seed=3, batch=2)
    check_pairs(operator, top_pairs(operator, 5, seeds=[0, 1], delta=1e-6), operator.matrix)


def test_the_checker_sees_a_rest_that_is_too_small():
    operator = rotated(spectrum("slow", NARROW), WIDE, NARROW, seed=3)
    pairs = top_pairs(operator, 3, seeds=[0], delta=1e-6)
    assert pairs.rest is not None
    with pytest.raises(AssertionError):
        check_pairs(operator, pairs._replace(rest=0.9 * pairs.rest), operator.matrix)
    with pytest.raises(AssertionError):
        check_pairs(operator, pairs._replace(value=pairs.value * (1 + 1e-9)), operator.matrix)


@pytest.mark.parametrize("shape", [(1, 1), (1, WIDE), (WIDE, 1), (3, WIDE), (WIDE, 3), (7, 5), (WIDE, 90)])
def test_more_pairs_than_there_are(shape: tuple[int, int]):
    least = min(shape)
    operator = rotated(torch.linspace(2, 1, least).double(), *shape, seed=1, batch=2)
    pairs = top_pairs(operator, 12, seeds=[0, 0], delta=1e-6)
    assert pairs.value.shape == (min(12, least), 2)
    check_pairs(operator, pairs, operator.matrix)
    if least <= 12:
        assert torch.allclose(pairs.value, torch.linspace(2, 1, least).double()[:, None].expand(-1, 2), rtol=1e-12)
        assert pairs.rest is not None
        assert float(pairs.rest.max()) < 1e-11


def test_more_pairs_than_the_rank():
    """What the Krylov space of one start cannot hold, copies and the kernel, is found from fresh directions."""
    values = torch.zeros(NARROW, dtype=torch.float64)
    values[:4] = torch.tensor([3.0, 3.0, 3.0, 1.0])
    operator = rotated(values, WIDE, NARROW, seed=5)
    pairs = top_pairs(operator, 6, seeds=[0], delta=1e-6)
    check_pairs(operator, pairs, operator.matrix)
    assert pairs.value[:, 0].tolist() == pytest.approx(values[:6].tolist(), abs=1e-7)


def test_the_zero_matrix():
    operator = Matrix(torch.zeros(1, WIDE, WIDE + 9, dtype=torch.float64))
    pairs = top_pairs(operator, 3, seeds=[0], delta=1e-6)
    check_pairs(operator, pairs, operator.matrix)
    assert pairs.rest is not None
    assert float(pairs.rest) == 0.0


@pytest.mark.parametrize("count", [1, 3])
def test_a_start_that_is_orthogonal_to_the_top(count: int):
    """A start cannot hide the top for good: a random direction begins beside it."""
    right = orthogonal(NARROW, 2)[0]
    operator = Matrix((orthogonal(WIDE, 1)[0, :, :NARROW] * spectrum("isolated", NARROW) @ right.mT)[None])
    start = right[:, [10, 50]].mT[:, None]
    pairs = top_pairs(operator, count, start, seeds=[0], delta=1e-6)
    check_pairs(operator, pairs, operator.matrix)
    assert float(pairs.value[0]) == pytest.approx(1.0, rel=1e-9)
    (one,) = top_pairs(operator, 1, start, seeds=[0], tol=1e-8).value.flatten().tolist()
    assert one == pytest.approx(1.0, rel=1e-8)


def test_a_warm_start_pays():
    """Pairs of a map that has moved a little are better from those before than from nothing, at the same price."""
    operator = rotated(spectrum("flat", 200), WIDE, 200, seed=3)
    before = top_pairs(operator, 3, seeds=[0], tol=1e-10)
    moved = operator.matrix + 1e-5 * rotated(spectrum("flat", 200), WIDE, 200, seed=9).matrix
    warm, cold = (top_pairs(Matrix(moved), 3, start, seeds=[1]) for start in (before.right, None))
    truth = torch.linalg.svdvals(moved[0])[:3]
    assert torch.allclose(warm.value[:, 0], truth, rtol=1e-8)
    assert not torch.allclose(cold.value[:, 0], truth, rtol=1e-3)


@pytest.mark.parametrize("name", ["clustered", "equal", "flat", "slow", "square root"])
def test_to_a_tolerance(name: str):
    """Values that have converged are those of a decomposition; copies may be found by the next pairs alone."""
    values = spectrum(name, NARROW)
    operator = rotated(values, WIDE, NARROW, seed=4)
    start = torch.randn(4, 1, NARROW, generator=torch.Generator().manual_seed(0)).double()
    pairs = top_pairs(operator, 4, start, seeds=[0], tol=1e-7, delta=1e-6)
    check_pairs(operator, pairs, operator.matrix)
    assert torch.allclose(pairs.value[:, 0], values[:4], rtol=1e-9)
    assert pairs.rest is not None
    assert float(pairs.rest) <= 1.05 * float(values[4])


def test_one_pair_to_a_tolerance_is_that_of_golub_kahan():
    operator = rotated(spectrum("slow", NARROW), WIDE, NARROW, seed=4, batch=2)
    pairs = top_pairs(operator, 1, seeds=[7, 8], tol=1e-4)
    for item, solution in enumerate(GolubKahan().solve(operator, 1e-4, None, [7, 8])):
        assert float(pairs.value[0, item]) == pytest.approx(solution.value, rel=1e-12)
        assert torch.allclose(pairs.right[0, item], solution.direction, atol=1e-12)


def test_attention_in_a_batch_and_alone():
    layer, _ = attention(20, 16, seed=2, heads=2, gain=3.0)
    x = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    operator = layer.linearize(x)[1]
    assert not small(operator)
    together = top_pairs(operator, 3, seeds=[0, 1, 2], delta=1e-6)
    check_pairs(operator, together, operator.dense())
    for item in range(3):
        alone = top_pairs(operator.select(torch.tensor([item])), 3, seeds=[item])
        assert torch.allclose(alone.value[:, 0], together.value[:, item], rtol=1e-12)
        (own,) = together.select(torch.tensor([item])).value.T
        assert torch.equal(own, together.value[:, item])
    replaced = together.put(torch.tensor([1]), together.select(torch.tensor([2])))
    assert torch.equal(replaced.value[:, 1], together.value[:, 2])
    assert torch.equal(replaced.right[:, 0], together.right[:, 0])


def test_single_precision():
    operator = rotated(spectrum("slow", NARROW), WIDE, NARROW, seed=4, dtype=torch.float32)
    pairs = top_pairs(operator, 3, seeds=[0], delta=1e-6)
    truth = operator.matrix[0].double()
    U, V = (t[:, 0].double() for t in (pairs.left, pairs.right))
    left = truth - U.T @ (U @ truth)
    assert pairs.value.dtype == torch.float32
    assert torch.allclose(pairs.value[:, 0].double(), torch.linalg.svdvals(truth)[:3], rtol=1e-3)
    assert pairs.rest is not None
    assert float(torch.linalg.matrix_norm(left - (left @ V.T) @ V, 2)) <= float(pairs.rest) <= 1.05 * 4**-0.25


def test_certificates_fail_no_more_often_than_they_may():
    """With one step a rest that hides behind the start is missed with a probability of `δ` at most, and it is missed."""
    trials, missed = 2000, {}
    values = torch.tensor([9.0, 2.0] + [1.0] * 58).double()
    operator = shuffled(values, trials, seed=0)
    first = torch.nn.functional.one_hot(operator.values.argmax(-1), 60)[:, None].double()
    others = Deflated(operator, first, first)
    for delta in (0.5, 1e-6):
        missed[delta] = int((norm_upper(others, GolubKahan(max_steps=1, delta=delta), 1e-3, [0] * trials) < 2.0).sum())
    assert missed[1e-6] == 0
    assert 0 < missed[0.5] <= 0.5 * trials


def test_norms_beyond_the_range_are_infinite():
    operator = rotated(spectrum("slow", 40), 40, 40, seed=0)
    one = torch.ones((), dtype=torch.float64)
    solver = GolubKahan()
    for size in (1e-200, 1e200):
        scaled = Weighted(operator, size * one, one)
        assert size <= float(norm_upper(scaled, solver, 1e-3, [0])) <= 1.01 * size
    assert norm_upper(Weighted(operator, 1e308 * one, 1e10 * one), solver, 1e-3, [0]).tolist() == [math.inf]


@pytest.mark.parametrize("size", [5, WIDE])
def test_what_is_not_finite_is_refused(size: int):
    matrix = torch.eye(size, dtype=torch.float64)[None]
    matrix[0, 0, 0] = math.nan
    with pytest.raises(NoConvergenceError, match="finite"):
        top_pairs(Matrix(matrix), 2, seeds=[0])


def test_products_are_counted(monkeypatch: pytest.MonkeyPatch):
    """24 products with `JᵀJ`, the pairs' own, and at most 32 for the certificate."""
    operator, made = rotated(spectrum("slow", NARROW), WIDE, NARROW, seed=3), {"jvp": 0, "vjp": 0}
    for name in made:
        plain = getattr(Matrix, name)

        def counted(self, v, name=name, plain=plain):
            made[name] += len(v)
            return plain(self, v)

        monkeypatch.setattr(Matrix, name, counted)
    top_pairs(operator, 6, seeds=[0])
    assert made == {"jvp": 24 + 6, "vjp": 24}
    top_pairs(operator, 6, seeds=[0], delta=1e-6)
    assert made["jvp"] <= 2 * 30 + 1 + 32


def test_orthonormal_directions():
    block = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    block[0, 2] = block[0, 0] - 2 * block[0, 1]
    beside = orthonormal(torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    block[1, 1] = beside[1, 0]
    found = orthonormal(block, beside)
    whole = torch.cat([beside, found], 1)
    gone = (whole == 0).all(-1)
    assert gone.nonzero().tolist() == [[0, 4], [1, 3]]
    one = torch.eye(6, dtype=torch.float64) * (~gone).double()[..., None]
    assert torch.allclose(whole @ whole.mT, one, atol=1e-13)
    assert torch.allclose(block - (block @ whole.mT) @ whole, torch.zeros_like(block), atol=1e-12)


def test_krylov_spaces_that_close():
    """Every Ritz pair of a small map is a pair of it, and none is counted twice."""
    spectrum_ = torch.tensor([[5.0, 5.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    start = torch.ones(2, 1, 5, dtype=torch.float64)
    found = krylov(lambda v: spectrum_[:, None] * v, start, products=9, count=5)
    assert torch.allclose(found.values, spectrum_, atol=1e-12)
    assert found.residual(5) < 1e-12
    few = krylov(lambda v: spectrum_[:, None] * v, start, products=9)
    assert bool((few.values[:, 0] <= spectrum_[:, 0] + 1e-12).all())
    assert torch.allclose(few.ahead(1), spectrum_[:, None, :1] * few.vectors[:, :1], atol=1e-12)
    none = krylov(torch.zeros_like, start, products=3)
    assert torch.equal(none.ahead(1), none.vectors[:, :1])


def test_converged_vectors():
    diagonal = torch.linspace(1, 0, 200).double().square()
    start = torch.randn(1, 2, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = converged(lambda v: diagonal * v, start, 12, 1e-9, count=2)
    assert torch.allclose(found.values[0, :2], diagonal[:2], rtol=1e-12)
    assert found.residual(2) <= 1e-9


@pytest.mark.parametrize("times", [1, 4])
def test_block_steps_follow_maps_that_move(times: int):
    """Two maps at once, each with its own rows; the value never exceeds the norm and gets there."""
    operator = rotated(spectrum("slow", 40), 30, 40, seed=3, batch=6)
    J = operator.matrix
    u = torch.randn(6, times, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth, value, gain = torch.linalg.svdvals(J)[:, 0], torch.zeros(6), 1.0
    for _ in range(300):
        turned = block_step(u @ J, lambda v: v @ J.mT)
        assert bool((turned.value >= value * (1 - 1e-12)).all())
        assert bool((turned.value <= truth * (1 + 1e-12)).all())
        u, value, gain = turned.directions, turned.value, float(turned.gain)
    assert torch.allclose(value, truth, rtol=1e-6)
    assert gain < 1e-6


@pytest.mark.parametrize("times", [1, 3])
def test_block_steps_of_what_is_not_finite(times: int):
    pulled = torch.randn(2, times, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pulled[1, 0, 0] = math.inf
    turned = block_step(pulled, lambda v: 2 * v)
    assert float(turned.value[0]) == pytest.approx(2.0)
    assert bool(turned.value[1].isnan())
    assert not bool(turned.directions[1].any())
    assert math.isfinite(float(turned.gain))


def test_a_basis_of_dependent_directions_is_no_longer_than_one():
    block = torch.randn(1, 3, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    block[0, 2] = block[0, 0] + 1e-13 * block[0, 1]
    v, products = spanned(block)
    assert float(torch.linalg.matrix_norm(v[0], 2)) <= 1 + 1e-12
    assert torch.allclose(products, block @ block.mT)
