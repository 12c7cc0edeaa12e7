"""Does splitting a token pay? As a cloud of mass, a token may be split into two halves that move apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import final

from torch import Tensor

from howsmooth.kernels.kinds.kind import counts_tokens
from howsmooth.maps import Attention
from howsmooth.models import Measurement
from howsmooth.models.measurement import estimate_columns
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Ladder, Section, number
from howsmooth.study.closed_forms import layer_tasks, task_of_layer, unanswered
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.question import Extras, Question, Steps, lines_by_place
from howsmooth.study.scope import Setting
from howsmooth.verbs import splitting

_MIDDLE = 128  # tokens


@final
@dataclass(frozen=True, kw_only=True)
class SplittingRow(EstimateRow):
    """The constant where one token is split (`value`) and where tokens move whole (`moved`).

    gain: their ratio where that is finite.  certain: whether the intervals say so.  token: the one to split.
    """

    kind = "splitting"
    moved: float
    gain: float | None = None
    pays: bool | None = None
    certain: bool | None = None
    token: int | None = None


def splitting_jobs(setting: Setting, lengths: Sequence[int] | None = None, samples: int | None = None) -> list[Job]:
    """Every layer, length and sample, or the first few samples."""
    return layer_tasks(measure_splitting, setting, lengths, samples, lambda kind: counts_tokens(kind))


@task_of_layer()
def measure_splitting(m: Measurement, window: Cells, attn: Attention, x: Tensor) -> SplittingRow:
    """What splitting a token does, and what moving them does."""
    s = splitting(attn, x, tol=m.estimate.tol, seed=m.estimate.seed)
    gain = s.gain if math.isfinite(s.gain) else None
    more = {"moved": s.moved.value, "gain": gain, "pays": s.pays, "certain": s.certain, "token": s.token}
    return SplittingRow.measured(m, window, **estimate_columns(s.split), **more)


def tasks(setting: Setting) -> Steps:
    """Every layer, length and sample."""
    yield splitting_jobs(setting)


def _line(rows: list[SplittingRow]) -> Cells:
    gains = [row.gain for row in rows if row.gain is not None]
    line: Cells = {"inputs": len(rows), "pays": sum(bool(row.pays) for row in rows)}
    return line | ({"median gain": median_high(gains), "largest gain": max(gains)} if gains else {})


def on_page(setting: Setting, extras: Extras) -> Steps:
    """The first sample at a middle length."""
    yield splitting_jobs(setting, [setting.nearest(_MIDDLE)], samples=1)


def sentence(rows: list[SplittingRow], data: ReportData) -> str:
    """In how many cases splitting pays, and where most."""
    paid = [row for row in rows if row.value > row.moved]
    if not paid:
        return f"Splitting pays in none of {len(rows)} cases."
    most = max(paid, key=lambda row: row.value / row.moved if row.moved > 0 else math.inf)
    gain = f": {number(most.value / most.moved)} times" if most.moved > 0 else ""
    return f"Splitting pays in {len(paid)} of {len(rows)} cases, most in layer {most.layer} at n = {most.n}{gain}."


def figure(rows: list[SplittingRow], data: ReportData) -> list[Drawing]:
    """Moving tokens whole beside splitting one, a row for each layer and length."""
    times = [row.value / row.moved if row.value > row.moved > 0 else None for row in rows]
    cells = [row.columns("layer", "n", "moved", "value") | {"times": k} for row, k in zip(rows, times, strict=True)]
    chart = Ladder(
        name="splitting",
        title="Moving tokens whole, or splitting one",
        unit="times, log scale",
        source="splitting",
        rows=cells,
        label="layer {layer}, n = {n}",
        marks=(("moved", "point"), ("value", "ball hollow")),
        right=("×{times}", "no gain"),
        x_label="local constant, times",
        tip=("layer {layer}, n = {n}", "whole: {moved}", "split: {value}"),
    )
    return [Drawing((chart,), file="splitting")] if rows else []


SPLITTING = Question(
    name="splitting",
    row=SplittingRow,
    tasks=tasks,
    title="splitting a token against moving tokens; it pays where the gain is above 1",
    table=lambda measured: lines_by_place(_line, measured.of(SplittingRow)),
    lacking=lambda setting: unanswered(setting, "splitting", lambda kind: counts_tokens(kind)),
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="splitting",
        name="Splitting",
        title="Does splitting a token pay?",
        place=100,
        folded=True,
        text="Seen as a cloud of mass, a token may be split into two halves that move apart. $sentence",
        swatches=(("", "tokens move whole"), ("ball hollow", "one token is split")),
    ),
)
