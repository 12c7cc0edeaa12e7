"""Small problems are decomposed, and say so."""

import pytest
import torch

import howsmooth as hs
from howsmooth.spectral import DenseSVD, GolubKahan
from problems.spectra import SPECTRA, Matrix, attention, norm_of, rotated, spectrum

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("shape", [(30, 30), (20, 50), (50, 20), (1, 9), (9, 1), (1, 1)])
@pytest.mark.parametrize("name", SPECTRA)
def test_exact(name: str, shape: tuple[int, int]):
    count = min(shape)
    values = spectrum(name, count) if count > 5 else spectrum(name, 20)[:count]
    operator = rotated(values, *shape, seed=0, batch=3)
    solutions = DenseSVD().solve(operator, 1e-3, None, [0])
    for solution, matrix in zip(solutions, operator.matrix, strict=True):
        sigma = float(torch.linalg.svdvals(matrix)[0])
        # two decompositions of one matrix, each backward stable
        assert solution.value == pytest.approx(sigma, rel=8 * EPS * max(shape) ** 0.5)
        assert sigma <= solution.upper <= sigma * (1 + 1e-12)
        assert float((matrix @ solution.direction).norm()) == pytest.approx(sigma, rel=1e-12)


def test_many_columns_go_in_slices():
    matrix = torch.randn(1, 300, 280, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (solution,) = DenseSVD().solve(Matrix(matrix), 1e-3, None, [0])
    assert solution.value == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-13)


def test_what_it_says_of_itself():
    layer, x = attention(8, 4, seed=0)
    est = hs.lipschitz(layer, x, solver=DenseSVD())
    assert (est.status, est.confidence, est.precision) == ("dense", 1.0, "float64")
    assert est.lower <= est.upper <= est.lower * (1 + 1e-10)
    assert est.steps == 32


@pytest.mark.parametrize(
    ("n", "d", "out", "small"), [(32, 8, 8, True), (2, 128, 1, True), (33, 8, 8, False), (32, 8, 9, False)]
)
def test_chosen_up_to_256_entries(n: int, d: int, out: int, small: bool):
    layer, x = attention(n, d, seed=0, out=out)
    est = hs.lipschitz(layer, x)
    assert (est.status == "dense") == small
    assert (est.confidence == 1.0) == small
    assert hs.lipschitz(layer, x, solver=GolubKahan()).status != "dense"


def test_single_precision_is_decomposed_in_double():
    layer, x = attention(10, 6, seed=0, gain=5.0, dtype=torch.float32)
    est = hs.lipschitz(layer, x)
    truth = norm_of(layer.to(torch.float64), x)
    assert (est.precision, est.direction.dtype) == ("float64", torch.float64)
    assert est.value == pytest.approx(truth, rel=1e-12)
    assert est.lower <= truth * (1 + 1e-14)
    assert truth <= est.upper * (1 + 1e-14)


def test_options_decide_nothing():
    layer, x = attention(6, 4, seed=0)
    plain, other = hs.lipschitz(layer, x), hs.lipschitz(layer, x, tol=0.5, certify=1e-9, seed=3)
    assert (plain.lower, plain.upper) == (other.lower, other.upper)
