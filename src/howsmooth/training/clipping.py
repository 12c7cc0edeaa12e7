"""Weights scaled down in place until a layer's constant, or its largest logit, is at most a target."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from numbers import Number
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, AttentionJacobian
from howsmooth.maps.base import Map, check_finite, check_tokens
from howsmooth.models import Model
from howsmooth.models.recorded import Recordings
from howsmooth.program.closed import ByHead, HeadParameters, Rows, head_weights
from howsmooth.settings import LayerChoice, choice, number
from howsmooth.solve import Options, solve
from howsmooth.training.paths import chosen, paths_of
from howsmooth.training.probe import Inputs, Probe, model_that_trains, untouched

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
    x: Tensor | Inputs,
    target: float,
    *,
    quantity: Quantity = "constant",
    parts: Literal["qk", "vo", "qkvo"] = "qk",
    layers: LayerChoice = "all",
) -> Clipped:
    """Scale weights down in place, head by head, until each head's constant or largest logit at `x` is at most `target`.

    Heads at or below the target are not touched. Where heads share keys or values, these are scaled by what the head that
    needs it least allows, and the rest falls to queries or to W_o. Everything is measured again afterwards, in the weights' own
    precision; where that fails, the weights are put back and it is said.

    Args:
        layer: An `Attention`, whose tensors are written to; or a model, whose parameters are, in the layers that are named.
        x: Tokens (n, d) for an `Attention`; for a model a batch by the names of its `forward`.
        target: Above 0.
        quantity: `constant`, of every head alone through its part of the output projection, or `logit`, the largest one
            seen.
        parts: `qk` scales logits by a factor shared between W_q and W_k (and their biases); `vo` what a head gives, by W_v
            and W_o; `qkvo` both by one factor. Scaling logits leaves a head the constant of uniform attention: a target
            below that needs `vo`.
        layers: Of a model, `"all"` or a list of numbers.

    Returns:
        Every head that was clipped, with its quantity before and after.

    >>> import howsmooth as hs
    >>> attn = Attention(4 * torch.eye(2), torch.eye(2), torch.eye(2), scale=1.0)
    >>> hs.clip_(attn, torch.eye(2), 2.0, quantity="logit"), round(float(attn.w_q[0, 0] * attn.w_k[0, 0]), 4)
    (Clipped(1 of 1 heads, logit at most 2), 2.0)
    """
    if isinstance(x, Number) or (isinstance(x, Tensor) and x.ndim == 0):
        raise BadInputError("expected tokens or a batch in second place, got a number; call clip_(layer, x, target)")
    target = number(target, "a target above 0", "it is a Lipschitz constant or a logit", above=0)
    quantity = choice(quantity, "a quantity", ("constant", "logit"))
    parts = choice(parts, "parts", _PARTS)
    if quantity == "logit" and parts == "vo":
        raise BadInputError("expected parts 'qk' to bound logits, got 'vo', which they do not depend on; leave it out")
    if isinstance(layer, Attention):
        if not isinstance(x, Tensor):
            raise BadInputError(f"expected tokens (n, d) as a tensor, got {type(x).__name__}; pass what enters the layer")
        check_tokens(x)
        if x.ndim != 2:
            raise BadInputError(f"expected tokens (n, d) of one sequence, got shape {tuple(x.shape)}; pass one at a time")
        check_finite(x, "tokens")
        if not layer.kind.traits.softmax:
            raise BadInputError(
                f"expected softmax attention to clip, got {layer.kind!r}; how its logits and values scale is not known here"
            )
        return Clipped(quantity, target, tuple(_clip(_of_attention(layer, x, quantity, parts), quantity, target, 0)))
    if not isinstance(layer, nn.Module | Model):
        raise BadInputError(f"expected an Attention or a model, got {type(layer).__name__}; pass one of them")
    loaded = model_that_trains(layer)
    probe, recordings = Probe.of(loaded, x), Recordings()
    with untouched(loaded.module, at=(probe.args, probe.kwargs)), torch.no_grad():
        paths = paths_of(loaded, recordings, probe.row(0), "all", "attention")
        which = list(paths.ends) if layers == "all" else chosen(layers, len(paths.recording.layers.found))
        found = ((k, _of_model(loaded, recordings, probe, k, quantity, parts)) for k in which)
        rows = [row for k, one in found for row in _clip(one, quantity, target, k)]
    return Clipped(quantity, target, tuple(rows))


Weights = Mapping[str, Tensor]
Measure = Callable[[Weights, int], float]  # of a head, with other numbers for some weights


@final
class _Clippable:
    """A layer as something to clip: the entries of its weights that make each head.

    named: its weights.  at: what measures it at the weights of the moment.  parts: what is scaled.  unprojected: what is said
    where outputs have no weights.
    """

    def __init__(
        self, heads: int, by_head: HeadParameters, named: Weights, at: Callable[[], Measure], parts: str, unprojected: str
    ):
        self.heads, self.parts, self._by_head, self._named, self._at = heads, parts, by_head, named, at
        self._measure = at()
        if "qk" in parts and by_head.queries is None:
            raise BadInputError(
                "expected queries and keys without norms, which undo any factor, got some, or weights that several heads "
                "share; bound the norms' weights, or pass parts='vo'"
            )
        if "vo" in parts and by_head.outputs is None and len(by_head.values or ()) != heads:
            raise BadInputError(unprojected)

    def measure(self, head: int, factor: float = 1.0) -> float:
        """The largest over the rows of a probe, where what is scaled of the head is multiplied by a factor."""
        by, scaled = torch.ones(self.heads, dtype=torch.float64), dict[str, Tensor]()
        by[head] = factor
        for rows, c in self._entries(by):
            own = scaled[rows.name] if rows.name in scaled else self._named[rows.name].double()
            index = rows.index.to(own.device)
            scaled[rows.name] = own.index_copy(rows.axis, index, c * own.index_select(rows.axis, index))
        return self._measure(scaled, head)

    def scale(self, by: Tensor) -> None:
        """Multiply what is scaled of every head by its factor, in the weights themselves."""
        for rows, c in self._entries(by):
            t, index = self._named[rows.name], rows.index.to(self._named[rows.name].device)
            try:
                t.index_copy_(rows.axis, index, (t.index_select(rows.axis, index).double() * c).to(t.dtype))
            except RuntimeError as error:
                raise BadInputError(
                    f"expected weights that can be written to, got a tensor that cannot ({error}); clone it"
                ) from None
        self._measure = self._at()

    def tensors(self) -> list[Tensor]:
        """The weights that are written to."""
        return [self._named[name] for name in {rows.name for side in self._by_head for own in side or () for rows in own}]

    def _entries(self, by: Tensor) -> list[tuple[Rows, float]]:
        """Rows of weights, and what they are multiplied by.

        Keys and values take the square root of the largest factor of the heads that share them, so no head loses more than it
        must; queries and outputs the rest, where these and those have weights.
        """

        def split(by: Tensor, shared: ByHead | None) -> tuple[Tensor, Tensor]:
            if shared is None:
                return by, torch.ones_like(by)
            both = by.reshape(len(shared), -1).amax(1).sqrt()
            return by / both.repeat_interleave(len(by) // len(shared)), both

        logits, values = (by if side in self.parts else torch.ones_like(by) for side in ("qk", "vo"))
        (q, k), (o, v) = split(logits, self._by_head.keys), split(values, self._by_head.values)
        factors = q, k, values if self._by_head.outputs is None else v, o, logits
        sides = zip(self._by_head, factors, strict=True)
        pairs = [pair for side, by in sides for pair in zip(side or (), by.tolist(), strict=False)]
        return [(rows, c) for own, c in pairs for rows in own if c != 1]


def _of_attention(layer: Attention, x: Tensor, quantity: Quantity, parts: str) -> _Clippable:
    """An `Attention` as something to clip."""
    names = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v")
    named = {name: t for name in names if (t := getattr(layer, name)) is not None}
    used = [named[name] for name in names[:4] if name in named]
    if len({t.data_ptr() for t in used}) < len(used):
        raise BadInputError("expected weights that are tensors of their own, got one tensor twice; clone it")

    def by_head(heads: int, axis: int, *names: str) -> ByHead | None:
        there = {name: torch.arange(named[name].shape[axis]).chunk(heads) for name in names if name in named}
        return tuple(tuple(Rows(name, axis, own[h]) for name, own in there.items()) for h in range(heads)) if there else None

    normed = layer.q_norm is not None or layer.k_norm is not None
    rows = HeadParameters(
        queries=None if normed else by_head(layer.heads, 0, "w_q", "b_q"),
        keys=by_head(layer.kv_heads, 0, "w_k", "b_k"),  # else the tokens themselves are keys
        values=by_head(layer.kv_heads, 0, "w_v", "b_v"),
        outputs=by_head(layer.heads, 1, "w_o"),
    )

    def measure(weights: Weights, head: int) -> float:
        one = replace(layer.to(torch.float64), **weights).head(head)
        if quantity == "constant":
            return _constant(one, x.double())
        operator = one.linearize(x.double()[None])[1]
        assert isinstance(operator, AttentionJacobian)
        return operator.kernel.logit_range()[1]

    unprojected = "expected an output projection for heads that share values, got none; give w_o"
    return _Clippable(layer.heads, rows, named, lambda: measure, parts, unprojected)


def _of_model(model: Model, recordings: Recordings, probe: Probe, index: int, quantity: Quantity, parts: str) -> _Clippable:
    """A layer of a model as something to clip: the entries of its parameters are read off its recorded run."""
    first = probe.row(0).inputs(model, recordings, torch.float64)[0]
    map, kind = first.segment(index), first.kind(index)
    if not map.ends.heads or kind is None or not kind.traits.softmax:
        raise BadInputError(
            f"expected softmax attention to clip, got {map.place}, whose heads cannot be told apart; leave layer {index} out"
        )

    def at() -> Measure:
        maps = [row.segment(index) for row in probe.inputs(model, recordings, torch.float64)]

        def measure(weights: Weights, head: int) -> float:
            whole = {name: t.detach() for name, t in map.run.program.weights_now().items()} | dict(weights)
            alone = [(m.of(head=head, run=replace(m.run, weights=whole)), m.start) for m in maps]
            if quantity == "constant":
                return max(_constant(one, x) for one, x in alone)
            return max(one.replayed(x).kernels[0].logit_range()[1] for one, x in alone)

        return measure

    rows = head_weights(map.run.at(torch.float64), map.ends)
    named = dict(model.module.named_parameters(remove_duplicate=False))
    unprojected = "expected an output projection that is a matrix of its own, got none; use parts='qk'"
    return _Clippable(map.ends.heads, rows, named, at, parts, unprojected)


def _clip(layer: _Clippable, quantity: Quantity, target: float, index: int) -> list[ClippedHead]:
    """Scale, measure, and scale again where rounding of the weights took something back."""
    heads = range(layer.heads)
    before = after = [layer.measure(h) for h in heads]
    total, kept, aim = torch.ones(layer.heads, dtype=torch.float64), [t.detach().clone() for t in layer.tensors()], target
    try:
        for _ in range(_TRIES):
            if all(after[h] <= target for h in heads):
                break
            by = torch.ones_like(total)
            for h in heads:
                by[h] = 1.0 if after[h] <= target else _factor(layer, quantity, target, h, aim)
            layer.scale(by)
            total, after = total * by, [layer.measure(h) for h in heads]
            aim *= 0.995  # room for weights of few digits
        good = all(after[h] <= target for h in heads)
        if not good or not all(math.isclose(after[h], before[h], rel_tol=0.02) for h in heads if total[h] == 1):
            raise BadInputError(
                f"expected heads of layer {index} that follow their weights' scale, got {quantity} "
                f"{max(after):.4g} after scaling to {target:g}; nothing was changed, scale by hand"
            )
    except BaseException:
        for t, old in zip(layer.tensors(), kept, strict=True):
            t.copy_(old)
        raise
    return [ClippedHead(index, h, before[h], after[h], float(total[h])) for h in heads]


def _constant(map: Map, x: Tensor) -> float:
    return solve(map, x, Options(tol=1e-4)).estimate.value


def _factor(layer: _Clippable, quantity: Quantity, target: float, head: int, aim: float) -> float:
    """The factor, found by bisection, that brings a head to at most `aim` and not more than 1 % below it."""

    @functools.cache
    def at(c: float) -> float:
        return layer.measure(head, c)

    low, high = aim / at(1.0) * (1 - 1e-6), 1.0  # logits without a cap or bias, and values, are proportional
    while low > _LEAST and not at(low) <= aim:
        low /= 4
    if not low > _LEAST:
        raise BadInputError(
            f"expected a target that scaling {layer.parts} can reach, got {target:g} for head {head}, whose "
            f"{quantity} stays at {at(_LEAST):.4g}; pass parts='qkvo' or a larger target"
        )
    for _ in range(_HALVINGS):
        if at(low) >= aim * (1 - _NEAR):
            break
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle) <= aim else (low, middle)
    return low
