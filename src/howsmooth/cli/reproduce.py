"""`howsmooth reproduce`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from howsmooth.cli import options
from howsmooth.cli.root import Told, command, show_table, typed
from howsmooth.errors import BadInputError
from howsmooth.paper.curves import curves_of, exponents
from howsmooth.paper.page import write_reproduction
from howsmooth.paper.protocol import PAPER, PARTS, QUICK, Part
from howsmooth.paper.protocol import reproduce as run
from howsmooth.run import Local, progress_bar, write_table


@command()
def reproduce(
    part: Annotated[str, typer.Argument(help=f"all, or one of {', '.join(PARTS)}")] = "all",
    model: Annotated[
        list[str] | None,
        typer.Option(help="a pretrained model beside the demo: bert-base-uncased, gpt2, any name or folder; repeat"),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for results, tables, figures and the page")] = Path("reproduction"),
    samples: Annotated[int | None, typer.Option(help="windows of text a length; 10 as in the paper, 1 with --quick")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="few lengths: a look at every curve in about a minute")] = False,
    resume: options.Resume = False,
    force: options.Force = False,
    workers: Annotated[int, typer.Option(help="processes that share out the work")] = 1,
    device: Annotated[
        str, typer.Option(help="where models read text: cpu, cuda, cuda:1, or auto: a GPU if there is one")
    ] = "auto",
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
) -> Told:
    """Measure the experiments of "How Smooth Is Attention?" again: figures (PDF, PNG), tables (CSV) and a page.

    It can be stopped at any moment and continued with --resume. Pretrained models other than the demo are read only if named.

    Example: howsmooth reproduce all --quick --out reproduction
    Example: howsmooth reproduce real --model bert-base-uncased --model gpt2
    """
    parts: list[Part] = [p for p in PARTS if part in ("all", p)]
    if not parts:
        raise BadInputError(f"expected all or one of {', '.join(PARTS)}, got {part!r}; pick one of them")
    result = run(
        parts,
        ["demo", *(name for name in dict.fromkeys(model or []) if name != "demo")],
        out,
        protocol=replace((QUICK if quick else PAPER).with_samples(samples), device=device),
        seed=seed,
        resume=resume,
        force=force,
        engine=Local(workers=workers),
        progress=progress_bar("measuring", quiet=quiet),
        command=typed(),
    )
    if not result.rows:
        why = next(iter(result.failures))
        raise BadInputError(f"expected results, got {result.tasks} failed tasks ({why}); see {result.path}")
    files = [*write_reproduction(result, out), write_table(result.path, out / "results.csv", force=True)]
    table = exponents(curves_of(result.rows))
    for why, count in result.failures.items():
        typer.echo(f"howsmooth: {count} tasks failed: {why}", err=True)

    def show() -> None:
        if table and not quiet:
            show_table("exponent of every curve", [_line(row) for row in table], words=("curve",), digits=3)
        print(files[0])

    numbers = {"tasks": result.tasks, "skipped": result.skipped, "failures": result.failures}
    return Told({"exponents": table, "files": [str(f) for f in files], **numbers}, show)


def _line(row: dict[str, Any]) -> dict[str, Any]:
    names = {"L": "exponent", "from": "low", "to": "high", "scripts": "scripts", "paper": "printed"}
    curve = f"{row['subject']}, {row['masking']}, layer {row['layer']}, {row['map']}"
    return {"curve": curve} | {name: row[key] for name, key in names.items()}
