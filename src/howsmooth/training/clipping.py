"""Weights scaled down in place until a layer's constant, or its largest logit, is at most a target."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Softmax
from howsmooth.maps import Attention, AttentionJacobian
from howsmooth.maps.base import Map, check_finite, check_tokens
from howsmooth.models import Model
from howsmooth.models.recorded import Recordings
from howsmooth.program.head_weights import ByHead, HeadParameters, head_weights
from howsmooth.program.segments import SegmentMap
from howsmooth.settings import choice, number
from howsmooth.solve import Options, solve
from howsmooth.training.paths import RowRun, chosen, recorded_paths
from howsmooth.training.probe import Inputs, Probe
from howsmooth.training.untouched import untouched, whole_model

Quantity = Literal["constant", "logit"]
_PARTS = ("qk", "vo", "qkvo")
_HALVINGS = 40
_NEAR = 0.01  # how far below the target a factor may leave a head, as a share
_LEAST = 2.0**-30  # factor at which scaling is given up: a constant that does not fall is not made of these weights
_TRIES = 4


@final
@dataclass(frozen=True)
class ClippedHead:
    """One head, before and after; `factor` is what its logits, or its values, were multiplied by."""

    layer: int
    head: int
    before: float
    after: float
    factor: float


@final
@dataclass(frozen=True, repr=False)
class Clipped:
    """What `clip_` did, head by head.

    >>> Clipped("logit", 2.0, (ClippedHead(layer=0, head=0, before=4.0, after=2.0, factor=0.5),))
    Clipped(1 of 1 heads, logit at most 2)
    """

    quantity: Quantity
    target: float
    rows: tuple[ClippedHead, ...]

    @property
    def changed(self) -> tuple[ClippedHead, ...]:
        return tuple(row for row in self.rows if row.factor < 1)

    def to_dict(self) -> dict[str, Any]:
        return {"quantity": self.quantity, "target": self.target, "rows": [asdict(row) for row in self.rows]}

    def __repr__(self) -> str:
        return f"Clipped({len(self.changed)} of {len(self.rows)} heads, {self.quantity} at most {self.target:g})"


@torch.no_grad()
def clip_(
    layer: Attention | nn.Module | Model,
    target: float,
    x: Tensor | Inputs,
    *,
    quantity: Quantity = "constant",
    parts: Literal["qk", "vo", "qkvo"] = "qk",
    layers: str | Sequence[int] = "all",
) -> Clipped:
    """Scale weights down in place, head by head, until each head's constant or largest logit at `x` is at most `target`.

    layer: an `Attention`, whose tensors are written to; or a model, whose parameters are, in the layers that are named.
    x: tokens (n, d) for an `Attention`; for a model a batch by the names of its `forward`.
    quantity: `constant`, of every head alone through its part of the output projection, or `logit`, the largest one seen.
    parts: `qk` scales logits by a factor shared between W_q and W_k (and their biases); `vo` what a head gives, by W_v and W_o;
    `qkvo` both by one factor. Scaling logits leaves a head the constant of uniform attention: a target below that needs `vo`.

    Heads at or below the target are not touched. Where heads share keys or values, these are scaled by what the head that
    needs it least allows, and the rest falls to queries or to W_o. Everything is measured again afterwards, in the weights' own
    precision; where that fails, the weights are put back and it is said.

    >>> import howsmooth as hs
    >>> attn = Attention(4 * torch.eye(2), torch.eye(2), torch.eye(2), scale=1.0)
    >>> hs.clip_(attn, 2.0, torch.eye(2), quantity="logit"), round(float(attn.w_q[0, 0] * attn.w_k[0, 0]), 4)
    (Clipped(1 of 1 heads, logit at most 2), 2.0)
    """
    target = number(target, "a target above 0", "it is a Lipschitz constant or a logit", above=0)
    quantity = choice(quantity, "a quantity", ("constant", "logit"))
    parts = choice(parts, "parts", _PARTS)
    if quantity == "logit" and parts == "vo":
        raise BadInputError("expected parts 'qk' to bound logits, got 'vo', which they do not depend on; leave it out")
    asked = _Asked(target, quantity, parts)
    if isinstance(layer, Attention):
        if not isinstance(x, Tensor):
            raise BadInputError(f"expected tokens (n, d) as a tensor, got {type(x).__name__}; pass what enters the layer")
        check_tokens(x)
        if x.ndim != 2:
            raise BadInputError(f"expected tokens (n, d) of one sequence, got shape {tuple(x.shape)}; pass one at a time")
        check_finite(x, "tokens")
        if not isinstance(layer.kind, Softmax):
            raise BadInputError(
                f"expected softmax attention to clip, got {layer.kind!r}; how its logits and values scale is not settled here"
            )
        return Clipped(quantity, target, tuple(_clip(_Own(layer, x), asked, 0)))
    if not isinstance(layer, nn.Module | Model):
        raise BadInputError(f"expected an Attention or a model, got {type(layer).__name__}; pass one of them")
    loaded = layer if isinstance(layer, Model) else Model.of(whole_model(layer), type(whole_model(layer)).__name__, None, None)
    with untouched(loaded.module):
        probe, recordings = Probe.of(loaded, x), Recordings()
        paths = recorded_paths(loaded, recordings, probe.row(0), "all", "attention")
        which = list(paths.ends) if layers == "all" else chosen(layers, len(paths.recording.layers.found))
        rows = [row for k in which for row in _clip(_OfModel(loaded, recordings, probe, k), asked, k)]
    return Clipped(quantity, target, tuple(rows))


@dataclass(frozen=True)
class _Asked:
    target: float
    quantity: Quantity
    parts: str


class _Clipping(Protocol):
    """A layer as something to clip. heads, groups: query heads, and those that share keys, and values."""

    heads: int
    key_groups: int
    value_groups: int

    def check(self, parts: str) -> None:
        """Refuse what scaling does not scale."""
        ...

    def measure(self, head: int, quantity: Quantity, logits: float = 1.0, values: float = 1.0) -> float:
        """The largest over the rows of a probe, the head's logits and what it gives multiplied by factors."""
        ...

    def factors(self, logits: Tensor, values: Tensor) -> "_Factors":
        """By which weights are multiplied."""
        ...

    def scale(self, factors: "_Factors") -> None:
        """Write into the weights."""
        ...

    def tensors(self) -> list[Tensor]:
        """Those that are written to."""
        ...


class _Own:
    """An `Attention` as something to clip."""

    def __init__(self, layer: Attention, x: Tensor):
        self.layer, self.x = layer, x
        self.heads, self.key_groups, self.value_groups = layer.heads, layer.kv_heads, layer.kv_heads
        used = [t for t in (layer.w_q, layer.w_k, layer.w_v, layer.w_o) if t is not None]
        if len({t.data_ptr() for t in used}) < len(used):
            raise BadInputError("expected weights that are tensors of their own, got one tensor twice; clone it")

    def check(self, parts: str) -> None:
        if "qk" in parts and (self.layer.q_norm is not None or self.layer.k_norm is not None):
            raise _normed()
        if self.layer.w_o is None and "vo" in parts and self.heads != self.value_groups:
            raise BadInputError("expected an output projection for heads that share values, got none; give w_o")

    def measure(self, head: int, quantity: Quantity, logits: float = 1.0, values: float = 1.0) -> float:
        one, x = self.layer.to(torch.float64).head(head), self.x.double()
        b_q, b_v = (None if b is None else c * b for b, c in ((one.b_q, logits), (one.b_v, values)))
        scaled = replace(one, w_q=logits * one.w_q, b_q=b_q, w_v=values * one.w_v, b_v=b_v)
        if quantity == "constant":
            return _constant(scaled, x)
        operator = scaled.linearize(x[None])[1]
        assert isinstance(operator, AttentionJacobian)
        return operator.kernel.logit_range()[1]

    def factors(self, logits: Tensor, values: Tensor) -> "_Factors":
        shared, projected = self.layer.w_k is not None, self.layer.w_o is not None  # else the tokens themselves are keys
        return _Factors.of(logits, values, self.key_groups if shared else None, self.value_groups, projected)

    def scale(self, factors: "_Factors") -> None:
        a = self.layer
        for t, by in ((a.w_q, factors.q), (a.b_q, factors.q), (a.w_k, factors.k), (a.b_k, factors.k), (a.w_v, factors.v)):
            if t is not None:
                _write(t, 0, by.repeat_interleave(len(t) // len(by)))
        if a.b_v is not None:
            _write(a.b_v, 0, factors.v.repeat_interleave(len(a.b_v) // len(factors.v)))
        if a.w_o is not None:
            _write(a.w_o, 1, factors.o.repeat_interleave(a.w_o.shape[1] // len(factors.o)))

    def tensors(self) -> list[Tensor]:
        a = self.layer
        return [t for t in (a.w_q, a.w_k, a.w_v, a.w_o, a.b_q, a.b_k, a.b_v) if t is not None]


class _OfModel:
    """A layer of a model as something to clip: the entries of its parameters that make each head, read off its recorded run."""

    def __init__(self, model: Model, recordings: Recordings, probe: Probe, index: int):
        self._model, self._recordings, self._probe, self._index = model, recordings, probe, index
        self._maps = self._read()
        first = self._maps[0]
        if not first.heads or not isinstance(self._call_kind(first), Softmax):
            raise BadInputError(
                f"expected softmax attention to clip, got {first.place}, whose heads cannot be told apart; "
                f"leave layer {index} out"
            )
        self.parts: HeadParameters = head_weights(first.run.program, first.ends, first.run.at(torch.float64).values)
        self.heads = first.heads
        self.key_groups, self.value_groups = (len(by or ()) or self.heads for by in (self.parts.keys, self.parts.values))

    def _read(self) -> list[SegmentMap]:
        """The layer's map at every row, at the weights of the moment."""
        rows = RowRun.every(self._model, self._recordings, self._probe)
        return [row.segment(self._index, "attention", torch.float64) for row in rows]

    def _call_kind(self, map: SegmentMap) -> Any:
        return map.replayed(map.start).calls[0].scores.kind

    def check(self, parts: str) -> None:
        if "qk" in parts and self.parts.queries is None:
            raise _normed()
        if "vo" in parts and self.parts.outputs is None and (self.parts.values is None or self.heads != self.value_groups):
            raise BadInputError("expected an output projection that is a matrix of its own, got none; use parts='qk'")

    def measure(self, head: int, quantity: Quantity, logits: float = 1.0, values: float = 1.0) -> float:
        factors = self.factors(
            *(torch.ones(self.heads, dtype=torch.float64).index_fill(0, torch.tensor(head), c) for c in (logits, values))
        )
        return max(self._measured(map, head, quantity, factors) for map in self._maps)

    def _measured(self, map: SegmentMap, head: int, quantity: Quantity, factors: "_Factors") -> float:
        weights = {name: t.detach() for name, t in map.run.program.weights_now().items()}
        for name, axis, index, by in self._entries(factors):
            own = weights[name].double()
            weights[name] = own.index_copy(axis, index, by * own.index_select(axis, index))
        one = replace(map, head=head, run=replace(map.run, weights=weights))
        if quantity == "constant":
            return _constant(one, map.start)
        return one.replayed(map.start).kernels[0].logit_range()[1]

    def factors(self, logits: Tensor, values: Tensor) -> "_Factors":
        keys = None if self.parts.keys is None else self.key_groups
        shared = None if self.parts.values is None else self.value_groups
        return _Factors.of(logits, values, keys, shared, self.parts.outputs is not None)

    def _entries(self, factors: "_Factors") -> list[tuple[str, int, Tensor, float]]:
        """Rows of parameters, and what they are multiplied by."""
        sides: list[tuple[ByHead | None, Tensor]] = [
            (self.parts.queries, factors.q),
            (self.parts.keys, factors.k),
            (self.parts.values, factors.v),
            (self.parts.outputs, factors.o),
            (self.parts.facing, factors.logits),
        ]
        return [
            (rows.name, rows.axis, rows.index, c)
            for side, by in sides
            for own, c in zip(side or (), by.tolist(), strict=False)
            for rows in own
            if c != 1
        ]

    def scale(self, factors: "_Factors") -> None:
        for name, axis, index, by in self._entries(factors):
            _write(self._named[name], axis, by, index)
        self._maps = self._read()

    @functools.cached_property
    def _named(self) -> dict[str, Tensor]:
        return dict(self._model.module.named_parameters(remove_duplicate=False))

    def tensors(self) -> list[Tensor]:
        sides = (self.parts.queries, self.parts.keys, self.parts.values, self.parts.outputs, self.parts.facing)
        return [self._named[name] for name in {rows.name for side in sides for own in side or () for rows in own}]


def _normed() -> BadInputError:
    return BadInputError(
        "expected queries and keys without norms, which undo any factor, got some, or weights that several heads share; bound "
        "the norms' weights, or pass parts='vo'"
    )


@dataclass(frozen=True)
class _Factors:
    """By which weights are multiplied: q, o and what logits are by query head, k and v by key/value head."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, values: Tensor, keys: int | None, shared: int | None, projected: bool) -> "_Factors":
        """From factors of every head's logits and of what it gives.

        keys, shared: how many heads of keys and of values have weights, nothing where these have none; they take the square
        root of the largest factor of their group, so no head loses more than it must.  projected: whether outputs have weights.
        """

        def split(by: Tensor, groups: int | None) -> tuple[Tensor, Tensor]:
            if groups is None:
                return by, torch.ones_like(by)
            both = by.reshape(groups, -1).amax(1).sqrt()
            return by / both.repeat_interleave(len(by) // groups), both

        (q, k), (o, v) = split(logits, keys), split(values, shared)
        if not projected:
            o, v = torch.ones_like(values), values
        return cls(q, k, v, o, logits)


@torch.no_grad()
def _write(t: Tensor, axis: int, by: Tensor | float, rows: Tensor | None = None) -> None:
    own = t if rows is None else t.index_select(axis, rows.to(t.device))
    by = (
        by.to(t.device, torch.float64).reshape([-1 if i == axis else 1 for i in range(t.ndim)])
        if isinstance(by, Tensor)
        else by
    )
    new = (own.double() * by).to(t.dtype)
    try:
        t.copy_(new) if rows is None else t.index_copy_(axis, rows.to(t.device), new)
    except RuntimeError as error:
        raise BadInputError(f"expected weights that can be written to, got a tensor that cannot ({error}); clone it") from None


def _clip(layer: _Clipping, asked: _Asked, index: int) -> list[ClippedHead]:
    """Scale, measure, and scale again where rounding of the weights took something back."""
    layer.check(asked.parts)
    heads = range(layer.heads)
    before = after = [layer.measure(h, asked.quantity) for h in heads]
    total, kept = torch.ones(layer.heads, dtype=torch.float64), [t.detach().clone() for t in layer.tensors()]
    aim = asked.target
    try:
        for _ in range(_TRIES):
            over = [h for h in heads if not after[h] <= asked.target]
            if not over:
                break
            by = torch.ones(layer.heads, dtype=torch.float64)
            for h in over:
                by[h] = _factor(layer, asked, h, aim)
            one = torch.ones_like(by)
            layer.scale(layer.factors(by if "qk" in asked.parts else one, by if "vo" in asked.parts else one))
            total, after = total * by, [layer.measure(h, asked.quantity) for h in heads]
            aim *= 0.995  # room for weights of few digits
        good = all(after[h] <= asked.target for h in heads)
        if not good or not all(math.isclose(after[h], before[h], rel_tol=0.02) for h in heads if total[h] == 1):
            raise BadInputError(
                f"expected heads of layer {index} that follow their weights' scale, got {asked.quantity} "
                f"{max(after):.4g} after scaling to {asked.target:g}; nothing was changed, scale by hand"
            )
    except BaseException:
        for t, old in zip(layer.tensors(), kept, strict=True):
            t.copy_(old)
        raise
    return [ClippedHead(index, h, before[h], after[h], float(total[h])) for h in heads]


def _constant(map: Map, x: Tensor) -> float:
    return solve(map, x, Options(tol=1e-4)).estimate.value


def _factor(layer: _Clipping, asked: _Asked, head: int, aim: float) -> float:
    """The factor, found by bisection, that brings a head to at most `aim` and not more than 1 % below it."""

    def at(c: float) -> float:
        return layer.measure(head, asked.quantity, c if "qk" in asked.parts else 1.0, c if "vo" in asked.parts else 1.0)

    guess = aim / at(1.0) * (1 - 1e-6)
    if aim * (1 - _NEAR) <= at(guess) <= aim:  # logits without a cap or bias, values: proportional
        return guess
    low = _falls_to(at, aim, guess)
    high = 1.0
    if low is None:
        floor = at(_LEAST)
        raise BadInputError(
            f"expected a target that scaling {asked.parts} can reach, got {asked.target:g} for head {head}, whose "
            f"{asked.quantity} stays at {floor:.4g}; pass parts='qkvo' or a larger target"
        )
    for _ in range(_HALVINGS):
        if at(low) >= aim * (1 - _NEAR):
            break
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle) <= aim else (low, middle)
    return low


def _falls_to(at: Callable[[float], float], aim: float, start: float) -> float | None:
    """A factor at which a quantity is at most `aim`; nothing where none is."""
    c = start
    while c > _LEAST:
        if at(c) <= aim:
            return c
        c /= 4
    return None
