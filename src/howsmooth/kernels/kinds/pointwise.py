"""Kinds whose weights come from one logit and one number of its row: softmax, sigmoid, products of features, the top few."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds.features import Featured, short
from howsmooth.kernels.kinds.kind import Counts, FeatureMap, Logistic, Pointwise, Traits, hidden_as
from howsmooth.kernels.tensors import check_tensor, sigmoid
from howsmooth.settings import choice, flag, number, whole


@final
@dataclass(frozen=True, repr=False)
class Softmax(Pointwise):
    """`P_ij = exp(s_ij) / (exp(sink) + Σ_j exp(s_ij))`, the sum over what query i sees; without a sink, softmax.

    Attributes:
        sink: (heads,), a logit of every head that takes weight and gives no value (gpt-oss; Xiao et al. 2023).

    >>> Softmax(), Softmax(torch.zeros(2))
    (Softmax(), Softmax(sink=2 numbers))
    """

    fused: ClassVar[bool] = True
    sloped: ClassVar[bool] = False
    sink: Float[Tensor, " heads"] | None = None

    @property
    def traits(self):
        return Traits(softmax=True, sink=self.sink)

    def __post_init__(self):
        if self.sink is not None:
            check_tensor(self.sink, "sink", ("heads",), "give one number per head")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Softmax) or self.sink is None or other.sink is None:
            return isinstance(other, Softmax) and self.sink is other.sink
        return self.sink.shape == other.sink.shape and bool((self.sink.cpu() == other.sink.cpu()).all())

    def __hash__(self) -> int:
        return hash(type(self))

    def check_layer(self, heads, scale):
        if self.sink is not None and len(self.sink) != heads:
            raise BadInputError(
                f"expected a sink of {heads} numbers, one per head, got {len(self.sink)}; take it from the layer it belongs to"
            )

    def to(self, device, dtype):
        sink = None if self.sink is None else self.sink.to(device, dtype)
        return self if sink is self.sink else Softmax(sink)

    def head(self, index):
        return self if self.sink is None else Softmax(self.sink[index : index + 1])

    def weigh(self, s, visible, slack, counts=None):
        s = s if counts is None else s + counts.log()
        if self.sink is not None:
            sink = self.sink.to(s)[:, None, None].expand(*s.shape[:-1], 1)
            return torch.softmax(torch.cat([s.masked_fill(~visible, -torch.inf), sink], -1), -1)[..., :-1]
        empty = ~visible.any(-1, keepdim=True)
        return hidden_as(torch.softmax(s.masked_fill(~visible, -torch.inf).masked_fill(empty, 0.0), -1), ~empty)

    def start(self, rows):
        return None if self.sink is None else self.sink.to(rows)[:, None].expand(rows.shape)

    def statistic(self, tiles, rows, slack):
        for heads, at, s in tiles:
            torch.maximum(rows[heads, at], s.amax(-1), out=rows[heads, at])
        return rows.masked_fill_(rows == -torch.inf, 0.0)

    def tile(self, s, row, cap):
        weights = s.sub_(row).exp_()
        return weights, weights if cap is None else cap.mul_(weights)


@final
@dataclass(frozen=True, repr=False)
class Sigmoid(Pointwise):
    """`P_ij = σ(s_ij + b)` (Ramapuram et al. 2024): rows do not sum to one.

    Attributes:
        bias: `b`; by default `−log n`, `n` the number of real keys of the sequence, whatever a causal mask or a window
            hides.

    >>> Sigmoid(), Sigmoid(bias=-3.0)
    (Sigmoid(), Sigmoid(bias=-3.0))
    """

    fused: ClassVar[bool] = True
    bias: float | None = None

    @property
    def traits(self):
        return Traits(divided=False, logistic=Logistic(self.bias))

    def __post_init__(self):
        if self.bias is not None:
            bias = number(self.bias, "a finite bias of Sigmoid", "leave it out for −log n")
            object.__setattr__(self, "bias", bias)

    def shift(self, mask, m):
        if self.bias is not None:
            return self.bias
        m = m if mask.keys is None else mask.keys.sum(-1).clamp_min(1).double()
        return -m.log() if isinstance(m, Tensor) else -math.log(m)

    def weigh(self, s, visible, slack, counts=None):
        return _times(hidden_as(sigmoid(s), visible), counts)

    def tile(self, s, row, cap):
        slope = s.neg().sigmoid_()  # σ(−s), which 1 − σ(s) is not where σ(s) is near one
        weights = s.sigmoid_()
        slope.mul_(weights)
        return weights, slope if cap is None else slope.mul_(cap)


@final
@dataclass(frozen=True, repr=False)
class Hard(Pointwise):
    """Equal weights on the keys whose logits are the `top` largest of their row: softmax's limit for large logits.

    Keys that tie with the last of them all get in, up to rounding, so that no order of the tokens matters. Weights are
    constant between ties, so the derivative goes through the values alone; at a tie the map jumps, and the derivative is that
    of the weights it has there.

    Attributes:
        top: How many of the largest logits count.

    >>> Hard(), Hard(top=4)
    (Hard(), Hard(top=4))
    """

    flat: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    sloped: ClassVar[bool] = False
    top: int = 1

    @property
    def traits(self):
        return Traits(smooth=False, top=self.top)

    def __post_init__(self):
        top = whole(self.top, "a whole number of keys for Hard, at least 1", "top=1 takes the largest logit", least=1)
        object.__setattr__(self, "top", top)

    def weigh(self, s, visible, slack, counts=None):
        s = s.detach().masked_fill(~visible, -torch.inf)
        last = s.topk(min(self.top, s.shape[-1]), -1).values[..., -1:] if counts is None else self._last(s, counts)
        chosen = _times(hidden_as((s >= last - slack).to(s.dtype), visible), counts)
        total = chosen.sum(-1, keepdim=True)
        return chosen / torch.where(total > 0, total, 1.0)

    def _last(self, s: Tensor, counts: Counts) -> Tensor:
        """The least logit of each row that gets in: from the best on, until keys stand for `top` tokens; of mass, the best."""
        order = s.argsort(-1, descending=True)
        sizes = counts.expand(s.shape).gather(-1, order)
        before = sizes.cumsum(-1) - sizes
        few = before < self.top - 0.5 if self.top > 1 else before <= 0
        return torch.where(few, s.gather(-1, order), torch.inf).amin(-1, keepdim=True)

    def statistic(self, tiles, rows, slack):
        best = rows.new_full((*rows.shape, self.top), -torch.inf)
        for heads, at, s in tiles:
            best[heads, at] = torch.cat([best[heads, at], s], -1).topk(self.top, -1).values
        return rows.copy_(best[..., -1] - slack()[..., 0])

    def tile(self, s, row, cap):
        chosen = ((s >= row) & (s > -torch.inf)).to(s.dtype)
        return chosen, s.new_zeros(()).expand(s.shape)


@final
@dataclass(frozen=True, repr=False)
class Linear(Pointwise):
    """`P_ij = φ(q_i)·φ(k_j) / Σ_j φ(q_i)·φ(k_j)` (Katharopoulos et al. 2020), in time linear in the number of tokens.

    Attributes:
        features: `φ`, "elu" for `elu(x) + 1` or "relu", entry by entry.
        normalized: False leaves the sum out.

    A query whose sum is zero, as "relu" allows, gives zero. Where a sum underflows, as it can beside keys that a mask hides, a
    plain value is nan, and a derivative is refused.

    >>> Linear(), Linear("relu", normalized=False)
    (Linear(), Linear(features='relu', normalized=False))
    """

    maps: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    lacks: ClassVar[dict[str, str]] = {
        "softcap": "its weights are products of features, there are no logits to cap",
        "bias": "its weights are products of features, there are no logits to add to",
    }
    features: FeatureMap = "elu"
    normalized: bool = True

    @property
    def traits(self):
        return Traits(divided=self.normalized, smooth=self.features == "elu" or not self.normalized, features=self.features)

    def __post_init__(self):
        object.__setattr__(self, "features", choice(self.features, "features of Linear", ("elu", "relu")))
        object.__setattr__(self, "normalized", flag(self.normalized, "normalized"))

    def scale(self, width):
        return 1.0

    def check_layer(self, heads, scale):
        if scale != 1:
            raise BadInputError(f"expected no scale for Linear attention, got {scale:g}; features have none, pass scale=None")

    def enter(self, q, k, v, scale):
        return Featured(q, k, v, self.features, self.normalized)

    def weigh(self, s, visible, slack, counts=None):
        s = _times(hidden_as(s, visible), counts)
        if not self.normalized:
            return s
        total = s.sum(-1, keepdim=True)
        weights = hidden_as(s / torch.where(total > 0, total, 1.0), total > 0)
        positive = visible.any(-1, keepdim=True) if self.features == "elu" else total > 0
        keys = s.shape[-1] if counts is None else counts.sum(-1, keepdim=True)
        return weights.masked_fill(short(total, keys) & positive, torch.nan)

    def tile(self, s, row, cap):
        visible = s > -torch.inf
        return s.masked_fill_(~visible, 0.0), visible.to(s.dtype)


def _times(weights: Tensor, counts: Counts | None) -> Tensor:
    return weights if counts is None else weights * counts
