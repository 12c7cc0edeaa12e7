"""Attention linearised inside a graph: first derivatives right in every mode, second ones refused."""

import pytest
import torch
from torch.autograd import forward_ad

from checks import assert_close
from howsmooth.errors import BadInputError
from howsmooth.kernels import Mask, attention_and_kernel
from problems.kinds import kind_problem
from problems.layers import gaussian, problem

P = problem(batch=2, heads=4, kv_heads=2, n=7, mask=Mask(causal=True))
TANGENTS = tuple(gaussian(*t.shape, seed=i) for i, t in enumerate(P.qkv))


def f(q, k, v):
    return attention_and_kernel(q, k, v, P.scores)[0] ** 2


def reference(q, k, v):
    return P.value(q, k, v) ** 2


def test_forward_mode():
    got, want = (torch.func.jvp(g, P.qkv, TANGENTS) for g in (f, reference))
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.parametrize("i", [0, 1, 2])
def test_forward_mode_in_one_argument(i):
    def with_argument(g):
        return lambda x: g(*P.qkv[:i], x, *P.qkv[i + 1 :])

    got, want = (torch.func.jvp(with_argument(g), (P.qkv[i],), (TANGENTS[i],))[1] for g in (f, reference))
    assert_close(got, want)


def test_reverse_mode():
    pulled = torch.func.vjp(f, *P.qkv)
    g = gaussian(*pulled[0].shape, seed=5)
    want = torch.func.vjp(reference, *P.qkv)
    for got, true in zip(pulled[1](g), want[1](g), strict=True):
        assert_close(got, true)


@pytest.mark.parametrize("name", ["sink", "sigmoid", "l2", "linear", "three iterations", "differential"])
def test_every_kind_in_a_graph(name):
    p = kind_problem(name)
    d = tuple(gaussian(*t.shape, seed=i) for i, t in enumerate(p.qkv))

    def inside(q, k, v):
        return attention_and_kernel(q, k, v, p.scores)[0] ** 2

    def plain(q, k, v):
        return p.value(q, k, v) ** 2

    got, want = (torch.func.jvp(g, p.qkv, d)[1] for g in (inside, plain))
    assert_close(got, want, growth=10.0)
    g = gaussian(*want.shape, seed=5)
    for a, b in zip(*(torch.func.vjp(h, *p.qkv)[1](g) for h in (inside, plain)), strict=True):
        assert_close(a, b, growth=10.0)


def test_backward():
    leaves = [t.clone().requires_grad_() for t in P.qkv]
    f(*leaves).sum().backward()
    plain = [t.clone().requires_grad_() for t in P.qkv]
    for leaf, want in zip(leaves, torch.autograd.grad(reference(*plain).sum(), plain), strict=True):
        assert leaf.grad is not None
        assert_close(leaf.grad, want)


def test_dual_numbers():
    want = torch.func.jvp(reference, P.qkv, TANGENTS)[1]
    with forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(t, d) for t, d in zip(P.qkv, TANGENTS, strict=True)))
        tangent = forward_ad.unpack_dual(out).tangent
    assert tangent is not None
    assert_close(tangent, want)


def test_half_precision_comes_back_as_it_came():
    q, k, v = (t.bfloat16() for t in P.qkv)
    result = torch.func.jvp(lambda x: attention_and_kernel(x, k, v, P.scores)[0], (q,), (q,))
    assert result[0].dtype == result[1].dtype == torch.bfloat16


q, k, v = P.qkv


@pytest.mark.parametrize(
    "twice",
    [
        lambda: torch.func.hessian(lambda x: f(x, k, v).sum())(q),
        lambda: torch.func.jvp(torch.func.grad(lambda x: f(x, k, v).sum()), (q,), (q,)),
        lambda: torch.func.grad(lambda x: torch.func.jvp(lambda y: f(y, k, v), (x,), (x,))[1].sum())(q),
        lambda: torch.func.jvp(lambda x: f(x, k, v), (q.clone().requires_grad_(),), (q,))[1].sum().backward(),
    ],
    ids=["hessian", "forward over reverse", "reverse over forward", "backward through a tangent"],
)
def test_second_derivatives_are_refused(twice):
    with pytest.raises(BadInputError, match="first derivatives only"):
        twice()


def test_dual_gradients_are_refused():
    leaf = q.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf, q)
        with pytest.raises(BadInputError, match="first derivatives only"):
            torch.autograd.grad(f(dual, k, v).sum(), dual)


def test_double_backward_is_refused():
    leaf = q.clone().requires_grad_()
    gradient = torch.autograd.grad(f(leaf, k, v).sum(), leaf, create_graph=True)[0]
    with pytest.raises(BadInputError, match="first derivatives only"):
        gradient.sum().backward()


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_backward_pass_through_the_gradient_is_a_product_with_the_jacobian(start):
    """`u ↦ Jᵀu` is linear, so its graph may be made at zero or anywhere, and its own backward pass is `J v`."""
    leaves = [t.clone().requires_grad_() for t in P.qkv]
    y = f(*leaves)
    u = torch.full_like(y, start).requires_grad_()
    pulled = torch.autograd.grad(y, leaves, u, create_graph=True)
    for _ in range(2):
        (pushed,) = torch.autograd.grad(pulled, u, TANGENTS, retain_graph=True)
        assert_close(pushed, torch.func.jvp(reference, P.qkv, TANGENTS)[1])


def test_a_backward_pass_through_a_tangent_is_a_product_with_the_transpose():
    tangents = [t.clone().requires_grad_() for t in TANGENTS]
    pushed = torch.func.jvp(f, P.qkv, tuple(tangents))[1]
    u = gaussian(*pushed.shape, seed=5)
    want = torch.func.vjp(reference, *P.qkv)[1](u)
    for got, true in zip(torch.autograd.grad(pushed, tangents, u), want, strict=True):
        assert_close(got, true)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_a_gradient_is_not_taken_for_constant(i):
    """In a model, the part of a second derivative that goes around attention is not handed out as if it were all."""
    leaves = [t.clone().requires_grad_() for t in P.qkv]
    pulled = torch.autograd.grad(f(*leaves).sum(), leaves, create_graph=True)
    with pytest.raises(BadInputError, match="first derivatives only"):
        torch.autograd.grad(torch.cat([t.flatten() for t in pulled]).sum(), leaves[i])


@pytest.mark.parametrize("grad", [True, False])
def test_the_kernel_comes_with_the_output(grad):
    q, k, v = (t.clone().requires_grad_(grad) for t in P.qkv)
    out, kernel = attention_and_kernel(q, k, v, P.scores)
    assert out.requires_grad == grad
    assert torch.equal(out, kernel.output)
    assert out.data_ptr() != kernel.output.data_ptr()  # what is done to the output in place is no concern of the kernel
    assert not any(t.requires_grad for t in kernel.inputs)
