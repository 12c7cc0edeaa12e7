"""Kinds that are softmax attention on other vectors: distances, cosines, and the difference of two."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from howsmooth.kernels.kinds.kind import Distances, Entry, Exit, Kind, Traits, TwoSoftmaxes, UnitVectors, Vectors
from howsmooth.kernels.kinds.pointwise import Softmax
from howsmooth.settings import flag, number


class _OfSoftmax(Kind):
    """Weights of logits as softmax's."""

    maps: ClassVar[bool] = True

    def weigh(self, s, visible, slack, counts=None):
        return Softmax().weigh(s, visible, slack, counts)


@final
@dataclass(frozen=True, repr=False)
class L2(_OfSoftmax):
    """`P_i = softmax_j(−scale |q_i − k_j|²)` (Kim, Papamakarios & Mnih 2021).

    `−|q − k|² = 2 q·k − |k|² − |q|²`, and softmax does not see what all keys of a query share, so this is softmax attention
    with a number added for every key.

    Attributes:
        tied: A layer takes `W_k = W_q`, as that paper does; else they are two matrices.

    >>> L2(), L2(tied=True)
    (L2(), L2(tied=True))
    """

    lacks: ClassVar[dict[str, str]] = {"softcap": "logits are distances, known up to a number per query that a cap would bend"}
    tied: bool = False

    @property
    def traits(self):
        return Traits(distances=Distances(self.tied))

    def __post_init__(self):
        object.__setattr__(self, "tied", flag(self.tied, "tied"))

    def enter(self, q, k, v, scale):
        return _Offset(q, k, v, scale)

    def inner(self, scores):
        return replace(scores, scale=2 * scores.scale, kind=Softmax())


class _Offset(Entry):
    """`−scale |k|²` beside every key."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float):
        self.vectors = Vectors(q, k, v, -scale * k.square().sum(-1))
        self.below = scale * q.square().sum(-1)
        self._twice = -2 * scale

    def push(self, dq, dk, dv):
        return Vectors(dq, dk, dv, self._twice * (self.vectors.k * dk).sum(-1))

    def pull(self, g):
        assert g.offset is not None
        return g.q, torch.addcmul(g.k, self.vectors.k, g.offset[..., None], value=self._twice), g.v


@final
@dataclass(frozen=True, repr=False)
class Cosine(_OfSoftmax):
    """`P_i = softmax_j(scale · q̂_i·k̂_j)` with `x̂ = x/√(|x|² + ε)` (LipsFormer, Qi et al. 2023; query-key normalisation).

    Attributes:
        epsilon: `ε`.
        values: Values are normalised too, as LipsFormer does; False leaves them as they are.
        factor: Its `ν`, which multiplies the output.

    The scale of a layer is its `τ`, `√(head width)` by default, so that random logits have size one.

    >>> Cosine(), Cosine(values=False)
    (Cosine(), Cosine(values=False))
    """

    epsilon: float = 1e-6
    values: bool = True
    factor: float = 1.0

    @property
    def traits(self):
        return Traits(unit_vectors=UnitVectors(self.epsilon, self.values, self.factor))

    def __post_init__(self):
        epsilon = number(self.epsilon, "a finite, positive epsilon of Cosine", "the default is 1e-6", above=0.0)
        factor = number(self.factor, "a finite factor of Cosine", "the default is 1")
        for name, value in (("epsilon", epsilon), ("values", flag(self.values, "values")), ("factor", factor)):
            object.__setattr__(self, name, value)

    def scale(self, width):
        return math.sqrt(width)

    def enter(self, q, k, v, scale):
        return _Units(q, k, v, self)

    def inner(self, scores):
        return replace(scores, kind=Softmax())


class _Units(Entry):
    """Rows divided by their length. `D x̂ = (I − x̂ x̂ᵀ)/√(|x|² + ε)` is symmetric: one product serves both ways."""

    roundings = 16.0

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kind: Cosine):
        self._q, self._k = softened(q, kind.epsilon), softened(k, kind.epsilon)
        self._v = softened(v, kind.epsilon) if kind.values else None
        self._factor = kind.factor
        self.vectors = Vectors(self._q[0], self._k[0], self._factor * (v if self._v is None else self._v[0]))

    def push(self, dq, dk, dv):
        dv = dv if self._v is None else _across(self._v, dv)
        return Vectors(_across(self._q, dq), _across(self._k, dk), self._factor * dv)

    def pull(self, g):
        return self.push(g.q, g.k, g.v)[:3]


def softened(t: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """A row divided by `√(|t|² + ε)`, and that length."""
    largest = t.detach().abs().amax(-1, keepdim=True).clamp_min(1.0)  # taken out, so that squares stay in range
    length = largest * ((t / largest).square().sum(-1, keepdim=True) + epsilon / largest.square()).sqrt()
    return t / length, length


def _across(unit: tuple[Tensor, Tensor], d: Tensor) -> Tensor:
    u, length = unit
    return torch.addcmul(d, u, (u * d).sum(-1, keepdim=True), value=-1) / length


@final
@dataclass(frozen=True, repr=False)
class Differential(_OfSoftmax):
    """`P = softmax(scale · q₁ k₁ᵀ) − lam · softmax(scale · q₂ k₂ᵀ)` on shared values (Ye et al. 2024).

    `q₁, q₂` are the halves of a head's queries, `k₁, k₂` of its keys; norms and rotary phases act on each half, and the scale
    is `1/√(half the head width)` by default.

    Attributes:
        lam: `λ` of the layer.
        epsilon: Of an RMS norm of each head's output, which the paper has; None leaves it out. Weights of that norm belong in
            `w_o`.
        factor: What multiplies the output, the paper's `1 − λ_init`.

    >>> Differential(0.5), Differential(0.5, epsilon=1e-5, factor=0.2)
    (Differential(lam=0.5), Differential(lam=0.5, epsilon=1e-05, factor=0.2))
    """

    parts: ClassVar[int] = 2
    lam: float
    epsilon: float | None = None
    factor: float = 1.0

    @property
    def traits(self):
        return Traits(two_softmaxes=TwoSoftmaxes(self.lam, self.epsilon, self.factor))

    def __post_init__(self):
        lam = number(self.lam, "a finite lam of Differential", "take λ of the layer it belongs to")
        factor = number(self.factor, "a finite factor of Differential", "the default is 1")
        epsilon = self.epsilon
        if epsilon is not None:
            epsilon = number(epsilon, "a finite, positive epsilon of Differential", "leave it out for no norm", above=0.0)
        for name, value in (("lam", lam), ("epsilon", epsilon), ("factor", factor)):
            object.__setattr__(self, name, value)

    def enter(self, q, k, v, scale):
        return _Halves(q, k, v)

    def leave(self, o):
        return _Difference(o, self)

    def inner(self, scores):
        bias = scores.mask.bias
        if bias is not None and bias.shape[1] > 1:
            bias = bias.repeat(1, 2, 1, 1)
        return replace(scores, mask=replace(scores.mask, bias=bias), kind=Softmax())


class _Halves(Entry):
    """All first halves, then all second ones, each with the values of its head."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor):
        self.vectors = self.push(q, k, v)

    def push(self, dq, dk, dv):
        return Vectors(_halves_first(dq), _halves_first(dk), torch.cat([dv, dv], -3))

    def pull(self, g):
        first, second = g.v.chunk(2, -3)
        return _heads_first(g.q), _heads_first(g.k), first + second


def _halves_first(t: Tensor) -> Tensor:
    """(…, heads · 2, n, d), halves of a head side by side → the first half of every head, then the second."""
    return t.unflatten(-3, (-1, 2)).transpose(-4, -3).flatten(-4, -3)


def _heads_first(t: Tensor) -> Tensor:
    """The transpose of `_halves_first`."""
    return t.unflatten(-3, (2, -1)).transpose(-4, -3).flatten(-4, -3)


class _Difference(Exit):
    """`factor · norm(o₁ − λ o₂)`."""

    def __init__(self, o: Tensor, kind: Differential):
        self._kind = kind
        left = self._less(o)
        self._unit = None if kind.epsilon is None else softened(left, kind.epsilon * left.shape[-1])
        self._parts = o, left
        self.output = self._size * (left if self._unit is None else self._unit[0])

    @property
    def _size(self) -> float:
        width = self._parts[1].shape[-1]
        return self._kind.factor if self._unit is None else self._kind.factor * math.sqrt(width)  # RMS is length over √width

    @property
    def growth(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What cancels in the difference."""
        o, left = self._parts
        first, second = (float(t.norm()) for t in o.chunk(2, -3))
        whole = float(left.norm())
        return 1 + (first + abs(self._kind.lam) * second) / whole if whole > 0 else 1.0

    def _less(self, o: Tensor) -> Tensor:
        first, second = o.chunk(2, -3)
        return first - self._kind.lam * second

    def push(self, do):
        d = self._less(do)
        return self._size * (d if self._unit is None else _across(self._unit, d))

    def pull(self, g):
        g = self._size * (g if self._unit is None else _across(self._unit, g))
        return torch.cat([g, -self._kind.lam * g], -3)

    def signs(self, heads):
        return torch.tensor([1.0, -self._kind.lam], dtype=torch.float64).repeat_interleave(heads // 2)
