"""Softmax attention inside a torch graph: its two products come from the kernels, so autograd never sees an n × n matrix."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels import Scores, SoftmaxAttention, linearize
from howsmooth.kernels.base import Precision


class _Attend(torch.autograd.Function):
    """`o = softmax(s) v`; backwards, the transposed product of the kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: SoftmaxAttention) -> Tensor:
        ctx.kernel = kernel
        return kernel.output.clone()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        dq, dk, dv = _Transposed.apply(g[0], ctx.kernel)  # pyright: ignore[reportGeneralTypeIssues]
        return dq, dk, dv, None


class _Transposed(torch.autograd.Function):
    """`g ↦ Jᵀ g`, linear in `g`: its own backward pass is `J`, which is how a product `J v` runs through the graph.

    Second derivatives in `q, k, v` are left out: no product with a Jacobian needs them.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, kernel: SoftmaxAttention) -> tuple[Tensor, Tensor, Tensor]:
        ctx.kernel = kernel
        if not bool(g.any()):  # the graph of a linear map is made at zero
            q, k, v = kernel.inputs
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dq, dk, dv = kernel.vjp(g[None])
        return dq[0], dk[0], dv[0]

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> Any:
        return ctx.kernel.jvp(*(t[None] for t in v))[0], None


def attend(
    q: Float[Tensor, "batch heads n d"],
    k: Float[Tensor, "batch kv_heads m d"],
    v: Float[Tensor, "batch kv_heads m d_v"],
    scores: Scores,
    precision: Precision = "half",
) -> tuple[Float[Tensor, "batch heads n d_v"], SoftmaxAttention]:
    """Softmax attention whose derivatives run on the kernels, and the kernel itself.

    >>> x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    >>> out, _ = attend(x, x, x, Scores(1.0))
    >>> torch.autograd.grad(out.sum(), x)[0].shape
    torch.Size([1, 1, 3, 2])
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    with torch.no_grad():
        kernel = linearize(q.detach().to(kind), k.detach().to(kind), v.detach().to(kind), scores, precision=precision)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (q, k, v)):
        return kernel.output.to(q.dtype), kernel
    out = _Attend.apply(q, k, v, kernel)
    assert isinstance(out, Tensor)
    return out, kernel
