"""Features of linear attention, entry by entry, up to factors that its weights ignore; which of their sums underflow."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds.kind import Entry, FeatureMap, Vectors

_WIDEST = 2**10  # entries of a head: each may lose the smallest normal number


class Features(NamedTuple):
    """Of queries and keys, and their slopes."""

    q: Tensor
    slope_q: Tensor
    k: Tensor
    slope_k: Tensor


def features_of(q: Tensor, k: Tensor, features: FeatureMap, *, divided: bool) -> Features:
    """`φ` of queries and keys by head, entry by entry, up to factors that weights ignore, and its slope.

    The slope of relu at zero is zero, as torch takes it. `φ = elu + 1` is `e^t` below zero and underflows, so its logarithms
    are taken first. An entry of all keys is divided by the largest of them, and that of queries multiplied by it, which leaves
    products as they are. divided: weights are divided by their row sums, so every query is divided by its largest entry. Then
    the weights of a row that sees all keys sum to one at least.
    """
    if features == "relu":
        return Features(q.relu(), (q > 0).to(q.dtype), k.relu(), (k > 0).to(k.dtype))
    log_q, log_k = _log(q), _log(k)
    largest = log_k.detach().amax(-2, keepdim=True)
    log_q = log_q + largest.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    if divided:
        log_q = log_q - log_q.detach().amax(-1, keepdim=True)
    q_, k_ = log_q.exp(), (log_k - largest).exp()
    return Features(q_, q_ / (1 + q.clamp_min(0.0)), k_, k_ / (1 + k.clamp_min(0.0)))


def _log(t: Tensor) -> Tensor:
    """The logarithm of elu + 1."""
    return torch.where(t > 0, t.clamp_min(0.0).log1p(), t)


class Featured(Entry):
    """Features of queries and keys, entry by entry."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, features: FeatureMap, divided: bool):
        at = features_of(q, k, features, divided=divided)
        self._dq, self._dk = at.slope_q, at.slope_k
        self.vectors = Vectors(at.q, at.k, v)
        self._pair = q, k

    @property
    def roundings(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 4 + 3 * sum(float(t.abs().max()) for t in self._pair)  # exp turns an error in a logarithm into a share

    def push(self, dq, dk, dv):
        return Vectors(dq * self._dq, dk * self._dk, dv)

    def pull(self, g):
        return g.q * self._dq, g.k * self._dk, g.v


def supported(t: Tensor, features: FeatureMap) -> Tensor:
    """One where a feature is positive before rounding, zero elsewhere."""
    return torch.ones_like(t) if features == "elu" else (t > 0).to(t.dtype)


def short(total: Tensor, keys: int | Tensor) -> Bool[Tensor, "*rows"]:
    """Which row sums are so small that underflow may have taken a share of them that counts. keys: of a row, at most."""
    numbers = torch.finfo(total.dtype)
    return ~(total > keys * _WIDEST * numbers.tiny / numbers.eps)


def check_sums(total: Tensor, keys: int, positive: Callable[[], Bool[Tensor, "*rows"]], *, divided: bool) -> None:
    """Refuse row sums that underflow: one of them where weights are divided by them, all of them elsewhere.

    positive: which of them are positive before rounding, made only where it matters.
    """
    small = short(total, keys)
    if bool(small.any() if divided else small.all()) and bool((small & positive()).any()):
        raise BadInputError(
            f"expected features whose sums over keys stay in the range of {total.dtype}, got sums that underflow; "
            "use float64, or weights and tokens with features less near zero"
        )
