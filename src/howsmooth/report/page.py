"""The page of a report: its sentences, its sections and what its script reads."""

import base64
import math
import re
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from howsmooth.errors import BadInputError
from howsmooth.report.answer import STRONG, answer, findings, number, plain
from howsmooth.report.data import KEYS, ReportData
from howsmooth.report.shell import asset, encoded, save, whole_page
from howsmooth.run import check_folder
from howsmooth.study.jobs import Cells
from howsmooth.study.question import mean

LARGEST = 6_000_000  # bytes
_MOST_ROWS = 20_000  # of the table of all measurements; what is drawn is always whole
_COLUMNS = (*KEYS["layer"], "relative", "top_share", "seconds", "seed")
_FAINTEST = 1e-4  # of the largest norm of a picture; smaller ones are shown as this
_BOUND = ("layer", "n", "value", "where", "id", "name", "side", "log_value", "statement", "source", "reason")


def render(data: ReportData) -> str:
    """The page as text."""
    m, sentences, rows = data.methods, answer(data), data.of("layer")
    main = Template(asset("page.html")).substitute(
        map=escape(m.map),
        jumped=" An outlined cell is where a layer has just jumped." if data.jumps else "",
        intervals=_intervals(data),
        token=_token(data),
        maps=_maps(data),
        near=_html(_near(data)),
        change=_part(data),
        radii=_html(_radii(data)),
        influence=_influence(data),
        splitting=_splitting(data),
        worst=_worst(data),
        variants=_variants(data),
        confidence=escape(str(min(row["confidence"] for row in rows))),
        cut=f" The first {_MOST_ROWS} of {len(rows)} are here." if len(rows) > _MOST_ROWS else "",
        methods="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _methods(data).items() if v),
        command=escape(m.command),
    )
    found = "".join(f'<div class="finding">{_html(sentence)}</div>' for sentence in findings(data))
    return whole_page(
        main,
        title=data.title,
        name=f"{data.title} {m.model}",
        meta=_meta(data),
        description=plain(sentences[0]),
        answer=[_html(sentence) for sentence in sentences],
        below=f'{found}\n<nav id="contents"></nav>',
        version=m.versions.get("howsmooth", ""),
        script=asset("page.js"),
        data=payload(data),
    )


def write_page(data: ReportData, folder: str | Path, *, force: bool = False) -> Path:
    """Write `folder/index.html`, whole or not at all; a folder that holds anything is refused unless `force`."""
    check_folder(folder, "report", force=force)
    text = render(data)
    size = len(encoded(text))
    if size > LARGEST:
        raise BadInputError(
            f"expected a page of at most {LARGEST / 1e6:.0f} MB, got {size / 1e6:.1f} MB; show fewer or shorter passages"
        )
    return save(text, Path(folder) / "index.html")


def payload(data: ReportData) -> dict[str, Any]:
    """What the script reads: rows with the keys that the page shows."""
    worst = data.least_smooth()["layer"]
    focus, after = (data.jumps[0][0], data.jumps[0][1].after) if data.jumps else (worst, 0)
    shown = [n for n in data.shares if n in data.texts]
    kinds = ("held", "head", "near", "change", "splitting", "worst")
    parts = {kind: [{key: row[key] for key in KEYS[kind]} for row in data.of(kind)] for kind in kinds}
    return parts | {
        "maps": data.maps,
        "variants": data.variants,
        "influence": [_picture(row, shown) for row in data.of("influence")[:1]],
        "layers": data.layers,
        "lengths": data.lengths,
        "summary": data.summary,
        "fits": {layer: fit.to_dict() for layer, fit in data.fits.items()},
        "bounds": [{key: bound.get(key) for key in _BOUND} for bound in data.bounds],
        "texts": [{"tokens": data.texts[n], "shares": data.shares[n]} for n in shown],
        "text": shown.index(after) if after in shown else 0,
        "rows": {
            "names": _COLUMNS,
            "rows": [[_exact(row.get(name)) for name in _COLUMNS] for row in data.of("layer")[:_MOST_ROWS]],
        },
        "focus": focus,
        "heads_at": after,
        "worst_layer": worst,
    }


def _picture(row: Cells, shown: list[int]) -> dict[str, Any]:
    """A matrix of norms as 16-bit numbers on a logarithmic scale from `low` (1) to `high` (65535), 0 for zero; by rows."""
    norms = np.nan_to_num(np.asarray(row["norms"], float), nan=0.0, posinf=0.0)
    high = float(norms.max(initial=0.0)) or 1.0
    least = float(norms[norms > 0].min(initial=high))
    low = max(least, _FAINTEST * high)
    scale = math.log(high / low) or 1.0
    codes = 1 + np.rint(65534 * np.log(np.maximum(norms, low) / low) / scale)
    codes = np.where(norms > 0, codes, 0).astype("<u2")
    text = shown.index(row["n"]) if row["n"] in shown else None
    about = {key: row[key] for key in ("layer", "n", "accuracy")}
    about |= {"low": low, "high": high, "faint": least < low, "text": text}
    return about | {"codes": base64.b64encode(codes.tobytes()).decode()}


def _exact(value: Any) -> Any:
    """A confidence of 0.999999 must not be rounded to 1, which would claim certainty."""
    return str(value) if isinstance(value, float) and 1 > value > 0.9999995 else value


def _html(sentence: str) -> str:
    """A sentence as it is read: what is strong in bold, powers such as n^0.25 raised."""
    return re.sub(r"\^((?:\d|[−.-](?=\d))+)", r"<sup>\1</sup>", STRONG.sub(r"<b>\1</b>", escape(sentence)))


def _meta(data: ReportData) -> str:
    lengths, m = data.lengths, data.methods
    span = f"n = {lengths[0]} … {lengths[-1]}" if len(lengths) > 1 else f"n = {lengths[0]}"
    parts = (m.model, m.text, f"{len(data.layers)} layer{'s' * (len(data.layers) > 1)}", span, m.date)
    return " · ".join(filter(None, parts))


def _intervals(data: ReportData) -> str:
    methods = {f.method for f in data.fits.values()}
    if "samples" in methods:
        return "Intervals come from resampling the samples."
    if "residuals" in methods:
        return "Intervals come from resampling the residuals, since fewer than five samples were measured."
    return "Too few lengths were measured for intervals."


def _token(data: ReportData) -> str:
    rows = [row for row in data.of("held") if row["value"] > 0]
    if not rows:
        return ""
    most = max(rows, key=lambda row: row["whole"] / row["value"])
    gain = most["whole"] / most["value"]
    if gain < 1.05:  # what is told apart in a picture
        return "Here no layer owes much of its constant to one token."
    named = f"layer {most['layer']}: with token {most['token'] + 1} held fixed"
    return f"It matters most in {named} L is {number(gain)} times smaller."


def _maps(data: ReportData) -> str:
    at = {(row["map"], row["layer"]): row["value"] for row in data.maps}
    both = [k for k in data.layers if at.get(("attention", k), 0) > 0 and at.get(("block", k), 0) > 0]
    if not both:
        return ""
    most = max(both, key=lambda k: abs(math.log(at["attention", k] / at["block", k])))
    ratio = at["attention", most] / at["block", most]
    return f"They differ most in layer {most}: its block is {number(max(ratio, 1 / ratio))} times " + (
        "smoother than its attention." if ratio >= 1 else "less smooth than its attention."
    )


def _near(data: ReportData) -> str:
    """The layer whose certified constant is furthest from the one at the text, at the middle radius."""
    rows = [row for row in data.of("near") if row["value"] > 0]
    if not rows:
        return ""
    k = min(1, len(rows[0]["within"]) - 1)
    known = [row for row in rows if row["upper_ends"][k] is not None]
    share = number(rows[0]["within"][k])
    if not known:
        return f"Nothing is certified within r = {share}."
    most = max(known, key=lambda row: row["upper_ends"][k] / row["value"])
    up, found = (number(most[ends][k] / most["value"]) for ends in ("upper_ends", "lower_ends"))
    where = f"layer {most['layer']}, where {found} times is attained"
    none = "no layer's L" if len(known) == len(data.layers) else f"no L of the {len(known)} layers asked"
    return f"Within r = {share} {none} is more than {up} times that at the text ({where})."


def _part(data: ReportData) -> str:
    return f"{100 * data.of('change')[0]['change']:g} %" if data.of("change") else ""


def _radii(data: ReportData) -> str:
    """The layer that may be moved least."""
    rows = data.of("change")
    if not rows:
        return ""
    least = min(rows, key=lambda row: row["certified"] / row["size"])
    certified = number(least["certified"] / least["size"])
    attacked = "" if least["attacked"] is None else f", and an attack needs {number(least['attacked'] / least['size'])}"
    return f"The smallest certified radius is {certified} of a token's length, in layer {least['layer']}{attacked}."


def _influence(data: ReportData) -> str:
    rows = data.of("influence")
    if not rows or not rows[0]["accuracy"]:
        return "Every number is exact to rounding."
    return f"The numbers are estimates from random probes, typically within {100 * rows[0]['accuracy']:.0f} %."


def _splitting(data: ReportData) -> str:
    rows = data.of("splitting")
    paid = [row for row in rows if row["value"] > row["moved"]]
    if not paid:
        return f"Splitting pays in none of {len(rows)} cases."
    most = max(paid, key=lambda row: row["value"] / row["moved"] if row["moved"] > 0 else math.inf)
    gain = f": {number(most['value'] / most['moved'])} times" if most["moved"] > 0 else ""
    return f"Splitting pays in {len(paid)} of {len(rows)} cases, most in layer {most['layer']} at n = {most['n']}{gain}."


def _worst(data: ReportData) -> str:
    rows = [row for row in data.of("worst") if row["text"] > 0]
    if not rows:
        return ""
    most = max(rows, key=lambda row: row["value"] / row["text"])
    how, gain = f" ({escape(most['how'])})" if most["how"] else "", number(most["value"] / most["text"])
    return f"In layer {most['layer']} at n = {most['n']} it is {gain} times what the text shows{how}."


def _variants(data: ReportData) -> str:
    """Which kind has the least constant at the entropy of softmax, and which the least relative one, at the longest length."""
    if not data.variants:
        return ""
    n = max(row["n"] for row in data.variants)
    rows = [row for row in data.variants if (row["n"], row["factor"]) == (n, 1) and row["way"] in ("both", "matched")]
    said = []
    for key, words in (("mean", "the smallest L"), ("relative", "the smallest relative constant")):
        ratios = _over_softmax(rows, key)
        if len(ratios) > 1:
            least, most = min(ratios, key=lambda name: ratios[name]), max(ratios, key=lambda name: ratios[name])
            said.append(
                f"{escape(least)} has {words}, {number(ratios[least])} times softmax's, and {escape(most)} the largest, "
                f"{number(ratios[most])} times"
            )
    return f"At n = {n} and equal entropy {'; '.join(said)}." if said else ""


def _over_softmax(rows: list[Cells], key: str) -> dict[str, float]:
    """By kind, the geometric mean over layers of what it has over what softmax has in the same layer."""
    base = {row["layer"]: row[key] for row in rows if row["variant"] == "softmax"}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row[key] is not None and base.get(row["layer"]):
            ratios.setdefault(row["variant"], []).append(row[key] / base[row["layer"]])
    return {name: mean(some) for name, some in ratios.items()}


def _methods(data: ReportData) -> dict[str, str]:
    m, samples = data.methods, sorted({row["samples"] for row in data.summary})
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
