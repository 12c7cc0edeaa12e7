"""Which heads? Every head of a layer alone, through its own part of the output projection."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from howsmooth.errors import BadInputError
from howsmooth.study.jobs import EstimateRow, Job
from howsmooth.study.question import Question, Steps
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

_LONGEST = 256  # tokens up to which a page has every head


@final
@dataclass(frozen=True, kw_only=True)
class HeadRow(EstimateRow):
    """A head alone, on the first sample."""

    kind = "head"
    head: int


def head_jobs(setting: Setting, lengths: Sequence[int] | None = None) -> list[Job]:
    """Every head alone, on the first sample, at these lengths."""
    if setting.scope.map not in ("attention", "normed"):
        return []
    return [part.job(measure_heads) for part in parts(setting, lengths, samples=1, layers=1)]


@task_of_part
def measure_heads(reader: Reader, part: Part) -> Iterator[HeadRow]:
    """A row for every head; none where heads cannot be told apart."""
    captured = part.capture(reader)
    for layer in part.layers:
        one = replace(part, layers=(layer,))
        for head in range(captured.heads(layer)):
            try:
                measured = one.measure(reader, head=head)
            except BadInputError:  # a layer that is not cut has no heads to speak of
                break
            yield from (HeadRow.measured(m, window) for m, window in measured)


def tasks(setting: Setting) -> Steps:
    """Heads at every length."""
    yield head_jobs(setting)


HEADS = Question(name="heads", row=HeadRow, tasks=tasks)
