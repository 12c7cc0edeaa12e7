"""A question is one object in one file: its rows, tasks, table, sentence, figure and section. Whoever shows answers loops over
`questions()`, which finds every question that a module of this package defines."""

import functools
import importlib
import math
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import geometric_mean
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, final

from howsmooth.errors import BadInputError
from howsmooth.models import Capture, Measurement
from howsmooth.study.charts import Drawing, Section
from howsmooth.study.jobs import Cells, EstimateRow, Job, Measured, Row, SomeRow
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, one_length

if TYPE_CHECKING:
    from howsmooth.study.answers import ReportData

# Batches of jobs, one after the other; what a batch gave is sent back before the next one is asked for.
Steps: TypeAlias = Generator[list[Job], Measured, None]


@final
@dataclass(frozen=True)
class Beside:
    """Rows that are made of the measurement of a layer, on the first sample, rather than measured apart from it.

    rows: of the layer's capture and its measurement, with the part and the columns of its window.
    lengths: at which a page has them.  slow: takes as long as a measurement, so that each layer is a task of its own.
    """

    rows: Callable[[Capture, Measurement, Part, Cells], Iterable[Row]]
    lengths: Callable[[Setting], Sequence[int]]
    slow: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Question(Generic[SomeRow]):
    """One question about a model, from what is measured to what a person reads.

    name: of the study, `howsmooth study NAME`.  row: the type of its answers.
    tasks: the jobs of the study, from a setting and options by keyword, in batches where one depends on another.
    table: the lines of its table, with `title` above; a question without one is no study of its own.
    words: columns of the table that are words.  lengths: that are usual, for a reader and so many samples.
    lacking: a sentence for each reason why layers have no answer.  remarks: what to say beside the table.
    beside: how rows come with those of layers, where they do.  on_page: the jobs of a page, in batches as well.
    sentence, figure: what the rows of a report say, `**strong**` where it matters, and their charts.
    found: whether that is worth a look; the page folds what is not.
    section: its place on the page, without one it is not there.
    """

    name: str
    row: type[SomeRow]
    tasks: Callable[..., Steps] = lambda setting: nothing()
    title: str = ""
    table: Callable[[Measured], list[Cells]] | None = None
    words: tuple[str, ...] = ()
    lengths: Callable[[Reader, int], tuple[int, ...]] = one_length
    lacking: Callable[[Setting], tuple[str, ...]] = lambda setting: ()
    remarks: Callable[[Measured], list[str]] = lambda measured: []
    beside: Beside | None = None
    on_page: Callable[[Setting, "Extras"], Steps] = lambda setting, extras: nothing()
    sentence: Callable[[list[SomeRow], "ReportData"], str] = lambda rows, data: ""
    figure: Callable[[list[SomeRow], "ReportData"], Sequence[Drawing]] = lambda rows, data: ()
    found: Callable[[list[SomeRow], "ReportData"], bool] = lambda rows, data: True
    section: Section | None = None

    def said_of(self, data: "ReportData") -> str:
        """The sentence of a report's rows."""
        return self.sentence(data.of(self.row), data)

    def folded(self, data: "ReportData") -> bool:
        """Whether the page shows one line of it until it is opened."""
        return self.section is not None and (self.section.folded or not self.found(data.of(self.row), data))

    def drawings(self, data: "ReportData") -> Sequence[Drawing]:
        """The charts of a report's rows."""
        return self.figure(data.of(self.row), data)

    def ask(self, steps: Steps, run: Callable[[list[Job]], Measured]) -> Measured:
        """What the tasks give, batch after batch; refused where not one of them answers the question."""
        found = follow(steps, run)
        if not found.of(self.row):
            reason = found.failures[0] if found.failures else "got none; study growth measures any layer"
            raise BadInputError(f"expected a layer that is a formula of its weights, {reason}")
        return found


@final
@dataclass(frozen=True)
class Extras:
    """What a page has only where it is wanted.

    radii: the part of its length that a layer's output may move by.  variants: other kinds of attention in the layers.
    """

    radii: float | None = None
    variants: bool = False


def nothing() -> Steps:
    """No jobs."""
    yield []


def later(steps: Steps) -> Steps:
    """Steps that begin once all layers are measured."""
    yield []
    yield from steps


def follow(steps: Steps, run: Callable[[list[Job]], Measured]) -> Measured:
    """What batches of jobs give, one after the other."""
    found, jobs = Measured(), next(steps, None)
    while jobs is not None:
        last = run(jobs) if jobs else Measured()
        found += last
        try:
            jobs = steps.send(last)
        except StopIteration:
            break
    return found


@functools.cache
def questions() -> dict[str, Question[Any]]:
    """Every question by name: those that modules of this package hold."""
    import howsmooth.study as package

    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return found_in(modules)


def found_in(modules: Sequence[ModuleType]) -> dict[str, Question[Any]]:
    """The questions that modules define, by name; refused where two have one name."""
    named: dict[str, Question[Any]] = {}
    for value in [value for module in modules for value in vars(module).values() if isinstance(value, Question)]:
        if named.setdefault(value.name, value) is not value:
            raise ValueError(f"expected one question {value.name!r}, got two; give the other another name")
    return named


def lines_by_place(cells: Callable[[list[Any]], Cells], rows: Sequence[Row]) -> list[Cells]:
    """One line of a table for each layer and length: what `cells` makes of the rows there."""
    there = groupby(sorted(rows, key=_place), lambda row: (row.layer, row.n))
    return [{"layer": layer, "n": n} | cells(list(own)) for (layer, n), own in there]


def mean_lines(column: Callable[[Any], str], rows: Sequence[EstimateRow]) -> list[Cells]:
    """One line for each layer and length: the geometric mean over samples of the values that go into the same column."""

    def cells(some: list[EstimateRow]) -> Cells:
        values: dict[str, list[float]] = defaultdict(list)
        for row in some:
            values[column(row)].append(row.value)
        return {name: mean(own) for name, own in values.items()}

    return lines_by_place(cells, rows)


def _place(row: Row) -> tuple[int, int]:
    return row.layer, row.n


def mean(values: Sequence[float]) -> float:
    """The geometric mean; zero where one is, or where there are none."""
    return geometric_mean(values) if values and min(values) > 0 else 0.0


def power_of_ten(log: float | None) -> float | str:
    """`exp(log)`, a power of ten where it is huge."""
    return "–" if log is None else math.exp(log) if log < 60 else f"10^{log / math.log(10):.0f}"
