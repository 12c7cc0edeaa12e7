"""`howsmooth training`."""

from pathlib import Path

from howsmooth.cli import Answer, show_table
from howsmooth.report.answer import plain
from howsmooth.training.run_page import RunRecord, write_run_page


def training(folder: Path, *, out: Path | None = None, force: bool = False, quiet: bool = False) -> Answer:
    """Write the page of a training run.

    It shows constants, logits and entropies by layer over the steps, with the loss beside them.

    folder: folder that howsmooth.training.Recorder wrote to
    out: file of the page [default: smoothness.html in the folder]
    force: overwrite a file that exists

    Example: howsmooth training runs/alice
    """
    run = RunRecord.of(folder)
    page = write_run_page(run, out, force=force)

    def show() -> None:
        if not quiet:
            show_table("L by layer", run.table())
            print("", *map(plain, run.sentences()), "", sep="\n")
        print(page.resolve())

    return Answer({"page": str(page.resolve()), **run.to_dict()}, show)
