"""`howsmooth training`."""

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli import options
from howsmooth.cli.root import Told, command, show_table
from howsmooth.training.run_page import RunRecord, write_run_page

Folder = Annotated[Path, typer.Argument(help="of a run that howsmooth.training.Recorder wrote to")]


@command()
def training(
    folder: Folder,
    out: Annotated[Path | None, typer.Option(help="the page; smoothness.html in the folder by default")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that is there")] = False,
    quiet: options.Quiet = False,
) -> Told:
    """The page of a training run: constants, logits and entropies by layer over the steps, the loss beside them.

    Example: howsmooth training runs/alice
    """
    run = RunRecord.of(folder)
    page = write_run_page(run, out, force=force)

    def show() -> None:
        if not quiet:
            show_table("L by layer", run.table())
            print("", *run.sentences(), "", sep="\n")
        print(page.resolve())

    return Told({"page": str(page.resolve()), **run.to_dict()}, show)
