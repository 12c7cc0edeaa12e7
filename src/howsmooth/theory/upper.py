"""Upper bounds as a type: what is made of them is an upper bound too, whatever floating point does.

A bound is a float or a tensor of non-negative numbers. Every operation of a bound gives a number that is no smaller than the
exact result; what is no number becomes infinity. So a proof that adds, multiplies and takes roots is carried out to the last
digit, and nobody adds a margin by hand. What exponentials and a softmax make of bounds is proved in docs/explanation/around.md,
*Jets*.
"""

import math
from collections.abc import Callable
from typing import Any, Union, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.spectral import spectral_norm

_UNIT = torch.finfo(torch.float64).eps
_LEAST = 5e-324  # what underflow hides of one product
# Units of rounding per square root of the number of terms, in the sums at a token (docs/explanation/point-bounds.md 4.9).
ROUNDINGS = 16
TINY = torch.finfo(torch.float64).tiny
FARTHEST = 300.0  # logits that can move further than this are not followed: any weights may come of them

Bounded = Union["Upper", float, Tensor]


@final
class Upper:
    """A number that some non-negative quantity is proved not to exceed; or a tensor of them.

    Sums, products, quotients and roots round outward. A bound of exactly zero says that the quantity vanishes, so its product
    with anything does, with infinity too; a product that underflows is no such zero. NaN and negative numbers bound nothing:
    they become infinity.

    >>> third = Upper(1.0) / 3.0
    >>> (
    ...     (third + third + third).value > 1,
    ...     (Upper(1e-200) * 1e-200).value > 0,
    ...     (Upper(0.0) * math.inf).value,
    ...     Upper(math.nan).value,
    ... )
    (True, True, 0.0, inf)
    >>> float(Upper(torch.tensor([3.0, 4.0])).length()) >= 5
    True
    """

    __slots__ = ("value",)
    value: Any

    def __init__(self, value: Bounded):
        if isinstance(value, Upper):
            self.value = value.value
        elif isinstance(value, Tensor):
            self.value = torch.where(value >= 0, value, torch.inf)
        else:
            self.value = float(value) if value >= 0 else math.inf

    def __add__(self, other: Bounded) -> "Upper":
        total = self.value + _value(other)
        return _known(_next(total, lambda: total == 0))

    def __mul__(self, other: Bounded) -> "Upper":
        a, b = self.value, _value(other)
        return _known(_next(a * b, lambda: (a == 0) | (b == 0)))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, lower: float | Tensor) -> "Upper":
        """The bound divided by a lower bound, or by a number that is exact; infinite where that is not positive."""
        a = self.value
        if isinstance(a, Tensor) or isinstance(lower, Tensor):
            return _known(_next(torch.where(torch.as_tensor(lower > 0), a / lower, torch.inf), lambda: (a == 0) & (lower > 0)))
        return _known(_next(a / lower if lower > 0 else math.inf, lambda: a == 0 and lower > 0))

    def __matmul__(self, other: Bounded) -> "Upper":
        """The product with a matrix or vector of bounds, summed over the last axis of this one."""
        a, b = self.value, _value(other)
        terms = a.shape[-1]
        return Upper(a @ b).raised(2 * terms) + terms * _LEAST

    def __getitem__(self, index: Any) -> "Upper":
        return _known(self.value[index])

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"Upper({self.value!r})"

    def sqrt(self) -> "Upper":
        """The root, which is correctly rounded everywhere."""
        a = self.value
        return _known(_next(a.sqrt() if isinstance(a, Tensor) else math.sqrt(a), lambda: a == 0))

    def square(self) -> "Upper":
        return self * self

    def max(self, other: Bounded) -> "Upper":
        """The larger of two bounds, which holds for both quantities."""
        return _known(_picked(torch.maximum, max, self.value, _value(other)))

    def min(self, other: Bounded) -> "Upper":
        """The smaller of two bounds on one quantity."""
        return _known(_picked(torch.minimum, min, self.value, _value(other)))

    def sum(self, axis: int | tuple[int, ...] = -1, keepdim: bool = False) -> "Upper":
        """The sum along axes of a tensor, whatever its order."""
        axes = (axis,) if isinstance(axis, int) else axis
        terms = math.prod(self.value.shape[k] for k in axes)
        return Upper(self.value.sum(axes, keepdim=keepdim)).raised(terms)

    def amax(self, axis: int | tuple[int, ...] = -1, keepdim: bool = False) -> "Upper":
        """The largest along axes of a tensor, zero for an empty one."""
        axes = (axis,) if isinstance(axis, int) else axis
        if any(self.value.shape[k] == 0 for k in axes):
            return _known(self.value.sum(axes, keepdim=keepdim))
        return _known(self.value.amax(axes, keepdim=keepdim))

    def length(self, axis: int = -1) -> "Upper":
        """The Euclidean length along an axis, the largest entry taken out so that squares stay in range."""
        size = self.amax(axis, keepdim=True).value
        fine = (size > 0) & size.isfinite()
        even = self / torch.where(fine, size, 1.0)
        return even.square().sum(axis).sqrt() * size.squeeze(axis)

    def raised(self, units: float) -> "Upper":
        """The bound for a number that was computed with a relative error of so many units of rounding."""
        return self * (1 + (units + 2) * _UNIT)

    def map(self, f: Callable[[Tensor], Tensor]) -> "Upper":
        """The bound after a change of shape, or another function that picks from its numbers."""
        return _known(f(self.value))


def _known(value: Any) -> Upper:
    """A bound of numbers that are none but non-negative."""
    bound = object.__new__(Upper)
    bound.value = value
    return bound


def _value(bound: Bounded) -> Any:
    return bound.value if isinstance(bound, Upper) else Upper(bound).value


def _next(value: Any, vanishes: Callable[[], Any]) -> Any:
    """The next number above a result, but zero where the exact result is."""
    if not isinstance(value, Tensor):
        return 0.0 if vanishes() else math.nextafter(value, math.inf)
    above = torch.nextafter(value, torch.full((), math.inf, dtype=value.dtype, device=value.device))
    if bool((value > 0).all()):
        return above
    return torch.where(torch.as_tensor(vanishes()), 0.0, above)


def _picked(of_tensors: Callable[..., Tensor], of_floats: Callable[..., float], a: Any, b: Any) -> Any:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return of_floats(a, b)
    like = a if isinstance(a, Tensor) else b
    return of_tensors(*(t if isinstance(t, Tensor) else torch.full_like(like, t) for t in (a, b)))


def no_nan(bounds: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Upper bounds with infinity where arithmetic gave no number: what overflowed is never a small bound."""
    return torch.where(bounds.isnan(), torch.inf, bounds)


def largest_entry(m: Tensor) -> float:
    """`max |m_ij|`, 1 for zero: divided by it, products of weights neither overflow nor vanish."""
    return float(m.abs().max()) or 1.0


def product_norm(
    left: Float[Tensor, "*heads p r"], right: Float[Tensor, "*heads r q"], scale: float = 1.0
) -> Float[Tensor, "*heads"]:
    """`|scale| ‖left right‖₂`, formed in range, with what rounding may hide where the product cancels."""
    p, q = largest_entry(left), largest_entry(right)
    share = spectral_norm((left / p) @ (right / q)) + product_blur(left / p, right / q)
    return no_less(share * abs(scale), share * p * abs(scale) * q)


def product_blur(left: Float[Tensor, "*heads _ _"], right: Float[Tensor, "*heads _ _"]) -> Float[Tensor, "*heads"]:
    """The norm of the error of a product of float64 matrices, either of them transposed or not."""
    return ROUNDINGS * torch.finfo(torch.float64).eps * lengths(left.flatten(-2)) * lengths(right.flatten(-2))


def no_less(share: Tensor, norm: Tensor) -> Tensor:
    """Norms, raised to the least normal number where they vanish and their share of the whole does not."""
    return torch.where(share > 0, norm.clamp_min(TINY), norm)


def lengths(t: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """`|t|` along the last axis, the largest entry taken out, so that squares stay in range."""
    size = t.abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    return (t / size).norm(dim=-1) * size[..., 0]


def slack(size: int) -> float:
    """1 plus the relative error of a float64 norm of matrices of that size: products and a backward stable SVD."""
    return 1 + 64 * torch.finfo(torch.float64).eps * max(size, 16)


def rounded_up(values: Tensor, size: int) -> tuple[float, ...]:
    """Upper bounds on norms that were computed of matrices of that size."""
    return tuple(float(x) * slack(size) for x in values.flatten())


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
