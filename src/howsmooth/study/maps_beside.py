"""Attention, norm and block: maps of the same layer side by side, each with the change of its output against its size."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import final

from howsmooth.errors import BadInputError
from howsmooth.models import MapName
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Lines, Option, Pick, Section, number
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.layers import LayerRow
from howsmooth.study.question import Extras, Question, Steps
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

SIDE_BY_SIDE: tuple[MapName, ...] = ("attention", "normed", "block")
QUANTITY = (
    Option("value", "L, the constant", "L"),
    Option("relative", "L·|x| / |f(x)|, the relative constant", "Relative constant"),
)
ROUGH = 1e-2  # least relative accuracy of what is only set beside a measurement


@final
@dataclass(frozen=True, kw_only=True)
class MapRow(EstimateRow):
    """Another map of a layer, on the first sample at the longest length."""

    kind = "map"
    map: str = field()
    relative: float | None
    top_token: int | None = None
    top_word: str | None = None
    top_share: float | None = None
    top_received: float | None = None


def map_jobs(setting: Setting) -> list[Job]:
    """Attention, normed and block of every layer, but for the map that is studied: the longest length, the first sample."""
    scope = setting.scope
    rough = replace(setting, scope=replace(scope, tol=max(scope.tol, ROUGH), certify=None))
    return [
        replace(part, map=name).job(measure_maps)
        for name in SIDE_BY_SIDE
        if name != scope.map
        for part in parts(rough, [setting.longest], samples=1, layers=1)
    ]


@task_of_part
def measure_maps(reader: Reader, part: Part) -> Iterator[MapRow]:
    """A row for every layer that has the map."""
    for layer in part.layers:
        try:
            measured = replace(part, layers=(layer,)).measure(reader)
        except BadInputError:  # a block that normalises after it attends has no normed attention
            continue
        yield from (MapRow.measured(m, window, **m.about()) for m, window in measured)


def on_page(setting: Setting, extras: Extras) -> Steps:
    """The maps beside the one that is studied."""
    yield map_jobs(setting)


def records(data: ReportData) -> list[Cells]:
    """Maps of the layers side by side: the one that is studied, on the first sample at the longest length, and others."""
    studied, order = data.methods.map, (*SIDE_BY_SIDE, data.methods.map)
    there = [row for row in data.of(LayerRow) if row.n == data.lengths[-1] and row.relative is not None]
    first = {row.layer: row for row in reversed(there)}
    rows = [row.columns("layer", "n", "map", "value", "relative") | {"map": studied} for _, row in sorted(first.items())]
    rows += [row.columns("layer", "n", "map", "value", "relative") for row in data.of(MapRow)]
    return sorted(rows, key=lambda row: order.index(row["map"]) if row["map"] in order else len(order))


def sentence(rows: list[MapRow], data: ReportData) -> str:
    """Where attention and block differ most."""
    at = {(row["map"], row["layer"]): row["value"] for row in records(data)}
    both = [k for k in data.layers if at.get(("attention", k), 0) > 0 and at.get(("block", k), 0) > 0]
    if not both:
        return ""
    most = max(both, key=lambda k: abs(math.log(at["attention", k] / at["block", k])))
    ratio = at["attention", most] / at["block", most]
    return f"They differ most in layer {most}: its block is {number(max(ratio, 1 / ratio))} times " + (
        "smoother than its attention." if ratio >= 1 else "less smooth than its attention."
    )


def figure(rows: list[MapRow], data: ReportData) -> list[Drawing]:
    """L of attention, normed attention and block, layer by layer, and the same relative to input and output."""
    chart = Lines(
        name="maps",
        title="{y} of each map, n = {n}",
        unit="first sample, log scale",
        source="maps",
        rows=records(data),
        series="map",
        y_label="{y}",
        tip=("layer {layer}, {map}", "L = {value}", "relative: {relative}"),
    )
    pick = Pick("maps-quantity", "Show", "y", QUANTITY, "value", panels=True)
    return [Drawing((chart,), (pick,), file="maps")] if chart.rows else []


MAPS_BESIDE = Question(
    name="maps",
    row=MapRow,
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="maps",
        name="Maps",
        title="Attention, norm and block",
        place=50,
        folded=True,
        text="<b>attention</b> takes what enters the attention sub-layer, <b>normed</b> the block's own norm before it, "
        "<b>block</b> the whole layer with its residual paths. The relative constant L·|x| / |f(x)| sets the change of the "
        "output against the size of the output. $sentence",
    ),
)
