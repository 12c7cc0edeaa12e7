"""What a kernel gives: softmax attention linearised at `q, k, v`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.masks import Mask

if TYPE_CHECKING:
    from howsmooth.kernels.tiled import Tiled

Precision = Literal["half", "mixed", "strict"]  # of the fused kernels' products: docs/performance.md
FINER: dict[Precision, Precision] = {"half": "mixed", "mixed": "strict"}


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
    """Softmax attention linearised at `q, k, v`: its output and products with its Jacobian."""

    scores: Scores
    largest_logit: float  # a bound on every logit before masks
    _inputs: tuple[Tensor, Tensor, Tensor]  # q, k, v as they came

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """`q, k, v`, keys and values not repeated."""
        return self._inputs

    @property
    @abstractmethod
    def output(self) -> Float[Tensor, "batch heads n d_v"]:
        """`o = P v`."""

    @property
    @abstractmethod
    def logsumexp(self) -> Float[Tensor, "batch heads n"]:
        """Log of each row's sum of exponentials; −inf where nothing is seen."""

    @abstractmethod
    def jvp(
        self,
        dq: Float[Tensor, "probes batch heads n d"],
        dk: Float[Tensor, "probes batch kv_heads m d"],
        dv: Float[Tensor, "probes batch kv_heads m d_v"],
    ) -> Float[Tensor, "probes batch heads n d_v"]:
        """Derivative of the output along `dq, dk, dv`, one row of the leading axis per probe."""

    @abstractmethod
    def vjp(
        self, g: Float[Tensor, "probes batch heads n d_v"]
    ) -> tuple[
        Float[Tensor, "probes batch heads n d"],
        Float[Tensor, "probes batch kv_heads m d"],
        Float[Tensor, "probes batch kv_heads m d_v"],
    ]:
        """Transposed product: gradients of `⟨g, o⟩` in `q, k, v`, one row of the leading axis per probe."""

    @abstractmethod
    def attention_received(self) -> Float[Tensor, "batch m"]:
        """Column sums of `P`, averaged over heads: how much each key is attended to."""

    @abstractmethod
    def logit_range(self) -> tuple[float, float]:
        """The least and the greatest logit that some query sees, soft-cap and bias included; two zeros where none does."""

    @abstractmethod
    def select(self, items: Tensor) -> "SoftmaxAttention":
        """The same attention on some items of the batch."""

    @abstractmethod
    def tiled(self) -> "Tiled":
        """The same attention with its weights within reach, tile by tile."""

    @property
    def noise(self) -> float:
        """Relative error of a product: rounding, and what it makes of logits, where one unit in s moves `P` by s units."""
        return torch.finfo(self.output.dtype).eps * (32 + self.largest_logit)

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


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse key/value heads that cannot be shared out among the query heads."""
    if heads % kv_heads:
        raise BadInputError(f"expected key/value heads that divide the {heads} query heads, got {kv_heads}; change kv_heads")


def bound_logits(q: Tensor, k: Tensor, scale: float) -> float:
    """A bound on every logit before masks: `|scale| max|q_i| max|k_j|`."""
    length = [t.double().square().sum(-1).max().sqrt().item() for t in (q, k)]
    bound = abs(scale) * length[0] * length[1]
    if not bound < 0.25 * torch.finfo(q.dtype).max:
        raise BadInputError(
            f"expected logits within the range of {q.dtype}, got up to {bound:.1e}; use float64 or smaller weights"
        )
    return bound
