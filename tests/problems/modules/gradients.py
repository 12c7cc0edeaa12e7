"""Functions whose gradient by autograd is not their derivative."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from problems.modules.base import (
    D,
    Formula,
    Own,
    Question,
    Step,
    asks,
    fused,
    merge,
    one,
    plain,
    seeded,  # fmt: skip
)
from problems.modules.softmax import qkv


class Beside(nn.Module):
    """A residual beside attention, through which the gradient is not the derivative; `way` says how."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.att, self.gate, self.way = Own(fused), nn.Linear(D, 1), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def under_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.att(x)
    return x + y


def heads_under_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = fused(m.att, x)
    return x + m.att.o(y)


def detached(m: Any, x: Tensor) -> Tensor:
    return x + m.att(x).detach()


def detached_input(m: Any, x: Tensor) -> Tensor:
    return x + m.att(x.detach())


def detached_weights(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m.att, x)
    return x + m.att.o(merge((q @ k.mT / 2).softmax(-1).detach() @ v))


def straight_through(m: Any, x: Tensor) -> Tensor:
    y = m.att(x)
    return x + (y + (y.clamp(-0.5, 0.5) - y).detach())


def hard_gate(m: Any, x: Tensor) -> Tensor:
    soft = torch.sigmoid(m.gate(x))
    hard = (soft > 0.5).to(x.dtype)
    return x + (hard + soft - soft.detach()) * m.att(x)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class Softmax(torch.autograd.Function):
    """A softmax with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y,) = ctx.saved_tensors
        return y * (grads[0] - (grads[0] * y).sum(-1, keepdim=True))


def reversed_gradient(m: Any, x: Tensor) -> Tensor:
    return x + m.att(Reverse.apply(x))


def own_backward(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m.att, x)
    return x + m.att.o(merge(Softmax.apply(q @ k.mT / 2) @ v))  # pyright: ignore


def data_doubled(m: Any, x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x + m.att(x)


def in_float32(m: Any, x: Tensor) -> Tensor:
    return x + m.att(x.float()).to(x.dtype)


def beside(block: Callable[[Any, Tensor], Tensor] | None = None) -> Callable[..., Formula]:
    def formula(m: Any, x: Tensor) -> Formula:
        def attention(t: Tensor) -> Tensor:
            return m.att.o(plain(m.att, t))

        def run(t: Tensor) -> Tensor:
            return t + attention(t) if block is None else block(m, t)

        return Formula(x, [Step(run, attention, lambda t: plain(m.att, t))])

    return formula


def clamped(m: Any, t: Tensor) -> Tensor:
    return t + m.att.o(plain(m.att, t)).clamp(-0.5, 0.5)


def gated(m: Any, x: Tensor) -> Formula:
    hard = (m.gate(x) > 0).double()
    return Formula(x, [Step(lambda t: t + hard * m.att.o(plain(m.att, t)))])


def mixed() -> nn.Module:
    m: Any = seeded(Beside(in_float32))
    m.att.float()
    return m


def mixed_formula(m: Any, x: Tensor) -> Formula:
    return beside()(seeded(Beside(in_float32)), x)


def besides(name: str, way: Callable[[Any, Tensor], Tensor], *specs: str, formula: Any = None, **others: Any) -> list[Question]:
    return asks(name, lambda: seeded(Beside(way)), one, formula or beside(), *specs, **others)


QUESTIONS: list[Question] = [
    *besides("attention under no_grad", under_no_grad, "attention, heads, block, update"),
    *besides("heads under no_grad", heads_under_no_grad, "attention, block"),
    *besides("attention detached", detached, "attention, block"),
    *besides("attention's input detached", detached_input, "attention, block"),
    *besides("attention's weights detached", detached_weights, "attention, heads, block"),
    *besides("a clamp, straight through", straight_through, "block", formula=beside(clamped)),
    *besides("a hard gate, straight through", hard_gate, "block", formula=gated),
    *besides("a gradient reversed", reversed_gradient, "attention, block"),
    *besides("a backward pass of its own", own_backward, "attention, heads, block"),
    *besides(
        "the input's data doubled",
        data_doubled,
        "block or refused",
        formula=beside(lambda m, t: 2 * t + m.att.o(plain(m.att, 2 * t))),
    ),
    *asks("float32 inside double", mixed, one, mixed_formula, "attention, heads, block", tolerance=1e-5),
]
