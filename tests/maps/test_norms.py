"""Norms equal torch's, value and Jacobian, alone and composed with attention."""

import pytest
import torch
from torch import nn

from checks import assert_close, check_batch_equals_loop, check_operator, jacobians
from howsmooth import Attention, LayerNorm, RMSNorm
from howsmooth.maps import Map
from problems.layers import gaussian


def attention(d: int, d_out: int, seed: int = 0, **options) -> Attention:
    w_q, w_k, w_v = (gaussian(4, d, seed=seed + i) for i in range(3))
    return Attention(w_q, w_k, w_v, gaussian(d_out, 4, seed=seed + 3), heads=2, **options)


def layer_norm(d: int) -> LayerNorm:
    return LayerNorm(gaussian(d, seed=20), gaussian(d, seed=21), eps=1e-3)


def rms_norm(d: int) -> RMSNorm:
    return RMSNorm(gaussian(d, seed=22), eps=1e-3)


@pytest.mark.parametrize("d", [1, 2, 5, 63])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm_equals_torch(d, eps, with_bias):
    module = nn.LayerNorm(d, eps=eps, bias=with_bias, dtype=torch.float64)
    with torch.no_grad():
        for i, t in enumerate(module.parameters()):
            t.copy_(gaussian(d, seed=i))
    norm = LayerNorm(module.weight.detach(), module.bias.detach() if with_bias else None, eps)
    x = gaussian(2, 3, d, seed=9)
    growth = 1 / eps  # at d = 1 every token is its own mean, and only rounding is left
    assert_close(norm(x), module(x).detach(), growth=growth)
    check_operator(norm.linearize(x)[1], jacobians(module, x), growth=growth, scale=1.0)


@pytest.mark.parametrize("d", [1, 2, 5, 63])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_norm_equals_torch(d, eps):
    module = nn.RMSNorm(d, eps=eps, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(gaussian(d, seed=1))
    x = gaussian(2, 3, d, seed=9)
    norm = RMSNorm(module.weight.detach(), eps=eps)
    assert_close(norm(x), module(x).detach())
    check_operator(norm.linearize(x)[1], jacobians(module, x), growth=1 / eps, scale=1.0)


@pytest.mark.parametrize("build", [layer_norm, rms_norm])
def test_zero_tokens_with_eps(build):
    norm, x = build(4), torch.zeros(1, 2, 4).double()
    check_operator(norm.linearize(x)[1], jacobians(norm, x))


@pytest.mark.parametrize("build", [layer_norm, rms_norm])
def test_a_norm_forgets_the_scale(build):
    """Without eps, `f(cx) = f(x)`: the derivative along `x` is zero."""
    norm = type(build(5))(build(5).weight, eps=0.0)
    x = gaussian(1, 3, 5, seed=1)
    value, op = norm.linearize(x)
    assert_close(norm(7 * x), norm(x))
    assert float(op.jvp(x[None]).norm()) <= 1e-14 * float(value.norm())
    assert_close(op.dense() / 7, norm.linearize(7 * x)[1].dense())


COMPOSITIONS = {
    "attention after norm": attention(5, 5, causal=True) @ layer_norm(5),
    "attention after rms": attention(5, 3) @ rms_norm(5),
    "norm after attention": layer_norm(3) @ attention(5, 3, window=2),
    "three": rms_norm(4) @ attention(5, 4) @ layer_norm(5),
    "attention twice": attention(3, 2, seed=40) @ (attention(5, 3, causal=True) @ layer_norm(5)),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composition_is_the_chain_rule(name):
    f: Map = COMPOSITIONS[name]
    x = gaussian(2, 4, 5, seed=30)
    value, op = f.linearize(x)
    assert f.width == 5
    assert_close(value, f(x), growth=100)
    check_operator(op, jacobians(f, x), growth=100)
    check_batch_equals_loop(lambda t: f.linearize(t)[1], x, growth=100)


def test_composition_is_from_right_to_left():
    f, g, x = attention(5, 3), layer_norm(5), gaussian(4, 5, seed=1)
    assert_close((f @ g)(x), f(g(x)))


def test_composition_with_padding():
    real = torch.tensor([[True, True, True, False], [True, True, True, True]])
    f = layer_norm(3) @ attention(5, 3, attention_mask=real) @ rms_norm(5)
    x = gaussian(2, 4, 5, seed=30)
    check_operator(f.linearize(x)[1], jacobians(f, x), growth=1e3)
