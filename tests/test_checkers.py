"""Every check must fail on a wrong answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

import checks
import howsmooth as hs
from howsmooth.kernels.base import Tile
from howsmooth.spectral import Operator, inner
from howsmooth.theory.around import Around, AroundAttention, Neighbourhood
from problems import neighbourhoods
from problems.spectra import Matrix
from shapes import shapes_checked

MATRIX = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Product = Callable[[Tensor], Tensor]


class Wrong(Operator):
    """A right operator with one method replaced."""

    def __init__(self, matrix: Tensor, **replaced: Callable):
        self._right, self._replaced = Matrix(matrix), replaced
        self.batch, self.in_shape, self.out_shape = self._right.batch, self._right.in_shape, self._right.out_shape
        self.dtype, self.device = matrix.dtype, matrix.device

    def jvp(self, v):
        return self._replaced.get("jvp", self._right.jvp)(v)

    def vjp(self, u):
        return self._replaced.get("vjp", self._right.vjp)(u)

    def gram(self, v):
        return self._replaced.get("gram", super().gram)(v)

    def select(self, items):
        return self._replaced.get("select", self._right.select)(items)


def times(factor: float | Tensor) -> Product:
    return lambda v: factor * Matrix(MATRIX).jvp(v)


def poisoned(v: Tensor) -> Tensor:
    out = Matrix(MATRIX).jvp(v)
    out[0, -1, 0] = torch.nan
    return out


def mixes_probes(v: Tensor) -> Tensor:
    out = Matrix(MATRIX).jvp(v)
    return out + 1e-6 * out.mean(0)


def writes_into_its_argument(v: Tensor) -> Tensor:
    return Matrix(MATRIX).jvp(v.mul_(2)).div_(2)


def gram(product: float = 1.0, energy: float = 1.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def compute(v):
        p, e = Operator.gram(Matrix(MATRIX), v)
        return product * p, energy * e

    return compute


WRONG_PRODUCTS = {
    "sign": times(-1.0),
    "scale": times(1 + 1e-9),
    "nan": poisoned,
    "transposed": lambda v: torch.einsum("bij,pbj->pbi", MATRIX[:, :, :4].mT, v[..., :4])[..., :4],
    "shape": lambda v: Matrix(MATRIX).jvp(v)[..., None],
    "items swapped": lambda v: Matrix(MATRIX).jvp(v).flip(1),
}


def test_a_right_operator_passes():
    checks.check_operator(Wrong(MATRIX), MATRIX)
    checks.check_batch_equals_loop(Matrix, MATRIX)
    checks.check_operator(Wrong(MATRIX.float()), MATRIX)


@pytest.mark.parametrize("name", WRONG_PRODUCTS)
def test_check_dense_fails(name):
    with pytest.raises(AssertionError):
        checks.check_dense(Wrong(MATRIX, jvp=WRONG_PRODUCTS[name]), MATRIX)


def test_check_dense_looks_at_the_product_that_dense_does_not_take():
    wrong = Wrong(MATRIX, jvp=times(-1.0))
    assert torch.equal(wrong.dense(), MATRIX)  # more columns than rows: dense takes vjp
    with pytest.raises(AssertionError, match="error"):
        checks.check_dense(wrong, MATRIX)


@pytest.mark.parametrize("name", WRONG_PRODUCTS)
def test_check_adjoint_fails(name):
    with pytest.raises(AssertionError):
        checks.check_adjoint(Wrong(MATRIX, jvp=WRONG_PRODUCTS[name]))


def test_check_adjoint_fails_on_a_wrong_vjp():
    with pytest.raises(AssertionError):
        checks.check_adjoint(Wrong(MATRIX, vjp=lambda u: torch.einsum("bij,pbi->pbj", MATRIX.flip(0), u)))


@pytest.mark.parametrize("product", [mixes_probes, writes_into_its_argument])
def test_check_probes_fails(product):
    with pytest.raises(AssertionError):
        checks.check_probes_equal_loop(Wrong(MATRIX, jvp=product))


@pytest.mark.parametrize("factors", [(1 + 1e-9, 1.0), (1.0, 1 + 1e-9), (torch.nan, 1.0), (1.0, -1.0)])
def test_check_gram_fails(factors):
    with pytest.raises(AssertionError):
        checks.check_gram(Wrong(MATRIX, gram=gram(*factors)))


@pytest.mark.parametrize(
    "select",
    [
        lambda items: Matrix(MATRIX[items.flip(0)]),
        lambda items: Matrix(MATRIX[: len(items)]),
        lambda items: Matrix(MATRIX),
        lambda items: Wrong(MATRIX[items], select=lambda again: Matrix(MATRIX[again])),
    ],
    ids=["order", "first ones", "all", "the second time"],
)
def test_check_select_fails(select):
    with pytest.raises(AssertionError):
        checks.check_select(Wrong(MATRIX, select=select))


@pytest.mark.parametrize(
    "build",
    [
        lambda x: Matrix(x - x.mean(0)),
        lambda x: Matrix(x.flip(0)),
        lambda x: Matrix(x[:1]),
    ],
    ids=["mixed", "swapped", "one item"],
)
def test_check_batch_equals_loop_fails(build):
    with pytest.raises(AssertionError):
        checks.check_batch_equals_loop(build, MATRIX)


@pytest.mark.parametrize(
    "spoil",
    [torch.neg, lambda t: t.mT, lambda t: t * torch.nan, lambda t: t + 1e-12],
    ids=["sign", "transposed", "nan", "shifted"],
)
def test_check_operator_fails(spoil):
    with pytest.raises(AssertionError):
        checks.check_operator(Matrix(MATRIX), spoil(MATRIX))


@pytest.mark.parametrize(
    ("actual", "truth"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0])),
        (torch.tensor([torch.nan]), torch.tensor([1.0])),
        (torch.tensor([torch.inf]), torch.tensor([torch.inf])),
        (torch.tensor([1.0001]), torch.tensor([1.0])),
        (torch.tensor([1e-30]), torch.tensor([0.0])),
    ],
    ids=["shape", "nan", "both infinite", "far", "not zero"],
)
def test_assert_close_fails(actual, truth):
    with pytest.raises(AssertionError):
        checks.assert_close(actual, truth)


def test_assert_close_asks_more_of_double():
    one = torch.ones(1, dtype=torch.float64)
    checks.assert_close(one + 1e-7, one, torch.float32)
    with pytest.raises(AssertionError, match="allowed"):
        checks.assert_close(one + 1e-7, one)


def test_tolerance_is_far_below_any_bug():
    assert checks.tolerance(torch.float64, 10**6) < 1e-11
    assert checks.tolerance(torch.float32, 10**4) < 1e-3


@pytest.mark.slow
def test_jacobians_refuses_a_mixing_function():
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(checks.jacobians(lambda t: 2 * t, x), 2 * torch.eye(3).double().expand(2, -1, -1))
    with pytest.raises(AssertionError, match="mixes"):
        checks.jacobians(lambda t: t + t.flip(0), x)


def test_shapes_are_checked_inside_the_contract():
    with shapes_checked(), pytest.raises(TypeCheckError):
        inner(torch.zeros(2, 1, 3), torch.zeros(2, 2, 3))
    wrong: Any = None
    assert Tile(wrong, slice(1), False).rows is None  # outside
    with shapes_checked(), pytest.raises(TypeCheckError):
        Tile(wrong, slice(1), False)


@pytest.mark.parametrize("spoiled", ["slope", "change", "moved", "moved_total", "rest"])
@pytest.mark.parametrize("factor", [0.5, torch.nan])
def test_a_wrong_bound_around_an_input_is_refuted(spoiled: str, factor: float):
    bound = Around(2.0, 1.0, torch.full((2,), 0.5), 0.75, "a bound", rest=0.25)
    truth = 2.0, 1.0, torch.full((2,), 0.5), 0.25, 0.0  # of a point that reaches them
    assert not neighbourhoods.refuted(bound, *truth)
    wrong = replace(bound, **{spoiled: factor * getattr(bound, spoiled)})
    assert any(why.startswith(spoiled) for why in neighbourhoods.refuted(wrong, *truth))


def test_a_lower_end_that_is_not_attained_is_refuted():
    case = neighbourhoods.near(0)
    found = hs.lipschitz(case.layer, case.area.point, within=case.within, per=case.per, tokens=case.tokens, steps=0)
    assert found.point is not None
    (truth,) = neighbourhoods.truths(case, [found.point])
    assert truth is not None
    assert not neighbourhoods.not_attained(found, case, truth[0])
    assert neighbourhoods.not_attained(replace(found, lower=1.01 * found.lower), case, truth[0])
    outside = case.area.point + 3 * case.area.radii[:, None] * torch.ones_like(case.area.point)
    assert neighbourhoods.not_attained(replace(found, point=outside), case, truth[0])


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", ["slope", "change", "moved_total"])
def test_looking_into_neighbourhoods_finds_a_bound_that_is_too_small(spoiled: str, monkeypatch: pytest.MonkeyPatch):
    within = AroundAttention.within

    def smaller(self: AroundAttention, area: Neighbourhood) -> Around:
        bound = within(self, area)
        return replace(bound, **{spoiled: 0.9 * getattr(bound, spoiled)})

    looked = neighbourhoods.Looked()
    monkeypatch.setattr(AroundAttention, "within", smaller)
    for seed in range(1000, 1020):
        neighbourhoods.examine(neighbourhoods.near(seed), looked)
        if any(why.startswith(spoiled) for why in looked.wrong):
            return
    pytest.fail(f"no {spoiled} that is too small was found")
