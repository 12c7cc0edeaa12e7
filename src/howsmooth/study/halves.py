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
from howsmooth.study.closed_forms import layer_tasks, task_of_layer, unanswered
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.question import Question, Steps, lines_by_place
from howsmooth.study.scope import Setting
from howsmooth.verbs import splitting


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


SPLITTING = Question(
    name="splitting",
    row=SplittingRow,
    tasks=tasks,
    title="splitting a token against moving tokens; it pays where the gain is above 1",
    table=lambda measured: lines_by_place(_line, measured.of(SplittingRow)),
    lacking=lambda setting: unanswered(setting, "splitting", lambda kind: counts_tokens(kind)),
)
