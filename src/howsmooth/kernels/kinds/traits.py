"""What a kind of attention says of its weights: one record, so that nobody asks a kind for its class.

A part of the record that is None is a step that the kind does not take; a part that is there has the numbers of that step.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from jaxtyping import Float
from torch import Tensor

FeatureMap = Literal["elu", "relu"]


class Logistic(NamedTuple):
    """Weights `σ(s + b)`. bias: `b`; None for `−log n`, `n` the number of real keys."""

    bias: float | None

    def shift(self, n: int) -> float:
        """`b` for n keys."""
        return -math.log(n) if self.bias is None else self.bias


class Balancing(NamedTuple):
    """Rows and columns of `exp(s)` normalised in turn. iterations: how often; None for the limit."""

    iterations: int | None


class Distances(NamedTuple):
    """Logits `−scale |q − k|²`. tied: keys are the queries, `W_k = W_q`."""

    tied: bool


class UnitVectors(NamedTuple):
    """Queries and keys divided by `√(|x|² + epsilon)`, values too where `values`; the output times `factor`."""

    epsilon: float
    values: bool
    factor: float


class TwoSoftmaxes(NamedTuple):
    """`factor · norm(o₁ − lam · o₂)` of softmax on two halves. epsilon: of the RMS norm; None without one."""

    lam: float
    epsilon: float | None
    factor: float


@final
@dataclass(frozen=True, eq=False)
class Traits:
    """How weights of a kind come from logits, and its logits from queries and keys.

    softmax: weights are softmax of the logits `scale · q·k`, beside a sink or not.  sink: (heads,), a logit of every head that
    takes weight and gives no value.  divided: weights are divided by their sums over keys; else a key that is there twice
    counts twice.  smooth: weights do not jump, as those of the largest logits do, and those divided by sums that may vanish.
    top: weights are equal on the keys of so many largest logits.  features: weights are products of features.
    """

    softmax: bool = False
    sink: Float[Tensor, " heads"] | None = None
    divided: bool = True
    smooth: bool = True
    logistic: Logistic | None = None
    top: int | None = None
    features: FeatureMap | None = None
    balancing: Balancing | None = None
    distances: Distances | None = None
    unit_vectors: UnitVectors | None = None
    two_softmaxes: TwoSoftmaxes | None = None

    @property
    def plain(self) -> bool:
        """Whether weights are softmax of the logits and nothing more, with no sink: what most of theory speaks of."""
        return self.softmax and self.sink is None

    @property
    def tied(self) -> bool:
        """Whether keys are the queries, `W_k = W_q`."""
        return self.distances is not None and self.distances.tied

    @property
    def scaled(self) -> bool:
        """Whether weights change with the scale of the logits."""
        return self.features is None and self.top is None

    @property
    def takes_masses(self) -> bool:
        """Whether `log a` beside the logits of a key gives it the weight of `a` such keys: a softmax of some logits."""
        return self.softmax or any(t is not None for t in (self.distances, self.unit_vectors, self.two_softmaxes))
