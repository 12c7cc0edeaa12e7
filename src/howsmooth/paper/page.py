"""The page of a reproduction: one HTML file with the figures, the exponents and the command; no script, no request."""

import base64
import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, final

from howsmooth.errors import ResultsError
from howsmooth.paper.curves import Curve, Exponent, curves, exponents
from howsmooth.paper.figures import Rows, draw_reproduction
from howsmooth.report import asset

SECTIONS: dict[str, tuple[str, str]] = {
    "exponents": (
        "Exponents side by side",
        "L grows like n to this power up to n = 98. A circle is the constant, a square what the paper's public scripts print "
        "on the same inputs, a bar what is drawn on the paper's plot. Lines are 95 % intervals.",
    ),
    "real": ("Pretrained models on text", "Windows of Alice in Wonderland, tokens at the layer's input, R their size."),
    "random": (
        "Random models of full size",
        "BERT-base and GPT-2 as configured by transformers, width 768, 12 heads, fresh weights, dropout off.",
    ),
    "adversarial": (
        "Adversarial tokens",
        "Tokens built from an eigenvector of one head's A, the whole layer measured; hollow marks are the worst configuration "
        "of any kind in the same ball.",
    ),
    "trap": (
        "What the public scripts compute",
        "The scripts take the first element of what torch.func.jvp returns. That is the output f(X), not the tangent J u, so "
        "they print √‖Jᵀ f(X)‖ whatever the start. Both numbers on the same inputs:",
    ),
    "iteration": (
        "The iteration step by step",
        "With the output it stands still from the first step on; with the tangent it climbs to ‖J‖₂.",
    ),
    "meanfield-growth": ("Measures in a ball", "The worst two Diracs against the radius, between the mean-field bounds."),
    "meanfield-convergence": ("Many tokens", "Constants of n tokens reach that of the measure they stand for."),
    "splitting-map": ("Where splitting pays", "Two atoms on a line: splitting one, in units of moving both."),
    "splitting-frequency": ("How often splitting pays", "Random layers and Gaussian inputs."),
}


@final
@dataclass(frozen=True)
class About:
    """What a reader needs to make the page again. failures: reasons of tasks that failed, each with how many."""

    command: str
    versions: Mapping[str, str]
    seed: int
    models: Sequence[str]
    samples: int
    tasks: int
    failures: Mapping[str, int]


def write_reproduction(rows: Rows, folder: Path, about: About) -> list[Path]:
    """Figures as PDF and PNG, `curves.csv`, `exponents.csv` and `index.html`."""
    found = curves(rows)
    table = exponents(found)
    figures = draw_reproduction(rows, folder)
    written = [*figures, *(p.with_suffix(".pdf") for p in figures)]
    try:
        if found:
            written.append(_csv(curve_table(found), folder / "curves.csv"))
        if table:
            written.append(_csv([e.to_dict() for e in table], folder / "exponents.csv"))
        page = folder / "index.html"
        part = folder / f".index.{os.getpid()}.part"
        part.write_text(render(table, figures, about), "utf-8")
        os.replace(part, page)
    except OSError as error:
        raise ResultsError(f"expected a folder that can be written, got {folder} ({error.strerror}); choose another") from None
    return [page, *written]


def curve_table(found: Sequence[Curve]) -> list[dict[str, Any]]:
    """A row per curve and length: geometric means over samples and extremes, of L and of the scripts' number, and R."""
    rows = []
    for c in found:
        name = {"study": c.study, "subject": c.subject, "masking": c.masking, "layer": c.layer, "map": c.map}
        for n in c.lengths:
            points = [p for p in c.points if p.n == n]
            values, scripts = [p.value for p in points], [p.scripts for p in points]
            rows.append(
                name
                | {"n": n, "samples": len(points), "L": _mean(values), "L_min": min(values), "L_max": max(values)}
                | {"L_upper": max(p.upper for p in points), "scripts": _mean(scripts), "R": c.radius(n)}
            )
    return [{k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def _mean(values: Sequence[float]) -> float:
    product = 1.0
    for v in values:
        product *= v ** (1 / len(values))
    return product


def _csv(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)
    return path


def render(table: Sequence[Exponent], figures: Sequence[Path], about: About) -> str:
    """The page as text. Everything that comes from outside is escaped."""
    there = {path.stem: path for path in figures}
    parts = []
    for name, (title, text) in SECTIONS.items():
        if name not in there:
            continue
        image = base64.b64encode(there[name].read_bytes()).decode()
        chart = f'<figure class="chart"><img alt="{escape(title)}" src="data:image/png;base64,{image}"></figure>'
        parts.append(f'<section id="{name}"><h2>{escape(title)}</h2><p>{escape(text)}</p>{chart}</section>')
    contents = "".join(f'<a href="#{name}">{escape(SECTIONS[name][0])}</a>' for name in SECTIONS if name in there)
    if table:
        parts.append(f'<section id="numbers"><h2>Exponents</h2><div class="scroll">{_html_table(table)}</div></section>')
        contents += '<a href="#numbers">Numbers</a>'
    failures = "".join(
        f'<div class="finding">{count} tasks failed: {escape(why)}</div>' for why, count in about.failures.items()
    )
    methods = {
        "models": ", ".join(about.models),
        "text": "Alice in Wonderland",
        "samples a length": str(about.samples),
        "seed": str(about.seed),
        "tasks": str(about.tasks),
        "software": ", ".join(f"{k} {v}" for k, v in about.versions.items()),
        "files": "results.sqlite and results.csv: all measurements, curves.csv: what is drawn, exponents.csv: what is fitted",
    }
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in methods.items() if v)
    return Template(resources.files("howsmooth").joinpath("paper/reproduction.html").read_text("utf-8")).substitute(
        style=asset("page.css"),
        answer="".join(f"<p>{escape(sentence)}</p>" for sentence in answer(table)),
        failures=failures,
        contents=contents,
        sections="".join(parts),
        methods=listed,
        command=escape(about.command),
        version=escape(about.versions.get("howsmooth", "")),
    )


def answer(table: Sequence[Exponent]) -> list[str]:
    """What the exponents say, in a sentence for each experiment that was made."""
    said = []
    names = {"real": "On text", "random": "With random weights", "adversarial": "At the paper's adversarial tokens"}
    for study, start in names.items():
        part = [e for e in table if e.study == study and e.map != "worst configuration"]
        if part:
            low, high = min(e.exponent for e in part), max(e.exponent for e in part)
            scripts = [e.scripts for e in part]
            said.append(
                f"{start} L grows like n to the power {low:.2f} to {high:.2f} over {len(part)} curves; "
                f"what the public scripts print there, {min(scripts):.2f} to {max(scripts):.2f}."
            )
    return said or ["Mean-field constants and mass splitting."]


def _html_table(table: Sequence[Exponent]) -> str:
    heads = (
        "model",
        "mask",
        "layer",
        "tokens",
        "lengths",
        "samples",
        "L",
        "95 %",
        "scripts",
        "95 %",
        "L, n ≥ 49",
        "L, all lengths",
        "paper",
    )
    rows = []
    for e in table:
        cells = [e.subject, e.masking, e.layer, e.map, f"{e.shortest} … {e.longest}", e.samples, f"{e.exponent:.3f}"]
        cells += [_ends(e.low, e.high), f"{e.scripts:.3f}", _ends(e.scripts_low, e.scripts_high)]
        cells += ["" if v is None else f"{v:.{digits}f}" for v, digits in ((e.tail, 3), (e.longer, 3), (e.printed, 2))]
        rows.append("".join(f"<td{_text(i)}>{escape(str(c))}</td>" for i, c in enumerate(cells)))
    first = "".join(f"<th{_text(i)}>{escape(h)}</th>" for i, h in enumerate(heads))
    return f"<table><thead><tr>{first}</tr></thead><tbody>{''.join(f'<tr>{r}</tr>' for r in rows)}</tbody></table>"


def _text(column: int) -> str:
    return ' class="text"' if column in (0, 1, 3) else ""


def _ends(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f} … {high:.2f}"
