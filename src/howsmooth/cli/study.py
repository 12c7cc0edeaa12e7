"""`howsmooth study`: one question of a model each."""

from pathlib import Path
from typing import Any

from howsmooth.cli import Answer, note, show_table, typed
from howsmooth.cli.options import EngineName, engine_of
from howsmooth.errors import BadInputError
from howsmooth.models import MapName
from howsmooth.report.assemble import variants_report
from howsmooth.run import check_folder, check_writable, progress_bar, write_table
from howsmooth.study.jobs import Job, Measured, run_sweep
from howsmooth.study.question import questions
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Scope, settle
from howsmooth.study.swapped import kind_names

STUDIES = tuple(name for name, question in questions().items() if question.table is not None)


def study(
    name: str,
    model: str,
    *,
    text: str | None = None,
    lengths: tuple[int, ...] | None = None,
    layers: tuple[int, ...] | None = None,
    samples: int = 8,
    map: MapName = "attention",
    factors: tuple[float, ...] | None = None,
    steps: int | None = None,
    kinds: str | None = None,
    page: Path | None = None,
    out: Path | None = None,
    table: Path | None = None,
    resume: bool = False,
    engine: EngineName = "local",
    address: str | None = None,
    workers: int | None = None,
    side: str | None = None,
    device: str = "auto",
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Answer:
    """Ask one question of a model.

    growth: L against n, fitted. layers: every layer and head at one length. radius: L against the size of the tokens.
    norms: with and without the norm in front. bounds: measured against each bound. splitting: does splitting a token pay.
    worst: the worst input found beside the text. variants: the same layers with other kinds of attention put in.

    name: one of growth, layers, radius, norms, bounds, splitting, worst, variants
    factors: radius, variants: what the tokens are multiplied by, as in 0.5,1,2
    steps: worst: measurements of every start of the search; 30 by default
    kinds: variants: kinds of attention to put in, as in sigmoid,linear
    page: variants: also write a page and figures into this folder
    out: results file, .sqlite; <study>-results.sqlite by default
    table: also write the rows, .csv or .parquet

    Example: howsmooth study growth demo --lengths 8,16,32,64,128,136,256,512 --samples 8
    """
    if name not in STUDIES:
        raise BadInputError(f"expected a study among {', '.join(STUDIES)}, got {name!r}; pick one of them")
    for option, given, studies in (
        ("--factors", factors, ("radius", "variants")),
        ("--steps", steps, ("worst",)),
        ("--kinds", kinds, ("variants",)),
        ("--page", page, ("variants",)),
    ):
        if given is not None and name not in studies:
            only = f"the study {studies[0]} alone" if len(studies) == 1 else f"the studies {' and '.join(studies)} alone"
            raise BadInputError(f"expected {option} with {only}, got it with {name}; leave it out")
    put_in = kind_names(None if kinds is None else [part.strip() for part in kinds.split(",") if part.strip()])
    if page is not None:
        check_folder(page, "page", force=resume)
    results = out or Path(f"{name}-results.sqlite")
    if table is not None:
        check_writable(table)
        if table.suffix not in (".csv", ".parquet") or table.exists():
            raise BadInputError(f"expected a new file named .csv or .parquet, got {table}; choose another name")
    given = {"factors": factors, "steps": steps, "kinds": kinds and put_in}
    more: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    question, reader = questions()[name], Reader.by_name(model, text, side, device)
    setting = settle(reader, Scope(lengths or question.lengths(reader, samples), samples, layers, map, tol, certify, seed))
    jobs, lacking = next(question.tasks(setting, **more)), question.lacking(setting)
    if not jobs and lacking:
        raise BadInputError(f"expected a layer that has an answer, got none ({lacking[0].rstrip('.')}); measure another layer")
    if not jobs:
        raise BadInputError(f"expected the map attention for the study {name}, got {map!r}; leave --map out")
    for sentence in lacking:
        note(sentence)
    hands, begun = engine_of(engine, address, workers, reader.model, device), resume

    def run(jobs: list[Job]) -> Measured:
        nonlocal begun
        again, begun = begun, True
        return run_sweep(reader, jobs, results, engine=hands, resume=again, progress=progress_bar(name, quiet=quiet))

    measured = question.ask(question.tasks(setting, **more), run)
    if page is not None:
        variants_report(reader, setting, measured, typed()).save(page, force=True)
    if table is not None:
        write_table(results, table)

    def show() -> None:
        if not quiet and question.table is not None:
            show_table(question.title, question.table(measured), words=question.words)
            for said in question.remarks(measured):
                note(said)
            for reason in measured.failures[:3]:
                note(f"a task gave nothing: {reason}")
        print(results.resolve())

    rows = [row.to_dict() for row in measured.rows]
    return Answer({"results": str(results.resolve()), "rows": rows, "failures": measured.failures}, show)
