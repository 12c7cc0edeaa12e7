"""Softmax attention linearised inside a graph of torch's: the node of a measured map, with the kernel that serves it.

Weights are kept where they fit, and products come in the precision asked for, since a solver takes dozens at one place.

A product with the Jacobian is linear in the vector it is given, and the derivative of `v ↦ J v` is `Jᵀ`, that of `g ↦ Jᵀ g`
is `J`: the two products are each other's backward pass, so `J v` also runs as a backward pass through a graph of `Jᵀ g`.
How `J` changes with `q, k, v` is no part of a linearisation: that raises.
"""

import importlib
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import AttentionKernel, Keys, Outputs, Precision, Queries, Scores, Values
from howsmooth.kernels.dispatch import Kernel, linearize

_ONCE = "expected first derivatives only, got a derivative of a derivative; use howsmooth.sdpa for those"


def attention_and_kernel(
    q: Queries, k: Keys, v: Values, scores: Scores, precision: Precision = "half", copies: int = 1
) -> tuple[Outputs, AttentionKernel]:
    """`softmax(s) v`, and the kernel that serves it: for whoever puts it inside a model and must know how exact it is.

    copies: how often every item comes, one copy behind the other, each with a direction of its own; the kernel serves one.

    >>> x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    >>> out, kernel = attention_and_kernel(x, x, x, Scores(1.0))
    >>> torch.autograd.grad(out.sum(), x)[0].shape
    torch.Size([1, 1, 3, 2])
    """
    here = _Here(_first(scores, len(q), copies), "auto", precision, copies)
    return here.attend(q, k, v), here.kernel


def _first(scores: Scores, items: int, copies: int) -> Scores:
    """The scores of the first copy of every item."""
    mask = scores.mask
    keys, bias = (t[::copies] if t is not None and len(t) == items else t for t in (mask.keys, mask.bias))
    return scores if copies == 1 else replace(scores, mask=replace(mask, keys=keys, bias=bias))


@dataclass(eq=False)
class _Here:
    """Attention at one `q, k, v`: the kernel made in the forward pass, which sees plain tensors, read by the derivatives."""

    scores: Scores
    name: Kernel
    precision: Precision = "half"
    copies: int = 1
    kernel: AttentionKernel = field(init=False)
    dual: bool = field(init=False)  # torch's own forward mode is on

    def probes(self, t: Tensor) -> Tensor:
        """Directions, one for each copy, as the kernel takes them: a probe for each copy."""
        return t.to(self.kernel.output.dtype).unflatten(0, (-1, self.copies)).transpose(0, 1)

    def attend(self, *qkv: Tensor) -> Tensor:
        if max(_transforms(t) for t in qkv) > 1:
            raise BadInputError(_ONCE)
        self.dual = any(_transforms(t) == 0 and forward_ad.unpack_dual(t).tangent is not None for t in qkv)
        return _Attention.apply(self, *qkv)


def _transforms(t: Tensor) -> int:
    """How many of torch.func's transforms look at a tensor."""
    functorch = importlib.import_module("torch._C._functorch")
    depth = 0
    while functorch.is_functorch_wrapped_tensor(t):
        t, depth = functorch.get_unwrapped(t), depth + 1
    return depth


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(here: _Here, *qkv: Tensor) -> Tensor:
        kind = torch.promote_types(qkv[0].dtype, torch.float32)
        q, k, v = (t.detach()[:: here.copies].to(kind) for t in qkv)
        here.kernel = linearize(q, k, v, here.scores, here.name, here.precision)
        out = here.kernel.output.to(qkv[0].dtype, copy=True)  # the kernel keeps its own
        return out if here.copies == 1 else out.repeat_interleave(here.copies, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.here, ctx.qkv = inputs[0], inputs[1:]

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple:
        if ctx.here.dual:
            raise BadInputError(_ONCE)
        graph = torch.is_grad_enabled()  # of the backward pass itself, for another one through it
        products = _Transposed.apply(ctx.here, graph, *g)
        if graph and ctx.here.copies == 1:
            guard = _Guard.apply(*ctx.qkv)
            products = (t + guard for t in products)
        return None, *products

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        filled = (torch.zeros_like(x) if t is None else t for t, x in zip(tangents[1:], ctx.qkv, strict=True))
        return _Along.apply(ctx.here, *filled) + _Guard.apply(*ctx.qkv)


class _Along(torch.autograd.Function):
    """`dq, dk, dv ↦ J (dq, dk, dv)`."""

    @staticmethod
    def forward(here: _Here, *tangents: Tensor) -> Tensor:
        return here.kernel.jvp(*map(here.probes, tangents)).transpose(0, 1).flatten(0, 1).to(tangents[0].dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.here = inputs[0]

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple:
        return None, *_Transposed.apply(ctx.here, False, *g)


class _Transposed(torch.autograd.Function):
    """`g ↦ Jᵀ g`."""

    @staticmethod
    def forward(here: _Here, graph: bool, g: Tensor) -> tuple[Tensor, ...]:
        if graph and here.copies == 1 and not bool(g.any()):  # the graph of a linear map is made at zero
            return tuple(torch.zeros_like(t, dtype=g.dtype) for t in here.kernel.inputs)
        return tuple(t.transpose(0, 1).flatten(0, 1).to(g.dtype) for t in here.kernel.vjp(here.probes(g)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.here = inputs[0]

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple:
        return None, None, _Along.apply(ctx.here, *tangents)


class _Guard(torch.autograd.Function):
    """Zero, added to a product for its dependence on `q, k, v`; raises when that is asked for."""

    @staticmethod
    def forward(*qkv: Tensor) -> Tensor:
        return qkv[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> NoReturn:
        raise BadInputError(_ONCE)
