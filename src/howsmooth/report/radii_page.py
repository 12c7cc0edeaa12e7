"""The page of certified radii, by layer and by input: one HTML file that fetches nothing."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from howsmooth.errors import ResultsError
from howsmooth.report.answer import number
from howsmooth.report.page import asset, embed
from howsmooth.run import versions, writing
from howsmooth.search import Radius
from howsmooth.study import Radii

_COLUMNS = ("layer", "sample", "label", "certified", "first_order", "attacked", "margin", "size", "confidence")


def check_page(page: Path, force: bool) -> None:
    """Refuse a page that would take the place of a file, before any work."""
    if page.exists() and not force:
        raise ResultsError(f"expected a new file, got {page}, which exists; pass --force to replace it")


def write_radii_page(radii: Radii, page: Path, *, model: str, command: str, change: float | None, force: bool = False) -> Path:
    """Write the page of radii. change: the part of its length that an output may move by; nothing where an answer must hold."""
    check_page(page, force)
    text = render(radii, model=model, command=command, change=change).encode("utf-8", "replace")
    with writing(page, parents=True) as part:
        part.write_bytes(text)
    return page


def render(radii: Radii, *, model: str, command: str, change: float | None) -> str:
    """The page as text."""
    script, found = asset("charts.js") + asset("radii.js"), radii.found()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    layers, inputs = ({row[k] for row in radii.rows} for k in (1, 0))
    what = "the answer changes" if change is None else f"the output moves by more than {100 * change:g} % of its length"
    together = bool(found) and found[0][2].per == "sequence"
    said, refused = _said(found), [f"Input {w + 1}, layer {k}: {r}" for w, k, r in radii.rows if isinstance(r, str)]
    return Template(asset("radii.html")).substitute(
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'",
        description=escape(said),
        title="How far does it hold?",
        style=asset("page.css"),
        meta=escape(f"{model} · {_many(len(layers), 'layer')} · {_many(len(inputs), 'input')}"),
        answer=f"<p>{escape(said)}</p>",
        moves="all tokens together" if together else "every one of the tokens",
        what=escape(what),
        refused="".join(f"<li>{escape(line)}</li>" for line in refused),
        version=escape(versions().get("howsmooth", "")),
        command=escape(command),
        data=embed(_payload(found)),
        script=script,
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
