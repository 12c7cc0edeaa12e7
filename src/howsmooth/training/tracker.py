"""What a layer's constant does while a model trains: cheap to follow, certified now and then."""

import math
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.models import MapName, Model
from howsmooth.models.measurement import Measurement
from howsmooth.settings import flag, number, whole
from howsmooth.spectral.ritz import orthonormal
from howsmooth.training.aside import aside, bare, first_bad
from howsmooth.training.looks import squares
from howsmooth.training.passes import Passes
from howsmooth.training.probe import Inputs, captured
from howsmooth.training.turns import How, Seen

PREFIX = "smoothness"
_START = 8  # passes from a random start, where no certified solve gives the first directions
_MOST = 6  # passes in one update; one is enough while weights change slowly
_SETTLED = 0.06  # gain of a step at which a layer is left until the next update: docs/explanation/penalty.md, tracking
_WIDTH = 4  # directions that are carried for a layer: when another one becomes the top, it is there


class TrackingWarning(UserWarning):
    """Something that whoever trains should know; training goes on."""


@final
@dataclass(frozen=True)
class Checked:
    """A layer where tracking was compared with a certified solve. `drift` is `tracked/value − 1`."""

    layer: int
    head: int | None
    tracked: float
    value: float
    upper: float

    @property
    def drift(self) -> float:
        return self.tracked / self.value - 1 if self.value > 0 else 0.0


@final
@dataclass(frozen=True, repr=False)
class Check:
    """Every tracked number beside its certified one.

    >>> Check(0, (Checked(layer=0, head=None, tracked=0.99, value=1.0, upper=1.1),))
    Check(step 0, 1 numbers, furthest off -1.00% in layer 0)
    """

    step: int
    rows: tuple[Checked, ...]

    @property
    def worst(self) -> Checked:
        """Where tracking is furthest off."""
        return max(self.rows, key=lambda row: abs(row.drift))

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "rows": [asdict(row) | {"drift": row.drift} for row in self.rows]}

    def __repr__(self) -> str:
        furthest = f"{self.worst.drift:+.2%} in layer {self.worst.layer}"
        return f"Check(step {self.step}, {len(self.rows)} numbers, furthest off {furthest})"


@final
@dataclass(frozen=True, eq=False)
class Tracker:
    """The constants of a model's layers at a fixed probe, followed as its weights change.

    model: the one that trains, compiled or wrapped as it may be, or a `Model`.  probe: a batch of few rows by the names of the
    model's `forward`; the constant of a layer is the largest over its rows.  layers: `"all"` or a list.
    map: `attention`, `heads`, `normed` or `block`.  heads: also the constant of every head alone, at the price of a row for
    each.  check_every: certified solves after so many updates, and before the first; 0 for never.
    tol, certify: of those, as in `howsmooth.lipschitz`.  average: over the processes of a distributed run, each with a probe of
    its own; by default the first process measures and the others get nothing.

    `update()` gives a flat dictionary to log. Its constants are lower ends: `|J w|` for a unit `w`, from four directions that
    are carried over from update to update, with one block product with `Jᵀ` and one with `J` each time, and more where weights
    have moved far. The run is left as it was: mode, hooks, random numbers, buffers, gradients.

    >>> import howsmooth as hs
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> tracker = hs.Tracker(torch.nn.TransformerEncoder(layer, 2), probe=torch.randn(1, 5, 8))
    >>> sorted(tracker.update())[:2]
    ['smoothness/drift/layer_00', 'smoothness/drift/layer_01']
    """

    model: nn.Module | Model
    probe: Inputs
    layers: str | Sequence[int] = "all"
    map: MapName = "attention"
    heads: bool = False
    check_every: int = 50
    tol: float = 1e-3
    certify: float | None = None
    average: bool = False

    def __post_init__(self):
        expected = "check_every as a whole number of updates, 0 for never"
        known = {
            "heads": flag(self.heads, "heads"),
            "average": flag(self.average, "average"),
            "check_every": whole(self.check_every, expected, "the default is 50"),
            "tol": number(self.tol, "0 < tol < 1", "the default is 1e-3", above=0, below=1),
        }
        for name, value in known.items():
            object.__setattr__(self, name, value)
        if isinstance(self.model, Model):
            loaded = self.model
        elif isinstance(self.model, nn.Module):
            module = bare(self.model)
            loaded = Model.of(module, type(module).__name__, None, None)
        else:
            raise BadInputError(f"expected a torch module that trains, got {type(self.model).__name__}; pass the model")
        with aside(loaded.module):
            passes = Passes(loaded, self.probe, self.layers, self.map)
        if self.heads and not (passes.course.kernels and passes.probe.together and all(passes.heads.values())):
            raise BadInputError(
                "expected a model whose heads can be told apart for heads=True, got one whose attention is its own code; "
                "leave heads out"
            )
        vars(self)["_state"] = _State(loaded, passes)

    @property
    def _now(self) -> "_State":
        return vars(self)["_state"]

    @property
    def names(self) -> dict[int, str]:
        """The tracked layers by number, as they are called in the model."""
        return {route.index: route.name for route in self._now.passes.course.routes}

    @property
    def broken(self) -> str | None:
        """Where and when something was first not finite, in a sentence; nothing while all is well."""
        return self._now.broken

    def key(self, layer: int, what: str | None = None, head: int | None = None) -> str:
        """The name a number is logged under.

        what: nothing for the constant, or `max_logit`, `entropy`, `sink`, `radius`, `head`, `upper`, `drift`.
        """
        keys, asked = self._now.keys, (layer, what, head)
        if asked not in keys:
            digits = max(2, len(str(self._now.passes.count - 1)))
            parts = (what, f"layer_{layer:0{digits}d}", None if head is None else f"head_{head:02d}")
            keys[asked] = "/".join([PREFIX, *filter(None, parts)])
        return keys[asked]

    def update(self, step: int | None = None) -> dict[str, float]:
        """The numbers at the weights of this moment, by the names they are logged under.

        For each layer: the constant, the largest logit of every head and of all, the mean entropy of attention in nats, the
        largest share of all attention that one token gets, the root mean square norm of the tokens that enter. After a check
        also the certified upper end and how far tracking was off. Where something is not finite: NaN, and a warning that says
        where.

        step: of the training, for what is said; counts updates by default.
        """
        state = self._now
        step = state.updates if step is None else step
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and not self.average and torch.distributed.get_rank() > 0:
            state.updates += 1
            return {}
        checks = self.check_every > 0 and state.updates % self.check_every == 0
        with aside(state.loaded.module):
            if checks and not state.directions:
                self._certified(step)
            elif not state.directions:
                for _ in range(_START):
                    self._follow()
            values = self._follow()
            bad = [k for k in state.passes.layers if not math.isfinite(values[self.key(k)])]
            if bad:
                self._say(step, bad[0])
            elif checks:
                check = self._certified(step)
                for row in check.rows if check else ():
                    for what, number_ in (("upper", row.upper), ("drift", row.drift)):
                        values[self.key(row.layer, what, row.head)] = number_
        state.updates += 1
        return self._averaged(values) if distributed and self.average else values

    def check(self, step: int | None = None) -> Check:
        """Certified solves of everything that is tracked, beside what tracking says now, which goes on from there."""
        state = self._now
        with aside(state.loaded.module):
            if state.directions:
                self._follow()
            checked = self._certified(state.updates if step is None else step, strict=True)
            assert checked is not None
            if not state.tracked:  # nothing was followed before
                self._follow()
                checked = Check(checked.step, tuple(_again(row, state.tracked) for row in checked.rows))
        return checked

    def _follow(self) -> dict[str, float]:
        """One step of power iteration in every layer, and more where the weights have moved far."""
        state, passes = self._now, self._now.passes
        given = {k: u for (k, h), u in state.directions.items() if h is None}
        found = list(passes.run(given, How(times=state.times, rounds=_MOST, settled=_SETTLED, looks=True)))
        rows = {k: there for k in passes.layers if len(there := [seen[k] for seen in found if k in seen]) == len(found)}
        values = {self.key(k): state.turn(k, rows[k]) if k in rows else math.nan for k in passes.layers}
        seen = {k: self._beside(rows[k]) for k in passes.layers if k in rows}
        numbers = iter(torch.cat([t for parts in seen.values() for t in parts]).tolist() if seen else [])  # all at once
        for k in passes.layers:
            values |= self._told(k, [list(islice(numbers, len(t))) for t in seen[k]]) if k in rows else self._missing(k)
        if self.heads:
            most = max(passes.heads.values())
            given = {k: v for (k, h), v in state.directions.items() if h is not None}
            for seen in passes.run(given, How(times=most, heads=True)):
                for k in passes.layers:
                    values |= self._by_head(k, seen.get(k), most)
        state.tracked = {(k, None): values[self.key(k)] for k in passes.layers}
        if self.heads:
            state.tracked |= {(k, h): values[self.key(k, "head", h)] for k in passes.layers for h in range(passes.heads[k])}
        return values

    def _missing(self, layer: int) -> dict[str, float]:
        """What is logged of a layer that could not be measured."""
        names = self._names(layer, self._now.passes.heads[layer] if self._now.passes.course.kernels else 0)
        return dict.fromkeys(names, math.nan)

    def _names(self, layer: int, heads: int) -> list[str]:
        """What is logged of a layer beside its constant. heads: how many, nothing where attention cannot be seen."""
        seen = [self.key(layer, what) for what in ("entropy", "sink", "max_logit")] if self._now.passes.course.kernels else []
        return [self.key(layer, "radius"), *seen, *(self.key(layer, "max_logit", h) for h in range(heads))]

    def _beside(self, there: list[Seen]) -> list[Tensor]:
        """What a layer's numbers beside its constant are made of: the mean square of its tokens, then its looks."""
        lengths = [squares(seen.x, real) for seen, real in zip(there, self._now.passes.probe.real, strict=True)]
        tokens = lengths[0] if len(lengths) == 1 else torch.cat(lengths)
        return [tokens.mean(0, keepdim=True), *(t for seen in there for t in seen.looks)]

    def _told(self, layer: int, parts: list[list[float]]) -> dict[str, float]:
        """Those numbers by the names they are logged under."""
        (square,), *looks = parts
        heads = self._now.passes.heads[layer]
        told = [math.sqrt(square)]
        alike = all(len(look) == 2 + heads for look in looks)
        if looks:
            told += [statistics.fmean(both) for both in zip(*(look[:2] for look in looks), strict=True)]
            told += [_largest(t for look in looks for t in look[2:])]
            told += [_largest(own) for own in zip(*(look[2:] for look in looks), strict=True)] if alike else []
        return dict(zip(self._names(layer, heads if alike and looks else 0)[: len(told)], told, strict=True))

    def _by_head(self, layer: int, seen: Seen | None, most: int) -> dict[str, float]:
        state, passes = self._now, self._now.passes
        keys = [self.key(layer, "head", h) for h in range(passes.heads[layer])]
        if seen is None:
            return dict.fromkeys(keys, math.nan)
        state.point(layer, seen)
        values = seen.value.reshape(len(passes.probe.rows), most).amax(0)
        return dict(zip(keys, values.tolist(), strict=False))

    def _certified(self, step: int, strict: bool = False) -> Check | None:
        """Certified solves, whose directions tracking takes over. strict: what refuses them is raised, and said otherwise."""
        state, passes = self._now, self._now.passes
        rows: list[Checked] = []
        try:
            by_row = [
                captured(state.loaded, row).measure(
                    passes.layers, self.map, heads=self.heads, tol=self.tol, certify=self.certify, closed=False
                )
                for row in passes.probe.rows
            ]
        except HowSmoothError as error:
            if strict:
                raise
            warnings.warn(f"step {step}: no certified constants ({error})", TrackingWarning, stacklevel=4)
            return None
        tops: dict[int, Tensor] = {}
        by_head: dict[int, Tensor] = {}
        most = max(passes.heads.values())
        for i, k in enumerate(passes.layers):
            own = [measured[i] for measured in by_row]
            tops[k] = torch.stack([_spread(m, m.direction, passes, r) for r, m in enumerate(own)])
            rows.append(_compared(k, None, state.tracked, [m.estimate for m in own]))
            if self.heads:
                whole_ = [[_spread(m, e.direction, passes, r) for e in m.heads] for r, m in enumerate(own)]
                filled = [each + [torch.zeros_like(each[0])] * (most - len(each)) for each in whole_]
                by_head[k] = torch.stack([v for each in filled for v in each])
                rows += [_compared(k, h, state.tracked, [m.heads[h] for m in own]) for h in range(passes.heads[k])]
        state.lead(list(passes.run({}, starts=tops)))
        for seen in passes.run({}, How(times=most, heads=True), starts=by_head) if self.heads else ():
            for k, there in seen.items():
                state.point(k, there)
        return Check(step, tuple(rows))

    def _averaged(self, values: dict[str, float]) -> dict[str, float]:
        state = self._now
        here = state.passes.device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=here)
        torch.distributed.all_reduce(total)
        return dict(zip(values, (total / torch.distributed.get_world_size()).tolist(), strict=True))

    def _say(self, step: int, layer: int) -> None:
        """Say, once, where the first thing that is not finite is."""
        state = self._now
        if state.broken is not None:
            return
        blocks = {route.index: route for route in state.passes.course.routes}
        where = next((k for k, r in blocks.items() if first_bad(dict(r.block.named_parameters())) is not None), None)
        bad = first_bad(dict(state.loaded.module.named_parameters()))
        if where is not None:
            said = f"weights of layer {where} ({blocks[where].name}) are not finite"
        elif bad is not None:
            said = f"weights outside of the layers ({bad}) are not finite, seen first by layer {layer} ({blocks[layer].name})"
        else:
            said = f"what enters layer {layer} ({blocks[layer].name}), or its logits, is not finite or out of range"
        state.broken = f"step {step}: {said}"
        warnings.warn(f"{state.broken}; its constants are NaN from here on, training goes on", TrackingWarning, stacklevel=4)


class _State:
    """What changes from update to update.

    directions: unit vectors at the outputs, (rows · times, N), by layer and -1 for all heads, or nothing for the layer itself.
    tracked: by layer and head.
    """

    def __init__(self, loaded: Model, passes: Passes):
        self.loaded, self.passes = loaded, passes
        self.directions: dict[tuple[int, int | None], Tensor] = {}
        self.tracked: dict[tuple[int, int | None], float] = {}
        self.keys: dict[tuple[int, str | None, int | None], str] = {}  # names that were asked for
        self.updates = 0
        self.broken: str | None = None
        self.times = min(_WIDTH, passes.least) if passes.probe.together else 1

    def turn(self, layer: int, rows: list[Seen]) -> float:
        """A layer's constant, and its directions carried over."""
        value = torch.cat([seen.value for seen in rows])
        self._carry((layer, None), torch.cat([seen.directions for seen in rows]), value)
        return float(value.max())  # NaN where one is

    def point(self, layer: int, seen: Seen) -> None:
        """Carry the heads' directions over."""
        self._carry((layer, -1), seen.directions, seen.value)

    def _carry(self, where: tuple[int, int | None], fresh: Tensor, value: Tensor) -> None:
        """Those that are none are left as they were."""
        old, good = self.directions.get(where), value > 0
        if old is None or bool(good.all()):
            self.directions[where] = fresh
        else:
            kept = good.repeat_interleave(len(fresh) // len(value)).to(fresh.device)[:, None]
            self.directions[where] = torch.where(kept, fresh, old)

    def lead(self, found: list[dict[int, Seen]]) -> None:
        """Put what certified top directions go to before the carried ones."""
        for k in set.intersection(*(set(seen) for seen in found)):
            tops = torch.cat([seen[k].directions for seen in found])[:, None]  # (rows, 1, N)
            old = self.directions.get((k, None))
            if old is None:
                random = torch.Generator().manual_seed(k)
                old = torch.randn(len(tops) * self.times, tops.shape[-1], generator=random).to(tops)
            both = torch.cat([tops, old.reshape(len(tops), self.times, -1)[:, : self.times - 1]], 1)
            self.directions[k, None] = orthonormal(both.double()).to(tops).flatten(0, 1)


def _largest(numbers: Iterable[float]) -> float:
    """NaN where one of them is."""
    there = list(numbers)
    return math.nan if any(x != x for x in there) else max(there)


def _compared(layer: int, head: int | None, tracked: dict[Any, float], estimates: list[Any]) -> Checked:
    value, upper = max(e.value for e in estimates), max(e.upper for e in estimates)
    known = tracked.get((layer, head))
    return Checked(layer, head, value if known is None else known, value, upper)


def _again(row: Checked, tracked: dict[tuple[int, int | None], float]) -> Checked:
    return Checked(row.layer, row.head, tracked[row.layer, row.head], row.value, row.upper)


def _spread(measured: Measurement, direction: Tensor, passes: Passes, row: int) -> Tensor:
    """A direction of all tokens of a row, zero at padding."""
    probe = passes.probe
    real = probe.real[0 if probe.together else row]
    own = None if real is None else real[row if probe.together else 0, :, 0]
    direction = direction.to(passes.device, passes.course.work)
    if own is None or len(direction) == len(own):
        return direction
    whole_ = direction.new_zeros(len(own), direction.shape[-1])
    return whole_.index_copy_(0, torch.nonzero(own)[:, 0].to(direction.device), direction)
