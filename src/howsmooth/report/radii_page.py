"""The page of certified radii, by layer and by input: one HTML file that fetches nothing."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from howsmooth.report.answer import number
from howsmooth.report.shell import asset, check_page, save, whole_page
from howsmooth.run import versions
from howsmooth.search import Radius
from howsmooth.study import Radii

_COLUMNS = ("layer", "sample", "label", "certified", "first_order", "attacked", "margin", "size", "confidence")


def write_radii_page(radii: Radii, page: Path, *, model: str, command: str, change: float | None, force: bool = False) -> Path:
    """Write the page of radii. change: the part of its length that an output may move by; nothing where an answer must hold."""
    check_page(page, force)
    return save(render(radii, model=model, command=command, change=change), page)


def render(radii: Radii, *, model: str, command: str, change: float | None) -> str:
    """The page as text."""
    found = radii.found()
    layers, inputs = ({row[k] for row in radii.rows} for k in (1, 0))
    what = "the answer changes" if change is None else f"the output moves by more than {100 * change:g} % of its length"
    together = bool(found) and found[0][2].per == "sequence"
    said, refused = _said(found), [f"Input {w + 1}, layer {k}: {r}" for w, k, r in radii.rows if isinstance(r, str)]
    main = Template(asset("radii.html")).substitute(
        moves="all tokens together" if together else "every one of the tokens",
        what=escape(what),
        refused="".join(f"<li>{escape(line)}</li>" for line in refused),
    )
    return whole_page(
        main,
        title="How far does it hold?",
        meta=f"{model} · {_many(len(layers), 'layer')} · {_many(len(inputs), 'input')}",
        description=said,
        answer=[escape(said)],
        version=versions().get("howsmooth", ""),
        command=command,
        script=asset("radii.js"),
        data=_payload(found),
    )


def _said(found: Sequence[tuple[int, int, Radius]]) -> str:
    if not found:
        return "No radius could be certified; the reasons stand below."
    w, k, least = min(found, key=lambda row: row[2].certified / row[2].size)
    shown = [f"{r / least.size:.2g}" for r in (least.certified, least.attacked)]
    attack = f"an attack needs {shown[1]}" if least.attacked < float("inf") else "no attack was found"
    return f"The smallest certified radius is {shown[0]} of a token's length, for input {w + 1} at layer {k}, where {attack}."


def _payload(found: Sequence[tuple[int, int, Radius]]) -> dict[str, Any]:
    rows = [{"layer": k, "sample": w} | r.to_dict() for w, k, r in found]
    kept = [name for name in _COLUMNS if name != "label" or any(r["label"] is not None for r in rows)]
    layers = sorted({row["layer"] for row in rows})
    return {"layers": layers, "columns": kept, "rows": [{name: row[name] for name in kept} for row in rows]}


def _many(count: int, what: str) -> str:
    return f"{number(count)} {what}{'s' * (count != 1)}"
