"""Run the jobs of a study: here and now in memory, or as a sweep that survives and may use many processes."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from howsmooth.errors import BadInputError
from howsmooth.run import Engine, Plan, Progress, read, sweep, versions
from howsmooth.study.reader import Reader, Source, prepare

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]
_TEXT = ("shares", "bounds", "norms", "within", "lower_ends", "upper_ends")  # columns that are lists, of no use in a table


@final
@dataclass(frozen=True)
class Job:
    """A task of a study: a function of a reader that gives rows, and its arguments."""

    function: Callable[..., list[Row]]
    arguments: dict[str, Any]


@final
@dataclass(frozen=True)
class Measured:
    """What jobs gave. failures: the reasons of those that gave nothing."""

    rows: tuple[Row, ...]
    failures: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    def of(self, kind: str) -> list[Row]:
        """The rows of one kind: `layer`, `held`, `map`, `head`, `bounds`, `near`, `change`, `splitting`, `worst`, `radius`,
        `norms`."""
        return [row for row in self.rows if row["kind"] == kind]


def plan(source: Source, jobs: Sequence[Job]) -> Plan:
    """The jobs as a plan for workers that load the source once."""
    if not jobs:
        raise BadInputError("expected a study with something to measure, got nothing; ask for a layer and a length")
    setup: dict[str, Any] = {"setup": prepare, "setup_arguments": source.to_dict()}
    return functools.reduce(Plan.__add__, (Plan.of(job.function, [job.arguments], **setup) for job in jobs))


def run_here(reader: Reader, jobs: Sequence[Job], progress: Progress | None = None) -> Measured:
    """The jobs one after the other in this process; the first that fails ends it."""
    if progress is not None and not isinstance(progress, Progress):
        raise BadInputError(f"expected progress as a Progress of howsmooth.run, got {type(progress).__name__}; leave it out")
    rows: list[Row] = []
    with progress or Progress() as shown:
        shown.begin(len(jobs), 0)
        for job in jobs:
            rows += job.function(reader, **job.arguments)
            shown.advance(False)
    return Measured(tuple(rows), (), versions())


def run_sweep(
    reader: Reader,
    jobs: Sequence[Job],
    path: str | Path,
    *,
    engine: Engine | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
    empty: bool = False,
) -> Measured:
    """The jobs as a sweep into a results file; rows of earlier plans in it are left out.

    empty: jobs that give no rows are no mistake.

    reader: from `Reader.by_name`, so that other processes can load it too; work in this process loads nothing again.
    """
    if reader.source is None:
        raise BadInputError("expected a model and a text by name, got ones built in memory; use run_here")
    whole = plan(reader.source, jobs)
    sweep(whole, path, engine=engine, resume=resume, progress=progress, command=command, context=reader)
    keys = {task.key for task in whole.tasks}
    ended = [record for record in read(path) if record.key in keys]
    rows = [row for record in ended if record.status == "done" for row in record.value]
    failures = [record.reason or "no reason given" for record in ended if record.status == "failed"]
    if not rows and (failures or not empty):
        raise BadInputError(failures[0] if failures else "expected rows, got none; nothing could be measured")
    return Measured(tuple(rows), tuple(failures), versions())


def to_frame(rows: Sequence[Row]) -> "pandas.DataFrame":
    """Rows as a pandas data frame, without the columns that are lists."""
    import pandas

    return pandas.DataFrame.from_records([{k: v for k, v in row.items() if k not in _TEXT} for row in rows])
