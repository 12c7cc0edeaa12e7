"""A guess of what a map of a model stretches most: that of its closed form, through norms and blocks, or none."""

import warnings
from functools import cache

import pytest
import torch

import howsmooth as hs
from checks import assert_close
from howsmooth.models import Capture, MapName
from howsmooth.spectral import Operator
from problems.zoo import ZOO, ids, randomize

N = 24


@cache
def captured(name: str) -> Capture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hs.load(randomize(ZOO[name].build()).double()).capture(ids=ids(n=N))


def linearized(name: str, map: MapName, head: int | None = None) -> Operator:
    cut = captured(name).map(1, map, head)
    return cut.linearize(cut.start.double()[None])[1]


def guess_of(operator: Operator) -> torch.Tensor:
    guess = operator.guess([3])
    assert guess is not None
    assert guess.shape == (1, *operator.in_shape)
    return guess / guess.norm()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3"])
def test_a_layer_that_is_cut_out_has_the_guess_of_its_formula(name):
    layer = captured(name).attention(1)
    formula = layer.linearize(captured(name).tokens(1).double()[None])[1]
    assert_close(guess_of(linearized(name, "attention")), guess_of(formula), growth=1e4)
    alone = layer.head(1).linearize(captured(name).tokens(1).double()[None])[1]
    assert_close(guess_of(linearized(name, "attention", head=1)), guess_of(alone), growth=1e4)


@pytest.mark.parametrize("map", ["normed", "block"])
def test_a_guess_goes_through_norms_and_blocks(map: MapName):
    """It is stretched far more than a random direction."""
    operator = linearized("llama", map)
    matrix = operator.dense()[0]
    along = operator.jvp(guess_of(operator)[None]).norm()
    assert along > 0.5 * torch.linalg.matrix_norm(matrix, 2)
    assert along > 2 * matrix.norm() / matrix.shape[1] ** 0.5


def test_a_padded_input_has_a_guess_for_its_own_tokens():
    given = ids(n=N)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = hs.load(randomize(ZOO["bert"].build()).double())
        padded = model.capture(ids=[*given[0].tolist(), 0, 0, 0, 0, 0], mask=[True] * N + [False] * 5)
        plain = model.capture(ids=given[0].tolist())
    both = [c.map(1).linearize(c.map(1).start.double()[None])[1] for c in (padded, plain)]
    assert_close(guess_of(both[0]), guess_of(both[1]), growth=1e4)


def test_where_values_are_not_made_of_the_tokens_there_is_none():
    assert linearized("bert", "model").guess([3]) is None  # several calls of attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        short = hs.load(randomize(ZOO["bert"].build()).double()).capture(ids=ids(n=2)).map(1)
    assert short.linearize(short.start.double()[None])[1].guess([3]) is None  # it would take many passes
