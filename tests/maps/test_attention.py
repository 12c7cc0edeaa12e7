"""The layer's value and Jacobian: closed form = autodiff = dense, float64, and torch's own modules where they overlap."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from checks import assert_close, check_batch_equals_loop, check_operator, jacobians
from howsmooth import Attention
from howsmooth.kernels import dispatch
from howsmooth.maps import AutodiffJacobian
from howsmooth.spectral import Operator
from problems.layers import gaussian, layers


def jacobian(layer: Attention, x: torch.Tensor) -> Operator:
    return layer.linearize(x)[1]


def paper_layer(d: int, d_out: int, heads: int | None = None, **options) -> Attention:
    stack = () if heads is None else (heads,)
    return Attention.from_matrices(gaussian(*stack, d, d, seed=1), gaussian(*stack, d_out, d, seed=2), **options)


@pytest.mark.slow
@settings(max_examples=80)
@given(layers())
def test_closed_form_equals_autodiff_equals_dense(case):
    value, op = case.layer.linearize(case.x)
    growth = 1 + float(case.x.norm()) ** 2 * float(case.layer.w_q.norm())
    assert_close(value, case.layer(case.x), growth=growth)
    truth = jacobians(case.layer, case.x)
    scale = float(case.x.norm())
    check_operator(op, truth, growth=growth, scale=scale)
    assert_close(AutodiffJacobian(case.layer, case.x, batched=True).dense(), truth, growth=growth, scale=scale)


@settings(max_examples=20)
@given(layers())
def test_blocked_kernel_gives_the_same(case):
    kept = dispatch.KEPT_BYTES["cpu"]
    dense = jacobian(case.layer, case.x).dense()
    dispatch.KEPT_BYTES["cpu"] = 0
    try:
        assert_close(jacobian(case.layer, case.x).dense(), dense, growth=1 + float(dense.norm()), scale=1.0)
    finally:
        dispatch.KEPT_BYTES["cpu"] = kept


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}, {"causal": True, "window": 3}], ids=str)
@pytest.mark.parametrize("heads", [None, 1, 3])
@pytest.mark.parametrize(("n", "d", "d_out"), [(1, 1, 1), (1, 4, 2), (5, 1, 3), (6, 3, 3), (4, 2, 5)])
def test_from_matrices(options, heads, n, d, d_out):
    layer = paper_layer(d, d_out, heads, **options)
    x = gaussian(2, n, d, seed=3)
    check_operator(jacobian(layer, x), jacobians(layer, x), growth=1 + float(x.norm()) ** 2)
    check_batch_equals_loop(lambda t: jacobian(layer, t), x, growth=1 + float(x.norm()) ** 2)


@pytest.mark.parametrize(("n", "d"), [(63, 3), (111, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_odd_lengths(n, d, causal):
    layer = paper_layer(d, d, 2, causal=causal)
    x = gaussian(1, n, d, seed=3)
    v, u = gaussian(2, 1, n, d, seed=4), gaussian(2, 1, n, d, seed=5)
    op = jacobian(layer, x)
    for p in range(2):
        assert_close(op.jvp(v)[p], torch.func.jvp(layer, (x,), (v[p],))[1], growth=1 + float(x.abs().max()) ** 2)
        assert_close(op.vjp(u)[p], torch.func.vjp(layer, x)[1](u[p])[0], growth=1 + float(x.abs().max()) ** 2)


@pytest.mark.parametrize("causal", [False, True])
def test_the_paper_s_derivative_written_out(causal):
    """`(D_X f · ε)_i = V [Σ_j P_ij ε_j + C_i A ε_i + Σ_j P_ij (x_j − m_i) ⟨A x_i, ε_j⟩]`."""
    n, d = 5, 3
    A, V, x, eps = gaussian(d, d, seed=1), gaussian(2, d, seed=2), gaussian(n, d, seed=3), gaussian(n, d, seed=4)
    value, derivative = [], []
    for i in range(n):
        seen = range(i + 1) if causal else range(n)
        weights = [torch.exp((A @ x[i]) @ x[j]) for j in seen]
        P = [w / torch.stack(weights).sum() for w in weights]
        m = torch.stack([P[j] * x[j] for j in seen]).sum(0)
        C = torch.stack([P[j] * torch.outer(x[j] - m, x[j] - m) for j in seen]).sum(0)
        moved = torch.stack([P[j] * eps[j] for j in seen]).sum(0)
        turned = torch.stack([P[j] * (x[j] - m) * ((A @ x[i]) @ eps[j]) for j in seen]).sum(0)
        value.append(V @ m)
        derivative.append(V @ (moved + C @ A @ eps[i] + turned))
    layer = Attention.from_matrices(A, V, causal=causal)
    growth = 1 + float((x @ A @ x.mT).abs().max())
    assert_close(layer(x), torch.stack(value), growth=growth)
    assert_close(jacobian(layer, x[None]).jvp(eps[None, None])[0, 0], torch.stack(derivative), growth=growth)


def test_several_matrices_are_a_sum_of_heads():
    x, A, V = gaussian(5, 3, seed=0), gaussian(2, 3, 3, seed=1), gaussian(2, 4, 3, seed=2)
    heads = torch.stack([Attention.from_matrices(A[h], V[h])(x) for h in range(2)])
    assert_close(Attention.from_matrices(A, V)(x), heads.sum(0), growth=10)


def torch_module(d: int, heads: int) -> tuple[nn.MultiheadAttention, Attention]:
    module = nn.MultiheadAttention(d, heads, batch_first=True, dtype=torch.float64).eval()
    with torch.no_grad():
        for i, t in enumerate(module.parameters()):
            t.copy_(gaussian(*t.shape, seed=i))
    assert module.in_proj_weight is not None
    assert module.in_proj_bias is not None
    (w_q, w_k, w_v), (b_q, b_k, b_v) = module.in_proj_weight.detach().chunk(3), module.in_proj_bias.detach().chunk(3)
    w_o, b_o = module.out_proj.weight.detach(), module.out_proj.bias.detach()
    return module, Attention(w_q, w_k, w_v, w_o, heads, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o)


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_module(heads, causal):
    d, n = 6, 5
    module, layer = torch_module(d, heads)
    layer = Attention(**{**vars(layer), "causal": causal})
    x = gaussian(2, n, d, seed=9) / 4
    mask = nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64) if causal else None

    def f(t: torch.Tensor) -> torch.Tensor:
        return module(t, t, t, attn_mask=mask, need_weights=False, is_causal=causal)[0]

    growth = 1 + float(x.norm()) ** 2
    assert_close(layer(x), f(x).detach(), growth=growth)
    check_operator(jacobian(layer, x), jacobians(f, x), growth=growth)


def test_padding_equals_torch_module():
    module, layer = torch_module(4, 2)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    x = gaussian(2, 5, 4, seed=9) / 4
    ours = Attention(**{**vars(layer), "attention_mask": real})(x)
    theirs = module(x, x, x, key_padding_mask=~real, need_weights=False)[0].detach()
    assert_close(ours[real], theirs[real], growth=10)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_equals_torch_function(heads, kv_heads):
    d, width, n = 5, 3, 6
    w_q, w_k, w_v = (gaussian(h * width, d, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    bias = gaussian(2, heads, n, n, seed=7)
    x = gaussian(2, n, d, seed=8) / 3
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, width)).transpose(1, 2) for w in (w_q, w_k, w_v))
    truth = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True).transpose(1, 2).flatten(2)
    layer = Attention(w_q, w_k, w_v, heads=heads, kv_heads=kv_heads, bias=bias)
    assert_close(layer(x), truth, growth=10)
    assert_close(layer.linearize(x)[0], truth, growth=10)


def test_tokens_are_keys_when_no_key_weight_is_given():
    w_q, w_v, x = gaussian(4, 4, seed=0), gaussian(6, 4, seed=1), gaussian(5, 4, seed=2)
    layer = Attention(w_q, None, w_v, heads=2, b_k=gaussian(4, seed=3))
    assert_close(layer(x), Attention(w_q, torch.eye(4).double(), w_v, heads=2, b_k=gaussian(4, seed=3))(x))


@pytest.mark.parametrize("d_out", [None, 1, 3, 12])
def test_gram_by_either_way(d_out):
    """A wide `w_o` is replaced by `w_oᵀ w_o`, a narrow one is not; both must pass the contract."""
    heads, width, d = 2, 3, 4
    layer = Attention(
        *(gaussian(heads * width, d, seed=i) for i in range(3)),
        w_o=None if d_out is None else gaussian(d_out, heads * width, seed=3),
        heads=heads,
        attention_mask=torch.tensor([[True, True, False], [True, True, True]]),
    )
    x = gaussian(2, 3, d, seed=4) / 2
    check_operator(jacobian(layer, x), jacobians(layer, x), growth=1 + float(x.norm()) ** 2)


@pytest.mark.parametrize("heads", [1, 3])
def test_guess_is_exact_when_the_weights_are_uniform(heads):
    """With A = 0 every row of `P` is 1/n: the Jacobian has rank one in the tokens and the guess is its top input."""
    V = gaussian(heads, 3, 3, seed=1)
    layer = Attention.from_matrices(torch.zeros(heads, 3, 3).double(), V)
    op = jacobian(layer, gaussian(2, 4, 3, seed=2))
    guess = op.guess([0])
    assert guess is not None
    assert guess.shape == (2, 4, 3)
    unit = guess / guess.flatten(1).norm(dim=1)[:, None, None]
    top = torch.linalg.matrix_norm(op.dense(), 2)
    assert torch.all(op.jvp(unit[None])[0].flatten(1).norm(dim=1) >= 0.99 * top)


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 4, 5, 3)])
def test_value_takes_any_leading_axes(shape):
    layer, x = paper_layer(3, 2), gaussian(*shape, seed=3)
    out = layer(x)
    assert out.shape == (*shape[:-1], 2)
    loop = torch.stack([layer(t) for t in x.reshape(-1, 5, 3)]).reshape(out.shape)
    assert_close(out, loop, growth=10)


def test_value_is_differentiable_twice():
    layer, x = paper_layer(2, 2), gaussian(3, 2, seed=3)
    assert torch.autograd.gradcheck(layer, x.requires_grad_())
    assert torch.autograd.gradgradcheck(layer, x)


def test_linearize_leaves_no_graph():
    layer, x = paper_layer(2, 2), gaussian(1, 3, 2, seed=3).requires_grad_()
    value, op = layer.linearize(x)
    v = gaussian(1, 1, 3, 2, seed=4).requires_grad_()
    assert not any(t.requires_grad for t in (value, op.jvp(v), op.vjp(v), op.gram(v)[0]))
