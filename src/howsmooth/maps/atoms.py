"""Attention on points that carry mass, or stand for many equal tokens, of every kind, as a plain function for autodiff.

Kinds that are softmax of some logits take masses in their kernels, `log a_j` beside the logits. Of the others, what a key
gets that stands for many is said where the kind is (`Kind.weigh`; docs/explanation/kinds.md 8.12).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import NoConvergenceError
from howsmooth.kernels import Scores
from howsmooth.kernels.base import by_head, logits_of
from howsmooth.kernels.kinds import Kind
from howsmooth.kernels.kinds.balanced import Balance, balanced, unbalanced
from howsmooth.kernels.kinds.kind import Balancing, Vectors
from howsmooth.maps.base import Map
from howsmooth.maps.jacobian import AutodiffJacobian
from howsmooth.spectral.operator import Operator

if TYPE_CHECKING:
    from howsmooth.maps.attention import Attention

_TIE = 1e-12  # relative difference of logits that rounding explains

Points = Float[Tensor, "batch points d"]
Counts = Float[Tensor, "batch points"]
Weights = Float[Tensor, "batch heads points points"]
Visible = Bool[Tensor, "points points"]


def no_measures(kind: Kind) -> str | None:
    """Why a kind is no map of measures of mass one; None if it is."""
    traits = kind.traits
    if not traits.divided:
        return "its rows do not sum to one, so its output grows with the number of tokens, which a measure does not have"
    if traits.sink is not None:
        return "a sink weighs as much as one token, and a measure has none to count"
    if traits.top is not None and traits.top > 1:
        return "it counts the tokens it takes, and a measure has none to count; use Hard(top=1)"
    return None


def counted(attn: "Attention", x: Points, counts: Counts, visible: Visible | None = None, at: Points | None = None) -> Tensor:
    """The layer's outputs at points that stand for `counts` tokens each, (batch, points, d_out).

    visible: which points each one sees; all by default.  at: where the queries are, if not at `x`; keys, values and what
    columns are divided by stay. Limits of Sinkhorn that were not reached give zero.
    """
    kind, many, own = attn.kind, counts[:, None, None], attn.vectors(x)
    queries = own if at is None else (attn.vectors(at)[0], *own[1:])
    s, v, inner = _logits(attn, queries)
    if (balancing := kind.traits.balancing) is not None:
        weights = _balanced(balancing, s if at is None else _logits(attn, own)[0], s, many)
    else:
        shift = kind.shift(inner.mask, counts.sum(-1))
        s = s if shift is None else s + torch.as_tensor(shift, dtype=s.dtype, device=s.device).reshape(-1, 1, 1, 1)
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device) if visible is None else visible
        weights = kind.weigh(s, visible, _TIE * s.detach().abs().amax(-1, keepdim=True), many)
    o = weights @ v
    leave = kind.leave(o)
    return attn.finish(o if leave is None else leave.output)


def _logits(attn: "Attention", qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Scores]:
    """Logits of every pair of points, values for them, and the scores they were made by."""
    kind = attn.kind
    entry, inner = kind.enter(*qkv, attn.scale), kind.inner(Scores(attn.scale, attn.softcap, kind=kind))
    q, k, v, offset = by_head(Vectors(*qkv) if entry is None else entry.vectors)
    return logits_of(q, k, offset, inner.scale, inner.softcap), v, inner


def _balanced(balancing: Balancing, s: Tensor, queries: Tensor, counts: Tensor) -> Weights:
    """`a_j exp(s_ij + f_i + g_j)` at queries of their own, `g` that of the points."""
    balance, log_count = _balance(balancing, s, counts), counts.log()
    if queries is s:
        f, g = balance.f, balance.g
    else:  # every row is normalised last, or last but one, on its own
        g, rows = balance.g, balance.before if balancing.iterations is not None and balancing.iterations % 2 == 0 else balance.g
        f = -(queries + rows + log_count).logsumexp(-1, keepdim=True)
    return torch.where(balance.converged[:, None, None, None], (queries + f + g + log_count).exp(), 0.0)


def _balance(balancing: Balancing, s: Tensor, counts: Tensor) -> Balance:
    return balanced(balancing, s, torch.ones(s.shape, dtype=torch.bool, device=s.device), counts.log())


@dataclass(frozen=True, eq=False, repr=False)
class OnMeasure(Map):
    """An attention layer on the atoms of a measure."""

    layer: "Attention"

    @property
    def width(self) -> int:
        return self.layer.width

    @property
    def out_width(self) -> int:
        return self.layer.out_width

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    @property
    def device(self) -> torch.device:
        return self.layer.device

    def __repr__(self) -> str:
        return f"{self.layer!r} on a measure"


@final
@dataclass(frozen=True, eq=False, repr=False)
class CountedAttention(OnMeasure):
    """Of a kind whose kernel takes no masses."""

    mass: Float[Tensor, " atoms"]
    visible: Visible | None = None

    def moved(self, device, dtype):
        visible = None if self.visible is None else self.visible.to(device)
        return replace(self, layer=self.layer.to(device, dtype), mass=self.mass.to(device), visible=visible)

    def value(self, x):
        value = self.at_queries(x, x)
        balancing = self.layer.kind.traits.balancing
        if balancing is not None and balancing.iterations is None:
            s, _, _ = _logits(self.layer, self.layer.vectors(x))
            if not bool(_balance(balancing, s, self._mass(x)[:, None, None]).converged.all()):
                raise NoConvergenceError(unbalanced())
        return value

    def linearize(self, x):
        layer = self.to(x.device, x.dtype)
        value = layer.value(x)
        return value.detach(), AtomJacobian(layer, x.detach())

    def _mass(self, x: Points) -> Counts:
        return self.mass.to(x).expand(len(x), -1)

    def at_queries(self, y: Points, x: Points) -> Tensor:
        """Outputs at queries `y` while keys, values and what columns are divided by stay at `x`."""
        return counted(self.layer, x, self._mass(x), self.visible, None if y is x else y)


@final
class AtomJacobian(Operator):
    """The Jacobian of `CountedAttention`, by automatic differentiation."""

    def __init__(self, layer: CountedAttention, x: Points):
        self._layer, self._x = layer, x
        self._whole = AutodiffJacobian(layer.value, x, batched=True)
        self.batch, self.in_shape, self.out_shape = self._whole.batch, self._whole.in_shape, self._whole.out_shape
        self.dtype, self.device = self._whole.dtype, self._whole.device

    def jvp(self, v):
        return self._whole.jvp(v)

    def vjp(self, u):
        return self._whole.vjp(u)

    def select(self, items):
        return AtomJacobian(self._layer, self._x[items])

    def queries(self) -> AutodiffJacobian:
        """The derivative through the queries alone, block diagonal."""
        zero = 0.0  # hard attention does not move with its queries, and autodiff wants an output that hangs on them

        def alone(y: Tensor) -> Tensor:
            return self._layer.at_queries(y, self._x) + zero * y.sum((-2, -1), keepdim=True)

        return AutodiffJacobian(alone, self._x, batched=True, checked=False)
