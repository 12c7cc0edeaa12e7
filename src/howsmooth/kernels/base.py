"""What a kernel gives: attention of any kind linearised at `q, k, v`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Kind, Softmax
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.tensors import numbers

if TYPE_CHECKING:
    from howsmooth.kernels.tiled import Tiled

Precision = Literal["half", "mixed", "strict"]  # of the fused kernels' products: docs/reference/performance.md

FINER: dict[Precision, Precision] = {"half": "mixed", "mixed": "strict"}

# tensors by head; directions have an axis more, one row per probe. A kind may cut queries and keys of a head in parts
Queries = Float[Tensor, "*probes batch heads n d"]
Keys = Float[Tensor, "*probes batch kv_heads m d"]
Values = Float[Tensor, "*probes batch v_heads m d_v"]
Outputs = Float[Tensor, "*probes batch o_heads n d_v"]
Offsets = Float[Tensor, "*probes batch kv_heads m"]  # a number of every key, added to its logits


@dataclass(frozen=True)
class Scores:
    """How logits come from queries and keys, `s = scale · q·k`, soft-capped, then masked; and the kind of their weights."""

    scale: float
    softcap: float | None = None
    mask: Mask = field(default_factory=Mask)
    kind: Kind = field(default_factory=Softmax)

    def __post_init__(self):
        if self.softcap is not None and not self.softcap > 0:
            raise BadInputError(f"expected a positive soft-cap, got {self.softcap}; leave it out for none")
        self.kind.check(self.softcap, self.mask)

    @property
    def softmax(self) -> bool:
        """Whether weights are softmax's own, with no sink beside the keys: what most of theory speaks of."""
        return self.kind.traits.plain

    def select(self, items: Tensor) -> "Scores":
        """The scores of some items of the batch."""
        return replace(self, mask=self.mask.select(items))

    def check(self, q: Queries, k: Keys, v: Values) -> tuple[int, int, int, int]:
        """Refuse tensors that do not fit together; gives batch, heads, n and m."""
        parts = self.kind.parts
        (batch, heads, n, _), (kv_heads, m) = q.shape, k.shape[1:3]
        if heads % (parts * v.shape[1]) or kv_heads != parts * v.shape[1]:
            raise BadInputError(
                f"expected key/value heads that divide the {heads} query heads, got {kv_heads}; change kv_heads"
            )
        heads //= parts
        self.kind.check_layer(heads, self.scale)
        self.kind.check_tokens(n, m)
        self.mask.check(batch, heads, n, m)
        return batch, heads, n, m


class AttentionKernel(ABC):
    """Attention linearised at `q, k, v`: its output and products with its Jacobian.

    inputs: `q, k, v` as they came, keys and values not repeated.  largest_logit: a bound on every logit before masks.
    """

    largest_logit: float = 0.0

    def __init__(self, q: Queries, k: Keys, v: Values, scores: Scores, dtype: torch.dtype, trusted: bool = False):
        """dtype: of the products.  trusted: nothing is checked, so that nothing waits for the device."""
        self.inputs = (q, k, v)
        self.scores = scores
        if trusted:
            return
        scores.check(q, k, v)
        self.scores = replace(scores, mask=scores.mask.to(q.device, dtype), kind=scores.kind.to(q.device, dtype))

    def check_range(self, q: Queries, k: Keys, offset: Tensor | None, dtype: torch.dtype) -> None:
        """Write down `largest_logit`; refuse logits that leave the range of a precision. offset: of every key."""
        sizes = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).max() for t in (q, k)]
        sizes += [] if offset is None else [offset.abs().max().double()]
        longest_q, longest_k, *shift = numbers(torch.stack(sizes))  # the device is waited for once
        self.largest_logit = abs(self.scores.scale) * longest_q * longest_k + sum(shift)
        if not self.largest_logit < 0.25 * torch.finfo(dtype).max:
            raise BadInputError(
                f"expected logits within the range of {dtype}, got up to {self.largest_logit:.1e}; "
                "use float64 or smaller weights"
            )

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.inputs[0].shape[1] // self.inputs[1].shape[1]

    def expand(self, t: Tensor) -> Tensor:
        """Key/value heads repeated for the query heads that share them."""
        return t if self.group == 1 else t.repeat_interleave(self.group, dim=-3)

    def sum_groups(self, t: Tensor) -> Tensor:
        """Sums over the query heads that share a key head."""
        return t if self.group == 1 else t.unflatten(-3, (-1, self.group)).sum(-3)

    @property
    @abstractmethod
    def output(self) -> Outputs:
        """`o = P v`."""

    @abstractmethod
    def jvp(self, dq: Queries, dk: Keys, dv: Values, doffset: Offsets | None = None) -> Outputs:
        """Derivative of the output along `dq, dk, dv`, and along the offset of the keys where the kernel has one."""

    @abstractmethod
    def vjp(self, g: Outputs) -> tuple[Queries, Keys, Values]:
        """Transposed product: gradients of `⟨g, o⟩` in `q, k, v`."""

    def vjp_and_offset(self, g: Outputs) -> tuple[Queries, Keys, Values, Offsets | None]:
        """Gradients of `⟨g, o⟩` in `q, k, v`, and in the offset of the keys where the kernel has one."""
        return *self.vjp(g), None

    @abstractmethod
    def attention_received(self) -> Float[Tensor, "batch m"]:
        """Column sums of `P`, averaged over heads: how much each key is attended to."""

    def logit_range(self, below: Float[Tensor, "batch heads n"] | None = None) -> tuple[float, float]:
        """The least and the greatest logit that some query attends to, soft-cap and bias included; two zeros where none does.

        below: what is taken off the logits of each query.
        """
        return self.tiled().logit_range(below)

    @abstractmethod
    def select(self, items: Tensor) -> "AttentionKernel":
        """Attention on some items of the batch."""

    @abstractmethod
    def tiled(self) -> "Tiled":
        """Attention with its weights within reach, tile by tile; kinds whose weights are not on tiles are refused."""

    @property
    def noise(self) -> float:
        """Relative error of a product: rounding, and what it makes of logits, where one unit in s moves `P` by s units."""
        return torch.finfo(self.output.dtype).eps * (32 + self.largest_logit + self.lifted)

    @property
    def lifted(self) -> float:
        """How far a bias lifts or lowers the largest logit of a row: its digits are lost before it is taken off again."""
        return 0.0

    @property
    def coarse(self) -> bool:
        """Whether operands of every product keep eleven bits only, so that those around attention may."""
        return False

    @property
    def finer(self) -> Precision | None:
        """The next precision above this kernel's, where there is one short of float64."""
        return None

    def refined(self) -> "AttentionKernel | None":
        """Attention with more exact products at a higher price, where there is one short of float64."""
        return None

    @property
    def heavy(self) -> bool:
        """Whether products in float64 would cost far more than all the others together."""
        return False
