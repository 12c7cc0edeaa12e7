"""`howsmooth report` and `howsmooth demo`."""

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli import options
from howsmooth.cli.root import Told, command, show_table, typed
from howsmooth.report.assemble import inspect_into
from howsmooth.run import check_folder, progress_bar
from howsmooth.study.layers import Question, settle
from howsmooth.study.lengths import fitting_lengths
from howsmooth.study.reader import Reader

Out = Annotated[Path, typer.Option(help="folder for the page, figures, tables and results")]
Figures = Annotated[bool, typer.Option(help="also draw the figures as PDF and PNG")]


@command()
def report(
    model: options.ModelName,
    text: options.Text = None,
    lengths: options.Lengths = None,
    layers: options.Layers = "all",
    samples: options.Samples = 8,
    map_name: options.Map = "attention",
    engine: options.EngineName = "local",
    address: options.Address = None,
    workers: options.Workers = None,
    out: Out = Path("report"),
    resume: options.Resume = False,
    force: options.Force = False,
    figures: Figures = True,
    variants: Annotated[
        bool,
        typer.Option("--variants", help="also put other kinds of attention into the layers, on two samples"),
    ] = False,
    side: options.Side = None,
    device: options.Device = "auto",
    tol: options.Tol = 1e-3,
    certify: options.Certify = None,
    radii: Annotated[
        float | None, typer.Option(help="also radii within which a layer's output moves by at most this part of its length")
    ] = None,
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
) -> Told:
    """Measure every layer and head of a model on a text, and write a page about it.

    Example: howsmooth report demo --text alice.txt --lengths 16,32,64,128 --out report
    """
    asked, chosen, where = options.lengths_of(lengths), options.layers_of(layers), options.map_of(map_name)
    check_folder(out, "report", resume=resume, force=force)  # before the model is loaded
    reader = Reader.by_name(model, text, side, device)
    question = Question(asked or fitting_lengths(reader, samples), samples, chosen, where, tol, certify, seed)
    made, page = inspect_into(
        reader,
        settle(reader, question),
        out,
        typed(),
        engine=options.engine_of(engine, address, workers, reader.model, device),
        resume=resume,
        force=force,
        figures=figures,
        radii=radii,
        variants=variants,
        progress=progress_bar("measuring", quiet=quiet),
    )

    def show() -> None:
        if not quiet:
            show_table("L, geometric mean over samples", made.data.growth.table(), words=("breaks",))
            print("", *made.answer, *made.findings, "", sep="\n")
        print(page.resolve())

    return Told({"page": str(page.resolve()), **made.to_dict()}, show)


@command()
def demo(
    out: Out = Path("demo-report"),
    quick: Annotated[bool, typer.Option("--quick", help="two layers, three lengths, no figures: seconds, not minutes")] = False,
    workers: options.Workers = None,
    resume: options.Resume = False,
    force: options.Force = False,
    figures: Figures = True,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> Told:
    """The report of a small BERT that comes with the package, on Alice in Wonderland.

    Example: howsmooth demo --out demo-report
    """
    few = {"lengths": "8,12,16", "layers": "0,3", "samples": 2, "figures": False} if quick else {"figures": figures}
    return report("demo", out=out, workers=workers, resume=resume, force=force, device=device, quiet=quiet, **few)
