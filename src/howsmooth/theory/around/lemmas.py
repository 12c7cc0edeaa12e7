"""What an exponential, a softmax, a norm and a product can do around an input: lemmas, each of them once.

Proofs: docs/explanation/around.md, *Jets*, and docs/explanation/around-blocks.md §2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.theory.upper import TINY, Upper

BEND, TWIST = 2 / math.sqrt(3), 3.0  # of the second and third derivatives of a norm (Lemmas 2.1 and 6.3)
FARTHEST = 300.0  # logits that can move further than this are not followed: any weights may come of them
_HIDDEN = 1e-60  # weights that float64 takes for zero are below this wherever no logit moves that far
_UNIT = torch.finfo(torch.float64).eps


def exp_rest(t: Upper) -> Upper:
    """`e^t − 1 − t`, at most `t²/2 (1 + t)` where digits cancel.

    >>> 0.0 < float(exp_rest(Upper(1e-8))) - 0.5e-16 < 1e-24
    True
    """
    x = torch.as_tensor(t.value, dtype=torch.float64)
    return Upper(torch.where(x < 1e-3, 0.5 * x.square() * (1 + x), torch.expm1(x) - x)).raised(2**14)


def exp_ratios(t: Upper) -> tuple[Upper, Upper]:
    """`(e^t − 1 − t)/t²` and `(e^t − 1)/t`, which grow with `t`."""
    x = t.value
    bend = torch.where(x < 1e-3, 0.5 * (1 + x), exp_rest(t).value / x.square())
    steep = torch.where(x < 1e-3, 1 + x, torch.expm1(x) / x)
    return Upper(bend).raised(16), Upper(steep).raised(16)


def others(t: Upper, axis: int = -1) -> Upper:
    """Sums along an axis, each without its own term."""
    total, n = t.sum(axis, keepdim=True).value, t.value.shape[axis]
    return Upper((total - t.value * (1 - 8 * _UNIT)).clamp_min(0.0)).raised(2 * n)


def softmax_range(p: Tensor, moved: Upper, axis: int = -1) -> tuple[Tensor, Tensor, Upper]:
    """The least and the largest each weight can become, and how far it can move, where logits move at most so far (6.2)."""
    far = ~(moved.amax(axis, keepdim=True).value < FARTHEST)
    e = torch.where(far, 0.0, moved.value)
    grown, shrunk = p * e.exp() * (1 + 8 * _UNIT), p * (-e).exp() * (1 - 8 * _UNIT)
    slack = 8 * _UNIT * (p.shape[axis] + 8)
    fewest = (shrunk.sum(axis, keepdim=True) * (1 - slack) - shrunk).clamp_min(0.0)
    most = (grown.sum(axis, keepdim=True) * (1 + slack) - grown).clamp_min(0.0)
    high = torch.where(far, 1.0, grown / (grown + fewest).clamp_min(TINY))
    high = torch.where((p > 0) | (moved.value > 0), torch.maximum(high, p).clamp_max(1.0), 0.0)
    low = torch.where(far, 0.0, torch.minimum(shrunk / (shrunk + most).clamp_min(TINY), p))
    return low, high, Upper(torch.maximum(high - p, p - low)) + Upper(p) * slack


def softmax_remainder(p: Tensor, moved: Upper, axis: int) -> tuple[Tensor, Tensor, Upper]:
    """What `P(S + δ) − P(S) − DP δ` stays between, entry by entry, and how far `P` itself can move (Lemma 2.4).

    moved: bounds `|δ_j|` of logits measured from their mean under `p`, so that `Σ_j P_j δ_j = 0`; zero for hidden keys.
    """
    moved = Upper(moved.value.clamp_max(2 * FARTHEST))
    below, above, apart = softmax_range(p, moved, axis)
    mean, spread = (apart * moved).sum(axis, keepdim=True), (moved.square() * above).sum(axis, keepdim=True)
    high = ((moved + mean).square() * (0.5 * above)).min(moved * p + (above - p).clamp_min(0.0))
    low = (spread * (0.5 * above)).min(moved * p + (p - below).clamp_min(0.0))
    tiny = 8 * _UNIT * p + torch.where(moved.value > 0, _HIDDEN, 0.0)
    return -(low + tiny).value, (high + tiny).value, apart + tiny


@dataclass(frozen=True)
class NormAround:
    """LayerNorm or RMSNorm without its weight, `N`, at tokens that move at most so far.

    scale: `√(mean u² + eps)`, no larger than it is.  d: the width.
    """

    scale: Tensor
    moved: Upper
    d: int
    eps: float

    @classmethod
    def of(cls, z: Tensor, centred: bool, eps: float, moved: Upper) -> "NormAround":
        u, d = (z - z.mean(-1, keepdim=True) if centred else z), z.shape[-1]
        return cls((u.square().mean(-1) + eps).sqrt() * (1 - (2 * d + 16) * _UNIT), moved, d, eps)

    @property
    def floor(self) -> Tensor:
        """The smallest scale of tokens that moved."""
        low = (self.scale - self.moved.value / math.sqrt(self.d)) * (1 - 8 * _UNIT) - 8 * _UNIT * self.scale
        return torch.maximum(low, torch.full_like(low, math.sqrt(self.eps) * (1 - 4 * _UNIT)))

    @property
    def bend(self) -> Upper:
        """A mean of `‖D²N‖` on the way: over `s s'` where the scale falls to `s'` only, over `eps` past the floor."""
        low = self.floor
        above = self.scale - self.moved.value / math.sqrt(self.d) >= math.sqrt(self.eps)
        divisor = torch.where(above, self.scale * low, low.square()) * (1 - 4 * _UNIT)
        return Upper(torch.full_like(low, BEND)) / divisor / (math.sqrt(self.d) * (1 - 4 * _UNIT))

    @property
    def change(self) -> Upper:
        """`‖D_y N − D_x N‖` (Lemma 2.2)."""
        one = Upper(torch.ones_like(self.scale))
        return (self.bend * self.moved).min(one / self.scale + one / self.floor)

    @property
    def slope(self) -> Upper:
        """`‖D_y N‖`."""
        return Upper(torch.ones_like(self.scale)) / self.floor

    @property
    def remainder(self) -> Upper:
        """`|N(y) − N(x) − D_x N (y − x)|` (Lemma 2.2)."""
        return (self.bend * self.moved.square() * 0.5).min(self.moved / self.scale + 2 * math.sqrt(self.d))

    @property
    def ratios(self) -> tuple[Upper, Upper]:
        """The remainder over `|y − x|` and over its square, for all shorter moves too."""
        return self.change, self.bend * 0.5


def shared_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the axes that two factors of a product share, of length one where either is repeated (Lemma 4.3)."""
    return tuple(min(p, q) for p, q in zip(a[::-1], b[::-1], strict=False))[::-1]


def slice_lengths(t: Upper, shared: tuple[int, ...]) -> Upper:
    """Lengths of the slices of a factor, one for each entry of the axes that it shares with the other factor."""
    size = float(t.value.max()) if t.value.numel() else 0.0
    size = size if 0 < size < math.inf else 1.0  # taken out, so that squares stay in range
    squares = (t / size).square()
    return Upper(squares.value.sum_to_size(shared)).raised(t.value.numel()).sqrt() * size
