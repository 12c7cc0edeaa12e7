"""How bad can it get? The worst input found beside the text: as many tokens, none longer than the text's longest."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from howsmooth.maps import Attention
from howsmooth.models import Measurement
from howsmooth.models.measurement import estimate_columns
from howsmooth.settings import whole
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Ladder, Section, number
from howsmooth.study.closed_forms import layer_tasks, task_of_layer
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.question import Extras, Question, Steps, lines_by_place, power_of_ten
from howsmooth.study.scope import Setting
from howsmooth.verbs import worst_case

_SHORT = 32  # tokens, where each search costs seconds
_WORDS = {
    "tie": "most tokens alike and undecided between two",
    "clusters": "a few tokens against all others, which are alike",
    "opposite": "one token opposite to all others, which are alike",
    "half": "all tokens on one line, one twice as long",
}


@final
@dataclass(frozen=True, kw_only=True)
class WorstRow(EstimateRow):
    """The worst constant found (`value`), beside that of the text.

    log_ceiling, ceiling: logarithm and name of the least upper bound.  how: where the search began, in words.
    """

    kind = "worst"
    text: float
    log_ceiling: float | None
    ceiling: str | None = None
    how: str
    improved: bool | None = None


def worst_jobs(setting: Setting, lengths: Sequence[int], steps: int = 5, restarts: int = 4) -> list[Job]:
    """Every layer on the first sample at these lengths.

    steps, restarts: as in `howsmooth.worst_case`.
    """
    return layer_tasks(measure_worst, setting, lengths, 1, steps=steps, restarts=restarts)


@task_of_layer()
def measure_worst(m: Measurement, window: Cells, attn: Attention, x: Tensor, steps: int, restarts: int) -> WorstRow:
    """The text's constant and the worst found."""
    worst = worst_case(attn, n=m.n, radius=m.radius_max, steps=steps, restarts=restarts, seed=m.estimate.seed)
    log, name = (None, None) if worst.bound is None else (worst.bound.log_value, worst.bound.id)
    more = {"text": m.value, "log_ceiling": log, "ceiling": name, "how": in_words(worst.start)}
    more["improved"] = worst.status == "improved"
    return WorstRow.measured(m, window, **estimate_columns(worst.estimate), **more)


def in_words(start: str) -> str:
    """Where a climb began, for a reader.

    >>> in_words("tie: 1 and 1 against the rest (head 2), shaken")
    'most tokens alike and undecided between two, built from head 2'
    """
    family, _, rest = start.partition(":")
    if family not in _WORDS:
        return start
    head = re.search(r"\(head (\d+)", rest)
    return _WORDS[family] + (f", built from head {head[1]}" if head else "")


def tasks(setting: Setting, *, steps: int = 30) -> Steps:
    """Every layer and length, on the first sample.

    steps: measurements of every start of the search.
    """
    moves = whole(steps, "--steps of at least 0", "leave it out for 30")
    yield worst_jobs(setting, setting.scope.lengths, moves)


def _line(rows: list[WorstRow]) -> Cells:
    row = rows[0]
    line: Cells = {"R": row.radius_max, "text": row.text, "worst found": row.value}
    return line | {"ceiling": power_of_ten(row.log_ceiling), "how": row.how}


def on_page(setting: Setting, extras: Extras) -> Steps:
    """A short search at one length."""
    yield worst_jobs(setting, [setting.nearest(_SHORT)])


def sentence(rows: list[WorstRow], data: ReportData) -> str:
    """Where the worst input found is furthest from the text."""
    some = [row for row in rows if row.text > 0]
    if not some:
        return ""
    most = max(some, key=lambda row: row.value / row.text)
    how = f" ({most.how})" if most.how else ""
    return f"In layer {most.layer} at n = {most.n} it is {number(most.value / most.text)} times what the text shows{how}."


def figure(rows: list[WorstRow], data: ReportData) -> list[Drawing]:
    """The text, the worst input found and the ceiling, a row for each layer."""
    names = ("layer", "n", "radius_max", "text", "value", "log_ceiling", "how")
    times = [row.value / row.text if row.text > 0 else None for row in rows]
    cells = [row.columns(*names) | {"times": gain} for row, gain in zip(rows, times, strict=True)]
    chart = Ladder(
        name="worst-inputs",
        title="The text, the worst input found, the ceiling",
        unit="times, log scale",
        source="worst",
        rows=cells,
        label="layer {layer}, n = {n}",
        marks=(("text", "point"), ("value", "hot"), ("log_ceiling", "ball hollow")),
        logs=("log_ceiling",),
        right=("×{times}", ""),
        tip=(
            "layer {layer}, n = {n}, R = {radius_max}",
            "on the text: {text}",
            "worst found: {value}",
            "ceiling: {log_ceiling:log}",
            "{how}",
        ),
    )
    return [Drawing((chart,), file="worst-inputs")] if rows else []


WORST = Question(
    name="worst",
    row=WorstRow,
    tasks=tasks,
    title="L on the text, at the worst input found with tokens no longer, and the least upper bound there",
    table=lambda measured: lines_by_place(_line, measured.of(WorstRow)),
    words=("how",),
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="worst",
        name="Worst inputs",
        title="How bad can it get?",
        place=110,
        folded=True,
        text="The worst input found among tokens no longer than the text's own, beside the text and the smallest upper bound. "
        "$sentence",
        swatches=(("", "the text"), ("hot", "worst found"), ("ball hollow", "ceiling")),
    ),
)
