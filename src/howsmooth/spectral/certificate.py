"""The upper end: how large can the norm still be, given what a random start has shown?

`σ² = λ` is the largest eigenvalue of `M = JᵀJ`, `v` its unit eigenvector, and `k` steps from a random start `q` in R^N gave
Ritz values `θ_1 ≥ … ≥ θ_k` and off-diagonals `β_1 … β_k`. Proofs: docs/theory.md §2.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def log_growth(
    at: Float[Tensor, " batch"], ritz: Float[Tensor, "batch k"], beta: Float[Tensor, "batch k"]
) -> Float[Tensor, " batch"]:
    """`log Π_i (at − θ_i)/β_i`, for `at > θ_1`."""
    return (at[:, None] - ritz).log().sum(-1) - beta.log().sum(-1)


def log_rarity(starts: Float[Tensor, " batch"], size: int, delta: float) -> Float[Tensor, " batch"]:
    """The growth that would need starts of probability `delta`: `log √(2N/π) + log(1/δ)` for one. Corollary 2.4.

    starts: how many fresh random vectors the run has used (1, and one more for each invariant subspace it left). `m` of them
    are unlucky together when a product of `m` uniform numbers is small, and minus its logarithm has a Gamma(m) law.

    >>> float(log_rarity(torch.ones(1).double(), size=2, delta=1e-6) - math.log(1e6) - 0.5 * math.log(4 / math.pi)) < 1e-9
    True
    """
    low, high = torch.zeros_like(starts), 2 * starts - 4 * math.log(delta)
    high = _bisect(low, high, lambda at: torch.special.gammaincc(starts, at) <= delta)
    return high + starts * (0.5 * math.log(2 * size / math.pi))


def upper_end(
    ritz: Float[Tensor, "batch k"], beta: Float[Tensor, "batch k"], rarity: Float[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """An upper end for `λ` that fails with probability at most `δ` over the start, whatever the spectrum.

    `⟨v, q⟩ = ⟨v, q_{k+1}⟩ · Π_i β_i/(λ − θ_i)`, so `Π_i (λ − θ_i)/β_i ≤ 1/|⟨v, q⟩|`, and a uniform `q` has
    `|⟨v, q⟩| ≥ δ √(π/2N)` with probability `1 − δ`. The left side grows with `λ` past `θ_1`: the bound is where the two meet.
    It holds for all `k` on one event, so stopping early costs nothing. Van Dorsselaer, Hochstenbach & Van der Vorst (2000)
    for eigenvalues, Hochstenbach (2013) for norms. Theorem 2.2.

    rarity: `log_rarity` of the start.

    >>> ritz, beta = torch.tensor([[4.0]]).double(), torch.tensor([[1e-12]]).double()
    >>> rarity = log_rarity(torch.ones(1).double(), size=10, delta=1e-6)
    >>> 4 < float(upper_end(ritz, beta, rarity)) < 4.0001
    True
    """
    top = ritz.amax(-1)
    # bisect on s = log(λ − θ_1): every factor of the product is at least e^s/β_i, so the root is below `high`
    high = (beta.log().sum(-1) + rarity) / ritz.shape[-1]
    low = (top.abs().clamp_min(torch.finfo(top.dtype).tiny) * torch.finfo(top.dtype).eps).log().minimum(high - 1)
    return top + _bisect(low, high, lambda at: log_growth(top + at.exp(), ritz, beta) >= rarity).exp()


def _bisect(low: Tensor, high: Tensor, above: Callable[[Tensor], Tensor]) -> Tensor:
    """From above, where a condition begins to hold: sixty halvings, past the last bit."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        past = above(middle)
        low, high = torch.where(past, low, middle), torch.where(past, middle, high)
    return high
