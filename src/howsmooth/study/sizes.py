"""How does L depend on the size of the tokens? All tokens of the text are multiplied by one factor after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from howsmooth.study.jobs import EstimateRow
from howsmooth.study.question import Question, Steps, mean_lines
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, checked_factors, parts, task_of_part

FACTORS = (0.125, 0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0, 8.0)


@final
@dataclass(frozen=True, kw_only=True)
class SizeRow(EstimateRow):
    """A layer at tokens that are all multiplied by one factor."""

    kind = "radius"
    factor: float


def tasks(setting: Setting, *, factors: Sequence[float] = FACTORS) -> Steps:
    """Every layer, length and sample.

    factors: what the tokens are multiplied by; 1 leaves them as they are.
    """
    checked = checked_factors(factors)
    yield [part.job(measure_sizes, factors=checked) for part in parts(setting)]


@task_of_part
def measure_sizes(reader: Reader, part: Part, factors: list[float]) -> Iterator[SizeRow]:
    """A row for every factor, layer and window."""
    for f in factors:
        yield from (SizeRow.measured(m, window, factor=f) for m, window in part.measure(reader, factor=f))


SIZES = Question(
    name="radius",
    row=SizeRow,
    tasks=tasks,
    title="L where all tokens are multiplied by",
    table=lambda measured: mean_lines(lambda row: f"×{row.factor:g}", measured.of(SizeRow)),
)
