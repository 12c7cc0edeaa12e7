"""The public Jacobian: products in every shape, its transpose, its matrix, and SciPy's view of it."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import svds
from torch import Tensor

import howsmooth as hs
from checks import assert_close
from howsmooth.errors import BadInputError
from problems.layers import gaussian
from problems.spectra import attention

LAYER, TOKENS = attention(7, 4, seed=0, heads=2, out=3, gain=2.0)

CASES = {
    "attention": (LAYER, TOKENS),
    "norm": (hs.LayerNorm(gaussian(4, seed=1), gaussian(4, seed=2)), TOKENS),
    "composition": (LAYER @ hs.RMSNorm(gaussian(4, seed=1)), TOKENS),
    "wider": (lambda t: torch.cat([t.sin(), t**2], -1), TOKENS),
    "vector to number": (lambda t: t.square().sum(), gaussian(5, seed=3)),
    "number to number": (lambda t: t**3, torch.tensor(2.0).double()),
    "number to tokens": (lambda t: t * TOKENS, torch.tensor(2.0).double()),
    "three axes": (lambda t: torch.tanh(t).cumsum(0)[..., 0], gaussian(2, 3, 4, seed=4)),
}


def matrix(f, x: Tensor) -> Tensor:
    jacobian = torch.func.jacrev(f)(x)
    assert isinstance(jacobian, Tensor)
    return jacobian.reshape(-1, x.numel())


@pytest.mark.parametrize("name", CASES)
def test_products_in_every_shape(name):
    f, x = CASES[name]
    J, truth = hs.jacobian(f, x), matrix(f, x)
    y = f(x)
    growth = 1 + float(truth.norm()) + float(x.norm()) ** 2
    assert J.shape == tuple(truth.shape)
    for A, M, takes, gives in ((J, truth, x.shape, y.shape), (J.T, truth.mT, y.shape, x.shape)):
        assert A.shape == tuple(M.shape)
        assert_close(A.dense(), M, growth=growth)
        v = gaussian(3, A.shape[1], seed=5)
        one, probes = A @ v[0].reshape(takes), A @ v.reshape(3, *takes)
        assert one.shape == gives
        assert probes.shape == (3, *gives)
        assert_close(one.reshape(-1), M @ v[0], growth=growth)
        assert_close(probes.reshape(3, -1), v @ M.mT, growth=growth)
        assert_close(A @ v[0], (M @ v[0]).reshape(gives if takes == v[0].shape else -1), growth=growth)
        assert_close((A @ v).reshape(3, -1), v @ M.mT, growth=growth)


@pytest.mark.parametrize("name", ["attention", "wider"])
def test_the_two_products_are_transposes(name):
    J = hs.jacobian(*CASES[name])
    v, u = gaussian(J.shape[1], seed=5), gaussian(J.shape[0], seed=6)
    assert float(u @ (J @ v)) == pytest.approx(float((J.T @ u) @ v), rel=1e-12)
    assert J.T.T.shape == J.shape
    assert torch.equal(J.T.T @ v, J @ v)


@pytest.mark.parametrize("name", ["attention", "composition", "wider", "three axes"])
def test_scipy_finds_the_norm(name):
    f, x = CASES[name]
    J = hs.jacobian(f, x)
    operator = J.to_scipy()
    assert operator.shape == J.shape
    truth = float(torch.linalg.matrix_norm(J.dense(), 2))
    sigma: Any = svds(operator, k=1, v0=np.ones(min(J.shape)), return_singular_vectors=False)
    assert float(sigma[0]) == pytest.approx(truth, rel=1e-9)
    assert truth == pytest.approx(hs.lipschitz(f, x, tol=1e-9).value, rel=1e-8)
    v, u = gaussian(J.shape[1], seed=5), gaussian(J.shape[0], seed=6)
    assert operator.matvec(v.numpy()) == pytest.approx((J @ v).reshape(-1).numpy())
    assert operator.T.matvec(u.numpy()) == pytest.approx((J.T @ u).reshape(-1).numpy())
    block = gaussian(J.shape[1], 2, seed=7)
    assert operator @ block.numpy() == pytest.approx((J.dense() @ block).numpy())


def test_vectors_of_another_precision_are_converted():
    J = hs.jacobian(LAYER.to(torch.float32), TOKENS.float())
    assert J.dtype == (J @ TOKENS).dtype == torch.float32
    assert J.to_scipy().matvec(TOKENS.numpy().ravel()).dtype == "float64"
    assert J.device == torch.device("cpu")


@pytest.mark.parametrize(
    "v",
    [
        gaussian(5, seed=0),
        gaussian(4, 7, seed=0),
        gaussian(2, 2, 7, 4, seed=0),
        gaussian(28, 1, seed=0),
        torch.ones(7, 4, dtype=torch.long),
    ],
    ids=["short", "turned round", "two axes of probes", "a column", "whole numbers"],
)
def test_what_does_not_fit_is_refused(v):
    with pytest.raises(BadInputError, match=r"^expected a (vector|floating-point)"):
        _ = hs.jacobian(LAYER, TOKENS) @ v


def test_it_prints_in_a_line():
    J = hs.jacobian(LAYER, TOKENS)
    assert (repr(J), repr(J.T)) == ("Jacobian(21 × 28, float64)", "Jacobian(28 × 21, float64)")
    assert (hs.jacobian(LAYER, TOKENS) == J) is False
