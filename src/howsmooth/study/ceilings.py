"""How far from the ceiling? Every bound beside what was measured, at the input and over the ball that just holds its tokens."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

from howsmooth.errors import HowSmoothError
from howsmooth.maps import Attention
from howsmooth.models import Capture, Measurement
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Ladder, Option, Pick, Section, number
from howsmooth.study.jobs import Cells, EstimateRow, Measured, rare
from howsmooth.study.layers import LayerRow, layer_jobs
from howsmooth.study.question import Beside, Question, Steps, lines_by_place, power_of_ten
from howsmooth.study.scope import Part, Setting
from howsmooth.theory import Bound, point_bounds
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.over_ball.table import rows_over_ball

_MIDDLE = 128  # tokens
# norms of weights, which take longer than the rest; of the layers that a worker holds, which stay as they were read off
_KNOWN: WeakKeyDictionary[Attention, Constants] = WeakKeyDictionary()


@final
@dataclass(frozen=True)
class BoundCells:
    """A bound in a row. where: point or ball.  log_value: its logarithm, nothing where it does not apply for a `reason`."""

    where: str
    id: str
    name: str
    side: str
    log_value: float | None
    statement: str
    source: str
    reason: str | None

    @classmethod
    def of(cls, where: str, bound: Bound) -> "BoundCells":
        """A bound without its certificate."""
        b = bound
        return cls(where, b.id, b.name, b.side, b.log_value, b.statement, b.source, b.reason)


@final
@dataclass(frozen=True, kw_only=True)
class BoundsRow(EstimateRow):
    """Every bound of a layer at one input.  reason: why there are none."""

    kind = "bounds"
    bounds: Sequence[Cells]
    reason: str | None = rare()

    @property
    def each(self) -> list[BoundCells]:
        """The bounds one by one."""
        return [BoundCells(**b) for b in self.bounds]


def bounds_row(captured: Capture, m: Measurement, part: Part, window: Cells) -> Iterator[BoundsRow]:
    """One row for a layer in closed form. What fails there keeps nobody from the measurement."""
    began, attn = time.perf_counter(), captured.closed(m.layer)
    if attn is None or part.map != "attention":
        return
    more: dict[str, Any] = {}
    try:
        if attn not in _KNOWN:
            _KNOWN[attn] = replace(constants(replace(attn.to("cpu"))))  # the layer is another one, or it would keep itself here
        known = replace(_KNOWN[attn])  # what rows derive from it, larger than the layer, goes with them
        bounds = [BoundCells.of("point", b) for b in point_bounds(attn, captured.tokens(m.layer))]
        bounds += [BoundCells.of("ball", b) for b in rows_over_ball(known, m.n, m.radius_max)]
    except (HowSmoothError, RuntimeError) as error:  # weights out of range, too little memory, no decomposition
        bounds, more = [], {"reason": " ".join(str(error).split())[:500]}
    cells = [dict(vars(b)) for b in bounds]
    yield BoundsRow.measured(m, window, bounds=cells, **more, seconds=time.perf_counter() - began)


def tasks(setting: Setting) -> Steps:
    """Every layer at every length on the first sample, beside every bound; for attention."""
    first = replace(setting, starts=setting.starts[:1])
    yield layer_jobs(first, beside={"bounds": setting.scope.lengths}) if setting.scope.map == "attention" else []


def _line(rows: list[LayerRow | BoundsRow]) -> Cells:
    bounds = [b for row in rows if isinstance(row, BoundsRow) for b in row.each]  # of the first sample alone
    return {"L": rows[0].value} | {b.id: power_of_ten(b.log_value) for b in bounds if b.log_value is not None}


def table(measured: Measured) -> list[Cells]:
    """Measured and bounds, a line for each layer and length."""
    return lines_by_place(_line, measured.rows)


def page_lengths(setting: Setting) -> list[int]:
    """A middle length and the longest."""
    return [setting.nearest(_MIDDLE), setting.longest] if setting.scope.map == "attention" else []


@final
class BesideBound(NamedTuple):
    """A bound and the row of the constant that it is set beside."""

    row: BoundsRow
    bound: BoundCells

    @property
    def log(self) -> float:
        """The bound's logarithm, infinite where it does not apply."""
        return math.inf if self.bound.log_value is None else self.bound.log_value

    @property
    def above(self) -> float:
        """The logarithm of how many times what was measured it is."""
        return self.log - math.log(self.row.value) if self.row.value > 0 else math.inf

    def cells(self) -> Cells:
        """A line of a table of bounds."""
        return self.row.columns("model", "layer", "map", "n", "value", "radius_max") | vars(self.bound)


def bounds_of(data: ReportData) -> list[BesideBound]:
    """Every bound beside what was measured there."""
    return [BesideBound(row, bound) for row in data.of(BoundsRow) for bound in row.each]


def sentence(rows: list[BoundsRow], data: ReportData) -> str:
    """The least upper bounds beside what was measured, for the layer with the largest constant that has bounds."""
    uppers = [b for b in bounds_of(data) if b.bound.side == "upper" and b.bound.log_value is not None]
    if not uppers:
        return "No upper bound is known."
    layer = data.worst({row.layer for row, _ in uppers}).layer
    n = max(row.n for row, _ in uppers if row.layer == layer)
    at, over = (
        min(
            (b for b in uppers if (b.row.layer, b.row.n, b.bound.where) == (layer, n, where)), key=lambda b: b.log, default=None
        )
        for where in ("point", "ball")
    )
    said = []
    if at is not None:
        said.append(f"L ≤ {_huge(at.log)} at the first sample ({_huge(at.above)} × the measured {number(at.row.value)})")
    if over is not None:
        said.append(f"L ≤ {_huge(over.log)} for any {n} tokens whose vectors are no longer ({_huge(over.above)} ×)")
    return f"In layer {layer} theory proves {', and '.join(said)}."


def _huge(log: float) -> str:
    """`exp(log)`, as a power of ten where it is large."""
    return number(math.exp(log)) if log < 50 else f"10^{log / math.log(10):.0f}" if log < math.inf else "∞"


def figure(rows: list[BoundsRow], data: ReportData) -> list[Drawing]:
    """Each bound beside what was measured, at first for the least smooth layer that has bounds at its longest length."""
    lines = []
    for row, bound in bounds_of(data):
        cells = row.columns("layer", "n", "value") | vars(bound)
        upper = bound.side == "upper"
        log = None if bound.log_value is None or row.value <= 0 else BesideBound(row, bound).above
        looks = {"look": bound.where if upper else f"{bound.where} hollow", "beside": log}
        lines.append(cells | looks | {"place": "at this input" if bound.where == "point" else "over the ball"})
    if not lines:
        return []
    layers, lengths = (sorted({row[key] for row in lines}) for key in ("layer", "n"))
    worst = data.worst(layers).layer
    chart = Ladder(
        name="bound-ladder",
        title="Measured and bounds, layer {layer}, n = {n}",
        unit="times, log scale",
        source="bounds",
        rows=sorted(lines, key=lambda line: math.inf if line["log_value"] is None else line["log_value"]),
        label="{id} · {name}",
        marks=(("log_value", "look"),),
        logs=("log_value",),
        right=("{log_value:log}", ""),
        base="value",
        missing=("Bounds that do not apply here", "{id} · {name}: ", "{reason}"),
        tip=(
            "{id} · {name}",
            "{side} bound {place}: {log_value:log}",
            "{beside:log} × measured",
            "{statement}",
            "{source}",
        ),
    )
    layer = Pick("bounds-layer", "Layer", "layer", tuple(Option(k, f"layer {k}", str(k)) for k in layers), worst)
    length = Pick("bounds-length", "Length", "n", tuple(Option(n, f"n = {n}", str(n)) for n in lengths), lengths[-1])
    known = any(row["log_value"] is not None for row in lines)
    return [Drawing((chart,), (layer, length), file="bound-ladder" if known else None)]


BOUNDS = Question(
    name="bounds",
    row=BoundsRow,
    tasks=tasks,
    title="measured L on the first sample, and every bound that applies: D at the input, B over the ball",
    table=table,
    beside=Beside(bounds_row, page_lengths, slow=True),
    sentence=sentence,
    figure=figure,
    section=Section(
        id="bounds",
        name="Ceiling",
        title="How far from the ceiling",
        place=60,
        folded=True,
        text="What theory allows beside what was measured. $sentence A bound at this input uses the actual attention weights; "
        "a bound over the ball holds for every sequence of as many tokens that are no longer. An arrow is off the scale.",
        swatches=(("", "at this input"), ("ball", "over the ball"), ("hollow", "hollow: a lower bound")),
    ),
)
