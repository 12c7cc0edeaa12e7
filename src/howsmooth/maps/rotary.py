"""Rotary phases: planes of every query and key turned by an angle that grows with the token's position."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import Place, check_dense, check_tensor, described, place
from howsmooth.settings import flag, number, whole

_WIDEST, _MOST = 2**16, 2**30  # of the width of a head, and of the entries of a table


@final
@dataclass(frozen=True, eq=False, repr=False)
class Rotary:
    """Plane `p` of token `i` is turned by `(c, s) = (cos_ip, sin_ip)`: `(a, b) ↦ (c a − s b, c b + s a)`.

    Attributes:
        cos: (positions, planes), or (batch, positions, planes) where sequences differ. Row `i` belongs to token `i`; rows
            past the last token are not used.
        sin: Of the same shape. The first `2·planes` entries of a head are turned, the others are left alone (Phi).
        interleaved: Planes are neighbours (0, 1), (2, 3), … (GPT-J, Cohere); else they pair the two halves of what is
            turned (Llama, Qwen).

    >>> quarter = Rotary(torch.zeros(1, 1), torch.ones(1, 1))
    >>> quarter.turn(torch.tensor([[1.0, 0.0, 5.0]])).tolist()
    [[0.0, 1.0, 5.0]]
    """

    cos: Float[Tensor, "*batch n planes"]
    sin: Float[Tensor, "*batch n planes"]
    interleaved: bool = False

    def __post_init__(self):
        batched = isinstance(self.cos, Tensor) and self.cos.ndim == 3
        axes = ("batch", "positions", "planes") if batched else ("positions", "planes")
        check_tensor(self.cos, "rotary cos", axes, "Rotary.from_base makes such a table")
        check_tensor(self.sin, "rotary sin", tuple(self.cos.shape), "cos and sin have one shape")
        object.__setattr__(self, "interleaved", flag(self.interleaved, "interleaved"))

    @classmethod
    def from_base(
        cls,
        width: int,
        positions: int | Float[Tensor, "*batch n"],
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> "Rotary":
        """Angles `position · base^{−2p/width}`, the usual ones, made in float64.

        Args:
            width: Entries of a head that are turned, even.
            positions: Of every token, or how many from 0 on.
        """
        expected, fix = f"an even rotated width from 2 to {_WIDEST}", "planes have two entries each"
        width = whole(width, expected, fix, least=2, below=_WIDEST + 1)
        if width % 2:
            raise BadInputError(f"expected {expected}, got {width}; {fix}")
        base = number(base, "a positive base", "the usual value is 10000", above=0.0)
        if isinstance(positions, Tensor):
            check_dense(positions, "positions")
            if positions.is_complex() or positions.ndim not in (1, 2):
                raise BadInputError(
                    f"expected positions as a tensor (n,) or (batch, n), got {described(positions)}; one for each token"
                )
        else:
            expected = f"a whole number of positions from 1 to {_MOST // width}"
            positions = torch.arange(whole(positions, expected, "count the tokens", least=1, below=_MOST // width + 1))
        place(None, dtype)  # refuses what is no dtype of numbers
        speed = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width)
        angle = positions.double()[..., None] * speed
        return cls(angle.cos().to(dtype), angle.sin().to(dtype), interleaved)

    @property
    def width(self) -> int:
        """How many entries of a head are turned."""
        return 2 * self.cos.shape[-1]

    @property
    def gain(self) -> float:
        """The largest factor by which a vector grows: 1 for exact tables, rounded up; entries left alone count."""
        size = (self.cos.double().square() + self.sin.double().square()).max().sqrt()
        return max(1.0, float(size) * (1 + 1e-15))

    @property
    def shrink(self) -> float:
        """The smallest factor by which a vector grows: 1 for exact tables, rounded down; entries left alone count."""
        size = (self.cos.double().square() + self.sin.double().square()).min().sqrt()
        return min(1.0, float(size) * (1 - 1e-15))

    def to(self, device: Place = None, dtype: torch.dtype | None = None) -> "Rotary":
        """A copy in another precision or on another device, named as for a tensor."""
        device, dtype = place(device, dtype)
        cos, sin = self.cos.to(device, dtype), self.sin.to(device, dtype)
        return self if cos is self.cos and sin is self.sin else Rotary(cos, sin, self.interleaved)

    def __repr__(self) -> str:
        kind = ", interleaved" if self.interleaved else ""
        return f"Rotary({self.cos.shape[-2]} positions, {self.cos.shape[-1]} planes{kind})"

    def check(self, batch: int, n: int) -> None:
        """Refuse tables that do not reach every token."""
        if self.cos.shape[-2] < n:
            raise BadInputError(
                f"expected rotary tables for at least {n} positions, got {self.cos.shape[-2]}; make them longer"
            )
        if self.cos.ndim == 3 and self.cos.shape[0] not in (1, batch):
            raise BadInputError(
                f"expected rotary tables for {batch} sequences, got {self.cos.shape[0]}; give one per sequence or one for all"
            )

    def select(self, items: Tensor) -> "Rotary":
        """The tables of some sequences of the batch."""
        if self.cos.ndim == 2 or self.cos.shape[0] == 1:
            return self
        return Rotary(self.cos[items], self.sin[items], self.interleaved)

    def at(self, rows: slice) -> "Rotary":
        """The tables of some tokens."""
        return Rotary(self.cos[..., rows, :], self.sin[..., rows, :], self.interleaved)

    def turn(self, t: Float[Tensor, "*axes n d"], *, back: bool = False) -> Float[Tensor, "*axes n d"]:
        """Queries or keys turned, (…, heads, n, d) for tables with a batch axis. back: the transpose."""
        n, planes = t.shape[-2], self.cos.shape[-1]
        cos, sin = self.cos[..., :n, :], self.sin[..., :n, :]
        if cos.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]  # (batch, 1, n, planes): one table for all heads
        sin = -sin if back else sin
        turned, rest = t[..., : 2 * planes], t[..., 2 * planes :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            moved = torch.stack([cos * a - sin * b, cos * b + sin * a], -1).flatten(-2)
        else:
            a, b = turned[..., :planes], turned[..., planes:]
            moved = torch.cat([cos * a - sin * b, cos * b + sin * a], -1)
        return torch.cat([moved, rest], -1) if rest.shape[-1] else moved

    def planes(self, head_width: int) -> Tensor:
        """Which plane each entry of a head belongs to, (head_width,); entries left alone are planes of their own."""
        count = self.cos.shape[-1]
        index = torch.arange(count)
        pairs = index.repeat_interleave(2) if self.interleaved else index.repeat(2)
        return torch.cat([pairs, torch.arange(count, count + head_width - 2 * count)])
