"""How far may every token move before a layer's output moves by more than a part of its length?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from howsmooth.maps import Attention
from howsmooth.models import Measurement
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import ALL, Drawing, Lines, Option, Pick, Section, number
from howsmooth.study.closed_forms import WIDEST, layer_tasks, task_of_layer
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.nearby import SHORT
from howsmooth.study.question import Extras, Question, Steps
from howsmooth.study.radius import certified_radius
from howsmooth.study.scope import Setting


@final
@dataclass(frozen=True, kw_only=True)
class ChangeRow(EstimateRow):
    """Radii within which a layer's output moves by at most `change` of its length.

    size: the mean length of a token.  certified, first_order, attacked: as in `Radius`; nothing where no attack was found.
    """

    kind = "change"
    change: float
    size: float
    certified: float
    first_order: float
    attacked: float | None


def change_jobs(setting: Setting, n: int, change: float) -> list[Job]:
    """Every layer and sample, at one length."""
    return layer_tasks(measure_change, setting, [n], None, change=change)


@task_of_layer(WIDEST)
def measure_change(m: Measurement, window: Cells, attn: Attention, x: Tensor, change: float) -> ChangeRow:
    """The radius that is certified, the one that the norm at the text promises, and an attack's."""
    radius = certified_radius(attn, x, change=change)
    attacked = radius.attacked if math.isfinite(radius.attacked) else None
    ends = {"certified": radius.certified, "first_order": radius.first_order, "attacked": attacked}
    return ChangeRow.measured(m, window, change=change, size=radius.size, **ends)


def on_page(setting: Setting, extras: Extras) -> Steps:
    """Every layer and sample at the longest length up to 16, where a page is to have radii."""
    yield [] if extras.radii is None else change_jobs(setting, setting.nearest(SHORT), extras.radii)


def sentence(rows: list[ChangeRow], data: ReportData) -> str:
    """What was asked, and the layer that may be moved least."""
    least = min(rows, key=lambda row: row.certified / row.size)
    certified = number(least.certified / least.size)
    attacked = "" if least.attacked is None else f", and an attack needs {number(least.attacked / least.size)}"
    return (
        f"How far may every token move before a layer's output moves by more than {100 * least.change:g} % of its length? "
        "No input within the certified radius does it, the attack does, and the truth lies between them; **first order** is "
        "what L at the text alone would promise. "
        f"The smallest certified radius is {certified} of a token's length, in layer {least.layer}"
        f"{attacked}."
    )


def radii_by_layer(rows: Sequence[Cells], unit: str) -> Drawing:
    """Certified radius, first order and attack by layer, for one input or in the mean over all.

    rows: one for each layer and sample, with `certified`, `first_order`, `attacked`, and the `size` of a token.
    """
    samples = sorted({row["sample"] for row in rows})
    chart = Lines(
        name="radii",
        title="Radii by layer, {sample}",
        unit=unit,
        source="change",
        rows=rows,
        curves=(("certified", "certified", "ball"), ("first order", "first_order", "point"), ("attack", "attacked", "hot")),
        over="size",
        y_label="r / |x|",
        tip=("layer {layer}, input {input}", "{series}: {shown} of a token's length"),
        tip_all=("layer {layer}, {count} inputs", "{series}: {shown} of a token's length", "{low} to {high}"),
    )
    several = (Option(ALL, "all", "geometric mean over inputs"),) if len(samples) > 1 else ()
    options = several + tuple(Option(s, f"input {s + 1}", f"input {s + 1}") for s in samples)
    pick = Pick("radii-input", "Input", "sample", options, options[0].value)
    return Drawing((chart,), (pick,), file="radii")


def figure(rows: list[ChangeRow], data: ReportData) -> list[Drawing]:
    """Radii of every layer and sample."""
    names = ("layer", "n", "sample", "change", "size", "certified", "first_order", "attacked")
    cells = [row.columns(*names) | {"input": row.sample + 1} for row in rows]
    return [radii_by_layer(cells, f"n = {rows[0].n}, log scale; shaded: range over inputs")] if rows else []


CHANGES = Question(
    name="change",
    row=ChangeRow,
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="radii",
        name="Radii",
        title="How far tokens may move",
        place=40,
        text="$sentence",
        swatches=(("ball", "certified"), ("", "first order"), ("hot", "attack")),
    ),
)
