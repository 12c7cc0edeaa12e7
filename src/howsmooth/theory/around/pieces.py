"""What norms, softmax and scalar functions can do around an input: one piece at a time.

Proofs: docs/explanation/around-blocks.md §2.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.theory.bound import largest_entry

BEND = 2 / math.sqrt(3)  # the largest second derivative of `u/√(|u|²/d + eps)` is this over `√d s²` (Lemma 2.1)
_LARGE = 300.0  # exponents past which a weight may be anything
_GONE = 1e-60  # weights that float64 takes for zero are below this wherever no exponent is large
_UP = 1 + 1e-9


def norm_floor(scale: Tensor, moved: Tensor, d: int, eps: float) -> Tensor:
    """The smallest `√(mean u² + eps)` of tokens that moved at most that far."""
    return torch.maximum(scale - moved / math.sqrt(d), torch.full_like(scale, math.sqrt(eps)))


def _bend(scale: Tensor, moved: Tensor, d: int, eps: float) -> Tensor:
    """A mean of the second derivative on the way: `1/(s s')` where the scale can fall to `s'` only, `1/eps` past the floor."""
    low = norm_floor(scale, moved, d, eps)
    above = scale - moved / math.sqrt(d) >= math.sqrt(eps)
    return BEND / math.sqrt(d) / torch.where(above, scale * low, low.square())


def norm_change(scale: Tensor, moved: Tensor, d: int, eps: float) -> Tensor:
    """A bound on `‖D_y N − D_x N‖` of LayerNorm or RMSNorm without its weight, `|y − x| ≤ moved` (Lemma 2.2)."""
    near = _bend(scale, moved, d, eps) * moved
    return _UP * torch.fmin(torch.where(moved > 0, near, 0.0), 1 / scale + 1 / norm_floor(scale, moved, d, eps))


def norm_slope(scale: Tensor, moved: Tensor, d: int, eps: float) -> Tensor:
    """A bound on `‖D_y N‖`."""
    return _UP / norm_floor(scale, moved, d, eps)


def norm_remainder(scale: Tensor, moved: Tensor, d: int, eps: float) -> Tensor:
    """A bound on `|N(y) − N(x) − D_x N (y − x)|` for all `|y − x| ≤ moved` (Lemma 2.2)."""
    near = 0.5 * _bend(scale, moved, d, eps) * moved.square()
    return _UP * torch.fmin(torch.where(moved > 0, near, 0.0), 2 * math.sqrt(d) + moved / scale)


def norm_ratios(scale: Tensor, moved: Tensor, d: int, eps: float) -> tuple[Tensor, Tensor]:
    """Bounds on the remainder over `|y − x|` and over its square, for all shorter moves too."""
    return norm_change(scale, moved, d, eps), _UP * 0.5 * _bend(scale, moved, d, eps)


def shared_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the axes that two factors of a product share, of length one where either is repeated (Lemma 4.3)."""
    return tuple(min(p, q) for p, q in zip(a[::-1], b[::-1], strict=False))[::-1]


def slice_lengths(t: Tensor, shared: tuple[int, ...]) -> Tensor:
    """Lengths of the slices of a factor, one for each entry of the axes that it shares with the other factor."""
    size = largest_entry(t)
    size = size if size < math.inf else 1.0  # taken out, so that squares stay in range
    return (t / size).square().sum_to_size(shared).sqrt() * size


def softmax_remainder(
    weights: Float[Tensor, "..."], moved: Float[Tensor, "..."], axis: int
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]:
    """What `P(S + δ) − P(S) − DP δ` stays between, entry by entry, and how far `P` itself can move (Lemma 2.4).

    moved: bounds `|δ_j|` of logits measured from their mean under `weights`, so that `Σ_j P_j δ_j = 0`; zero for hidden keys.
    """
    far = moved > _LARGE
    s = moved.clamp_max(_LARGE)
    grown, shrunk = weights * s.exp(), weights * (-s).exp()
    # the largest and smallest each weight can become; what the others add up to loses digits where one weight is all
    lost = 1e-15 * weights.shape[axis]
    fewest = (shrunk.sum(axis, keepdim=True) * (1 - lost) - shrunk).clamp_min(0)
    most = (grown.sum(axis, keepdim=True) * (1 + lost) - grown).clamp_min(0)
    any_far = far.any(axis, keepdim=True)
    above = torch.where(any_far, 1.0, grown / (grown + fewest).clamp_min(1e-300))
    below = torch.where(any_far, 0.0, shrunk / (shrunk + most).clamp_min(1e-300))
    above = torch.where((weights > 0) | (moved > 0), torch.maximum(above, weights).clamp_max(1.0), 0.0)
    below = torch.minimum(below, weights)
    apart = torch.maximum(above - weights, weights - below)
    mean = (apart * moved).sum(axis, keepdim=True)
    spread = (above * moved.square()).sum(axis, keepdim=True)
    high = torch.minimum(0.5 * above * (moved + mean).square(), above - weights + weights * moved)
    low = torch.maximum(-0.5 * above * spread, below - weights - weights * moved)
    tiny = 1e-15 * weights + torch.where(moved > 0, _GONE, 0.0)
    return low * _UP - tiny, high * _UP + tiny, apart * _UP + tiny
