"""Which heads? Every head of a layer alone, through its own part of the output projection."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from howsmooth.errors import BadInputError
from howsmooth.study.charts import Drawing, Heat, Option, Pick, Section
from howsmooth.study.jobs import EstimateRow, Job
from howsmooth.study.question import Extras, Question, Steps
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

if TYPE_CHECKING:
    from howsmooth.study.answers import ReportData

_LONGEST = 256  # tokens up to which a page has every head


@final
@dataclass(frozen=True, kw_only=True)
class HeadRow(EstimateRow):
    """A head alone, on the first sample."""

    kind = "head"
    head: int

    @property
    def place(self) -> tuple[int, ...]:
        """What rows are ordered by."""
        return self.layer, self.n, self.sample, self.head


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


def on_page(setting: Setting, extras: Extras) -> Steps:
    """Heads at lengths up to 256."""
    lengths = sorted(set(setting.scope.lengths))
    yield head_jobs(setting, [n for n in lengths if n <= _LONGEST] or lengths[:1])


def figure(rows: list[HeadRow], data: "ReportData") -> list[Drawing]:
    """L of every head alone, at the longest length where heads were measured."""
    if not rows:
        return []
    lengths = sorted({row.n for row in rows})
    chart = Heat(
        name="layers-by-heads",
        title="L of every head alone, n = {n}",
        unit="times; one colour scale for all lengths",
        source="head",
        rows=[row.columns("layer", "head", "n", "value") for row in rows],
        x="head",
        x_label="head",
        tip=("layer {layer}, head {head}",),
        each="n = {n}: L = {value}",
    )
    pick = Pick("heads-length", "Length", "n", tuple(Option(n, f"n = {n}") for n in lengths), lengths[-1])
    return [Drawing((chart,), (pick,), file="layers-by-heads")]


HEADS = Question(
    name="heads",
    row=HeadRow,
    on_page=on_page,
    figure=figure,
    section=Section(
        id="heads",
        name="Heads",
        title="Which heads",
        place=35,
        text="Each head measured alone, through its own part of the output projection. Heads can add up or cancel in "
        "the layer.",
    ),
)
