"""Which keys are visible to a query."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import Place, place


@dataclass(frozen=True)
class Mask:
    """Visibility of key `j` from query `i`, and what is added to the logit.

    causal: `j ≤ i`.  window: `|i − j| < window`, so a causal window of `w` shows `w` tokens, itself included.
    first: added to `i` in both, where the first query stands in the middle of the keys' sequence.
    keys: (batch, m), true where the key may be visible.  bias: added to the logits after scale and soft-cap, broadcast to
    (batch, heads, n, m); `−inf` hides a key.  ends: row `i` attends to keys `j < ends[i]`, and ends never decrease: a
    causal mask with ties, kept on the CPU.

    >>> Mask(causal=True, window=2).visible(slice(0, 3), slice(0, 3), torch.device("cpu")).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    causal: bool = False
    window: int | None = None
    keys: Bool[Tensor, "batch m"] | None = None
    bias: Float[Tensor, "#batch #heads #n m"] | None = None
    ends: Int[Tensor, " n"] | None = None
    first: int = 0

    def __post_init__(self):
        if self.ends is not None and bool((self.ends.diff() < 0).any()):
            raise BadInputError(
                "expected ends that never decrease, got a row that attends to less than the one before; sort the rows"
            )
        if self.window is not None and not (isinstance(self.window, int) and self.window >= 1):
            raise BadInputError(f"expected a window of 1 or more whole tokens, got {self.window}; leave it out for none")
        if self.bias is not None and self.bias.ndim != 4:
            raise BadInputError(f"expected a bias of shape (batch, heads, n, m), got {tuple(self.bias.shape)}; add axes of 1")
        if self.bias is not None and bool((self.bias.isnan() | self.bias.isposinf()).any()):
            raise BadInputError("expected a finite bias or -inf where a key is hidden, got NaN or +inf; fix the bias")

    @classmethod
    def trusted(cls, causal: bool, window: int | None, bias: Tensor | None, first: int) -> "Mask":
        """A mask whose entries nobody looks at: where a bias is NaN or +inf, so is the answer."""
        mask = object.__new__(cls)
        vars(mask).update(causal=causal, window=window, keys=None, bias=bias, ends=None, first=first)
        return mask

    def check(self, batch: int, heads: int, n: int, m: int) -> None:
        """Refuse a mask that does not fit logits of shape (batch, heads, n, m)."""
        if self.keys is not None and tuple(self.keys.shape) != (batch, m):
            raise BadInputError(
                f"expected an attention mask of shape ({batch}, {m}), got {tuple(self.keys.shape)}; give one row per sequence"
            )
        if self.bias is not None and not (
            all(got in (1, want) for got, want in zip(self.bias.shape[:3], (batch, heads, n), strict=True))
            and self.bias.shape[3] == m
        ):
            raise BadInputError(
                f"expected a bias that broadcasts to ({batch}, {heads}, {n}, {m}), got {tuple(self.bias.shape)}; "
                "use 1 for an axis it does not depend on, and one column per key"
            )
        if self.ends is not None and (len(self.ends) != n or not 0 <= int(self.ends[0]) <= int(self.ends[-1]) <= m):
            raise BadInputError(
                f"expected {n} ends between 0 and {m}, got {len(self.ends)} from {int(self.ends[0])} to {int(self.ends[-1])}; "
                "give one per query"
            )

    def to(self, device: Place = None, dtype: Place = None) -> "Mask":
        """The mask on another device, its bias in another precision, named as for a tensor."""
        device, dtype = place(device, dtype)
        return replace(
            self,
            keys=None if self.keys is None else self.keys.to(device),
            bias=None if self.bias is None else self.bias.to(device, dtype),
        )

    def select(self, items: Tensor) -> "Mask":
        """The mask of some items of the batch."""
        keys = None if self.keys is None else self.keys[items]
        bias = self.bias if self.bias is None or self.bias.shape[0] == 1 else self.bias[items]
        return replace(self, keys=keys, bias=bias)

    def band(self, rows: slice, cols: slice) -> bool | None:
        """Whether a block of logits is inside the causal, window and `ends` band: all of it, none of it, or part (None)."""
        start, stop = self.first + rows.start, self.first + rows.stop
        nearest, furthest = start - (cols.stop - 1), (stop - 1) - cols.start  # least and greatest i − j
        low = 0 if self.causal else (-(self.window - 1) if self.window else -(2**62))
        high = self.window - 1 if self.window else 2**62
        if furthest < low or nearest > high:
            return False
        whole = low <= nearest and furthest <= high
        if self.ends is not None:
            if cols.start >= int(self.ends[rows.stop - 1]):
                return False
            whole &= cols.stop <= int(self.ends[rows.start])
        return True if whole else None

    def visible(self, rows: slice, cols: slice, device: torch.device) -> Bool[Tensor, "n m"]:
        """The causal, window and `ends` band on a block of logits."""
        i = self.first + torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(cols.start, cols.stop, device=device)[None, :]
        visible = torch.ones(i.shape[0], j.shape[1], dtype=torch.bool, device=device)
        if self.causal:
            visible &= j <= i
        if self.window is not None:
            visible &= (i - j).abs() < self.window
        if self.ends is not None:
            visible &= j < self.ends[rows].to(device)[:, None]
        return visible
