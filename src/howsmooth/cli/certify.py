"""`howsmooth certify`."""

from pathlib import Path
from typing import Literal

from howsmooth.cli import Answer, show_table, typed
from howsmooth.errors import BadInputError
from howsmooth.models import MapName, load
from howsmooth.models.model import Side
from howsmooth.paper.drawing import check_figure
from howsmooth.paper.radii import draw_radii
from howsmooth.report.page import write_radii_page
from howsmooth.report.shell import check_page
from howsmooth.study import Radii, radii, read_text


def certify(
    model: str,
    *,
    text: str | None = None,
    n: int = 12,
    samples: int = 1,
    layers: tuple[int, ...] | None = (0,),
    device: str = "auto",
    label: int | None = None,
    change: float | None = None,
    map: MapName | None = None,
    per: Literal["token", "sequence"] = "token",
    side: Side | None = None,
    seed: int = 0,
    figure: Path | None = None,
    page: Path | None = None,
    force: bool = False,
) -> Answer:
    """Prove how far tokens may move before the answer changes.

    The tokens are those that enter a layer. An attack shows how much of the certified radius is slack.

    n: number of tokens per window
    device: cpu or auto, which is the CPU too: certificates are computed there, in float64
    label: the answer that must hold [default: the one that the model gives]
    change: certify that the output moves by at most this fraction of its length, in place of an answer
    map: with --change, a map of the layer alone in place of all that follows
    per: what the radius limits, the move of each token or of all tokens together
    figure: also draw radii by layer (.png, .pdf or .svg)
    page: also write a page of radii by layer and input (.html)
    force: overwrite a page that exists

    Example: howsmooth certify demo --change 0.1 --map attention --figure radius.png
    """
    if figure is not None:
        check_figure(figure)
    if page is not None:
        check_page(page, force)
    if map is not None and change is None:
        raise BadInputError("expected --change beside --map, got none; a layer alone gives no answer, add --change 0.1")
    if device not in ("auto", "cpu"):
        raise BadInputError(f"expected --device cpu or auto, got {device!r}; certificates are computed on the CPU, in float64")
    passage = read_text(text)
    loaded = load(model, "cpu", side=side, head=change is None)
    windows = loaded.text(passage).windows(n, samples, seed)
    found = radii(loaded, windows, layers, label=label, change=change, map=map, per=per)
    if page is not None:
        write_radii_page(found, page, model=model, command=typed(), change=change, force=force)

    def show() -> None:
        _show(found, per, change)
        if page is not None:
            print(page.resolve())

    return Answer(found.to_dict(), show, figure and (lambda: draw_radii(figure, found)))


def _show(found: Radii, per: str, change: float | None) -> None:
    rows = [
        {"window": w, "layer": k, "answer": r.label, "certified": r.certified, "of a token": r.certified / r.size}
        | {"first order": r.first_order, "attack": r.attacked, "confidence": f"{r.confidence:.9g}"}
        for w, k, r in found.found()
    ]
    if rows:
        kept = "the answer holds" if change is None else f"the output moves by at most {change:.3g} of its length"
        show_table(f"radii per {per} within which {kept}, and at which an attack breaks that", rows, keys=2)
    for w, k, r in found.rows:
        if isinstance(r, str):
            print(f"window {w} layer {k}: {r}")
