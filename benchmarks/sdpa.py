"""`hs.sdpa` on a CPU against torch's math attention, which is what any derivative but a plain backward pass takes there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from benchmarks.harness import WrongAnswerError, side_by_side

TITLE = "hs.sdpa against torch's math attention on a CPU (n = 1024, 12 heads × 64, float32)"
N, HEADS, WIDTH = 1024, 12, 64
ERROR = 1e-4

Attend = Callable[..., Tensor]


def run(quick: bool) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    q, k, v, dq, dk, dv, g = (torch.randn(1, HEADS, N, WIDTH, generator=random) for _ in range(7))
    x, t = (q, k, v), (dq, dk, dv)
    rows = []
    for causal in (False, True):

        def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
            return hs.sdpa(q, k, v, is_causal=causal)

        def math(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        for name, mode in MODES.items():
            agree(name, mode(ours, x, t, g), mode(math, x, t, g))
            one, other = side_by_side([lambda mode=mode, f=f: mode(f, x, t, g) for f in (ours, math)], repeat=2 if quick else 5)
            mask = "causal" if causal else "full"
            rows.append({"mask": mask, "mode": name, "ours s": one, "torch s": other, "torch/ours": other / one})
    return rows


def agree(name: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...], error: float = ERROR) -> None:
    """Refuse to time answers that differ."""
    gap = max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))
    if not gap <= error:
        raise WrongAnswerError(f"{name}: expected answers within {error:g}, got {gap:.1e}; no time is reported")


def forward(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    return (f(*x),)


def backward(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    leaves = [a.detach().requires_grad_() for a in x]
    return torch.autograd.grad(f(*leaves), leaves, g)


def jvp(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    return torch.func.jvp(f, x, t)


def hvp(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    """Forward over reverse: the derivative of the gradients of `⟨g, o⟩`."""
    return torch.func.jvp(lambda *a: torch.func.vjp(f, *a)[1](g), x, t)[1]


def double_backward(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    leaves = [a.detach().requires_grad_() for a in x]
    first = torch.autograd.grad(f(*leaves), leaves, g, create_graph=True)
    return torch.autograd.grad(first, leaves, t)


def through_a_tangent(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    """Reverse over forward: gradients of `⟨g, do⟩` in the place."""
    leaves = tuple(a.detach().requires_grad_() for a in x)
    return torch.autograd.grad(torch.func.jvp(f, leaves, t)[1], leaves, g)


MODES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "forward": forward,
    "forward and backward": backward,
    "jvp": jvp,
    "forward over reverse": hvp,
    "reverse over reverse": double_backward,
    "reverse over forward": through_a_tangent,
}
