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

from howsmooth.errors import BadFunctionError, BadInputError, HowSmoothError
from howsmooth.models import MapName, Model
from howsmooth.settings import choice, flag, number, whole
from howsmooth.solve import Options
from howsmooth.spectral.ritz import orthonormal
from howsmooth.training.following import Following, Observed
from howsmooth.training.jacobians import drawn
from howsmooth.training.looks import squares
from howsmooth.training.paths import FAST
from howsmooth.training.probe import Inputs
from howsmooth.training.untouched import first_bad, untouched, whole_model

PREFIX = "smoothness"
_START = 8  # passes from a random start, where no certified solve gives the first directions
_MOST = 6  # passes in one update; one is enough while weights change slowly
_GAIN = 0.06  # gain of a step at which a layer is left until the next update: docs/explanation/penalty.md, tracking


Certified = dict[tuple[int, int | None], tuple[float, float]]  # value and upper end, by layer and head


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
        choice(self.map, "a map", FAST)
        Options(self.tol, self.certify)
        if isinstance(self.model, Model):
            loaded = self.model
        elif isinstance(self.model, nn.Module):
            module = whole_model(self.model)
            loaded = Model.of(module, type(module).__name__, None, None)
        else:
            raise BadInputError(f"expected a torch module that trains, got {type(self.model).__name__}; pass the model")
        with untouched(loaded.module):
            following = Following(loaded, self.probe, self.layers, self.map)
        if self.heads and not following.tells_heads:
            raise BadInputError(
                "expected a model whose heads can be told apart for heads=True, got one whose attention is its own code; "
                "leave heads out"
            )
        vars(self)["_state"] = _State(following)

    @property
    def _now(self) -> "_State":
        return vars(self)["_state"]

    @property
    def names(self) -> dict[int, str]:
        """The tracked layers by number, as they are called in the model."""
        following = self._now.following
        return {k: following.paths.place(k) for k in following.layers}

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
            digits = max(2, len(str(self._now.following.count - 1)))
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
        with untouched(state.following.model.module):
            values = self._confirmed(step, checks)
        state.updates += 1
        return self._averaged(values) if distributed and self.average else values

    def check(self, step: int | None = None) -> Check:
        """Certified solves of everything that is tracked, beside what tracking says now, which goes on from there."""
        state = self._now
        step = state.updates if step is None else step
        with untouched(state.following.model.module):
            state.following.replay()
            if not state.following.confirmed():
                state.following.record(anew=True)
            if state.directions:
                self._follow()
                return self._compared(step, self._certified())
            estimates = self._certified()
            self._follow()
            return self._compared(step, estimates)

    def _confirmed(self, step: int, checks: bool) -> dict[str, float]:
        """The numbers of an update, from a recording that gives what the model itself gives."""
        state = self._now
        for _ in range(2):
            state.following.replay()
            values, bad, check = self._updated(step, checks)
            if state.following.confirmed():
                break
            state.following.record(anew=True)
        else:
            raise BadFunctionError("expected a model that gives the same twice, got another output; call model.eval()")
        if bad is not None:
            self._say(step, bad)
        for row in check.rows if check else ():
            for what, number_ in (("upper", row.upper), ("drift", row.drift)):
                values[self.key(row.layer, what, row.head)] = number_
        return values

    def _updated(self, step: int, checks: bool) -> tuple[dict[str, float], int | None, Check | None]:
        """Numbers by name, the first layer whose constant is not finite, and what certified solves say."""
        state, estimates = self._now, None
        if checks and not state.directions:
            estimates = self._certified_or_said(step)
        elif not state.directions:
            for _ in range(_START):
                self._follow()
        values = self._follow()
        bad = next((k for k in state.following.layers if not math.isfinite(values[self.key(k)])), None)
        if bad is None and checks:
            estimates = self._certified_or_said(step) if estimates is None else estimates
            return values, bad, None if estimates is None else self._compared(step, estimates)
        return values, bad, None

    def _follow(self) -> dict[str, float]:
        """One step of power iteration in every layer, and more where the weights have moved far."""
        state, following = self._now, self._now.following
        found = following.run(state.carried(None), rounds=_MOST, least=_GAIN, looks=True)
        values = {self.key(k): state.turn((k, None), found.get(k)) for k in following.layers}
        parts = {k: self._beside(there) for k, there in found.items()}
        numbers = iter(torch.cat([t for own in parts.values() for t in own]).tolist() if parts else [])  # all at once
        for k in following.layers:
            own = [list(islice(numbers, len(t))) for t in parts.get(k, ())]
            values |= self._told(k, own) if own else self._missing(k)
        state.tracked = {(k, None): values[self.key(k)] for k in following.layers}
        by_head = following.run_heads(state.carried(-1)) if self.heads else {}
        for k in following.layers if self.heads else ():
            state.turn((k, -1), by_head.get(k))
            heads = range(following.paths.heads[k])
            own = by_head[k].value.reshape(following.probe.rows, -1).amax(0).tolist() if k in by_head else []
            told = dict(zip(heads, own or [math.nan] * len(heads), strict=False))
            values |= {self.key(k, "head", h): value for h, value in told.items()}
            state.tracked |= {(k, h): value for h, value in told.items()}
        return values

    def _missing(self, layer: int) -> dict[str, float]:
        """What is logged of a layer that could not be measured."""
        following = self._now.following
        heads = following.paths.heads[layer] if following.calls[layer] else 0
        return dict.fromkeys(self._names(layer, heads), math.nan)

    def _names(self, layer: int, heads: int) -> list[str]:
        """What is logged of a layer beside its constant. heads: how many, nothing where attention cannot be seen."""
        what = ("entropy", "sink", "max_logit") if self._now.following.calls[layer] else ()
        return [self.key(layer, w) for w in ("radius", *what)] + [self.key(layer, "max_logit", h) for h in range(heads)]

    def _beside(self, there: Observed) -> list[Tensor]:
        """What a layer's numbers beside its constant are made of: the mean square of its tokens, then its looks."""
        tokens = squares(there.x, self._now.following.probe.real)
        return [tokens.mean(0, keepdim=True), *there.looks]

    def _told(self, layer: int, parts: list[list[float]]) -> dict[str, float]:
        """Those numbers by the names they are logged under."""
        (square,), *looks = parts
        told = [math.sqrt(square)]
        alike = bool(looks) and all(len(look) == len(looks[0]) for look in looks)
        if looks:
            told += [statistics.fmean(both) for both in zip(*(look[:2] for look in looks), strict=True)]
            told += [_largest(t for look in looks for t in look[2:])]
            told += [_largest(own) for own in zip(*(look[2:] for look in looks), strict=True)] if alike else []
        return dict(zip(self._names(layer, len(looks[0]) - 2 if alike else 0), told, strict=True))

    def _certified_or_said(self, step: int) -> Certified | None:
        try:
            return self._certified()
        except HowSmoothError as error:
            warnings.warn(f"step {step}: no certified constants ({error})", TrackingWarning, stacklevel=6)
            return None

    def _certified(self) -> Certified:
        """Certified solves, by layer and head, whose directions tracking takes over."""
        state, following = self._now, self._now.following
        options, found, rows = Options(self.tol, self.certify), Certified(), following.row_runs()
        for k in following.layers:
            tops: list[Tensor | None] = []
            for h in (None, *range(following.paths.heads[k] if self.heads else 0)):
                estimates, top = following.certified(rows, k, h, options)
                found[k, h] = max(e.value for e in estimates), max(e.upper for e in estimates)
                tops.append(top)
            state.lead(k, tops[0])
            state.point(k, [t for t in tops[1:] if t is not None])
        return found

    def _compared(self, step: int, certified: Certified) -> Check:
        """Tracked numbers beside certified ones."""
        tracked = self._now.tracked
        return Check(step, tuple(Checked(k, h, tracked[k, h], *ends) for (k, h), ends in certified.items()))

    def _averaged(self, values: dict[str, float]) -> dict[str, float]:
        state = self._now
        here = state.following.model.device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=here)
        torch.distributed.all_reduce(total)
        return dict(zip(values, (total / torch.distributed.get_world_size()).tolist(), strict=True))

    def _say(self, step: int, layer: int) -> None:
        """Say, once, where the first thing that is not finite is."""
        state = self._now
        if state.broken is not None:
            return
        module, paths = state.following.model.module, state.following.paths
        weights = {k: module.get_submodule(paths.block(k)) for k in state.following.layers}
        where = next((k for k, part in weights.items() if first_bad(dict(part.named_parameters())) is not None), None)
        bad = first_bad(dict(module.named_parameters()))
        if where is not None:
            said = f"weights of layer {where} ({self.names[where]}) are not finite"
        elif bad is not None:
            said = f"weights outside of the layers ({bad}) are not finite, seen first by layer {layer} ({self.names[layer]})"
        else:
            said = f"what enters layer {layer} ({self.names[layer]}), or its logits, is not finite or out of range"
        state.broken = f"step {step}: {said}"
        warnings.warn(f"{state.broken}; its constants are NaN from here on, training goes on", TrackingWarning, stacklevel=4)


class _State:
    """What changes from update to update.

    directions: unit vectors at the outputs, (items, times, N), by layer and -1 for all heads, or nothing for the layer itself.
    tracked: by layer and head.
    """

    def __init__(self, following: Following):
        self.following = following
        self.directions: dict[tuple[int, int | None], Tensor] = {}
        self.tracked: dict[tuple[int, int | None], float] = {}
        self.keys: dict[tuple[int, str | None, int | None], str] = {}  # names that were asked for
        self.updates = 0
        self.broken: str | None = None

    def carried(self, head: int | None) -> dict[int, Tensor]:
        """The directions of layers, or of their heads."""
        return {k: u for (k, h), u in self.directions.items() if h == head}

    def turn(self, where: tuple[int, int | None], found: Observed | None) -> float:
        """A constant, and its directions carried over; those that are none are left as they were."""
        if found is None:
            return math.nan
        old, good = self.directions.get(where), found.value > 0
        fresh = found.directions
        if old is not None and old.shape == fresh.shape and not bool(good.all()):
            fresh = torch.where(good.to(fresh.device)[:, None, None], fresh, old)
        self.directions[where] = fresh
        return float(found.value.max())  # NaN where one is

    def lead(self, layer: int, top: Tensor | None) -> None:
        """Put what certified top directions go to, (items, N), before the carried ones."""
        if top is None:
            return
        times, old = self.following.times, self.directions.get((layer, None))
        if old is None or old.shape[::2] != top.shape:
            old = drawn(layer, (len(top), times, top.shape[-1]), top)
        self.directions[layer, None] = orthonormal(torch.cat([top[:, None].to(old), old[:, : times - 1]], 1))

    def point(self, layer: int, tops: list[Tensor]) -> None:
        """The same for the heads, each with a direction of its own."""
        if not tops:
            return
        most = max(self.following.paths.heads.values())
        block = torch.stack(tops, 1)  # (items, heads, N)
        filled = torch.cat([block, block.new_zeros(len(block), most - len(tops), block.shape[-1])], 1)
        self.directions[layer, -1] = filled.flatten(0, 1)[:, None]


def _largest(numbers: Iterable[float]) -> float:
    """NaN where one of them is."""
    there = list(numbers)
    return math.nan if any(x != x for x in there) else max(there)
