"""Weights scaled down in place until a layer's constant, or its largest logit, is at most a target."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Softmax
from howsmooth.maps import Attention, AttentionJacobian
from howsmooth.maps.base import check_finite, check_tokens
from howsmooth.models import Capture, Model
from howsmooth.models.reading import Stage, head_entries, written_along
from howsmooth.settings import choice, number
from howsmooth.solve import Options, solve
from howsmooth.training.paths import chosen
from howsmooth.training.probe import Inputs, captured, rows_of
from howsmooth.training.untouched import untouched as aside, whole_model as bare

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
        return Clipped(quantity, target, tuple(_clip(_Own(layer, x, 0), asked)))
    if not isinstance(layer, nn.Module | Model):
        raise BadInputError(f"expected an Attention or a model, got {type(layer).__name__}; pass one of them")
    loaded = layer if isinstance(layer, Model) else Model.of(bare(layer), type(bare(layer)).__name__, None, None)
    with aside(loaded.module):
        first = _captures(loaded, x)
        which = chosen(layers, first[0].num_layers)
        rows = [row for k in which for row in _clip(_OfModel(loaded, x, k), asked)]
    return Clipped(quantity, target, tuple(rows))


def _captures(model: Model, probe: Inputs) -> list[Capture]:
    return [captured(model, row) for row in rows_of(probe)]


@dataclass(frozen=True)
class _Asked:
    target: float
    quantity: Quantity
    parts: str


class _Own:
    """An `Attention` as something to clip."""

    def __init__(self, layer: Attention, x: Tensor, index: int):
        self.layer, self.x, self.index = layer, x, index
        used = [t for t in (layer.w_q, layer.w_k, layer.w_v, layer.w_o) if t is not None]
        if len({t.data_ptr() for t in used}) < len(used):
            raise BadInputError("expected weights that are tensors of their own, got one tensor twice; clone it")

    def forms(self) -> list[tuple[Attention, Tensor]]:
        return [(self.layer.to(torch.float64), self.x.double())]

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
    """A layer of a model as something to clip: its heads' weights found by watching which entries a head is made of."""

    def __init__(self, model: Model, probe: Inputs, index: int):
        self.model, self.probe, self.index = model, probe, index
        captured = _captures(model, probe)[0]
        self._read(captured)

    def forms(self) -> list[tuple[Attention, Tensor]]:
        return [(c.attention(self.index), c.tokens(self.index).double()) for c in _captures(self.model, self.probe)]

    def _read(self, captured: Capture) -> None:
        captured.attention(self.index)  # refuses what is no plain attention
        cut = captured.map(self.index).to(torch.float64)
        stage = Stage(cut)
        module, self.sides = cut.layer.module, list[list[list[tuple[Tensor, int, Tensor]]]]()
        if stage.parts:
            for heads in head_entries(stage):
                self.sides.append([_places(stage, entries) for entries in heads])
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            width = module.embed_dim // module.num_heads
            for role in range(3):
                rows = [torch.arange(width) + role * module.embed_dim + h * width for h in range(module.num_heads)]
                own = [t for t in (module.in_proj_weight, module.in_proj_bias) if t is not None]
                self.sides.append([[(t, 0, r) for t in own] for r in rows])
        else:
            raise _untouchable(module)
        self.projection = cut.layer.projection
        width = stage.call.v.shape[-1] * stage.call.q.shape[1]
        axis = None if self.projection is None else written_along(self.projection, stage, width)
        self.columns: list[tuple[Tensor, int, Tensor]] = []
        if self.projection is not None and axis is not None:
            weight: Any = self.projection.weight
            self.columns = [(weight, 1 - axis, own) for own in torch.arange(width).chunk(stage.call.q.shape[1])]

    def scale(self, factors: "_Factors") -> None:
        for heads, by in zip(self.sides, (factors.q, factors.k, factors.v), strict=True):
            for places, factor in zip(heads, by.tolist(), strict=True):
                for t, axis, rows in places:
                    _write(t, axis, factor, rows)
        if bool((factors.o != 1).any()):
            if not self.columns:
                raise BadInputError("expected an output projection that is a matrix of its own, got none; use parts='qk'")
            for (t, axis, rows), factor in zip(self.columns, factors.o.tolist(), strict=True):
                _write(t, axis, factor, rows)

    def tensors(self) -> list[Tensor]:
        own = {id(t): t for heads in self.sides for places in heads for t, _, _ in places}
        own |= {id(t): t for t, _, _ in self.columns}
        return list(own.values())


def _places(stage: Stage, entries: Tensor) -> list[tuple[Tensor, int, Tensor]]:
    """The rows of parameters that give some entries of what the parts give: tensor, axis, rows."""
    places, start = list[tuple[Tensor, int, Tensor]](), 0
    for part, width in zip(stage.parts, stage.widths, strict=True):
        rows = entries[(entries >= start) & (entries < start + width)].cpu() - start
        start += width
        if not len(rows):
            continue
        axis = written_along(part, stage, stage.x.shape[1])
        if axis is None:
            raise _untouchable(part)
        weight: Any = part.weight
        places.append((weight, axis, rows))
        if isinstance(bias := getattr(part, "bias", None), Tensor):
            places.append((bias, 0, rows))
    return places


def _untouchable(module: nn.Module) -> BadInputError:
    return BadInputError(
        f"expected queries and keys from matrices with weights of their own, got {type(module).__name__}; merge adapters, or "
        "scale by hand"
    )


@dataclass(frozen=True)
class _Factors:
    """By which weights are multiplied: q and o by query head, k and v by key/value head."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor

    @classmethod
    def of(cls, logits: Tensor, values: Tensor, groups: int) -> "_Factors":
        """From factors of every head's logits and of what it gives; groups: key/value heads.

        Shared keys take the square root of the largest factor of their group, so no head loses more than it must.
        """

        def split(by: Tensor) -> tuple[Tensor, Tensor]:
            shared = by.reshape(groups, -1).amax(1).sqrt()
            return by / shared.repeat_interleave(len(by) // groups), shared

        (q, k), (o, v) = split(logits), split(values)
        return cls(q, k, v, o)


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


def _clip(layer: "_Own | _OfModel", asked: _Asked) -> list[ClippedHead]:
    """Scale, measure, and scale again where rounding of the weights took something back."""
    forms = layer.forms()
    first = forms[0][0]
    if "qk" in asked.parts and (first.q_norm is not None or first.k_norm is not None):
        raise BadInputError(
            "expected queries and keys without norms, which undo any factor, got some; bound the norms' weights, or "
            "pass parts='vo'"
        )
    if isinstance(layer, _Own) and first.w_o is None and "vo" in asked.parts and first.heads != first.kv_heads:
        raise BadInputError("expected an output projection for heads that share values, got none; give w_o")
    before = after = _measured(forms, asked, range(first.heads))
    total, kept = torch.ones(first.heads, dtype=torch.float64), [t.detach().clone() for t in layer.tensors()]
    aim = asked.target
    try:
        for _ in range(_TRIES):
            over = [h for h in range(first.heads) if not after[h] <= asked.target]
            if not over:
                break
            by = torch.ones(first.heads, dtype=torch.float64)
            for h in over:
                by[h] = _factor(forms, asked, h, aim)
            one = torch.ones_like(by)
            layer.scale(_scaled(first, by if "qk" in asked.parts else one, by if "vo" in asked.parts else one))
            total, forms = total * by, layer.forms()
            after = _measured(forms, asked, range(first.heads))
            aim *= 0.995  # room for weights of few digits
        untouched = [h for h in range(first.heads) if total[h] == 1]
        good = all(after[h] <= asked.target for h in range(first.heads))
        if not good or not all(math.isclose(after[h], before[h], rel_tol=0.02) for h in untouched):
            raise BadInputError(
                f"expected heads of layer {layer.index} that follow their weights' scale, got {asked.quantity} "
                f"{max(after):.4g} after scaling to {asked.target:g}; nothing was changed, scale by hand"
            )
    except BaseException:
        with torch.no_grad():
            for t, old in zip(layer.tensors(), kept, strict=True):
                t.copy_(old)
        raise
    return [ClippedHead(layer.index, h, before[h], after[h], float(total[h])) for h in range(first.heads)]


def _scaled(attn: Attention, logits: Tensor, values: Tensor) -> _Factors:
    factors = _Factors.of(logits, values, attn.kv_heads)
    if attn.w_k is None:  # the tokens themselves are keys
        factors = replace(factors, q=logits, k=torch.ones_like(factors.k))
    if attn.w_o is None:
        factors = replace(factors, v=values, o=torch.ones_like(values))
    return factors


def _measured(forms: list[tuple[Attention, Tensor]], asked: _Asked, heads: Iterable[int]) -> list[float]:
    """The largest over the rows of a probe, by head."""
    return [max(_measure(attn.head(h), x, asked.quantity) for attn, x in forms) for h in heads]


def _measure(head: Attention, x: Tensor, quantity: Quantity) -> float:
    if quantity == "constant":
        return solve(head, x, Options(tol=1e-4)).estimate.value
    operator = head.linearize(x[None])[1]
    assert isinstance(operator, AttentionJacobian)
    return operator.kernel.logit_range()[1]


def _factor(forms: list[tuple[Attention, Tensor]], asked: _Asked, head: int, aim: float) -> float:
    """The factor, found by bisection, that brings a head to at most `aim` and not more than 1 % below it."""
    heads = [(attn.head(head), x) for attn, x in forms]

    def at(c: float) -> float:
        logits, values = c if "qk" in asked.parts else 1.0, c if "vo" in asked.parts else 1.0
        return max(_measure(_times(attn, logits, values), x, asked.quantity) for attn, x in heads)

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


def _times(head: Attention, logits: float, values: float) -> Attention:
    def by(t: Tensor | None, c: float) -> Tensor | None:
        return None if t is None else c * t

    return replace(head, w_q=logits * head.w_q, b_q=by(head.b_q, logits), w_v=values * head.w_v, b_v=by(head.b_v, values))
