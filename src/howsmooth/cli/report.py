"""`howsmooth report` and `howsmooth demo`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.cli.shared import (
    Address,
    EngineName,
    Layers,
    Lengths,
    MapOption,
    Quiet,
    Samples,
    Seed,
    TextFile,
    Tol,
    Workers,
    engine_of,
    layers_of,
    lengths_of,
    print_json,
    show_table,
)
from howsmooth.report.data import ReportData

Out = Annotated[Path, typer.Option(help="folder for the page, figures, tables and results")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the results in the folder")]
Force = Annotated[bool, typer.Option("--force", help="start anew in a folder that holds a report")]
Figures = Annotated[bool, typer.Option(help="also draw the figures as PDF and PNG")]
Side = Annotated[str | None, typer.Option(help="encoder or decoder, text or vision, of a model with two")]
Certify = Annotated[float | None, typer.Option(help="go on until upper/lower is at most 1 + this")]


@app.command()
def report(
    model: Annotated[str, typer.Argument(help="demo, a folder with config.json and safetensors, or a hub name")],
    text: TextFile = None,
    lengths: Lengths = None,
    layers: Layers = "all",
    samples: Samples = 8,
    map_name: MapOption = "attention",
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    out: Out = Path("report"),
    resume: Resume = False,
    force: Force = False,
    figures: Figures = True,
    side: Side = None,
    tol: Tol = 1e-3,
    certify: Certify = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure every layer and head of a model on a text, and write a page about it.

    Example: howsmooth report demo --text alice.txt --lengths 16,32,64,128 --out report
    """
    with one_sentence(debug):
        from howsmooth.report.assemble import check_folder, inspect_into
        from howsmooth.run import progress_bar
        from howsmooth.study.layers import Question, settle
        from howsmooth.study.lengths import fitting_lengths
        from howsmooth.study.reader import Reader

        asked, chosen = lengths_of(lengths), layers_of(layers)
        check_folder(out, resume, force)  # before the model is loaded
        reader = Reader.by_name(model, text, side)
        question = Question(asked or fitting_lengths(reader, samples), samples, chosen, map_name, tol, certify, seed)
        setting = settle(reader, question)
        found, page = inspect_into(
            reader,
            setting,
            out,
            engine=engine_of(engine, address, workers, reader.model),
            resume=resume,
            force=force,
            figures=figures,
            progress=progress_bar("measuring", quiet=quiet or as_json),
        )
        if as_json:
            print_json({"page": str(page.resolve()), **found.to_dict()})
            return
        if not quiet:
            show_table("L, geometric mean over samples", _table(found.data))
            print("", *found.answer, *found.findings, "", sep="\n")
        print(page.resolve())


@app.command()
def demo(
    out: Out = Path("demo-report"),
    workers: Workers = None,
    resume: Resume = False,
    force: Force = False,
    figures: Figures = True,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The report of a small BERT that comes with the package, on Alice in Wonderland.

    Example: howsmooth demo --out demo-report
    """
    report(
        "demo",
        workers=workers,
        out=out,
        resume=resume,
        force=force,
        figures=figures,
        quiet=quiet,
        as_json=as_json,
        debug=debug,
    )


def _table(data: ReportData) -> list[dict[str, str]]:
    """One line per layer: the constant at every length, and its exponent."""
    means = {(c.layer, c.n): c.mean for c in data.cells}
    lines = []
    for layer in data.layers:
        line = {"layer": str(layer)}
        line |= {f"n={n}": f"{means.get((layer, n), math.nan):.3g}" for n in data.lengths}
        fit = data.fits.get(layer)
        if fit is not None:
            sure = "" if fit.exponent.low is None else f" [{fit.exponent.low:.2f}, {fit.exponent.high:.2f}]"
            line["exponent"] = f"{fit.exponent.value:.2f}{sure}"
        lines.append(line)
    return lines
