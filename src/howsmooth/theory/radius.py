"""The radius that a norm in front of a layer fixes."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import LayerNorm, RMSNorm
from howsmooth.theory.weights import slack


@torch.no_grad()
def norm_radius(norm: LayerNorm | RMSNorm) -> float:
    """The largest length of a token that leaves a LayerNorm or RMSNorm, rounded up (docs/bounds.md §3.14).

    `α ⊙ u + β` with `|u|² ≤ d` (and `1·u = 0` after LayerNorm, which the multiplier `η` stands for) is at most

        |·|² ≤ λ d + |β|² + Σ_k (α_k β_k − η)²/(λ − α_k²)

    for every `λ` at which the quadratic form `λ − α²` is positive on these `u`, and equal to the least of these.

    >>> round(norm_radius(RMSNorm(torch.full((4,), 2.0))), 9)
    4.0
    """
    if not isinstance(norm, LayerNorm | RMSNorm):
        raise BadInputError(f"expected a LayerNorm or RMSNorm, got {type(norm).__name__}; give the radius as a number instead")
    alpha = norm.weight.double().cpu()
    beta = torch.zeros_like(alpha) if norm.bias is None else norm.bias.double().cpu()
    d, centred = alpha.numel(), isinstance(norm, LayerNorm)
    base = _centred_top(alpha.square()) if centred else float(alpha.square().max())
    scale = max(base, float(beta.square().sum()), 1e-300)

    def squared(log_gap: Tensor) -> Tensor:
        lam = base + scale * log_gap.exp()  # (m,)
        w = 1 / (lam[:, None] - alpha.square())
        ab = alpha * beta
        eta = (w * ab).sum(-1, keepdim=True) / w.sum(-1, keepdim=True) if centred else 0.0
        value = lam * d + beta.square().sum() + (w * (ab - eta).square()).sum(-1)
        negative = (w < 0).sum(-1)
        positive_form = (negative == 0) | ((negative == 1) & (w.sum(-1) < 0) & centred)
        return torch.where(positive_form & value.isfinite(), value, torch.inf)

    low, high, least = -34.0, 6.0, math.inf  # convex in λ, hence unimodal in its logarithm: refine a grid around its best point
    for _ in range(8):
        grid = torch.linspace(low, high, 33, dtype=torch.float64)
        values = squared(grid)
        least, best, step = min(least, float(values.min())), float(grid[values.argmin()]), (high - low) / 32
        low, high = best - step, best + step
    return least**0.5 * slack(d)


def _centred_top(squares: Float[Tensor, " d"]) -> float:
    """The largest `Σ α_k² u_k²` over unit `u` with `1·u = 0`: the root of `Σ 1/(λ − α_k²)` between the top two squares."""
    if len(squares) == 1:
        return 0.0
    low, high = (float(x) for x in squares.topk(2).values.flip(0))
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if float((1 / (middle - squares)).sum()) > 0 else (low, middle)
    return high
