"""How far may every token move before a layer's output moves by more than a part of its length?"""

import math
from dataclasses import dataclass
from typing import final

from torch import Tensor

from howsmooth.maps import Attention
from howsmooth.models import Measurement
from howsmooth.study.closed_forms import WIDEST, layer_tasks, task_of_layer
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.nearby import SHORT
from howsmooth.study.question import Question, Steps
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


def tasks(setting: Setting, *, change: float = 0.1) -> Steps:
    """Every layer and sample, at the longest length up to 16.

    change: the part of its length that an output may move by.
    """
    yield change_jobs(setting, setting.nearest(SHORT), change)


CHANGES = Question(name="change", row=ChangeRow, tasks=tasks)
