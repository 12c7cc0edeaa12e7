"""Operators made of operators, against the matrices they stand for."""

from typing import final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks import assert_close, check_batch_equals_loop, check_operator
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, AutodiffJacobian
from howsmooth.spectral import Composed, Operator, Weighted, inner
from howsmooth.spectral.operator import Restricted, Selected
from howsmooth.spectral.pairs import Deflated
from problems.layers import gaussian
from problems.spectra import Matrix

sizes = st.integers(1, 6)


@given(st.integers(1, 4), sizes, sizes)
def test_matrix(batch, rows, cols):
    matrix = gaussian(batch, rows, cols, seed=rows)
    check_operator(Matrix(matrix), matrix)
    check_batch_equals_loop(Matrix, matrix)


@given(st.integers(1, 3), sizes, sizes, sizes)
def test_composed(batch, a, b, c):
    outer, inside = gaussian(batch, a, b, seed=a), gaussian(batch, b, c, seed=c + 7)
    check_operator(
        Composed(Matrix(outer), Matrix(inside)), outer @ inside, growth=10, scale=float(outer.norm() * inside.norm())
    )


def test_composed_three_deep():
    a, b, c = gaussian(2, 3, 4, seed=1), gaussian(2, 4, 5, seed=2), gaussian(2, 5, 2, seed=3)
    check_operator(Composed(Matrix(a), Composed(Matrix(b), Matrix(c))), a @ b @ c, growth=10)
    check_operator(Composed(Composed(Matrix(a), Matrix(b)), Matrix(c)), a @ b @ c, growth=10)


class Guessing(Operator):
    """A matrix with a guess."""

    def __init__(self, matrix: torch.Tensor, guess: torch.Tensor):
        self._matrix, self._guess = Matrix(matrix), guess
        self.batch, self.in_shape, self.out_shape = self._matrix.batch, self._matrix.in_shape, self._matrix.out_shape
        self.dtype, self.device = matrix.dtype, matrix.device

    def jvp(self, v):
        return self._matrix.jvp(v)

    def vjp(self, u):
        return self._matrix.vjp(u)

    def guess(self, seeds):
        return self._guess


@final
class Coarse(Operator):
    """A matrix whose products are coarse until they are refined."""

    def __init__(self, matrix: torch.Tensor, coarse: bool = True):
        self._matrix, self._coarse = Matrix(matrix), coarse
        self.batch, self.in_shape, self.out_shape = self._matrix.batch, self._matrix.in_shape, self._matrix.out_shape
        self.dtype, self.device = self._matrix.dtype, self._matrix.device

    @property
    def noise(self) -> float:
        return 0.01 if self._coarse else 1e-6

    @property
    def heavy(self) -> bool:
        return True

    def refined(self):
        return Coarse(self._matrix.matrix, coarse=False) if self._coarse else None

    def jvp(self, v):
        return self._matrix.jvp(v)

    def vjp(self, u):
        return self._matrix.vjp(u)


@pytest.mark.parametrize("name", ["weighted", "restricted", "selected", "deflated"])
def test_an_operator_made_of_another_is_as_exact(name):
    inside = Coarse(gaussian(2, 4, 3, seed=0))
    made = {
        "weighted": lambda: Weighted(inside, torch.ones(4), torch.ones(3)),
        "restricted": lambda: Restricted(inside, [0, 2]),
        "selected": lambda: Selected(inside, torch.tensor([1])),
        "deflated": lambda: Deflated(inside, gaussian(2, 1, 4, seed=1), gaussian(2, 1, 3, seed=2)),
    }[name]()
    finer = made.refined()
    assert (made.noise, made.heavy) == (0.01, True)
    assert type(finer) is type(made)
    assert finer is not None
    assert (finer.noise, finer.refined()) == (1e-6, None)
    assert (finer.batch, finer.in_shape) == (made.batch, made.in_shape)


def test_composed_pulls_the_outer_guess_back():
    outer, inside, guess = gaussian(2, 3, 4, seed=1), gaussian(2, 4, 5, seed=2), gaussian(2, 4, seed=3)
    pulled = Composed(Guessing(outer, guess), Matrix(inside)).guess([0])
    assert pulled is not None
    assert_close(pulled, (inside.mT @ guess[..., None])[..., 0])
    assert Composed(Matrix(outer), Matrix(inside)).guess([0]) is None


@pytest.mark.parametrize("other", [gaussian(2, 3, 5, seed=0), gaussian(1, 3, 4, seed=0)], ids=["size", "batch"])
def test_composed_refuses_what_does_not_fit(other):
    with pytest.raises(BadInputError, match="expected an outer map"):
        Composed(Matrix(other), Matrix(gaussian(2, 4, 6, seed=1)))


@pytest.mark.parametrize(
    ("row_shape", "col_shape"), [((), ()), ((3,), (4,)), ((2, 1), (4,)), ((2, 3), (2, 4)), ((1, 3), (1, 1))]
)
def test_weighted(row_shape, col_shape):
    matrix = gaussian(2, 3, 4, seed=1)
    rows, cols = gaussian(*row_shape, seed=2).exp(), gaussian(*col_shape, seed=3)
    truth = rows.expand(2, 3)[..., None] * matrix * cols.expand(2, 4)[:, None]
    check_operator(Weighted(Matrix(matrix), rows, cols), truth)


def test_weighted_tokens():
    """One weight per token, `D^{½} J D^{−½}`."""
    x, a = gaussian(2, 3, 2, seed=1), gaussian(2, 3, 1, seed=2).exp()
    J = AutodiffJacobian(lambda t: torch.softmax(t @ t.mT, -1) @ t, x, batched=True)
    D = torch.diag_embed(a.expand(2, 3, 2).flatten(1))
    truth = D.sqrt() @ J.dense() @ torch.linalg.inv(D.sqrt())
    check_operator(Weighted(J, a.sqrt(), a.rsqrt()), truth, growth=10)


@pytest.mark.parametrize(("rows", "cols"), [((4,), (4,)), ((3,), (3,)), ((3, 3), (4,)), ((1, 2, 3), (4,))])
def test_weighted_refuses_what_does_not_fit(rows, cols):
    with pytest.raises(BadInputError, match="broadcast"):
        Weighted(Matrix(gaussian(2, 3, 4, seed=0)), torch.ones(rows), torch.ones(cols))


@pytest.mark.parametrize("items", [[0], [3, 1], [0, 1, 2, 3], [2, 0, 3]], ids=str)
def test_selected(items):
    matrix, index = gaussian(4, 3, 5, seed=0), torch.tensor(items)
    check_operator(Selected(Matrix(matrix), index), matrix[index])


@pytest.mark.parametrize(
    "build",
    [
        lambda m: Matrix(m),
        lambda m: Composed(Matrix(m), Matrix(m.mT)),
        lambda m: Weighted(Matrix(m), gaussian(4, 1, seed=1), gaussian(5, seed=2)),
        lambda m: Selected(Matrix(m), torch.tensor([3, 2, 1, 0])),
    ],
    ids=["matrix", "composed", "weighted", "selected"],
)
def test_select(build):
    op = build(gaussian(4, 3, 5, seed=0))
    items = torch.tensor([2, 0])
    check_operator(op.select(items), op.dense()[items])


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 5), (5, 3), (4, 4), (1, 300), (300, 2), (270, 300), (300, 270)])
def test_dense_takes_the_cheaper_side(rows, cols):
    matrix, calls = gaussian(2, rows, cols, seed=0), []

    class Counted(Guessing):
        def jvp(self, v):
            calls.append(("jvp", len(v)))
            return super().jvp(v)

        def vjp(self, u):
            calls.append(("vjp", len(u)))
            return super().vjp(u)

    op = Counted(matrix, matrix[:, 0])
    assert torch.equal(op.dense(), matrix)
    assert sum(count for _, count in calls) == min(rows, cols)
    assert {kind for kind, _ in calls} == {"jvp" if cols <= rows else "vjp"}


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([(), (1,), (3,), (2, 3), (2, 2, 2)]))
def test_inner(batch, count, shape):
    a, b = gaussian(count, batch, *(shape or (1,)), seed=1), gaussian(count, batch, *(shape or (1,)), seed=2)
    truth = torch.einsum("pbi,qbi->bpq", a.flatten(2), b.flatten(2))
    assert_close(inner(a, b), truth, scale=float(a.norm() * b.norm()))


def test_restricted_operators_are_columns_and_keep_their_order():
    layer = Attention(*torch.randn(4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), heads=2)
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, J = layer.linearize(x)
    tokens = (0, 2, 3)
    op = Restricted(J, tokens)
    check_operator(op, J.dense().unflatten(2, (5, 6))[:, :, list(tokens)].flatten(2), growth=10)
    v = torch.randn(2, 3, 6, dtype=torch.float64)
    assert torch.equal(op.spread(v)[:, list(tokens)], v)
    assert not op.spread(v)[:, [1, 4]].any()
