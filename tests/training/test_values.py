"""Smoothness is that of a function's values: what autograd is told otherwise is refused, and hides nothing in a penalty."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import howsmooth as hs
from problems.modules.base import Own, Pre, Stack, fused, largest, merge, seeded, split, tokens

pytestmark = pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")

X = tokens()
Function = Callable[[Tensor], Tensor]


class Wrong(torch.autograd.Function):
    """A sine whose derivatives are others'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 7 * grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return 5 * tangents[0]


def hooked(x: Tensor) -> Tensor:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda g: 9 * g)
    return y


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        norm = x.norm()
    return x * norm


def accumulated() -> Function:
    kept = torch.zeros(3, 4, dtype=torch.float64)
    return lambda x: kept.add_(x.detach()) * x


TOLD: dict[str, Function] = {
    "detach": lambda x: x.sin() + (2 * x.sin()).detach(),
    "data": lambda x: x.data.sin() + x,
    "a rounding passed by": lambda x: x + (x.round() - x).detach(),
    "a sigmoid passed by": lambda x: x + (3 * torch.sigmoid(x) - x).detach(),
    "item": lambda x: x * x.norm().item(),
    "numpy": lambda x: x * torch.from_numpy(x.detach().numpy()),
    "no_grad": without_gradients,
    "a wrong backward": lambda x: Wrong.apply(x),  # pyright: ignore[reportReturnType]
    "a hook on gradients": hooked,
    "random numbers": lambda x: x * torch.rand(4),
    "state": accumulated(),
    "not a number": lambda x: x.log(),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_autograd_is_told_is_refused(name: str):
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(hs.HowSmoothError, match="expected"):
        hs.smoothness(TOLD[name], x)


def test_what_agrees_is_not_refused():
    x = torch.randn(3, 4, dtype=torch.float64)
    for f in (torch.sin, lambda t: t + (t - t).detach(), lambda t: t.norm(dim=-1, keepdim=True) * t):
        assert hs.smoothness(f, x).item() == pytest.approx(largest(f, x), rel=1e-6)


def test_a_function_that_writes_into_its_input():
    x = torch.randn(3, 4, dtype=torch.float64)
    before = x.clone()
    assert hs.smoothness(lambda z: z.mul_(2).sin(), x).item() == pytest.approx(float(2 * (2 * x).cos().abs().max()), rel=1e-6)
    assert torch.equal(x, before)


class NoGradients(Own):
    """Attention whose derivative autograd is not told."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Inference(Own):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = super().forward(x)
        return y.clone()


class FixedWeights(Own):
    """Queries and keys without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            q, k = split(self.q(x)), split(self.k(x))
        return self.o(merge(F.scaled_dot_product_attention(q, k, split(self.v(x)))))


def two(kind: type[Own]) -> Any:
    return seeded(Stack(Pre(kind(fused)), Pre(kind(fused)), norm=False))


def penalty_of(net: nn.Module) -> float:
    return hs.SmoothnessPenalty(net, target=0.5, products=60)(X).item()


def truth() -> float:
    net, x, total = two(Own), X, 0.0
    for block in net.blocks:
        total += largest(block.att, block.ln1(x)) / 0.5 - 1
        x = block(x).detach()
    return total / 2


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", [Own, NoGradients, Inference, FixedWeights])
def test_a_penalty_counts_what_has_no_gradient(kind: type[Own], trains: bool):
    net = two(kind).requires_grad_(trains)
    assert penalty_of(net) == pytest.approx(truth(), rel=2e-2)
    assert penalty_of(net) == pytest.approx(penalty_of(two(Own)), rel=1e-6)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", [NoGradients, Inference, FixedWeights])
def test_a_tracker_counts_what_has_no_gradient(kind: type[Own]):
    net = two(kind)
    first = net.blocks[0]
    expected = largest(two(Own).blocks[0].att, first.ln1(X))
    assert hs.Tracker(net, probe=X).update()["smoothness/layer_00"] == pytest.approx(expected, rel=2e-2)


def test_where_gradients_are_off():
    with torch.no_grad():
        assert penalty_of(two(Own)) == pytest.approx(truth(), rel=2e-2)
        assert hs.smoothness(torch.sin, X).item() == pytest.approx(float(X.cos().abs().max()), rel=1e-6)
