"""Attention inside a pass: one kernel for all copies of a row, whose derivatives are its products, one probe for each copy."""

from typing import Any

import torch
from torch import Tensor

from howsmooth.kernels import SoftmaxAttention


def attended(kernel: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, times: int) -> Tensor:
    """The kernel's output for `times` copies of each of its rows, (rows · times, heads, n, d_v).

    Its first derivative in `q`, `k`, `v`, and the derivative of that in the vector it is applied to, are products of the
    kernel. How they change with `q`, `k`, `v` is not known to it.

    >>> from howsmooth.kernels import Scores, linearize
    >>> x = torch.randn(1, 1, 3, 2)
    >>> q = x.repeat(4, 1, 1, 1).requires_grad_()
    >>> out = attended(linearize(x, x, x, Scores(1.0)), q, q, q, 4)
    >>> torch.autograd.grad(out.sum(), q)[0].shape
    torch.Size([4, 1, 3, 2])
    """
    return _Attended.apply(kernel, times, q, k, v)  # pyright: ignore[reportReturnType]


def _probes(t: Tensor, times: int) -> Tensor:
    """(rows · times, …) as (times, rows, …)."""
    return t.unflatten(0, (-1, times)).transpose(0, 1)


def _copies(t: Tensor) -> Tensor:
    """(times, rows, …) as (rows · times, …)."""
    return t.transpose(0, 1).flatten(0, 1)


# with no setup_context: torch then looks up a signature at every call
class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: SoftmaxAttention, times: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.kernel, ctx.times = kernel, times
        return kernel.output.to(q.dtype, copy=True) if times == 1 else kernel.output.to(q.dtype).repeat_interleave(times, 0)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return None, None, *_Back.apply(ctx.kernel, ctx.times, *g)  # pyright: ignore[reportGeneralTypeIssues]


class _Back(torch.autograd.Function):
    """`g ↦ Jᵀ g`."""

    @staticmethod
    def forward(ctx: Any, kernel: SoftmaxAttention, times: int, g: Tensor) -> tuple[Tensor, ...]:
        ctx.kernel, ctx.times = kernel, times
        return tuple(_copies(t).to(g.dtype) for t in kernel.vjp(_probes(g.to(kernel.output.dtype), times)))

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        kind = ctx.kernel.output.dtype
        along = ctx.kernel.jvp(*(_probes(t.to(kind), ctx.times) for t in tangents))
        return None, None, _copies(along).to(tangents[0].dtype)
