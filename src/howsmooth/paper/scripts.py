"""The number that the paper's public scripts print, and the constant, by the same power iteration.

With `y, t = torch.func.jvp(f, (x,), (u,))`, `y = f(x)` and `t = J u`. The scripts go on with element 0, `y`; power iteration
needs element 1. docs/reproduction.md §6 says in two lines what either gives.
"""

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.maps.base import Map


def power_iteration(
    f: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"], *, element: Literal[0, 1], steps: int = 10, seed: int = 0
) -> list[float]:
    """What is printed after each step: `√|Jᵀ w|` with `w` an element of what `torch.func.jvp` returns, then `u ← Jᵀw/|Jᵀw|`.

    element: 0 as in the scripts, where the answer is `√|Jᵀ f(x)|` from the first step on; 1 for power iteration on `JᵀJ`, which
    tends to `‖J‖₂`.

    >>> f = lambda x: 2 * x + 1
    >>> x = torch.tensor([[3.0, 4.0]])
    >>> [round(v, 6) for v in power_iteration(f, x, element=1, steps=2)]  # ‖J‖ = 2
    [2.0, 2.0]
    >>> [round(v * v, 5) for v in power_iteration(f, x, element=0, steps=2)]  # |Jᵀ f(x)| = 2 |(7, 9)|
    [22.80351, 22.80351]
    """
    x = x.detach()
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    u = u / u.norm()
    printed = []
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # the one that has forward mode
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on first use of forward mode
        for _ in range(steps):
            w = torch.func.jvp(f, (x,), (u,))[element]
            (back,) = torch.func.vjp(f, x)[1](w)
            size = back.norm()
            printed.append(float(size.detach().sqrt()))
            u = (back / size).detach()
    return printed


@torch.no_grad()
def scripts_value(f: Map, x: Float[Tensor, "n d"]) -> float:
    """`√|Jᵀ f(x)|`, the fixed point of that iteration with element 0, from one product."""
    x = f.prepare(x)
    output, jacobian = f.linearize(x[None])
    return float(jacobian.vjp(output[None])[0, 0].double().norm().sqrt())
