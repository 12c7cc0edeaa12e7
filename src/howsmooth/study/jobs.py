"""Rows, what questions answer with, and the jobs that measure them: here in memory, or as a sweep that survives."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Self, TypeVar, final

from howsmooth.errors import BadInputError
from howsmooth.models import Measurement
from howsmooth.progress import Progress, progress_bar
from howsmooth.run import Engine, Plan, read, sweep, versions
from howsmooth.study.reader import Reader, Source, prepare

if TYPE_CHECKING:
    import pandas

Cells = dict[str, Any]  # a row as JSON has it, or a line of a table
SomeRow = TypeVar("SomeRow", bound="Row")
P = ParamSpec("P")
K = TypeVar("K")
T = TypeVar("T")
_KINDS: "dict[str, type[Row]]" = {}


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, keys and items in order of appearance.

    >>> grouped([3, 1, 5, 4], lambda k: k % 2)
    {1: [3, 1, 5], 0: [4]}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def rare() -> Any:
    """A column that is left out of the rows that have nothing in it."""
    return field(default=None, metadata={"rare": True})


@dataclass(frozen=True, kw_only=True)
class Row:
    """One answer of a question. kind: the name of its type in tables and results files, known once the class is defined."""

    kind: ClassVar[str] = ""
    model: str | None = None
    layer: int
    map: str | None = rare()
    n: int

    def __init_subclass__(cls) -> None:
        if cls.kind:
            _KINDS[cls.kind] = cls

    @classmethod
    def of(cls, cells: Mapping[str, Any]) -> Self:
        """A row from its cells; cells that it has no column for are left alone."""
        columns = fields(cls)
        missing = [c.name for c in columns if c.default is MISSING and c.default_factory is MISSING and c.name not in cells]
        if missing:
            raise BadInputError(f"expected {missing[0]!r} in every row, got one with {', '.join(cells)}; add it")
        return cls(**{c.name: cells[c.name] for c in columns if c.name in cells})

    def to_dict(self) -> Cells:
        """Plain numbers, strings and lists, under the names of the columns."""
        cells = {c.name: getattr(self, c.name) for c in fields(self)}
        without = {c.name for c in fields(self) if c.metadata.get("rare") and cells[c.name] is None}
        return {"kind": self.kind} | {name: value for name, value in cells.items() if name not in without}

    def columns(self, *names: str) -> Cells:
        """Some columns."""
        return {name: getattr(self, name) for name in names}

    @property
    def place(self) -> tuple[int, ...]:
        """What rows of one type are ordered by: layer and length, then the sample."""
        return self.layer, self.n


@dataclass(frozen=True, kw_only=True)
class EstimateRow(Row):
    """A constant with its interval, and the window of the text that it belongs to.

    radius, radius_max: root mean square and largest length of the tokens.  cut: whether attention is a formula of its weights.
    """

    value: float
    lower: float | None = None
    upper: float | None = None
    confidence: float | None = None
    status: str | None = None
    steps: int | None = None
    seed: int | None = None
    radius: float | None = None
    radius_max: float | None = None
    cut: bool | None = rare()
    sample: int = 0
    start: int | None = None
    seconds: float | None = None

    @property
    def place(self) -> tuple[int, ...]:
        """What rows of one type are ordered by."""
        return self.layer, self.n, self.sample

    @classmethod
    def measured(cls, m: Measurement, window: Cells, **more: Any) -> Self:
        """A row from a measurement at a window; more: its other columns, in place of those of the measurement."""
        return cls.of(m.row(cls.kind) | window | more)


def row_of(cells: Mapping[str, Any]) -> Row | None:
    """The row that cells say they are, by their `kind`; nothing where no question has such rows."""
    if "kind" not in cells:
        raise BadInputError(f"expected 'kind' in every row, got one with {', '.join(cells)}; add it")
    kind = _KINDS.get(cells["kind"])
    return None if kind is None else kind.of(cells)


def task(measure: Callable[P, Iterable[Row]]) -> Callable[P, list[Cells]]:
    """A task of a study, found by name in other processes: what it measures, as a results file keeps it."""

    @functools.wraps(measure)
    def stored(*args: P.args, **kwargs: P.kwargs) -> list[Cells]:
        return [row.to_dict() for row in measure(*args, **kwargs)]

    return stored


@final
@dataclass(frozen=True)
class Job:
    """A task of a study: a function that `task` marks, and its arguments beside the reader."""

    function: Callable[..., list[Cells]]
    arguments: dict[str, Any]


@final
@dataclass(frozen=True)
class Measured:
    """What jobs gave. failures: the reasons of those that gave nothing."""

    rows: tuple[Row, ...] = ()
    failures: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    def of(self, kind: type[SomeRow]) -> list[SomeRow]:
        """The rows of one type."""
        return [row for row in self.rows if isinstance(row, kind)]

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(self.rows + other.rows, self.failures + other.failures, self.versions | other.versions)


def plan(source: Source, jobs: Sequence[Job]) -> Plan:
    """The jobs as a plan for workers that load the source once."""
    if not jobs:
        raise BadInputError("expected a study with something to measure, got nothing; ask for a layer and a length")
    setup: dict[str, Any] = {"setup": prepare, "setup_arguments": source.to_dict()}
    return functools.reduce(Plan.__add__, (Plan.of(job.function, [job.arguments], **setup) for job in jobs))


def run_here(reader: Reader, jobs: Sequence[Job], progress: Progress | bool | None = None) -> Measured:
    """The jobs one after the other in this process; the first that fails ends it."""
    cells: list[Cells] = []
    with progress_bar("measuring", progress) as shown:
        shown.begin(len(jobs))
        for job in jobs:
            cells += job.function(reader, **job.arguments)
            shown.advance()
    return Measured(_rows(cells), (), versions())


def run_sweep(
    reader: Reader,
    jobs: Sequence[Job],
    path: str | Path,
    *,
    engine: Engine | None = None,
    resume: bool = False,
    progress: Progress | bool | None = None,
    command: str | None = None,
    empty: bool = False,
) -> Measured:
    """The jobs as a sweep into a results file; rows of earlier plans in it are left out.

    reader: from `Reader.by_name`, so that other processes can load it too; work in this process loads nothing again.
    empty: jobs that give no rows are no mistake.
    """
    if reader.source is None:
        raise BadInputError("expected a model and a text by name, got ones built in memory; use run_here")
    whole = plan(reader.source, jobs)
    sweep(whole, path, engine=engine, resume=resume, progress=progress, command=command, context=reader)
    keys = {task.key for task in whole.tasks}
    ended = [record for record in read(path) if record.key in keys]
    cells = [row for record in ended if record.status == "done" for row in record.value]
    failures = [record.reason or "no reason given" for record in ended if record.status == "failed"]
    if not cells and (failures or not empty):
        raise BadInputError(failures[0] if failures else "expected rows, got none; nothing could be measured")
    return Measured(_rows(cells), tuple(failures), versions())


def _rows(cells: Sequence[Cells]) -> tuple[Row, ...]:
    return tuple(row for some in cells if (row := row_of(some)) is not None)


def to_frame(lines: Sequence[Cells]) -> "pandas.DataFrame":
    """Rows or lines as a pandas data frame, without the columns that are lists."""
    import pandas

    return pandas.DataFrame.from_records([{k: v for k, v in line.items() if not isinstance(v, list)} for line in lines])
