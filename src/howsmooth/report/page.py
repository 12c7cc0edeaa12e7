"""The page: one HTML file that fetches nothing and works from any folder.

All data goes in as one JSON block that the page's own script reads; text reaches the document through `textContent` or escaped
here. A content security policy names that one script by its hash and allows no request at all.
"""

import base64
import contextlib
import hashlib
import json
import math
import os
from dataclasses import asdict
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.report.answer import Sentence, answer, findings, jumps, number, plain
from howsmooth.report.data import ReportData

LARGEST = 6_000_000  # bytes
_MOST_ROWS = 20_000  # of the table of all measurements; what is drawn is always whole
_COLUMNS = ("layer", "n", "sample", "value", "upper", "confidence", "status", "radius", "seconds", "seed")


def render(data: ReportData) -> str:
    """The page as text."""
    script, m = _asset("charts.js") + _asset("page.js"), data.methods
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    sentences = answer(data)
    return Template(_asset("page.html")).substitute(
        policy=policy,
        description=escape(plain(sentences[0])),
        title=escape(data.title),
        model=escape(m.model),
        style=_asset("page.css"),
        meta=_meta(data),
        answer="".join(f"<p>{_html(sentence)}</p>" for sentence in sentences),
        findings="".join(f'<div class="finding">{_html(sentence)}</div>' for sentence in findings(data)),
        contents=_contents(data),
        map=escape(m.map),
        jumped=" An outlined cell is where a layer has just jumped." if jumps(data) else "",
        intervals=_intervals(data),
        splitting=_splitting(data),
        worst=_worst(data),
        confidence=escape(str(min(row.confidence for row in data.measurements))),
        cut=_cut(data),
        methods="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _methods(data).items() if v),
        command=escape(m.command),
        version=escape(m.versions.get("howsmooth", "")),
        data=embed(payload(data)),
        script=script,
    )


def write_page(data: ReportData, folder: str | Path, *, force: bool = False) -> Path:
    """Write `folder/index.html`, whole or not at all; a folder that holds anything is refused unless `force`."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"expected a folder for the page, got the file {folder}; choose another name")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise BadInputError(f"expected a new folder for the page, got {folder}, which exists; pass --force to write into it")
    text = render(data).encode("utf-8", "replace")
    if len(text) > LARGEST:
        raise BadInputError(
            f"expected a page of at most {LARGEST / 1e6:.0f} MB, got {len(text) / 1e6:.1f} MB; show fewer or shorter passages"
        )
    part = folder / f".index.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(text)
        os.replace(part, folder / "index.html")
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise ResultsError(f"expected a folder that can be written, got {folder} ({error.strerror}); choose another") from None
    return folder / "index.html"


def embed(value: Any) -> str:
    """JSON that no parser can leave: pure ASCII, without `<`, `>` or `&`.

    >>> embed("</script>\\u2028")
    '"\\\\u003c/script\\\\u003e\\\\u2028"'
    """
    text = json.dumps(_rounded(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(value: Any) -> Any:
    """Six digits are more than a page shows; what is not finite has no JSON."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value


def payload(data: ReportData) -> dict[str, Any]:
    """What the script reads."""
    rows = [[_exact(getattr(m, name)) for name in _COLUMNS] for m in data.measurements[:_MOST_ROWS]]
    worst = max(data.cells, key=lambda c: c.mean).layer
    focus, jump = max(jumps(data), key=lambda j: abs(math.log(j[1].change.value)), default=(worst, None))
    after = 0 if jump is None else jump.after
    passage = next((i for i, p in enumerate(data.passages) if p.n == after), 0)
    return {
        "layers": data.layers,
        "lengths": data.lengths,
        "cells": [asdict(c) for c in data.cells],
        "fits": {str(layer): fit.to_dict() for layer, fit in data.fits.items()},
        "heads": [asdict(h) for h in data.heads],
        "heads_at": after,
        "bounds": [asdict(b) for b in data.bounds],
        "passages": [
            {
                "tokens": [[t.gap, t.text, t.special] for t in p.tokens],
                "shares": {str(layer): list(shares) for layer, shares in p.shares.items()},
            }
            for p in data.passages
        ],
        "passage": passage,
        "splits": [asdict(s) for s in data.splits],
        "worst": [asdict(w) for w in data.worst],
        "rows": {"names": list(_COLUMNS), "rows": rows},
        "focus": focus,
        "worst_layer": worst,
    }


def _exact(value: Any) -> Any:
    """A confidence of 0.999999 must not be rounded to 1, which would claim certainty."""
    return str(value) if isinstance(value, float) and 1 > value > 0.9999995 else value


def _asset(name: str) -> str:
    return resources.files("howsmooth.report").joinpath("assets", name).read_text("utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _html(sentence: Sentence) -> str:
    marks = {"": "{}", "strong": "<b>{}</b>", "sup": "<sup>{}</sup>"}
    return "".join(marks[kind].format(_powers(escape(text))) for text, kind in sentence)


def _powers(text: str) -> str:
    """n^0.25 and 10^6 as they are read."""
    parts = text.split("^")
    for i in range(1, len(parts)):
        stop = next(
            (k for k, c in enumerate(parts[i]) if not (c.isdigit() or (c in "−-." and parts[i][k + 1 : k + 2].isdigit()))), None
        )
        power, rest = (parts[i], "") if stop is None else (parts[i][:stop], parts[i][stop:])
        parts[i] = f"<sup>{power}</sup>{rest}" if power else f"^{rest}"
    return "".join(parts)


def _meta(data: ReportData) -> str:
    lengths, m = data.lengths, data.methods
    span = f"n = {lengths[0]} … {lengths[-1]}" if len(lengths) > 1 else f"n = {lengths[0]}"
    parts = (m.model, m.text, f"{len(data.layers)} layer{'s' * (len(data.layers) > 1)}", span, m.date)
    return escape(" · ".join(filter(None, parts)))


def _contents(data: ReportData) -> str:
    there = {
        "heat": ("Layers", True),
        "growth": ("Growth", bool(data.fits)),
        "heads": ("Heads", bool(data.heads)),
        "bounds": ("Ceiling", bool(data.bounds)),
        "text": ("Text", bool(data.passages)),
        "splitting": ("Splitting", bool(data.splits)),
        "worst": ("Worst inputs", bool(data.worst)),
        "numbers": ("Numbers", True),
        "methods": ("Methods", True),
    }
    return "".join(f'<a href="#{id}">{name}</a>' for id, (name, shown) in there.items() if shown)


def _intervals(data: ReportData) -> str:
    methods = {f.method for f in data.fits.values()}
    if "samples" in methods:
        return "Intervals come from resampling the samples."
    if "residuals" in methods:
        return "Intervals come from resampling the residuals, since fewer than five samples were measured."
    return "Too few lengths were measured for intervals."


def _splitting(data: ReportData) -> str:
    paid = [s for s in data.splits if s.split > s.whole]
    if not paid:
        return f"Splitting pays in none of {len(data.splits)} cases."
    most = max(paid, key=lambda s: s.split / s.whole if s.whole > 0 else math.inf)
    gain = f": {number(most.split / most.whole)} times" if most.whole > 0 else ""
    return f"Splitting pays in {len(paid)} of {len(data.splits)} cases, most in layer {most.layer} at n = {most.n}{gain}."


def _worst(data: ReportData) -> str:
    rows = [w for w in data.worst if w.text > 0]
    if not rows:
        return ""
    most = max(rows, key=lambda w: w.worst / w.text)
    how = f" ({escape(most.how)})" if most.how else ""
    return f"In layer {most.layer} at n = {most.n} it is {number(most.worst / most.text)} times what the text shows{how}."


def _cut(data: ReportData) -> str:
    count = len(data.measurements)
    return f" The first {_MOST_ROWS} of {count} are here." if count > _MOST_ROWS else ""


def _methods(data: ReportData) -> dict[str, str]:
    m, samples = data.methods, sorted({c.samples for c in data.cells})
    return {
        "model": m.model,
        "text": m.text,
        "map": m.map,
        "lengths": ", ".join(map(str, data.lengths)),
        "samples a length": str(samples[0]) if len(samples) == 1 else f"{samples[0]} to {samples[-1]}",
        "tolerance": f"{m.tol:g}",
        "seed": str(m.seed),
        "time": "" if m.seconds is None else f"{m.seconds:.0f} s of measuring",
        "date": m.date,
        "software": ", ".join(f"{k} {v}" for k, v in m.versions.items()),
    }
