"""`howsmooth certify`."""

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli import options
from howsmooth.cli.root import Told, command, show_table, typed
from howsmooth.errors import BadInputError
from howsmooth.models import load
from howsmooth.paper.drawing import check_figure
from howsmooth.paper.radii import draw_radii
from howsmooth.report.radii_page import write_radii_page
from howsmooth.report.shell import check_page
from howsmooth.study import Radii, radii, read_text


@command()
def certify(
    model: options.ModelName,
    text: options.Text = None,
    n: Annotated[int, typer.Option(help="tokens in a window")] = 12,
    samples: options.Samples = 1,
    layers: options.Layers = "0",
    label: Annotated[int | None, typer.Option(help="the answer that must hold; by default the one given at the input")] = None,
    change: Annotated[
        float | None, typer.Option(help="instead of an answer: the output moves by at most this part of its length")
    ] = None,
    map_name: Annotated[
        str | None, typer.Option("--map", help="with --change: that map of the layer alone, not all that follows")
    ] = None,
    per: Annotated[str, typer.Option(help="token: every token moves that far; sequence: all of them together")] = "token",
    side: options.Side = None,
    seed: options.Seed = 0,
    figure: Annotated[Path | None, typer.Option(help="also draw radii by layer (.png, .pdf or .svg)")] = None,
    page: Annotated[Path | None, typer.Option(help="also write a page of radii by layer and input (.html)")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a page that exists")] = False,
) -> Told:
    """How far can the tokens that enter a layer move before the model's answer changes? Certified, and attacked.

    Example: howsmooth certify demo --change 0.1 --map block --layers 0,2,4 --figure radius.png
    """
    if figure is not None:
        check_figure(figure)
    if page is not None:
        check_page(page, force)
    chosen, where = options.layers_of(layers), None if map_name is None else options.map_of(map_name)
    if where is not None and change is None:
        raise BadInputError("expected --change beside --map, got none; a layer alone gives no answer")
    if per not in ("token", "sequence"):
        raise BadInputError(f"expected --per token or sequence, got {per!r}; pick one of them")
    passage = read_text(text)
    loaded = load(model, "cpu", side=side, head=change is None)
    windows = loaded.text(passage).windows(n, samples, seed)
    found = radii(
        loaded,
        windows,
        chosen,
        lambda done, of: typer.echo(f"\rcase {done} of {of}", err=True, nl=done == of),
        label=label,
        change=change,
        map=where,
        per=per,
    )
    if page is not None:
        write_radii_page(found, page, model=model, command=typed(), change=change, force=force)

    def show() -> None:
        _show(found, per)
        if page is not None:
            print(page.resolve())

    return Told(found.to_dict(), show, figure and (lambda: draw_radii(figure, found)))


def _show(found: Radii, per: str) -> None:
    rows = [
        {"window": w, "layer": k, "answer": r.label, "certified": r.certified, "of a token": r.certified / r.size}
        | {"first order": r.first_order, "attack": r.attacked, "confidence": f"{r.confidence:.9g}"}
        for w, k, r in found.found()
    ]
    if rows:
        show_table(f"radii per {per} within which the answer holds, and at which an attack changes it", rows)
    for w, k, r in found.rows:
        if isinstance(r, str):
            print(f"window {w} layer {k}: {r}")
