"""`howsmooth study`: one question of a model each, answered by `study` or by a function of the question's name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from howsmooth.cli import Answer, note, show_table, typed
from howsmooth.cli.options import SweepOptions
from howsmooth.errors import BadInputError
from howsmooth.report.assemble import variants_report
from howsmooth.run import check_folder, check_writable, write_table
from howsmooth.study.jobs import Job, Measured, run_sweep
from howsmooth.study.question import questions
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Setting

_GROUP = "Ask one question of a model."
_QUESTIONS = "howsmooth.study"

WritePage = Callable[[Reader, Setting, Measured], None]


def study(
    model: str,
    *,
    question: str,
    sweep: SweepOptions,
    out: Path | None = None,
    table: Path | None = None,
    **options: Any,
) -> Answer:
    """Answer a question with rows in a results file and a table.

    out: file of the results, .sqlite [default: named after the study]
    table: also write the rows into this file, .csv or .parquet
    """
    return _answer(model, question, sweep, out, table, options, None)


def variants(
    model: str,
    *,
    question: str,
    sweep: SweepOptions,
    page: Path | None = None,
    out: Path | None = None,
    table: Path | None = None,
    **options: Any,
) -> Answer:
    """Answer a question that has a page of its own.

    page: also write a page and figures into this folder
    out: file of the results, .sqlite [default: named after the study]
    table: also write the rows into this file, .csv or .parquet
    """
    if page is not None:
        check_folder(page, "page", force=sweep.resume)
    return _answer(model, question, sweep, out, table, options, page and partial(_write, page))


def _write(page: Path, reader: Reader, setting: Setting, measured: Measured) -> None:
    variants_report(reader, setting, measured, typed()).save(page, force=True)


def _answer(
    model: str,
    name: str,
    sweep: SweepOptions,
    out: Path | None,
    table: Path | None,
    options: dict[str, Any],
    write_page: WritePage | None,
) -> Answer:
    question, results = questions()[name], out or Path(f"{name}-results.sqlite")
    if table is not None:
        check_writable(table)
        if table.suffix not in (".csv", ".parquet") or table.exists():
            raise BadInputError(f"expected a new file named .csv or .parquet, got {table}; choose another name")
    reader = sweep.reader(model)
    setting = sweep.setting(reader, question.lengths)
    jobs, lacking = next(question.tasks(setting, **options)), question.lacking(setting)
    if not jobs and lacking:
        raise BadInputError(f"expected a layer that has an answer, got none ({lacking[0].rstrip('.')}); measure another layer")
    if not jobs:
        raise BadInputError(f"expected the map attention for the study {name}, got {sweep.map!r}; leave --map out")
    for sentence in lacking:
        note(sentence)
    engine, begun = sweep.engine_for(reader.model), sweep.resume

    def run(jobs: list[Job]) -> Measured:
        nonlocal begun
        again, begun = begun, True
        return run_sweep(reader, jobs, results, engine=engine, resume=again, progress=not sweep.quiet)

    measured = question.ask(question.tasks(setting, **options), run)
    if write_page is not None:
        write_page(reader, setting, measured)
    if table is not None:
        write_table(results, table)

    def show() -> None:
        if not sweep.quiet and question.table is not None:
            show_table(question.title, question.table(measured), words=question.words)
            for said in question.remarks(measured):
                note(said)
            for reason in measured.failures[:3]:
                note(f"a task gave nothing: {reason}")
        print(results.resolve())

    rows = [row.to_dict() for row in measured.rows]
    return Answer({"results": str(results.resolve()), "rows": rows, "failures": measured.failures}, show)
