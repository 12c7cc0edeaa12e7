"""Softmax attention as a function torch can differentiate, backwards and forwards, in O(n · d) memory."""

import importlib
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import Scores, SoftmaxAttention
from howsmooth.kernels.dispatch import Kernel, linearize

_ONCE = "expected first derivatives only, got a derivative of a derivative; use kernels.attend for those"


def attention(
    q: Float[Tensor, "batch heads n d"],
    k: Float[Tensor, "batch kv_heads m d"],
    v: Float[Tensor, "batch kv_heads m d_v"],
    scores: Scores,
    kernel: Kernel = "auto",
) -> Float[Tensor, "batch heads n d_v"]:
    """`softmax(s) v` on the kernels: `torch.func.jvp`, `torch.func.vjp` and `backward()` go through their products.

    First derivatives only, in the precision of the inputs; masks and biases are constants. A second derivative raises.

    >>> from torch.func import jvp
    >>> x = torch.eye(2)[None, None]
    >>> value, tangent = jvp(lambda v: attention(0 * x, x, v, Scores(1.0)), (x,), (x,))
    >>> tangent[0, 0].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    if max(_transforms(t) for t in (q, k, v)) > 1:
        raise BadInputError(_ONCE)
    return _Attention.apply(q, k, v, scores, kernel, _Kept((q, k, v)))


def _transforms(t: Tensor) -> int:
    """How many of torch.func's transforms look at a tensor."""
    functorch = importlib.import_module("torch._C._functorch")
    depth = 0
    while functorch.is_functorch_wrapped_tensor(t):
        t, depth = functorch.get_unwrapped(t), depth + 1
    return depth


class _Kept:
    """Carries the linearisation from the forward pass, which sees plain tensors, to the derivatives."""

    at: SoftmaxAttention

    def __init__(self, inputs: tuple[Tensor, ...]):
        self.dual = any(_transforms(t) == 0 and forward_ad.unpack_dual(t).tangent is not None for t in inputs)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, kernel: Kernel, kept: _Kept) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        q_wide, k_wide, v_wide = (t.detach().to(wide) for t in (q, k, v))
        kept.at = linearize(q_wide, k_wide, v_wide, scores, kernel)
        return kept.at.output.to(q.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.kept, ctx.inputs = inputs[5], inputs[:3]

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple:
        if ctx.kept.dual:
            raise BadInputError(_ONCE)
        return *_Gradient.apply(ctx.kept, *g, *ctx.inputs), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        filled = (torch.zeros_like(x) if t is None else t for t, x in zip(tangents[:3], ctx.inputs, strict=True))
        return _Tangent.apply(ctx.kept, *filled, *ctx.inputs)


class _Product(torch.autograd.Function):
    """A product that knows what it depends on, and gives no derivative. Its forward pass sees plain tensors."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> NoReturn:
        raise BadInputError(_ONCE)


class _Tangent(_Product):
    @staticmethod
    def forward(kept: _Kept, dq: Tensor, dk: Tensor, dv: Tensor, *at: Tensor) -> Tensor:
        wide = kept.at.output.dtype
        return kept.at.jvp(*(t.to(wide)[None] for t in (dq, dk, dv)))[0].to(dq.dtype)


class _Gradient(_Product):
    @staticmethod
    def forward(kept: _Kept, g: Tensor, *at: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[0].to(g.dtype) for t in kept.at.vjp(g.to(kept.at.output.dtype)[None]))
