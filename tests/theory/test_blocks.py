"""The splitting blocks: what is left of a Jacobian when keys, values and all other tokens stay, and the norms of that."""

import pytest
import torch
from hypothesis import given

import howsmooth as hs
from checks import assert_close, check_operator
from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.spectral import Weighted
from howsmooth.theory import blocks as module
from howsmooth.theory.blocks import block_direction, block_norms, block_sizes, splitting_blocks
from problems.layers import gaussian, turned_layers
from problems.measures import KINDS, layer, make, random_measure
from problems.spectra import Matrix


def antisymmetric(f, mu: hs.Measure) -> torch.Tensor:
    """`S_i` from two halves of every atom that move apart, by autodiff: (m, d_out, d)."""
    halves = mu.split(parts=2)
    on = f.on(halves)
    signs = torch.tensor([1.0, -1.0]).double().repeat(len(mu))[:, None]

    def apart(e: torch.Tensor) -> torch.Tensor:
        return on.value((halves.points + signs * e.repeat_interleave(2, 0))[None])[0][::2]

    jacobian = torch.func.jacrev(apart)(torch.zeros_like(mu.points))
    assert isinstance(jacobian, torch.Tensor)
    blocks = jacobian.transpose(1, 2)[torch.arange(len(mu)), torch.arange(len(mu))]
    # nothing reaches other atoms
    assert float(jacobian.norm()) == pytest.approx(float(blocks.norm()), rel=1e-12)
    return blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_what_halves_moving_apart_do(kind, seed):
    f, mu = make(kind, 100 * seed), random_measure(5, seed)
    truth = antisymmetric(f, mu)
    op = splitting_blocks(f.on(mu).linearize(mu.points[None])[1], slice(1, 4))
    assert (op.batch, op.in_shape) == (3, (1, 3))
    check_operator(op, truth[1:4], growth=100, scale=float(truth.norm()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_bound_the_blocks(kind):
    for seed in range(20):
        f, mu = make(kind, 100 * seed), random_measure(5, seed)
        operator = f.on(mu).linearize(mu.points[None])[1]
        norms = torch.linalg.matrix_norm(antisymmetric(f, mu), 2)
        sizes = block_sizes(operator)
        assert bool((norms <= sizes.bound[0]).all())
        assert bool((sizes.bound <= sizes.terms * (1 + 1e-9)).all())


@given(turned_layers())
def test_layers_of_every_kind(p):
    """Through the query alone: keys and values frozen."""
    _, operator = p.layer.linearize(p.x)
    batch, n, d = p.x.shape
    frozen = p.layer

    def through_queries(e: torch.Tensor) -> torch.Tensor:
        from howsmooth.kernels import plain_attention

        q, _, _ = frozen.vectors(p.x + e)
        _, k, v = frozen.vectors(p.x)
        return frozen.finish(plain_attention(q, k, v, frozen._scores()))

    whole = torch.func.jacrev(through_queries)(torch.zeros_like(p.x))
    assert isinstance(whole, torch.Tensor)
    index = torch.arange(batch)
    blocks = whole[index, :, :, index]  # (batch, n, d_out, n, d)
    token = torch.arange(n)
    blocks = blocks[:, token, :, token].transpose(0, 1).flatten(0, 1)
    found = splitting_blocks(operator, slice(0, n)).dense()
    size = block_sizes(operator)
    _, k, v = frozen.vectors(p.x)  # keys that a norm makes alike differ by their own rounding
    rounding = float(k.norm() * v.norm() * frozen.w_q.norm() * (1 if frozen.w_o is None else frozen.w_o.norm()))
    assert_close(found, blocks, growth=100, scale=float(size.terms.sum()) + rounding)
    rest = 1e-300 if frozen.k_norm is None else 1e-12 * rounding
    assert bool((torch.linalg.matrix_norm(blocks, 2) <= size.bound.flatten() * (1 + 1e-12) + rest).all())


def test_weights_do_not_matter():
    mu = random_measure(4, 0)
    operator = layer(0).on(mu).linearize(mu.points[None])[1]
    root = mu.mass.sqrt()[None, :, None]
    weighted = Weighted(operator, root, 1 / root)
    assert torch.equal(splitting_blocks(weighted, slice(0, 4)).dense(), splitting_blocks(operator, slice(0, 4)).dense())
    assert torch.equal(block_sizes(weighted).bound, block_sizes(operator).bound)


def test_one_head_in_the_papers_notation():
    """`S_i = V C_i A`."""
    A, V = gaussian(3, 3, seed=0), gaussian(2, 3, seed=1)
    mu = random_measure(6, 2)
    weights = torch.softmax(mu.points @ A.mT @ mu.points.mT + mu.mass.log(), -1)
    centred = mu.points[None] - (weights @ mu.points)[:, None]
    cov = torch.einsum("ij,ija,ijb->iab", weights, centred, centred)
    operator = hs.Attention.from_matrices(A, V).on(mu).linearize(mu.points[None])[1]
    assert_close(splitting_blocks(operator, slice(0, 6)).dense(), V @ cov @ A, growth=50)


def test_other_operators_are_refused():
    for question in (lambda op: splitting_blocks(op, slice(0, 1)), block_sizes):
        with pytest.raises(BadInputError, match=r"^expected the Jacobian of a map of this package, got Matrix"):
            question(Matrix(torch.eye(2)[None]))


def problem(kind: str, seed: int):
    f, mu = make(kind, 100 * seed), random_measure(6, seed)
    operator = f.on(mu).linearize(mu.points[None])[1]
    return operator, torch.linalg.matrix_norm(splitting_blocks(operator, slice(0, 6)).dense(), 2)[None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [1, 2**23], ids=["token by token", "together"])
def test_decomposed(kind, numbers, monkeypatch):
    monkeypatch.setitem(module._NUMBERS, "cpu", numbers)
    operator, truth = problem(kind, 0)
    found = block_norms(operator)
    assert found.confidence == 1
    assert torch.allclose(found.lower, truth, rtol=1e-12)
    assert bool((truth <= found.upper).all())
    assert torch.allclose(found.upper, truth, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_through_products(kind, monkeypatch):
    monkeypatch.setattr(module, "SMALL", 0)
    operator, truth = problem(kind, 1)
    found = block_norms(operator)
    assert found.confidence == 1 - 1e-6
    assert bool((found.lower <= truth * (1 + 1e-12)).all())
    assert bool((truth <= found.upper * (1 + 1e-12)).all())
    assert bool((found.upper <= found.lower * 1.03).all())
    token = int(truth.argmax())
    v, value = block_direction(operator, token)
    assert float(v.norm()) == pytest.approx(1)
    assert value == pytest.approx(float(truth.max()), rel=1e-5)


def test_tokens_that_cannot_win_are_left_at_their_cheap_bound():
    operator, truth = problem("plain", 2)
    skipped = block_norms(operator, above=1e6)
    assert not bool(skipped.lower.any())
    assert bool((truth <= skipped.upper).all())


def test_infinite_blocks_are_refused(monkeypatch):
    operator, _ = problem("plain", 0)

    def broken(operator, rows):
        return Matrix(torch.nan * original(operator, rows).dense())

    original = module.splitting_blocks
    monkeypatch.setattr(module, "splitting_blocks", broken)
    with pytest.raises(NoConvergenceError, match=r"^expected finite splitting blocks"):
        block_norms(operator)
