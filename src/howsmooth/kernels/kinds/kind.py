"""What a kind of attention is: how logits come from queries and keys, how weights come from logits, the products of both.

What a kind says of its weights is one record, `Traits`, so that nobody asks a kind for its class. A part of the record that is
None is a step that the kind does not take; a part that is there has the numbers of that step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.masks import Mask
from howsmooth.settings import shown

if TYPE_CHECKING:
    from howsmooth.kernels.base import Scores

Logits = Float[Tensor, "batch heads n m"]
Visible = Bool[Tensor, "*batch n m"]
Counts = Float[Tensor, "batch 1 1 m"]
Tile = Float[Tensor, "g rows cols"]
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


class Vectors(NamedTuple):
    """What logits and outputs are made of, or directions along it. offset: of every key, added to its logits."""

    q: Float[Tensor, "*probes batch heads n d"]
    k: Float[Tensor, "*probes batch kv_heads m d"]
    v: Float[Tensor, "*probes batch kv_heads m d_v"]
    offset: Float[Tensor, "*probes batch kv_heads m"] | None = None


class Entry(ABC):
    """A map of queries, keys and values token by token, at one place: what it gives there, and its two products.

    Made of out-of-place operations of torch, so that autograd goes through `vectors`.
    vectors: what it gives.  roundings: units in the last place that it adds to what comes after it.
    """

    vectors: Vectors
    roundings: float = 0.0
    below: Float[Tensor, "batch heads n"] | None = None  # what was left out of all logits of a query

    @abstractmethod
    def push(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Vectors:
        """The derivative along `dq, dk, dv`, which may have an axis of probes in front."""

    @abstractmethod
    def pull(self, g: Vectors) -> tuple[Tensor, Tensor, Tensor]:
        """The transpose of `push`."""


class Exit(ABC):
    """A map of the outputs of a kernel at one place, as `Entry` is one of its inputs."""

    output: Float[Tensor, "batch heads n d_v"]
    growth: float = 1.0  # what it makes of relative errors

    @abstractmethod
    def push(self, do: Tensor) -> Tensor:
        """The derivative along `do`."""

    @abstractmethod
    def pull(self, g: Tensor) -> Tensor:
        """The transpose of `push`."""

    @abstractmethod
    def signs(self, heads: int) -> Float[Tensor, " heads"]:
        """What the weights of each head of the kernel are multiplied by before they are added up."""


class Kind(ABC):
    """A kind of attention, `o = P v` with its own weights `P`.

    parts: into how many heads of their own the queries and keys of a head are cut.
    maps: whether something is done to the vectors before logits are made.
    lacks: settings of a layer that it has no form for, with the reason.  fused: there are fused kernels for it on a GPU.
    sloped: slopes of its weights in the logits are numbers of their own, to be kept beside the weights.
    """

    parts: ClassVar[int] = 1
    maps: ClassVar[bool] = False
    lacks: ClassVar[dict[str, str]] = {}
    fused: ClassVar[bool] = False
    sloped: ClassVar[bool] = True

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """How its weights come about: what bounds, measures and studies go by."""

    def pointwise(self) -> "Pointwise":
        """The kind as a function of a logit and of one number of its row; others are refused."""
        raise BadInputError(f"expected a kind whose weights come from a logit and its row, got {self!r}; use kernels.linearize")

    def check(self, softcap: float | None, mask: Mask) -> None:
        """Refuse a soft-cap or a mask that there is no form for."""
        for name, why in self.lacks.items():
            given = softcap if name == "softcap" else getattr(mask, name)
            if given is not None and given is not False:
                raise BadInputError(f"expected {type(self).__name__} attention without {_SAID[name]}, got one; {why}")

    def check_layer(self, heads: int, scale: float) -> None:
        """Refuse a number of heads or a scale that does not fit."""
        return None

    def check_tokens(self, n: int, m: int) -> None:
        """Refuse numbers of queries and keys that there is no form for."""
        return None

    def shift(self, mask: Mask, m: int | Float[Tensor, " batch"]) -> float | Float[Tensor, " batch"] | None:
        """A number added to every logit of an item of the batch, after soft-cap and bias. m: of tokens among its keys."""
        return None

    def scale(self, width: int) -> float:
        """What logits are multiplied by where nothing else is said, for queries of that width."""
        return width**-0.5

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> Self:
        """The kind with its tensors elsewhere or in another precision."""
        return self

    def head(self, index: int) -> Self:
        """The kind for one head alone."""
        return self

    def enter(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Entry | None:
        """What is done to queries, keys and values first."""
        return None

    def leave(self, o: Tensor) -> Exit | None:
        """What is done to the outputs last."""
        return None

    def inner(self, scores: "Scores") -> "Scores":
        """The scores of the kernel between `enter` and `leave`."""
        return scores

    @abstractmethod
    def weigh(
        self, s: Logits, visible: Visible, slack: Float[Tensor, "batch heads n 1"], counts: Counts | None = None
    ) -> Logits:
        """Weights from finite logits, in out-of-place operations of torch; zero where a key is hidden.

        slack: of the logits in each row, the part that rounding may have made.  counts: how many equal tokens each key stands
        for, or what mass it has; it gets the weights of all of them. One by default (docs/explanation/kinds.md 8.12).
        """

    def __repr__(self) -> str:
        said = []
        for f in fields(self):  # pyright: ignore[reportArgumentType]  every kind is a dataclass
            value = getattr(self, f.name)
            if f.default is MISSING or (value is not f.default and not _same(value, f.default)):
                said.append(f"{f.name}={_shown(value)}")
        return f"{type(self).__name__}({', '.join(said)})"


_SAID = {
    "softcap": "a soft-cap",
    "causal": "a causal mask",
    "window": "a window",
    "bias": "a bias on its logits",
    "ends": "a mask by positions",
}


def _shown(value: Any) -> str:
    return f"{len(value)} numbers" if isinstance(value, Tensor) else repr(value)


def _same(value: Any, default: Any) -> bool:
    return not isinstance(value, Tensor) and value == default


class Pointwise(Kind):
    """A kind whose weights `P̂` are a function of a logit and of one number of its row, divided by their row sums or not.

    `P = P̂/z` with `z` the row sums of `P̂` where `traits.divided`; else `P = P̂`.  flat: weights do not move with the logits.
    grows: a unit in a logit moves a weight by a share of it, so rounding of the logits counts.
    """

    flat: ClassVar[bool] = False
    grows: ClassVar[bool] = True

    def pointwise(self):
        return self

    def start(self, rows: Float[Tensor, "batch heads n"]) -> Float[Tensor, "batch heads n"] | None:
        """A logit that every row begins with, before its first key. rows: of that shape."""
        return None

    def statistic(
        self,
        tiles: Iterable[tuple[slice, slice, Tile]],
        rows: Float[Tensor, "g n"],
        slack: Callable[[], Float[Tensor, "g n 1"]],
    ) -> Float[Tensor, "g n"]:
        """The number of each row, from all tiles of logits: heads, rows and entries, `−inf` where hidden.

        rows: to start at, written over.  slack: how far rounding may move a logit of each row.
        """
        return rows.zero_()

    @abstractmethod
    def tile(self, s: Tile, row: Float[Tensor, "g rows 1"], cap: Tile | None) -> tuple[Tile, Tile]:
        """`P̂` and its derivative in the logits, from a tile of logits and the slope of the soft-cap; may write over both."""


def hidden_as(weights: Tensor, visible: Tensor) -> Tensor:
    """Weights with zeros where a key is hidden."""
    return weights.masked_fill(~visible, 0.0)


def check_kind(kind: object) -> None:
    """Refuse what is no kind of attention."""
    if not isinstance(kind, Kind):
        got = kind.__name__ if isinstance(kind, type) else shown(kind)
        raise BadInputError(f"expected a kind of attention, got {got}; pass one of howsmooth.kinds, such as Softmax()")


def not_softmax(kind: Kind, *, sink: bool = False) -> str | None:
    """Why theorems on softmax say nothing of a kind; None where they do. sink: whether they allow a learned sink."""
    if not kind.traits.softmax:
        return f"proved for softmax attention, this layer's is {kind!r}"
    return None if sink or kind.traits.plain else "not proved beside a learned sink"


def check_softmax(kind: Kind, what: str) -> None:
    """Refuse a kind for what is known of plain softmax alone."""
    if not kind.traits.plain:
        raise BadInputError(f"expected softmax attention for {what}, got {kind!r}; it is not derived for that kind")


def counts_tokens(kind: Kind) -> str | None:
    """Why the halves of a token are not defined for a kind; None where they are."""
    return None if kind.traits.divided else "weights count tokens there, and halves of one would count twice"
