"""The upper end: how large can the norm still be, given what a random start has shown?

`σ² = λ` is the largest eigenvalue of `M = JᵀJ`, `v` its unit eigenvector, and `k` steps from a random start `q` in R^N gave
Ritz values `θ_1 ≥ … ≥ θ_k` and off-diagonals `β_1 … β_k`. Proofs: docs/explanation/theory.md §2.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

_NARROWEST = 1e-9  # `λ/θ_1 − 1` is not resolved below this, so that rounding in what follows is below the next number
_ROUNDED = 1e-4


def log_growth(
    at: Float[Tensor, " batch"], ritz: Float[Tensor, "batch k"], beta: Float[Tensor, "batch k"]
) -> Float[Tensor, " batch"]:
    """`log Π_i (at − θ_i)/β_i`, for `at > θ_1`."""
    return (at[:, None] - ritz).log().sum(-1) - beta.log().sum(-1)


def log_rarity(starts: Float[Tensor, " batch"], size: int, delta: float) -> Float[Tensor, " batch"]:
    """The growth that would need starts of probability `delta`: `log √(2N/π) + log(1/0.9δ)` for one. Corollary 2.4.

    starts: how many fresh random vectors the run has used (1, and one more for each invariant subspace it left). `m` of them
    are unlucky together when a product of `m` uniform numbers is small, and minus its logarithm has a Gamma(m) law. How many
    it will take is not known before, so each number has its share of `delta`: 0.9 for one, 0.1/(m(m − 1)) for `m`.

    >>> float(log_rarity(torch.ones(1).double(), size=2, delta=1e-6) - math.log(1e6 / 0.9) - 0.5 * math.log(4 / math.pi)) < 1e-9
    True
    """
    if bool((starts == 1).all()):  # `P(Gamma(1) ≥ x) = e^{−x}`
        return torch.full_like(starts, 0.5 * math.log(2 * size / math.pi) - math.log(0.9 * delta))
    share = delta * torch.where(starts > 1, 0.1 / (starts * (starts - 1)).clamp_min(1.0), 0.9)
    low, high = torch.zeros_like(starts), 2 * starts - 4 * share.log()
    high = _bisect(low, high, lambda at: torch.special.gammaincc(starts, at) <= share)
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


def inexact_end(
    alpha: Float[Tensor, "batch k"],
    beta: Float[Tensor, "batch k"],
    rest: Float[Tensor, "batch k"],
    error: float,
    rarity: Float[Tensor, " batch"],
    slack: float,
) -> Float[Tensor, " batch"]:
    """An upper end for `λ` from products with errors of any kind, however they depend on the start. Theorem 2.5.

    With `x = (λ − T)^{-1} e_1`, all of it positive past `θ_1`, `|⟨v, q⟩| ≤ β_k x_k + Σ_j ε_j x_j`, which falls as `λ` grows.

    alpha, beta: of `T`; the last of `beta` couples to the next vector.  rest: `|w_j − α_j q_j − β_{j−1} q_{j−1} − β_j q_{j+1}|`
    for the computed product `w_j` with `q_j`.  error: of products with `J` and with `Jᵀ`, so that `w_j` is within
    `error (2√λ + error)` of `JᵀJ q_j`.  rarity: `log_rarity` of the start.  slack: of the start, which is rounded too.

    >>> one = torch.ones(1, 1).double()
    >>> rarity = log_rarity(torch.ones(1).double(), size=10, delta=1e-6)
    >>> 4 < float(inexact_end(4 * one, 1e-14 * one, 1e-14 * one, 1e-14, rarity, 1e-15)) < 4.0001
    True
    """
    beside = beta[:, :-1]
    top = torch.linalg.eigvalsh(alpha.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1))[:, -1].clamp_min(0.0)
    unit = torch.where(top > 0, top, max(error**2, 1e-300))[:, None]
    alpha, beta, rest, error_in = alpha / unit, beta / unit, rest / unit, error / unit.sqrt()
    start = (top > 0).to(top)
    needed = (-rarity).exp() - slack  # what a likely start has along `v`, at least

    def unlikely(at: Tensor) -> Tensor:
        """Whether `λ = θ_1 + e^at` would need an unlikely start."""
        above = (start + at.exp())[:, None]
        pivots = [above - alpha[:, -1:]]
        for j in range(alpha.shape[1] - 2, -1, -1):
            pivots.append(above - alpha[:, j : j + 1] - beta[:, j : j + 1].square() / pivots[-1])
        pivots.reverse()
        x = 1 / pivots[0]
        entries = [x]
        for j in range(alpha.shape[1] - 1):
            x = beta[:, j : j + 1] * x / pivots[j + 1]
            entries.append(x)
        each = torch.cat(entries, 1)
        sizes = rest + error_in * (2 * above.sqrt() + error_in)
        reached = beta[:, -1] * each[:, -1] + (sizes * each).sum(-1)
        sound = (torch.cat(pivots, 1) > 0).all(-1) & reached.isfinite()
        return sound & (reached * (1 + _ROUNDED) <= needed)

    low = torch.full_like(top, math.log(_NARROWEST))
    high = low + 1.0
    for _ in range(10):
        high = torch.where(unlikely(high), high, 2 * (high - low) + low)
    high = torch.where(unlikely(high), high, torch.inf)
    ends = _bisect(low, torch.where(high.isfinite(), high, 0.0), unlikely, halvings=32).exp()
    return torch.where(high.isfinite(), (start + ends) * unit[:, 0] * (1 + _NARROWEST), torch.inf)


def _bisect(low: Tensor, high: Tensor, beyond: Callable[[Tensor], Tensor], halvings: int = 60) -> Tensor:
    """Where a condition begins to hold, no smaller than that: sixty halvings, beyond the last bit."""
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        holds = beyond(middle)
        low, high = torch.where(holds, low, middle), torch.where(holds, middle, high)
    return high
