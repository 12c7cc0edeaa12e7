"""`howsmooth report` and `howsmooth demo`."""

from functools import partial
from pathlib import Path

from howsmooth.cli import Answer, show_table, typed
from howsmooth.cli.options import EngineName, engine_of
from howsmooth.models import MapName
from howsmooth.report.assemble import inspect_into
from howsmooth.run import check_folder, progress_bar
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Scope, fitting_lengths, settle


def report(
    model: str,
    *,
    text: str | None = None,
    lengths: tuple[int, ...] | None = None,
    layers: tuple[int, ...] | None = None,
    samples: int = 8,
    map: MapName = "attention",
    engine: EngineName = "local",
    address: str | None = None,
    workers: int | None = None,
    out: Path = Path("report"),
    resume: bool = False,
    force: bool = False,
    figures: bool = True,
    variants: bool = False,
    side: str | None = None,
    device: str = "auto",
    tol: float = 1e-3,
    certify: float | None = None,
    radii: float | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Answer:
    """Measure every layer and head of a model on a text, and write a page about it.

    out: folder for the page, figures, tables and results
    figures: also draw the figures as PDF and PNG
    variants: also put other kinds of attention into the layers, on two samples
    radii: also radii within which a layer's output moves by at most this part of its length

    Example: howsmooth report demo --text alice.txt --lengths 16,32,64,128 --out report
    """
    check_folder(out, "report", resume=resume, force=force)  # before the model is loaded
    reader = Reader.by_name(model, text, side, device)
    scope = Scope(lengths or fitting_lengths(reader, samples), samples, layers, map, tol, certify, seed)
    written, page = inspect_into(
        reader,
        settle(reader, scope),
        out,
        typed(),
        engine=engine_of(engine, address, workers, reader.model, device),
        resume=resume,
        force=force,
        figures=figures,
        radii=radii,
        variants=variants,
        progress=progress_bar("measuring", quiet=quiet),
    )

    def show() -> None:
        if not quiet:
            show_table("L, geometric mean over samples", written.data.growth.table(), words=("breaks",))
            print("", *written.answer, *written.findings, "", sep="\n")
        print(page.resolve())

    return Answer({"page": str(page.resolve()), **written.to_dict()}, show)


def demo(
    *,
    out: Path = Path("demo-report"),
    quick: bool = False,
    workers: int | None = None,
    resume: bool = False,
    force: bool = False,
    figures: bool = True,
    device: str = "auto",
    quiet: bool = False,
) -> Answer:
    """The report of a small BERT that comes with the package, on Alice in Wonderland.

    out: folder for the page, figures, tables and results
    quick: two layers, three lengths, no figures: seconds, not minutes
    figures: also draw the figures as PDF and PNG

    Example: howsmooth demo --out demo-report
    """
    few = (
        partial(report, lengths=(8, 12, 16), layers=(0, 3), samples=2, figures=False)
        if quick
        else partial(report, figures=figures)
    )
    return few("demo", out=out, workers=workers, resume=resume, force=force, device=device, quiet=quiet)
