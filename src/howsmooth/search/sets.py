"""Where the tokens may be: a ball, what a norm maps onto, the neighbourhood of an input.

A set is written in coordinates `z` in which staying inside is a projection that costs nothing: the search moves `z` and
measures at `tokens(z)`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import LayerNorm, RMSNorm
from howsmooth.maps.base import one_sequence
from howsmooth.settings import PER, Per, choice, number
from howsmooth.theory.over_ball.table import LONGEST_TOKEN
from howsmooth.theory.scaled import norm_radius

_EDGE = 1e-6  # coordinates this close to the boundary, relatively, are on it


class TokenSet(ABC):
    """A set of token sequences, with coordinates."""

    @property
    @abstractmethod
    def reach(self) -> float:
        """A ball of this radius around zero holds every token of the set."""

    @property
    @abstractmethod
    def size(self) -> float:
        """A length in `z` that is large for one token of the set: the scale of first steps."""

    @abstractmethod
    def project(self, z: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The nearest coordinates of the set."""

    @abstractmethod
    def tangent(self, z: Float[Tensor, "batch n d"], g: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        """`g` without what would leave the set at `z` to first order."""

    def tokens(self, z: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The tokens at `z`, differentiable; by default `z` itself."""
        return z

    @abstractmethod
    def sample(self, count: int, n: int, d: int, random: torch.Generator) -> Float[Tensor, "count n d"]:
        """Random coordinates in the set, float64."""


class _Round(TokenSet):
    """All that is at most `radius` away from a centre; `_axes`: over which lengths are taken."""

    radius: float

    @property
    @abstractmethod
    def _axes(self) -> tuple[int, ...]: ...

    def _centre(self, z: Tensor) -> Tensor | float:
        return 0.0

    def _length(self, step: Tensor) -> Tensor:
        return torch.linalg.vector_norm(step, dim=self._axes, keepdim=True)

    @property
    def size(self) -> float:
        return self.radius

    def project(self, z):
        centre, tiny = self._centre(z), torch.finfo(z.dtype).tiny
        inside = self.radius * (1 - 4 * torch.finfo(z.dtype).eps)
        step = z - centre
        length = self._length(step)
        step = step * (inside / length.clamp_min(tiny))
        # rounding of the sum may leave the set by a unit of the centre: then the step is taken back as far
        reached = self._length((centre + step) - centre)
        step = torch.where(reached > self.radius, step * (self.radius / reached.clamp_min(tiny)) * (1 - 1e-9), step)
        return torch.where(length > inside, centre + step, z)

    def tangent(self, z, g):
        step = z - self._centre(z)
        square, outward = (step * step).sum(self._axes, keepdim=True), (step * g).sum(self._axes, keepdim=True)
        leaves = (square >= (self.radius * (1 - _EDGE)) ** 2) & (outward > 0)
        return torch.where(leaves, g - step * (outward / square), g)


@final
@dataclass(frozen=True)
class Ball(_Round):
    """Tokens of length at most `radius`, each for itself: `B_R^n`.

    Attributes:
        radius: Of every token, at most.

    >>> z = Ball(1.0).project(torch.tensor([[[3.0, 4.0]]]))
    >>> [round(t, 6) for t in z.flatten().tolist()], float(z.norm()) < 1  # just inside, so that rounding cannot leave the ball
    ([0.6, 0.8], True)
    """

    radius: float

    def __post_init__(self):
        object.__setattr__(self, "radius", length_of(self.radius, "radius"))

    @property
    def _axes(self):
        return (-1,)

    @property
    def reach(self) -> float:
        return self.radius

    def sample(self, count, n, d, random):
        """Uniform directions; half of the sequences on the sphere, half uniform in the ball."""
        z = torch.randn(count, n, d, generator=random, dtype=torch.float64)
        z = z / z.norm(dim=-1, keepdim=True)
        depth = torch.rand(count, n, 1, generator=random, dtype=torch.float64) ** (1 / d)
        depth[: count // 2] = 1.0
        return self.project(self.radius * depth * z)


@final
@dataclass(frozen=True)
class Ellipsoid(TokenSet):
    """What a LayerNorm or RMSNorm maps onto: `α ⊙ z + β` with `|z|² = d`, and `1·z = 0` after LayerNorm.

    The norm's `eps` is left out: tokens that are long beside it land there.

    Attributes:
        norm: The norm with its weights.

    >>> space = Ellipsoid(RMSNorm(torch.tensor([1.0, 2.0])))
    >>> [round(t, 6) for t in space.tokens(space.project(torch.tensor([[[0.0, 5.0]]]))).flatten().tolist()]
    [0.0, 2.828427]
    """

    norm: LayerNorm | RMSNorm

    def __post_init__(self):
        if not isinstance(self.norm, LayerNorm | RMSNorm):
            raise BadInputError(f"expected a LayerNorm or RMSNorm, got {type(self.norm).__name__}; use Ball(radius) for a ball")
        if self.norm.width < (3 if isinstance(self.norm, LayerNorm) else 2):
            raise BadInputError(
                f"expected a norm of more than {self.norm.width} channels, got one whose outputs are a few points; use Ball"
            )

    @property
    def reach(self) -> float:
        return norm_radius(self.norm)

    @property
    def size(self) -> float:
        return math.sqrt(self.norm.width)

    def project(self, z):
        z = self.norm.center(z)
        anywhere = torch.zeros_like(z)  # where the centre goes: on the first channel against the last
        anywhere[..., 0], anywhere[..., -1] = 1.0, -1.0
        z = torch.where(z.norm(dim=-1, keepdim=True) > 0, z, anywhere)
        return z * (self.size / z.norm(dim=-1, keepdim=True))

    def tangent(self, z, g):
        g = self.norm.center(g)
        return g - z * ((z * g).sum(-1, keepdim=True) / self.norm.width)

    def tokens(self, z):
        t = self.norm.weight.to(z) * z
        return t if self.norm.bias is None else t + self.norm.bias.to(z)

    def sample(self, count, n, d, random):
        return self.project(torch.randn(count, n, d, generator=random, dtype=torch.float64))


@final
@dataclass(frozen=True, eq=False, repr=False)
class BallAround(_Round):
    """Inputs near a given one.

    Attributes:
        x: The input, (n, d).
        radius: How far tokens may be from it.
        per: "sequence", all of them together (Frobenius norm), or "token", each alone.

    >>> [round(t, 6) for t in BallAround(torch.zeros(1, 2), 1.0).project(torch.tensor([[[0.0, 7.0]]])).flatten().tolist()]
    [0.0, 1.0]
    >>> BallAround(torch.zeros(3, 2), 1.0, per="token")
    BallAround(3 × 2, radius 1 per token)
    """

    x: Float[Tensor, "n d"]
    radius: float
    per: Per = "sequence"

    def __post_init__(self):
        object.__setattr__(self, "radius", length_of(self.radius, "radius"))
        choice(self.per, "per", PER)
        one_sequence(self.x)

    def __repr__(self) -> str:
        return f"BallAround({' × '.join(map(str, self.x.shape))}, radius {self.radius:g} per {self.per})"

    @property
    def _axes(self):
        return (-1,) if self.per == "token" else (-2, -1)

    def _centre(self, z):
        return self.x.detach().to(z)

    @property
    def reach(self) -> float:
        return float(self.x.double().norm(dim=-1).max()) + self.radius

    def along(self, g: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The boundary's points in the directions `g`; `x` where there is none."""
        length = self._length(g)
        return self._centre(g) + self.radius * g / torch.where(length > 0, length, 1.0)

    def sample(self, count, n, d, random):
        """Gaussian directions, on the boundary."""
        return self.project(self.along(torch.randn(count, n, d, generator=random, dtype=torch.float64).to(self.x.device)))


def length_of(value: float, what: str) -> float:
    """A length in token space, a positive number whose square is finite."""
    expected = f"a finite {what} > 0 and below {LONGEST_TOKEN:g}"
    return number(value, expected, "give it as a length in token space", above=0.0, below=LONGEST_TOKEN)


def check_width(got: int, width: int) -> None:
    """Refuse tokens of another width."""
    if got != width:
        raise BadInputError(f"expected tokens of width {width}, got {got}; the set and the map must agree")
