"""The page of a training run, from the file that a recorder wrote: one HTML file that fetches nothing."""

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any, final

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.report.answer import as_html, plain
from howsmooth.report.shell import asset, check_page, save, whole_page
from howsmooth.run import read
from howsmooth.study.charts import number, ranges
from howsmooth.study.yardsticks import HIGH
from howsmooth.training.recorder import FILE
from howsmooth.training.tracker import PREFIX

PAGE = "smoothness.html"
_TELLING = 1.05  # times, that are told apart in a picture
_CLEAR = 1.5  # times, by which a quantity must have changed to be a reason
# what may stand behind a constant that grows
_CAUSES = {
    "max_logit": "the largest logit",
    "entropy": "the entropy of attention",
    "sink": "the share of one token",
    "radius": "the size of the tokens",
}
_MOST = 240  # points of a curve; of more, the most telling one of each group is shown
_CHARTS = {
    "": "L",
    "max_logit": "largest logit",
    "entropy": "entropy of attention",
    "sink": "share of one token",
    "radius": "token radius",
}


@final
@dataclass(frozen=True, eq=False, repr=False)
class RunRecord:
    """A training run as it was recorded.

    steps: of the updates.  losses: beside them, where they were given.  series: by quantity ("" for the constant) and layer, a
    value for every step, nothing where it was not finite.  alarms: step, layer, quantity, sentence.  versions: of software.
    """

    folder: Path
    steps: tuple[int, ...]
    losses: tuple[float | None, ...]
    series: dict[str, dict[int, list[float | None]]]
    alarms: tuple[tuple[int, int, str, str], ...]
    drifts: tuple[float, ...]
    versions: dict[str, str]

    @classmethod
    def of(cls, folder: str | Path) -> "RunRecord":
        """From a run's folder, or the file itself."""
        path = Path(folder)
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise ResultsError(
                f"expected {FILE} of a recorder in {folder}, got none; pass folder= to howsmooth.training.Recorder"
            )
        records = [r for r in read(path) if r.function == f"{PREFIX}:update"]
        if not records:
            raise BadInputError(f"expected a run with updates, got {path} without any; was it recorded by a Recorder?")
        rows = [(r.arguments["step"], r.value) for r in records]
        series: dict[str, dict[int, list[float | None]]] = {}
        for name in dict.fromkeys(key for _, row in rows for key in row):
            what, layer = _named(name)
            if what in _CHARTS and layer is not None:
                series.setdefault(what, {})[layer] = [row.get(name) for _, row in rows]
        alarms = tuple((step, a[0], a[1], a[3]) for step, row in rows for a in row["alarms"])
        drifts = tuple(v for _, row in rows for k, v in row.items() if k.startswith(f"{PREFIX}/drift/") and v is not None)
        steps, losses = tuple(step for step, _ in rows), tuple(row["loss"] for _, row in rows)
        return cls(path.parent, steps, losses, dict(series), alarms, drifts, records[-1].versions)

    @property
    def layers(self) -> list[int]:
        return sorted(self.series[""])

    def finite(self, layer: int, what: str = "") -> list[float]:
        """The values of a quantity in one layer that are numbers."""
        return [v for v in self.series.get(what, {}).get(layer, []) if v is not None]

    def growth(self, layer: int) -> float:
        """The largest constant over the first one."""
        there = [v for v in self.finite(layer) if v > 0]
        return max(there) / there[0] if there else math.nan

    @property
    def grown(self) -> int | None:
        """The layer whose constant grew most; nothing where none is known."""
        there = [k for k in self.layers if not math.isnan(self.growth(k))]
        return max(there, key=self.growth, default=None)

    def sentences(self) -> list[str]:
        """What grew and how much, when, why, and what to do, in four sentences or so."""
        layer, span = self.grown, f"{len(self.steps)} updates from step {self.steps[0]} to step {self.steps[-1]}"
        if layer is None:
            return [f"**Nothing was measured** in {span}.", "**What to do:** Check that the model is finite at its probe."]
        return [
            self._which(layer, span),
            self._when(layer),
            f"**Why:** {self._why(layer)}",
            f"**What to do:** {self._do(layer)}",
        ]

    def _which(self, layer: int, span: str) -> str:
        last, there = self.series[""][layer][-1], self.finite(layer)
        broken = [k for k in self.layers if self.series[""][k][-1] is None]
        gone = f"**Layer{'s' * (len(broken) > 1)} {ranges(broken)} {'are' if len(broken) > 1 else 'is'} no longer finite.** "
        if self.growth(layer) < _TELLING:
            return f"{gone if broken else '**No layer grew.** '}L stayed within 5 % of where it began, in {span}."
        ends = f"from {number(there[0])} to {number(max(there))}"
        now = f"; it is {number(last)} now" if last is not None and last < max(there) / _TELLING else ""
        grew = f"**Layer {layer} grew most: {number(self.growth(layer))}-fold.** "
        return f"{gone if broken else ''}{grew}How much it amplifies the worst small change went {ends}{now}, in {span}."

    def _when(self, layer: int) -> str:
        values, first = self.series[""][layer], self.finite(layer)[0]
        doubled = next((step for step, v in zip(self.steps, values, strict=True) if v is not None and v > 2 * first), None)
        said = [] if doubled is None else [f"L had doubled by step {doubled}."]
        if self.alarms:
            count = f"{len(self.alarms)} alarm{'s' * (len(self.alarms) > 1)}"
            said.append(f"{count} went off, the first at {self.alarms[0][3]}.")
        elif not said:
            said.append("L never doubled, and no alarm went off.")
        losses = [v for v in self.losses if v is not None]
        if len(losses) > 1:
            said.append(f"The loss went from {number(losses[0])} to {number(losses[-1])}.")
        return f"**When:** {' '.join(said)}"

    def _ends(self, layer: int, what: str) -> tuple[float, float] | None:
        """A quantity at first, and where L was largest."""
        values = self.series.get(what, {}).get(layer)
        top = max(range(len(self.steps)), key=lambda i: self.series[""][layer][i] or 0.0)
        first = next(iter(self.finite(layer, what)), None)
        return None if values is None or first is None or values[top] is None else (first, values[top])  # pyright: ignore[reportReturnType]

    def _why(self, layer: int) -> str:
        said = []
        for what, words in _CAUSES.items():
            ends = self._ends(layer, what)
            if ends is None or min(ends) <= 0 or abs(math.log(ends[1] / ends[0])) < math.log(_CLEAR):
                continue
            said.append(f"{words} went from {number(ends[0])} to {number(ends[1])}")
        if not said:
            return "neither logits, attention nor the size of the tokens changed much there."
        return f"in layer {layer} {', '.join(said)}."

    def _do(self, layer: int) -> str:
        logits, size = (self._ends(layer, what) for what in ("max_logit", "radius"))
        if any(values[-1] is None for values in self.series[""].values()):
            return "Go back to weights from before that step, with a smaller learning rate or clipped gradients."
        if self.growth(layer) < 2:
            return "Nothing has to be done."
        if logits is not None and logits[1] > HIGH:
            return (
                "Cap the logits with `howsmooth.clip_(model, probe, 30, quantity='logit')`, normalise queries and keys, or "
                "lower "
                "the learning rate."
            )
        if size is not None and size[1] > _CLEAR * size[0]:
            return "Look at what enters the layer: its tokens grew. A norm in front, or weight decay, holds them."
        return "Go on and watch it; a `SmoothnessPenalty` in the loss holds it down."

    @property
    def tracking(self) -> str:
        """How near tracked values were to certified ones."""
        if not self.drifts:
            return ""
        near = sum(abs(d) <= 0.05 for d in self.drifts)
        return f"Tracking was within 5 % of certified values in {near} of {len(self.drifts)} comparisons."

    def table(self) -> list[dict[str, Any]]:
        """One row a layer: the constant at first, at most and at last, the largest logit, the least entropy."""
        rows = []
        for k in self.layers:
            there = self.finite(k)
            ends = (there[0], max(there), self.series[""][k][-1]) if there else (None, None, None)
            row = dict(zip(("first", "most", "last"), ends, strict=True))
            most, least = max(self.finite(k, "max_logit"), default=None), min(self.finite(k, "entropy"), default=None)
            rows.append({"layer": k, **row, "max_logit": most, "min_entropy": least})
        return rows

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "losses": list(self.losses),
            "series": {name or "constant": layers for name, layers in self.series.items()},
            "alarms": [dict(zip(("step", "layer", "quantity", "said"), a, strict=True)) for a in self.alarms],
            "said": [plain(sentence) for sentence in self.sentences()],
        }


def _named(key: str) -> tuple[str, int | None]:
    """Quantity and layer of a logged name; no layer where it is a head's or something else.

    >>> _named("smoothness/layer_07"), _named("smoothness/entropy/layer_07"), _named("smoothness/max_logit/layer_07/head_01")
    (('', 7), ('entropy', 7), ('max_logit', None))
    """
    first, *rest = key.split("/")
    what = rest[0] if len(rest) > 1 else ""
    last = rest[-1] if first == PREFIX and rest else ""
    return what, int(last.removeprefix("layer_")) if last.startswith("layer_") and last[6:].isdigit() else None


def render(run: RunRecord) -> str:
    """The page as text."""
    sentences = run.sentences()
    main = Template(asset("training.html", "training")).substitute(
        alarms="".join(f"<li>{escape(said)}</li>" for *_, said in run.alarms) or "<li>none</li>",
        tracking=escape(run.tracking),
        software=escape(", ".join(f"{k} {v}" for k, v in run.versions.items())),
    )
    return whole_page(
        main,
        title=f"Smoothness of {run.folder.resolve().name} while it trains",
        meta=f"{len(run.layers)} layers · {len(run.steps)} updates",
        description=plain(sentences[0]),
        answer=[as_html(sentence, code=True) for sentence in sentences],
        version=run.versions.get("howsmooth", ""),
        script=asset("training.js", "training"),
        data=_payload(run),
    )


def _payload(run: RunRecord) -> dict[str, Any]:
    steps = run.steps
    curves = [{"name": "loss", "title": "loss", "series": [{"name": "loss", "points": _thin(steps, run.losses, max)}]}]
    for what, title in _CHARTS.items():
        layers = run.series.get(what, {})
        telling = min if what == "entropy" else max
        series = [{"name": f"layer {k}", "layer": k, "points": _thin(steps, v, telling)} for k, v in sorted(layers.items())]
        curves.append({"name": what or "constant", "title": title, "series": series})
    curves = [c | {"series": [s for s in c["series"] if s["points"]]} for c in curves]
    return {
        "curves": [c for c in curves if c["series"]],
        "ends": [steps[0], max(steps[-1], steps[0] + 1)],
        "layers": run.layers,
        "focus": run.grown,
        "alarms": [{"step": step, "layer": layer, "quantity": what, "said": said} for step, layer, what, said in run.alarms],
        "table": run.table(),
    }


def _thin(steps: tuple[int, ...], values: Any, telling: Any) -> list[list[float]]:
    """At most so many points, those a logarithmic axis can show."""
    there = [[s, v] for s, v in zip(steps, values, strict=True) if v is not None and v > 0]
    size = math.ceil(len(there) / _MOST) or 1
    return [telling(there[i : i + size], key=lambda p: p[1]) for i in range(0, len(there), size)]


def write_run_page(run: RunRecord, out: str | Path | None = None, *, force: bool = False) -> Path:
    """Write the page, into the run's folder by default; a page of ours there is replaced, another file only if `force`."""
    page = run.folder / PAGE if out is None else Path(out)
    check_page(page, force or out is None)
    return save(render(run), page)
