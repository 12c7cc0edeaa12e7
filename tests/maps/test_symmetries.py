"""What theory says must not change the singular values, does not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks import assert_close
from howsmooth import Attention
from howsmooth.maps import Map
from problems.layers import gaussian

seeds = st.integers(0, 999)
lengths = st.integers(1, 6)


def singular_values(f: Map, x: torch.Tensor) -> torch.Tensor:
    """Of every item, (batch, …)."""
    return torch.linalg.svdvals(f.linearize(x)[1].dense())


def layer(d: int, seed: int, **options) -> Attention:
    w_q, w_k, w_v = (gaussian(6, d, seed=seed + i) for i in range(3))
    return Attention(w_q, w_k, w_v, gaussian(4, 6, seed=seed + 3), 2, b_q=gaussian(6, seed=seed + 4), **options)


@given(lengths, seeds)
def test_permuting_tokens(n, seed):
    f, x = layer(3, seed), gaussian(1, n, 3, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    growth = 1 + float(x.norm()) ** 2
    assert_close(f(x[:, order]), f(x)[:, order], growth=growth)
    assert_close(singular_values(f, x[:, order]), singular_values(f, x), growth=growth)


def test_permuting_tokens_under_a_causal_mask_is_another_problem():
    f, x = layer(3, 0, causal=True), gaussian(1, 5, 3, seed=0)
    assert not torch.allclose(singular_values(f, x.flip(1)), singular_values(f, x), rtol=1e-3)


@given(lengths, seeds, st.booleans())
def test_rotating_space(n, seed, causal):
    A, V, x = gaussian(4, 4, seed=seed), gaussian(4, 4, seed=seed + 1), gaussian(1, n, 4, seed=seed + 2)
    Q = torch.linalg.qr(gaussian(4, 4, seed=seed + 3))[0]
    f = Attention.from_matrices(A, V, causal=causal)
    g = Attention.from_matrices(Q @ A @ Q.mT, Q @ V @ Q.mT, causal=causal)
    growth = 1 + float(x.norm()) ** 2 * float(A.norm())
    assert_close(g(x @ Q.mT), f(x) @ Q.mT, growth=growth)
    assert_close(singular_values(g, x @ Q.mT), singular_values(f, x), growth=growth)


@given(lengths, seeds, st.sampled_from([0.1, 2.0, 10.0]))
def test_scaling_space(n, seed, c):
    """`A → A/c²`, `x → cx` leaves the logits alone, so the Jacobian too."""
    A, V, x = gaussian(3, 3, seed=seed), gaussian(2, 3, seed=seed + 1), gaussian(1, n, 3, seed=seed + 2)
    f, g = Attention.from_matrices(A, V), Attention.from_matrices(A / c**2, V)
    growth = 1 + float(x.norm()) ** 2 * float(A.norm())
    assert_close(g.linearize(c * x)[1].dense(), f.linearize(x)[1].dense(), growth=growth)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}, {"softcap": 1.0}], ids=str)
def test_padding_does_not_count(side, options):
    n, pad, d = 4, 3, 3
    x = gaussian(1, n, d, seed=1)
    filler = 5 * gaussian(1, pad, d, seed=2)
    real, hidden = torch.ones(1, n, dtype=torch.bool), torch.zeros(1, pad, dtype=torch.bool)
    order = slice(None) if side == "right" else slice(None, None, -1)
    padded, mask = torch.cat([x, filler][order], 1), torch.cat([real, hidden][order], 1)
    f, g = layer(d, 0, **options), layer(d, 0, attention_mask=mask, **options)
    truth = singular_values(f, x)
    growth = 1 + float(x.norm()) ** 2
    assert_close(g(padded)[mask], f(x)[0], growth=growth)
    assert_close(singular_values(g, padded)[:, : truth.shape[1]], truth, growth=growth)
    assert float(singular_values(g, padded)[:, truth.shape[1] :].norm()) <= 1e-13 * float(truth.norm())
    assert not torch.allclose(singular_values(f, padded)[:, :1], truth[:, :1], rtol=1e-3)  # unmasked, it would


def test_what_fills_the_padding_does_not_matter():
    mask = torch.tensor([[True, True, True, False, False]])
    f, x = layer(3, 0, attention_mask=mask), gaussian(1, 5, 3, seed=1)
    y = x.clone()
    y[:, 3:] = 1e3 * gaussian(1, 2, 3, seed=2)
    assert_close(singular_values(f, y), singular_values(f, x), growth=10)


@given(seeds)
def test_later_tokens_do_not_move_earlier_ones(seed):
    f, x = layer(3, seed, causal=True), gaussian(1, 5, 3, seed=seed)
    blocks = f.linearize(x)[1].dense().reshape(5, 4, 5, 3)
    for i in range(5):
        assert not bool(blocks[i, :, i + 1 :].any())
        assert bool(blocks[i, :, i].any())


def test_rows_average_what_they_see():
    """Constant values: the output ignores the logits, and a common shift of the values passes through unchanged."""
    x = gaussian(1, 5, 3, seed=1)
    f = Attention.from_matrices(gaussian(3, 3, seed=2), torch.eye(3).double())
    x[..., 2] = 1.0
    assert_close(f(x)[..., 2], torch.ones(1, 5).double())
