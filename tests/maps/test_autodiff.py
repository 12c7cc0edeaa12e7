"""The Jacobian of any torch function: equal to jacrev, the function evaluated once."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from checks import assert_close, check_batch_equals_loop, check_operator, jacobians
from howsmooth.errors import BadFunctionError
from howsmooth.maps import AutodiffJacobian, jacobian
from problems.layers import gaussian

W = gaussian(3, 4, seed=0)

# every function takes (items, 5, 4)
FUNCTIONS = {
    "identity": lambda x: x,
    "linear": lambda x: x @ W.mT,
    "elementwise": lambda x: torch.sin(x) * x,
    "vector": lambda x: x.square().sum(-1),
    "one number": lambda x: x.square().sum((-2, -1))[..., None],
    "wider": lambda x: torch.cat([x, x**2, x**3], -1),
    "four axes": lambda x: (x[..., :, None, :] * x[..., None, :, :]).exp(),
    "part of the input": lambda x: x[..., 1:3, ::2].tanh(),
    "attention": lambda x: torch.softmax(x @ x.mT, -1) @ x,
    "fused attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal fused attention": lambda x: F.scaled_dot_product_attention(x @ W.mT, x @ W.mT, x, is_causal=True),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "kinks": lambda x: torch.relu(x) + x.abs(),
    "a flat part": lambda x: torch.cat([x.sum(-1), torch.ones_like(x[..., 0])], -1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_jacrev_batched(name, batch):
    f, x = FUNCTIONS[name], gaussian(batch, 5, 4, seed=1)
    op = AutodiffJacobian(f, x, batched=True)
    assert (op.in_shape, op.out_shape) == ((5, 4), tuple(f(x).shape[1:]))
    torch.testing.assert_close(op.output, f(x), rtol=1e-14, atol=1e-14)  # torch's fused attention rounds anew with a graph
    check_operator(op, jacobians(f, x), growth=10)
    check_batch_equals_loop(lambda t: AutodiffJacobian(f, t, batched=True), x, growth=10)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_jacrev_single(name):
    f, x = FUNCTIONS[name], gaussian(5, 4, seed=1)
    op = AutodiffJacobian(f, x, batched=False)
    assert (op.batch, op.in_shape, op.out_shape) == (1, (5, 4), tuple(f(x).shape))
    truth = torch.func.jacrev(f)(x)
    assert isinstance(truth, Tensor)
    check_operator(op, truth.reshape(1, -1, 20), growth=10)


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (2, 3, 4), (2, 1, 3, 2)])
def test_inputs_of_any_shape(shape):
    x = gaussian(*shape, seed=2)
    truth = torch.func.jacrev(lambda t: t.flatten().cumsum(0).exp())(x)
    assert isinstance(truth, Tensor)
    op = AutodiffJacobian(lambda t: t.flatten().cumsum(0).exp(), x, batched=False)
    check_operator(op, truth.reshape(1, x.numel(), -1), growth=10)


@pytest.mark.parametrize("name", ["one number", "wider", "attention", "fused attention"])
def test_products_do_not_evaluate_the_function_again(name):
    calls = []

    def f(x: Tensor) -> Tensor:
        calls.append(x)
        return FUNCTIONS[name](x)

    op = AutodiffJacobian(f, gaussian(2, 5, 4, seed=1), batched=True)
    v = gaussian(3, 2, *op.in_shape, seed=3)
    op.vjp(op.jvp(v))
    op.gram(v)
    op.dense()
    op.select(torch.tensor([1])).jvp(v[:, :1])
    assert len(calls) == 1


class Cube(torch.autograd.Function):
    """`x³` whose backward pass is cut from the graph; it has a forward derivative."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (x,) = ctx.saved_tensors
        return (3 * x**2 * grad_outputs[0]).detach()

    @staticmethod
    def jvp(ctx, *grad_inputs):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad_inputs[0]


def cube(x: Tensor) -> Tensor:
    y = Cube.apply(x @ W.mT)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("batched", [True, False])
def test_falls_back_to_forward_mode(batched):
    x = gaussian(2, 5, 4, seed=1)
    truth = torch.func.jacrev(lambda t: (t @ W.mT) ** 3)(x)
    assert isinstance(truth, Tensor)
    truth = jacobians(lambda t: (t @ W.mT) ** 3, x) if batched else truth.reshape(1, 30, 40)
    check_operator(AutodiffJacobian(cube, x, batched), truth, growth=10)


def test_a_module_in_single_precision():
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = gaussian(2, 5, 8, seed=1, dtype=torch.float32)
    op = AutodiffJacobian(module, x, batched=True)
    exact = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64).eval()
    exact.load_state_dict(module.state_dict())
    check_operator(op, jacobians(exact, x.double()), growth=10)


def test_x_is_left_alone():
    x = gaussian(5, 4, seed=1)
    before = x.clone()
    op = AutodiffJacobian(FUNCTIONS["attention"], x, batched=False)
    v = gaussian(1, 1, 5, 4, seed=2)
    product = op.jvp(v)
    assert torch.equal(x, before)
    assert not x.requires_grad
    assert not product.requires_grad
    x.zero_()
    assert torch.equal(op.jvp(v), product)


def test_works_where_gradients_are_off():
    with torch.no_grad():
        op = AutodiffJacobian(FUNCTIONS["attention"], gaussian(5, 4, seed=1), batched=False)
        assert_close(op.dense()[0], AutodiffJacobian(FUNCTIONS["attention"], gaussian(5, 4, seed=1), batched=False).dense()[0])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x - x.mean(0),
        lambda x: x + x.flip(0),
        lambda x: torch.cumsum(x, 0),
        lambda x: F.batch_norm(x, None, None, training=True),
    ],
    ids=["mean", "flip", "cumulative sum", "batch norm"],
)
def test_mixing_items_is_refused(f):
    x = gaussian(4, 3, seed=1)
    with pytest.raises(BadFunctionError, match="mixes"):
        AutodiffJacobian(f, x, batched=True)
    assert AutodiffJacobian(f, x, batched=False).in_shape == (4, 3)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: (x, x), "one tensor"),
        (lambda x: (x > 0).long(), "floating-point"),
        (lambda x: x.detach(), "depends on x"),
        (lambda x: torch.ones(3), "depends on x"),
        (lambda x: (x - 10).log(), "finite"),
        (lambda x: x.sum(), "one output per item"),
        (lambda x: x[:1], "one output per item"),
    ],
    ids=["tuple", "integers", "detached", "constant", "nan", "scalar", "items lost"],
)
def test_functions_without_a_derivative_are_refused(f, message):
    with pytest.raises(BadFunctionError, match=message):
        AutodiffJacobian(f, gaussian(2, 3, seed=1), batched=True)


class Once(Cube):
    """`x³` with a backward pass that cannot be differentiated again."""

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad_outputs[0]


@pytest.mark.parametrize("mixed", [0.0, 1.0])
def test_a_backward_that_cannot_be_differentiated(mixed):
    x = gaussian(2, 5, 4, seed=1)
    op = AutodiffJacobian(lambda t: Once.apply(t) + mixed * t, x, batched=True)
    check_operator(op, jacobians(lambda t: t**3 + mixed * t, x), growth=10)


class Backless(Cube):
    """`x³` with a backward pass that torch cannot run in batches, and none in forward mode."""

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * float(grad_outputs[0].sum())


def test_no_derivative_in_either_mode_is_refused():
    with pytest.raises(BadFunctionError, match="expected a function with derivatives"):
        AutodiffJacobian(Backless.apply, gaussian(5, 4, seed=1), batched=False)


@pytest.mark.parametrize(
    "mix",
    [
        lambda t: torch.cat([t[:1] + t[1:2], t[1:]]),
        lambda t: t + torch.roll(t, 2, 0) * torch.tensor([1.0, 0, 0, 0])[:, None],
        lambda t: t - t.mean(0),
    ],
)
def test_any_mixing_of_items_is_refused(mix):
    with pytest.raises(BadFunctionError, match="mixes them"):
        AutodiffJacobian(mix, gaussian(4, 3, seed=1), batched=True)


@pytest.mark.parametrize("f", [lambda t: t.square().sum(), lambda t: t.sum() ** 2])
def test_one_number_without_axes(f):
    x = gaussian(5, 4, seed=1)
    check_operator(AutodiffJacobian(f, x, batched=False), torch.func.jacrev(f)(x).reshape(1, 1, 20), growth=10)


def test_a_number_as_input():
    x = torch.tensor(3.0).double()
    check_operator(AutodiffJacobian(lambda t: t**2, x, batched=False), torch.tensor([[[6.0]]]).double(), growth=10)


def test_functions_that_work_in_place():
    x = gaussian(5, 4, seed=1)
    op = AutodiffJacobian(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)).double(), x, batched=False)
    assert bool((x == gaussian(5, 4, seed=1)).all())
    assert op.out_shape == (5, 2)


def test_inference_mode_is_left():
    with torch.inference_mode():
        x = gaussian(5, 4, seed=1)
        op = AutodiffJacobian(torch.sin, x, batched=False)
    check_operator(op, torch.diag(x.flatten().cos())[None], growth=10)


def test_zeros_are_kept_once(monkeypatch: pytest.MonkeyPatch):
    """The graph of `u ↦ Jᵀu` keeps one number of a tensor of zeros, and its products are the same to the last bit."""
    x, v = gaussian(1, 8, 6, seed=0), gaussian(1, 1, 8, 6, seed=1)

    def f(t: Tensor) -> Tensor:
        return torch.nn.functional.silu(t) * t.square().mean(-1, keepdim=True).rsqrt() * t.mean(1, keepdim=True)

    plain = AutodiffJacobian(f, x, batched=True)
    kept: list[int] = []
    looked = jacobian._without_zeros

    def counted(t: Tensor) -> Tensor:
        kept.append(looked(t).untyped_storage().nbytes())
        return looked(t)

    monkeypatch.setattr(jacobian, "_MANY", 2)
    monkeypatch.setattr(jacobian, "_LOOKS", "cpu")
    monkeypatch.setattr(jacobian, "_without_zeros", counted)
    sparing = AutodiffJacobian(f, x, batched=True)
    assert 8 in kept  # one number
    for a, b in zip(plain.gram(v), sparing.gram(v), strict=True):
        assert torch.equal(a, b)


def test_a_graph_goes_with_what_keeps_it():
    x = gaussian(1, 4, 3, seed=0)
    jacobian_here = AutodiffJacobian(lambda t: t.exp(), x, batched=True)
    seen = weakref.ref(jacobian_here)
    gc.disable()
    try:
        del jacobian_here
        assert seen() is None
    finally:
        gc.enable()
