"""Constants where some tokens alone may move: the columns of the dense Jacobian, on every map, whichever way it is measured."""

import warnings

import numpy as np
import pytest
import torch

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import MapName, Model
from howsmooth.spectral.operator import Restricted
from problems import readers
from problems.zoo import ZOO, randomize

IDS, N = [7, 3, 11, 5, 19, 8, 2, 9], 8


def double(build) -> Model:
    return hs.load(randomize(build()).double())


def columns(captured, layer, map, tokens, head=None) -> torch.Tensor:
    """The dense Jacobian with the tokens that are held left out."""
    f = captured.map(layer, map, head)
    whole = hs.jacobian(f, f.start).dense().double()
    return whole.unflatten(1, (N, -1))[:, tokens].flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("map", ["attention", "heads", "block", "model"])
def test_on_every_map_it_is_the_norm_of_the_columns_that_are_left(map):
    captured = double(readers.bert).capture(ids=IDS)
    tokens = [1, 4, 6]
    m = captured.measure(1, map, tokens=tokens, tol=1e-8)
    assert m.value == pytest.approx(float(torch.linalg.matrix_norm(columns(captured, 1, map, tokens), 2)), rel=1e-6)
    assert m.value < captured.measure(1, map).value
    assert m.direction.shape == captured.measure(1, map).direction.shape
    assert [i for i in range(N) if m.direction[i].any()] == tokens
    assert m.moving == (1, 4, 6)
    assert m.to_dict()["moving"] == [1, 4, 6]
    assert "3 of them moving" in str(m)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mpnet"])
def test_causal_rotary_and_uncut_layers_and_single_heads(name):
    captured = double(ZOO[name].build).capture(ids=IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases: tuple[tuple[MapName, int | None], ...] = (("attention", None), ("normed", None), ("attention", 1))
        for map, head in cases:
            if name == "mpnet" and (map == "normed" or head is not None):  # it has neither
                continue
            m = captured.measure(0, map, head=head, tokens=range(1, N), tol=1e-8)
            truth = torch.linalg.matrix_norm(columns(captured, 0, map, list(range(1, N)), head), 2)
            assert m.value == pytest.approx(float(truth), rel=1e-6)


def test_closed_forms_in_lock_step_agree_and_certificates_hold():
    model = hs.load(readers.bert())
    captured = model.capture([IDS, IDS[::-1], [*IDS, 4]])
    with pytest.raises(BadInputError, match="a mask with one entry for each of 8"):
        captured.measure([0], tokens=[False] + 8 * [True])
    for m, one in zip(captured.measure([1], tokens=[0, 2, 7]), captured, strict=True):
        whole = hs.jacobian(one.map(1), one.tokens(1)).dense().double().unflatten(1, (m.n, -1))
        truth = float(torch.linalg.matrix_norm(whole[:, [0, 2, 7]].flatten(1), 2))
        assert m.value == pytest.approx(truth, rel=2e-3)
        assert m.lower <= truth * (1 + 1e-5)
        assert m.upper >= truth * (1 - 1e-5)


@pytest.mark.parametrize("solver", [hs.GolubKahan(), hs.GolubKahan(rigorous=True), hs.DenseSVD()])
def test_every_solver_and_the_random_start_live_among_the_tokens_that_move(solver):
    from howsmooth.solve import Options, solve

    random = torch.Generator().manual_seed(0)
    w = [torch.randn(6, 6, generator=random, dtype=torch.float64) / 2 for _ in range(4)]
    attn, x = hs.Attention(*w, heads=2, causal=True), torch.randn(20, 6, generator=random, dtype=torch.float64)
    tokens = tuple(range(5, 20, 3))
    truth = hs.jacobian(attn, x).dense().unflatten(1, (20, 6))[:, list(tokens)].flatten(1)
    estimate, operator, image, *_ = solve(attn, x, Options(1e-6, solver=solver, tokens=tokens))
    assert estimate.lower == pytest.approx(float(torch.linalg.matrix_norm(truth, 2)), rel=1e-5)
    assert estimate.upper >= float(torch.linalg.matrix_norm(truth, 2)) * (1 - 1e-12)
    assert not isinstance(operator, Restricted)
    assert float(image.norm()) == pytest.approx(estimate.lower, rel=1e-6)
    assert estimate.direction.shape == x.shape


def test_padding_is_not_counted():
    model = double(readers.bert)
    plain = model.measure(ids=IDS, layer=0, tokens=[0, 3])
    padded = model.measure(ids=[0, 0, *IDS], mask=[0, 0] + N * [1], layer=0, map="attention", tokens=[0, 3])
    assert padded.n == N
    assert [i for i in range(N) if padded.direction[i].any()] == [0, 3]
    assert plain.n == padded.n


GOOD = [[1, 0, 2, 2], range(3), {0, 1, 2}, torch.tensor([0, 1, 2]), np.arange(3), [True] * 3 + [False] * 5,
        torch.arange(8) < 3, np.arange(8) < 3]  # fmt: skip


@pytest.mark.parametrize("tokens", GOOD)
def test_positions_may_be_given_in_many_ways(tokens):
    m = hs.load(readers.bert()).measure(ids=IDS, layer=0, tokens=tokens)
    assert m.moving == (0, 1, 2)


@pytest.mark.parametrize(
    "tokens", [[], [8], [-1], [0.5], ["a"], 3, None.__class__, "all", [[0, 1]], [False] * 8, [True] * 7, [None], [0, 10**30]]
)
def test_bad_positions_are_one_sentence(tokens):
    with pytest.raises(BadInputError, match=r"expected .*, got .*; give positions from 0 to 7, or a mask with 8 entries"):
        hs.load(readers.bert()).measure(ids=IDS, layer=0, tokens=tokens)


def test_the_relative_constant_is_the_same_both_ways_and_known_for_a_linear_map():
    model = hs.load(readers.bert())
    captured = model.capture(ids=IDS)
    graph, closed = captured.measure(1, closed=False), captured.measure(1, closed=True)
    f = captured.map(1)
    truth = graph.value * float(f.start.norm()) / float(f(f.start).norm())
    assert graph.relative == pytest.approx(truth, rel=1e-4)
    assert closed.relative == pytest.approx(truth, rel=2e-3)
    assert captured.measure(1, head=0).relative is None
    assert set(captured.measure([0]).to_frame()) >= {"relative", "top_token", "top_word", "top_share", "top_received"}
