"""Attention, norm and block: maps of the same layer side by side, each with the change of its output against its size."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import final

from howsmooth.errors import BadInputError
from howsmooth.models import MapName
from howsmooth.study.jobs import EstimateRow, Job
from howsmooth.study.question import Question, Steps
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

SIDE_BY_SIDE: tuple[MapName, ...] = ("attention", "normed", "block")
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


def tasks(setting: Setting) -> Steps:
    """The maps beside the one that is studied."""
    yield map_jobs(setting)


MAPS_BESIDE = Question(name="maps", row=MapRow, tasks=tasks)
