"""What a tracker says, written down step by step: logged, kept in a file, held against alarms."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from howsmooth.errors import BadInputError, ResultsError, warn
from howsmooth.run.files import remove_results
from howsmooth.run.plan import Plan, Task
from howsmooth.run.store import Outcome, Store
from howsmooth.run.sweeping import versions
from howsmooth.settings import choice, flag, number, whole
from howsmooth.training.sharded import rank, told
from howsmooth.training.tracker import PREFIX, Tracker, TrackingWarning

FILE = "smoothness.sqlite"
QUANTITIES = ("constant", "max_logit", "entropy", "sink", "radius")
Log = Callable[[dict[str, float]], Any]


@final
@dataclass(frozen=True)
class Alarm:
    """A limit on a quantity of any layer: `Alarm("max_logit", above=50)`, `Alarm("entropy", below=0.5)`.

    Attributes:
        quantity: `constant`, `max_logit`, `entropy`, `sink` or `radius`.
        above: Goes off where the quantity is larger.
        below: Goes off where it is smaller; give one of the two.
    """

    quantity: str
    above: float | None = None
    below: float | None = None

    def __post_init__(self):
        choice(self.quantity, "a quantity", QUANTITIES)
        if (self.above is None) == (self.below is None):
            raise BadInputError("expected either above or below as the limit of an alarm, got both or neither; give one")
        name = "above" if self.below is None else "below"
        limit = number(getattr(self, name), f"{name} as a number above 0", "it is a limit", above=0)
        object.__setattr__(self, name, limit)

    def raised_by(self, value: float) -> bool:
        return value > self.above if self.above is not None else value < self.below if self.below is not None else False


@final
@dataclass(frozen=True)
class Raised:
    """An alarm that went off."""

    step: int
    layer: int
    quantity: str
    value: float
    limit: float

    def __str__(self) -> str:
        if self.quantity == "finite":
            return f"step {self.step}: layer {self.layer} is no longer finite"
        side = "above" if self.value > self.limit else "below"
        return f"step {self.step}: {self.quantity} of layer {self.layer} is {self.value:.4g}, {side} {self.limit:g}"


@final
class Recorder:
    """To be called in a training loop after every step: `record(step, loss=loss.item())`.

    Args:
        tracker: Gives the numbers.
        every: Steps between updates.
        log: Called with the numbers of an update, a dictionary.
        folder: Where they are kept, one row an update, committed as it comes, in `smoothness.sqlite`, which `howsmooth
            training` makes a page of.
        resume: Go on with a file that has rows.
        force: Remove a file that has rows, and begin anew.
        alarms: Limits on quantities of any layer.
        on_alarm: `warn` says it, `stop` also sets `stopped`, a function is called with the `Raised`. An alarm goes off once
            for a layer and a quantity. A layer that is no longer finite always does.
    """

    def __init__(
        self,
        tracker: Tracker,
        every: int = 10,
        *,
        log: Log | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        force: bool = False,
        alarms: Iterable[Alarm] = (),
        on_alarm: Literal["warn", "stop"] | Callable[[Raised], Any] = "warn",
    ):
        if not isinstance(tracker, Tracker):
            raise BadInputError(f"expected a Tracker, got {type(tracker).__name__}; make one with hs.Tracker(model, probe)")
        self.tracker, self.log = tracker, log
        self.every = whole(every, "a whole number of steps between updates, at least 1", "the default is 10", least=1)
        self.alarms = tuple(alarms)
        wrong = [a for a in self.alarms if not isinstance(a, Alarm)]
        if wrong:
            raise BadInputError(f"expected alarms as Alarm(quantity, above=…), got {type(wrong[0]).__name__}; make some")
        if not callable(on_alarm):
            on_alarm = choice(on_alarm, "on_alarm", ("warn", "stop"))
        self.on_alarm = on_alarm
        self.raised: list[Raised] = []
        self.stopped = False
        self._last: int | None = None
        resume = flag(resume, "resume")
        if flag(force, "force") and folder is not None and not rank():
            if resume:
                raise BadInputError("expected resume or force, got both; resume continues, force begins anew")
            remove_results(Path(folder) / FILE)
        self._store = None if folder is None or rank() else Store(Path(folder) / FILE, resume=resume)
        if self._store is not None:
            self._store.begin(Plan(()), "training", " ".join(sys.argv), versions())

    def __call__(self, step: int, loss: float | None = None) -> dict[str, float]:
        """The numbers of this step where one is due, else nothing. loss: kept beside them."""
        if step % self.every or step == self._last:
            return {}
        self._last = step
        values = self.tracker.update(step)
        if values and not rank():
            self._record(step, values, loss)
        if self.on_alarm == "stop":  # on all processes at once, or those that go on would wait for the others
            self.stopped |= any(told(self.stopped))
        return values

    def _record(self, step: int, values: dict[str, float], loss: float | None) -> None:
        new = self._alarms(step, values)
        if self.log is not None:
            self.log(dict(values))
        self._keep(step, values, loss, new)
        for raised in new:
            self._tell(raised)

    def _alarms(self, step: int, values: Mapping[str, float]) -> list[Raised]:
        known = {(r.layer, r.quantity) for r in self.raised}
        new: list[Raised] = []
        for layer in self.tracker.names:
            if not math.isfinite(values[self.tracker.key(layer)]):
                new.append(Raised(step, layer, "finite", math.nan, math.inf))
                break  # those behind it follow from it
            for alarm in self.alarms:
                what = None if alarm.quantity == "constant" else alarm.quantity
                value = values.get(self.tracker.key(layer, what))
                limit = alarm.above if alarm.below is None else alarm.below
                if value is not None and limit is not None and alarm.raised_by(value):
                    new.append(Raised(step, layer, alarm.quantity, value, limit))
        new = [r for r in new if (r.layer, r.quantity) not in known]
        self.raised += new
        return new

    def _tell(self, raised: Raised) -> None:
        if callable(self.on_alarm):
            self.on_alarm(raised)
            return
        if raised.quantity != "finite":  # the tracker has said that
            warn(f"{raised}; on_alarm='stop' ends training then, on_alarm=f calls f", TrackingWarning)
        self.stopped |= self.on_alarm == "stop"

    def _keep(self, step: int, values: Mapping[str, float], loss: float | None, raised: list[Raised]) -> None:
        """A row of the file; where it cannot be written, that is said and training goes on without."""
        if self._store is None:
            return
        row: dict[str, Any] = {"loss": loss, "alarms": [[r.layer, r.quantity, r.value, str(r)] for r in raised], **values}
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        row["alarms"] = [[a if not isinstance(a, float) or math.isfinite(a) else None for a in r] for r in row["alarms"]]
        task = Task(f"{PREFIX}:update", json.dumps({"step": int(step)}))
        try:
            self._store.add(task, Outcome("done", json.dumps(row, allow_nan=False)), int(step))
        except ResultsError as error:
            warn(f"{error}; training goes on, no more rows are kept in folder", TrackingWarning)
            self.close()

    def close(self) -> None:
        """Leave one plain file behind."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
