"""Norms of splitting blocks, decomposed or through products."""

import pytest
import torch

from howsmooth.errors import NoConvergenceError
from howsmooth.maps import Matrix
from howsmooth.maps.queries import own
from howsmooth.theory import blocks as module
from howsmooth.theory.blocks import own_direction, own_norms
from problems.measures import KINDS, make, random_measure


def problem(kind: str, seed: int):
    f, mu = make(kind, 100 * seed), random_measure(6, seed)
    operator = f.on(mu).linearize(mu.points[None])[1]
    return operator, torch.linalg.matrix_norm(own(operator, slice(0, 6)).dense(), 2)[None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [1, 2**23], ids=["token by token", "together"])
def test_decomposed(kind, numbers, monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS", numbers)
    operator, truth = problem(kind, 0)
    found = own_norms(operator)
    assert found.confidence == 1
    assert torch.allclose(found.lower, truth, rtol=1e-12)
    assert bool((truth <= found.upper).all())
    assert torch.allclose(found.upper, truth, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_through_products(kind, monkeypatch):
    monkeypatch.setattr(module, "_DENSE", 0)
    operator, truth = problem(kind, 1)
    found = own_norms(operator, delta=1e-3)
    assert found.confidence == 1 - 1e-3
    assert bool((found.lower <= truth * (1 + 1e-12)).all())
    assert bool((truth <= found.upper * (1 + 1e-12)).all())
    assert bool((found.upper <= found.lower * 1.03).all())
    token = int(truth.argmax())
    v, value = own_direction(operator, token)
    assert float(v.norm()) == pytest.approx(1)
    assert value == pytest.approx(float(truth.max()), rel=1e-5)


def test_tokens_that_cannot_win_are_left_at_their_cheap_bound():
    operator, truth = problem("plain", 2)
    skipped = own_norms(operator, above=1e6)
    assert not bool(skipped.lower.any())
    assert bool((truth <= skipped.upper).all())


def test_infinite_blocks_are_refused(monkeypatch):
    operator, _ = problem("plain", 0)

    def broken(operator, rows):
        return Matrix(torch.nan * original(operator, rows).dense())

    original = module.own
    monkeypatch.setattr(module, "own", broken)
    with pytest.raises(NoConvergenceError, match=r"^expected finite splitting blocks"):
        own_norms(operator)
