"""Which way the values of an attention call lead: the start of a guess for a map that is cut out of a model."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels import SoftmaxAttention
from howsmooth.maps.jacobian import top_input
from howsmooth.maps.operator import stream

_PASSES = 4  # backward passes through the values that a guess may take: less than a product with `JᵀJ` each


@dataclass(frozen=True, eq=False)
class Attended:
    """A call of attention in a graph: the kernel that serves it, the values it took and what it gave, (1, heads, n, d_v)."""

    kernel: SoftmaxAttention
    values: Tensor
    output: Tensor


def led_to(
    x: Float[Tensor, "1 n d"], y: Float[Tensor, "1 n d_out"], call: Attended, seed: int
) -> Float[Tensor, " d_out"] | None:
    """The output direction that the path through the values, `y ← output`, `values ← x`, stretches most.

    Before and behind attention every token is on its own, so one backward pass asks for as many rows of that path's matrix as
    there are tokens. Nothing where that takes many passes, or where values are not made of `x`.
    """
    (n, d), values, output = y.shape[1:], call.values, call.output
    if not (values.requires_grad and output.requires_grad) or values.shape[2] != output.shape[2]:
        return None
    if y.shape[1] != x.shape[1] or d > _PASSES * n:
        return None
    rows = []
    for first in range(0, d, n):
        some = torch.arange(min(n, d - first), device=y.device)
        u = torch.zeros_like(y)
        u[0, some, first + some] = 1.0
        (g,) = torch.autograd.grad(y, output, u, retain_graph=True, materialize_grads=True)
        g = g.unflatten(1, (values.shape[1], -1)).sum(2)  # (1, kv_heads, n, d_v): heads that share their values
        rows.append(torch.autograd.grad(values, x, g, retain_graph=True, materialize_grads=True)[0][0, some])
    path = torch.cat(rows)  # (d_out, d)
    start = torch.randn(1, path.shape[1], generator=stream(seed, "guess")).to(path)
    direction = path @ top_input(path, start)[0]
    return direction if bool(direction.isfinite().all()) and bool(direction.any()) else None
