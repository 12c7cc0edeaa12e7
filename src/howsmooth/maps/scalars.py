"""Scalar functions of activations and norms, with what bounds need of them: slopes, and how far slopes and values can move.

Formulas and proofs: docs/explanation/around-blocks.md §2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from howsmooth.kernels.tensors import sigmoid_slope, tanh_slope

_TANH_BEND = math.atanh(1 / math.sqrt(3))  # where tanh'' is extreme
_SILU_BEND = 3.435840993535111  # the positive root of 6t = x(3t² − 1), t = tanh(x/2), where silu'' is extreme
_GELU_C, _GELU_B = math.sqrt(2 / math.pi), 0.044715
_GELU_THIRD = 1.2  # bounds the third derivative of the tanh form of GELU
_CELLS = 8  # parts of an interval on which its second derivative is sampled
_ROUND = 1e-9  # relative, far above the rounding of any formula here


@final
@dataclass(frozen=True, eq=False)
class Scalar:
    """A function of one number.

    second: its second derivative.  bends: where the second derivative may be extreme beside the ends of an interval; nothing
    where it is sampled and `third` bounds its slope.  swing: how far apart two slopes can be at most.
    domain: numbers above this alone.  kink: where the slope jumps by `swing`, for functions that are straight on both sides.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]
    bends: tuple[float, ...] | None = ()
    third: float = 0.0
    swing: float = math.inf
    domain: float = -math.inf
    kink: float | None = None

    def curvature(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and largest second derivative between `low` and `high`, not from inside."""
        if self.bends is None:
            share = torch.linspace(0, 1, _CELLS + 1, dtype=low.dtype).reshape(-1, *[1] * low.ndim)
            sampled = self.second(low + share * (high - low))
            slack = self.third * (high - low) / (2 * _CELLS)
            least, most = sampled.amin(0) - slack, sampled.amax(0) + slack
        else:
            ends = torch.stack([self.second(low), self.second(high)])
            least, most = ends.amin(0), ends.amax(0)
            for at in self.bends:
                inside, there = (low < at) & (at < high), self.second(low.new_tensor(at))
                least = torch.where(inside, least.minimum(there), least)
                most = torch.where(inside, most.maximum(there), most)
        out = low <= self.domain
        return torch.where(out, -math.inf, least), torch.where(out, math.inf, most)

    def remainder(self, z: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """What `φ(z + t) − φ(z) − φ'(z) t` stays between for all `|t| ≤ moved`."""
        if self.kink is not None:
            return torch.zeros_like(z), self.swing * (moved - (z - self.kink).abs()).clamp_min(0)
        least, most = self.curvature(z - moved, z + moved)
        low, high = (0.5 * c * moved.square() * (1 + _ROUND) for c in (least.clamp_max(0), most.clamp_min(0)))
        low, high = (torch.where(moved == 0, 0.0, t) for t in (low, high))
        return low.clamp_min(-self.swing * moved), high.clamp_max(self.swing * moved)

    def ratios(self, z: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on the remainder over `|t|` and over `t²`, for all `0 < |t| ≤ moved`."""
        if self.kink is not None:
            away = (z - self.kink).abs()
            over = (moved - away).clamp_min(0)
            linear = self.swing * torch.where(over > 0, over / moved, 0.0)
            # (t − a)/t² is largest at t = 2a
            square = torch.where(moved >= 2 * away, 0.25 / away, over / moved.square())
            return linear, self.swing * torch.where(over > 0, square, 0.0)
        least, most = self.curvature(z - moved, z + moved)
        square = 0.5 * torch.maximum(-least, most).clamp_min(0) * (1 + _ROUND)
        return (square * moved).clamp_max(self.swing), square

    def slope_change(self, z: Tensor, moved: Tensor) -> Tensor:
        """A bound on `|φ'(z + t) − φ'(z)|` for all `|t| ≤ moved`."""
        if self.kink is not None:
            return torch.where(moved >= (z - self.kink).abs(), self.swing, 0.0)
        least, most = self.curvature(z - moved, z + moved)
        change = torch.maximum(-least, most).clamp_min(0) * moved * (1 + _ROUND)
        return torch.where(moved == 0, 0.0, change).clamp_max(self.swing)


def _normal(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2)) + x * _normal(x)


def _tanh_gelu(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(1 + T)/2` with `T = tanh g`, and the first two derivatives of `T`."""
    g1, g2 = _GELU_C * (1 + 3 * _GELU_B * x.square()), _GELU_C * 6 * _GELU_B * x
    g = _GELU_C * (x + _GELU_B * x**3)
    flat = tanh_slope(g)
    # far out flat is zero and its factors are large: their product is below any number that matters
    second = torch.where(flat == 0, 0.0, (g2 - 2 * torch.tanh(g) * g1.square()) * flat)
    return torch.sigmoid(2 * g), torch.where(flat == 0, 0.0, g1 * flat), second


def _silu(beta: float) -> Scalar:
    """`x σ(βx)`."""

    def slope(x: Tensor) -> Tensor:
        u = beta * x
        return torch.sigmoid(u) + u * sigmoid_slope(u)

    def second(x: Tensor) -> Tensor:
        u = beta * x
        return beta * sigmoid_slope(u) * (2 - u * torch.tanh(0.5 * u))

    bends = (0.0, _SILU_BEND / beta, -_SILU_BEND / beta)
    return Scalar(f"x·sigmoid({beta:g}x)", lambda x: x * torch.sigmoid(beta * x), slope, second, bends, swing=1.21)


def _powered(k: int) -> Scalar:
    """`x^k`, k = 2 or 3: the second derivative is straight."""
    return Scalar(f"x^{k}", lambda x: x**k, lambda x: k * x ** (k - 1), lambda x: k * (k - 1) * x ** (k - 2))


SCALARS = (
    Scalar("relu", torch.relu, lambda x: (x > 0).to(x), torch.zeros_like, swing=1.0, kink=0.0),
    Scalar(
        "gelu",
        torch.nn.functional.gelu,
        _gelu_slope,
        lambda x: _normal(x) * (2 - x.square()),
        (0.0, 2.0, -2.0),
        swing=1.26,
    ),
    Scalar(
        "tanh gelu",
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda x: _tanh_gelu(x)[0] + 0.5 * x * _tanh_gelu(x)[1],
        lambda x: _tanh_gelu(x)[1] + 0.5 * x * _tanh_gelu(x)[2],
        None,
        _GELU_THIRD,
        swing=1.27,
    ),
    _silu(1.0),
    _silu(1.702),
    Scalar(
        "tanh",
        torch.tanh,
        tanh_slope,
        lambda x: -2 * torch.tanh(x) * tanh_slope(x),
        (_TANH_BEND, -_TANH_BEND),
        swing=1.0,
    ),
    Scalar(
        "sigmoid",
        torch.sigmoid,
        sigmoid_slope,
        lambda x: -torch.tanh(0.5 * x) * sigmoid_slope(x),
        (2 * _TANH_BEND, -2 * _TANH_BEND),
        swing=0.25,
    ),
    Scalar(
        "erf",
        torch.erf,
        lambda x: 2 / math.sqrt(math.pi) * torch.exp(-x.square()),
        lambda x: -4 / math.sqrt(math.pi) * x * torch.exp(-x.square()),
        (math.sqrt(0.5), -math.sqrt(0.5)),
        swing=2 / math.sqrt(math.pi),
    ),
    Scalar("exp", torch.exp, torch.exp, torch.exp),
    _powered(2),
    _powered(3),
    Scalar("rsqrt", torch.rsqrt, lambda x: -0.5 * x**-1.5, lambda x: 0.75 * x**-2.5, domain=0.0),
    Scalar("sqrt", torch.sqrt, lambda x: 0.5 * x**-0.5, lambda x: -0.25 * x**-1.5, domain=0.0),
    Scalar("reciprocal", torch.reciprocal, lambda x: -(x**-2.0), lambda x: 2 * x**-3.0, domain=0.0),
)


def known_scalar(f: Callable[[Tensor], Tensor]) -> Scalar | None:
    """The function that `f` is, found by its values; nothing where it is none of ours."""
    far = torch.logspace(-3, 8, 67, dtype=torch.float64)  # 17.8 and 26.1 among them: where exp is as small as rounding
    x = torch.cat([torch.linspace(-9, 9, 401, dtype=torch.float64), far, -far])
    try:
        y = f(x)
    except RuntimeError:
        return None
    if y.shape != x.shape:
        return None
    for scalar in SCALARS:
        if torch.allclose(y, scalar.value(x), rtol=1e-10, atol=1e-12, equal_nan=True):
            return scalar
    return None
