"""What a layer's constant does while a model trains: cheap to follow, certified now and then."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import torch
from torch import nn

from howsmooth.errors import BadInputError, HowSmoothError, warn
from howsmooth.models import MapName, Model
from howsmooth.settings import LayerChoice, choice, flag, number, whole
from howsmooth.solve import Options
from howsmooth.training.following import Certified, Following
from howsmooth.training.paths import FAST
from howsmooth.training.probe import Inputs, Probe, first_bad, model_that_trains, untouched
from howsmooth.training.sharded import gathered, rank, told

PREFIX = "smoothness"
_START = 8  # passes from a random start, where no certified solve gives the first directions
_MOST = 6  # passes in one update; one is enough while weights change slowly
_GAIN = 0.06  # gain of a step at which a layer is left until the next update: docs/explanation/penalty.md, tracking
_BESIDE = ("radius", "entropy", "sink", "max_logit")  # what is logged of a layer beside its constant, then logits by head


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
class Tracker:
    """The constants of a model's layers at a fixed probe, followed as its weights change.

    `update()` gives a flat dictionary to log. Its constants are lower ends: `|J w|` for a unit `w`, from four directions that
    are carried over from update to update, with one block product with `Jᵀ` and one with `J` each time, and more where weights
    have moved far. The run is left as it was: mode, hooks, random numbers, buffers, gradients.

    Args:
        model: The one that trains, compiled or wrapped as it may be, or a `Model`.
        probe: A batch of few rows by the names of the model's `forward`; the constant of a layer is the largest over its
            rows.
        layers: `"all"` or a list.
        map: `attention`, `heads`, `normed` or `block`.
        heads: Also the constant and the largest logit of every head alone, at the price of a row for each; `"logits"` for its
            largest logit alone, which costs nothing.
        check_every: Certified solves after so many updates, and before the first; 0 for never.
        tol: Of certified solves, as in `howsmooth.lipschitz`.
        certify: Of certified solves, as in `howsmooth.lipschitz`.
        average: Over the processes of a distributed run, each with a probe of its own; by default the first process
            measures and the others get nothing.
        gain: Gaussian probes for the mean gain of random changes, logged as `gain`, the root mean square over the rows; none by
            default. Four cost one block product with `J` beside the two of an update.

    >>> import howsmooth as hs
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> tracker = hs.Tracker(torch.nn.TransformerEncoder(layer, 2), probe=torch.randn(1, 5, 8))
    >>> sorted(tracker.update())[:2]
    ['smoothness/drift/layer_00', 'smoothness/drift/layer_01']
    """

    def __init__(
        self,
        model: nn.Module | Model,
        probe: Inputs,
        layers: LayerChoice = "all",
        map: MapName = "attention",
        heads: bool | Literal["logits"] = False,
        check_every: int = 50,
        tol: float = 1e-3,
        certify: float | None = None,
        average: bool = False,
        gain: int = 0,
    ):
        fix = "4 is as many as the directions that are followed"
        self.gain = whole(gain, "gain as a whole number of probes, 0 for none", fix)
        self.heads, self.average = heads != "logits" and flag(heads, "heads"), flag(average, "average")
        self.head_logits = bool(heads)
        self.check_every = whole(check_every, "check_every as a whole number of updates, 0 for never", "the default is 50")
        self.map: MapName = choice(map, "a map", FAST)
        self._options = Options(number(tol, "0 < tol < 1", "the default is 1e-3", above=0, below=1), certify)
        self._updates = 0
        self._broken: str | None = None
        self._tracked: dict[tuple[int, int | None], float] = {}  # by layer and head
        loaded = model_that_trains(model)
        rows = Probe.of(loaded, probe)
        with untouched(loaded.module, at=(rows.args, rows.kwargs)):
            self._following = Following(loaded, rows, layers, map, certifies=self.check_every > 0)
        if self.heads and not self._following.tells_heads:
            raise BadInputError(
                "expected a model whose heads can be told apart for heads=True, got one whose attention is its own code; "
                "leave heads out"
            )

    def __repr__(self) -> str:
        module, count = type(self._following.model.module).__name__, len(self.names)
        return f"Tracker({module}, {self.map} of {count} layers, {self._updates} updates{', not finite' * bool(self._broken)})"

    @property
    def names(self) -> dict[int, str]:
        """The tracked layers by number, as they are called in the model."""
        return dict(self._following.places)

    @property
    def broken(self) -> str | None:
        """Where and when something was first not finite, in a sentence; nothing while all is well."""
        return self._broken

    def key(self, layer: int, what: str | None = None, head: int | None = None) -> str:
        """The name a number is logged under.

        Args:
            what: Nothing for the constant, or `gain`, `max_logit`, `entropy`, `sink`, `radius`, `head`, `upper`, `drift`.
        """
        digits = max(2, len(str(self._following.count - 1)))
        parts = (what, f"layer_{layer:0{digits}d}", None if head is None else f"head_{head:02d}")
        return "/".join([PREFIX, *filter(None, parts)])

    def update(self, step: int | None = None) -> dict[str, float]:
        """The numbers at the weights of this moment, by the names they are logged under.

        For each layer: the constant, the largest logit, the mean entropy of attention in nats, the
        largest share of all attention that one token gets, the root mean square norm of the tokens that enter, and the mean
        gain if it is wanted. After a check also the certified upper end and how far tracking was off. Where something is not
        finite: NaN, and a warning that says where.

        Args:
            step: Of the training, for what is said; counts updates by default.
        """
        step = self._updates if step is None else step
        following, checks = self._following, self.check_every > 0 and self._updates % self.check_every == 0
        if not self.average and rank():
            with gathered(following.model.module, here=False):
                self._updates += 1
            return {}
        with untouched(following.model.module):
            following.replay()
            certified = self._certified(step) if checks and not following.directions else None
            if not following.directions and not checks:
                for _ in range(_START):
                    self._follow()
            values = self._follow()
            bad = next((k for k in following.layers if not math.isfinite(values[self.key(k)])), None)
            if bad is not None:
                self._say(step, bad)
            elif checks:
                certified = certified or self._certified(step)
                for row in self._compared(step, certified).rows if certified else ():
                    values[self.key(row.layer, "upper", row.head)] = row.upper
                    values[self.key(row.layer, "drift", row.head)] = row.drift
        self._updates += 1
        if not self.average or rank() is None:
            return values
        found = told(values)
        return {key: sum(own[key] for own in found) / len(found) for key in values if all(key in own for own in found)}

    def check(self, step: int | None = None) -> Check:
        """Certified solves of everything that is tracked, beside what tracking says now, which goes on from there."""
        following = self._following
        with untouched(following.model.module):
            following.replay()
            certified = None if following.directions else following.certified(self._options, heads=self.heads)
            self._follow()
            certified = certified or following.certified(self._options, heads=self.heads)
        return self._compared(self._updates if step is None else step, certified)

    def _follow(self) -> dict[str, float]:
        """One step of power iteration in every layer, and more where the weights have moved far."""
        following = self._following
        found = following.turn(rounds=_MOST, least=_GAIN, probes=self.gain)
        self._tracked = {(k, None): float(found[k].value.max()) if k in found else math.nan for k in following.layers}
        values = {self.key(k): value for (k, _), value in self._tracked.items()}
        numbers = iter(torch.cat([own.beside for own in found.values()]).tolist() if found else [])  # all at once
        beside = {k: [next(numbers) for _ in own.beside] for k, own in found.items()}
        for k in following.layers:
            count = len(_BESIDE) + following.paths.heads[k] if following.is_softmax[k] else 1
            own = beside.get(k, [math.nan] * count)  # where it could not be measured
            names = [self.key(k, what) for what in _BESIDE]
            names += [self.key(k, "max_logit", h) for h in range(len(own) - len(_BESIDE))] if self.head_logits else []
            values |= zip(names, own, strict=False)
        if self.gain:
            gains = {k: own.gain for k, own in found.items() if own.gain is not None}
            means = {k: float(gain.square().mean().sqrt()) for k, gain in gains.items()}
            values |= {self.key(k, "gain"): means.get(k, math.nan) for k in following.layers}
        if not self.heads:
            return values
        by_head, most = following.turn(alone=True), max(following.paths.heads.values())
        for k in following.layers:
            own = by_head[k].value.unflatten(0, (-1, most)).amax(0).tolist() if k in by_head else [math.nan] * most
            own = own[: following.paths.heads[k]]
            values |= {self.key(k, "head", h): value for h, value in enumerate(own)}
            self._tracked |= {(k, h): value for h, value in enumerate(own)}
        return values

    def _certified(self, step: int) -> Certified | None:
        """Certified constants; where they are refused, that is said."""
        try:
            return self._following.certified(self._options, heads=self.heads)
        except HowSmoothError as error:
            warn(f"step {step}: no certified constants ({error}); check_every=0 leaves them out", TrackingWarning)
            return None

    def _compared(self, step: int, certified: Certified) -> Check:
        """Tracked numbers beside certified ones."""
        return Check(step, tuple(Checked(k, h, self._tracked[k, h], *ends) for (k, h), ends in certified.items()))

    def _say(self, step: int, layer: int) -> None:
        """Say, once, where the first thing that is not finite is."""
        if self._broken is not None:
            return
        module, found = self._following.model.module, self._following.paths.recording.layers.found
        weights = {k: module.get_submodule(found[k].path) for k in self._following.layers}
        where = next((k for k, part in weights.items() if first_bad(dict(part.named_parameters())) is not None), None)
        bad = first_bad(dict(module.named_parameters()))
        if where is not None:
            said = f"weights of layer {where} ({self.names[where]}) are not finite"
        elif bad is not None:
            said = f"weights outside of the layers ({bad}) are not finite, seen first by layer {layer} ({self.names[layer]})"
        else:
            said = f"what enters layer {layer} ({self.names[layer]}), or its logits, is not finite or out of range"
        self._broken = f"step {step}: {said}"
        warn(f"{self._broken}; its constants are NaN from here on, training goes on", TrackingWarning)
