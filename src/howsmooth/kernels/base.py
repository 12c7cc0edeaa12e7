"""What a kernel gives: softmax attention linearised at `q, k, v`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.masks import Mask

if TYPE_CHECKING:
    from howsmooth.kernels.tiled import Tiled

Precision = Literal["half", "mixed", "strict"]  # of the fused kernels' products: docs/reference/performance.md

FINER: dict[Precision, Precision] = {"half": "mixed", "mixed": "strict"}

# tensors by head; directions along them have an axis more, one row per probe
Queries = Float[Tensor, "*probes batch heads n d"]
Keys = Float[Tensor, "*probes batch kv_heads m d"]
Values = Float[Tensor, "*probes batch kv_heads m d_v"]
Outputs = Float[Tensor, "*probes batch heads n d_v"]


@dataclass(frozen=True)
class Scores:
    """How logits come from queries and keys: `s = scale · q·k`, soft-capped, then masked."""

    scale: float
    softcap: float | None = None
    mask: Mask = field(default_factory=Mask)

    def __post_init__(self):
        if self.softcap is not None and not self.softcap > 0:
            raise BadInputError(f"expected a positive soft-cap, got {self.softcap}; leave it out for none")


class SoftmaxAttention(ABC):
    """Softmax attention linearised at `q, k, v`: its output and products with its Jacobian.

    inputs: `q, k, v` as they came, keys and values not repeated.  largest_logit: a bound on every logit before masks.
    """

    def __init__(self, q: Queries, k: Keys, v: Values, scores: Scores, dtype: torch.dtype, trusted: bool = False):
        """dtype: of the products.  trusted: nothing is checked, so that nothing waits for the device."""
        self.inputs = (q, k, v)
        self.scores = scores
        if trusted:
            return
        (batch, heads, n, _), (kv_heads, m) = q.shape, k.shape[1:3]
        if heads % kv_heads:
            raise BadInputError(
                f"expected key/value heads that divide the {heads} query heads, got {kv_heads}; change kv_heads"
            )
        scores.mask.check(batch, heads, n, m)
        self.scores = replace(scores, mask=scores.mask.to(q.device, dtype))
        longest_q, longest_k = (torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).max().item() for t in (q, k))
        self.largest_logit = abs(scores.scale) * longest_q * longest_k
        if not self.largest_logit < 0.25 * torch.finfo(dtype).max:
            raise BadInputError(
                f"expected logits within the range of {dtype}, got up to {self.largest_logit:.1e}; "
                "use float64 or smaller weights"
            )

    @property
    @abstractmethod
    def output(self) -> Outputs:
        """`o = P v`."""

    @abstractmethod
    def jvp(self, dq: Queries, dk: Keys, dv: Values) -> Outputs:
        """Derivative of the output along `dq, dk, dv`."""

    @abstractmethod
    def vjp(self, g: Outputs) -> tuple[Queries, Keys, Values]:
        """Transposed product: gradients of `⟨g, o⟩` in `q, k, v`."""

    @abstractmethod
    def attention_received(self) -> Float[Tensor, "batch m"]:
        """Column sums of `P`, averaged over heads: how much each key is attended to."""

    def logit_range(self) -> tuple[float, float]:
        """The least and the greatest logit that some query sees, soft-cap and bias included; two zeros where none does."""
        return self.tiled().logit_range()

    @abstractmethod
    def select(self, items: Tensor) -> "SoftmaxAttention":
        """The same attention on some items of the batch."""

    @abstractmethod
    def tiled(self) -> "Tiled":
        """The same attention with its weights within reach, tile by tile."""

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

    def refined(self) -> "SoftmaxAttention | None":
        """The same attention with more exact products at a higher price, where there is one short of float64."""
        return None

    @property
    def heavy(self) -> bool:
        """Whether products in float64 would cost far more than all the others together."""
        return False
