"""The page of a reproduction: one HTML file with the figures, the exponents and the command; no script, no request."""

import base64
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path, PurePath
from string import Template

from howsmooth.paper.curves import Row, curve_table, curves_of, draw_reproduction, exponents
from howsmooth.paper.drawing import save_rows
from howsmooth.paper.protocol import Reproduced
from howsmooth.report import whole_page
from howsmooth.run import writing

SECTIONS: dict[str, tuple[str, str]] = {
    "exponents": (
        "Exponents side by side",
        "L grows like n to this power up to n = 98. A circle is the constant, a square what the paper's public scripts print "
        "on the same inputs, a bar what is drawn on the paper's plot. Lines are 95 % intervals.",
    ),
    "real": ("Pretrained models on text", "Windows of the text, tokens at the layer's input, R their size."),
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
_STYLE = """
.chart { overflow-x: auto; }
.chart img { width: 100%; height: auto; display: block; background: #fff; }
"""


def write_reproduction(result: Reproduced, folder: Path) -> list[Path]:
    """`index.html`, figures as PNG and PDF, `curves.csv` and `exponents.csv`."""
    lines = curves_of(result.rows)
    tables = {"curves.csv": curve_table(lines), "exponents.csv": exponents(lines)}
    figures = draw_reproduction(result.rows, folder)
    written = [save_rows(table, folder / name) for name, table in tables.items() if table]
    page = folder / "index.html"
    with writing(page) as part:
        part.write_text(render(tables["exponents.csv"], figures, result), "utf-8")
    return [page, *figures, *(p.with_suffix(".pdf") for p in figures), *written]


def render(table: Sequence[Row], figures: Sequence[Path], result: Reproduced) -> str:
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
        f'<div class="finding">{count} tasks failed: {escape(why)}</div>' for why, count in result.failures.items()
    )
    methods = {
        "models": ", ".join(result.models),
        "text": "Alice in Wonderland" if result.protocol.text is None else PurePath(result.protocol.text).name,
        "samples a length": str(result.protocol.samples),
        "seed": str(result.seed),
        "tasks": str(result.tasks),
        "software": ", ".join(f"{k} {v}" for k, v in result.versions.items()),
        "files": "results.sqlite and results.csv: all measurements, curves.csv: what is drawn, exponents.csv: what is fitted",
    }
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in methods.items() if v)
    template = resources.files("howsmooth").joinpath("paper/reproduction.html").read_text("utf-8")
    main = Template(template).substitute(sections="".join(parts), methods=listed, command=escape(result.command))
    sentences = answer(table)
    return whole_page(
        main,
        title="How smooth is attention? The experiments of Castin, Ablin & Peyré (ICML 2024), measured again",
        name="How smooth is attention? The experiments again",
        description=sentences[0],
        answer=[escape(sentence) for sentence in sentences],
        below=f"{failures}\n<nav>{contents}</nav>",
        version=result.versions.get("howsmooth", ""),
        style=_STYLE,
    )


def answer(table: Sequence[Row]) -> list[str]:
    """What the exponents say, in a sentence for each experiment that was made."""
    said = []
    names = {"real": "On text", "random": "With random weights", "adversarial": "At the paper's adversarial tokens"}
    for study, start in names.items():
        part = [e for e in table if e["study"] == study and e["map"] != "worst configuration"]
        if part:
            constants, scripts = [e["exponent"] for e in part], [e["scripts"] for e in part]
            said.append(
                f"{start} L grows like n to the power {min(constants):.2f} to {max(constants):.2f} over {len(part)} curves; "
                f"what the public scripts print there, {min(scripts):.2f} to {max(scripts):.2f}."
            )
    return said or ["Mean-field constants and mass splitting."]


def _html_table(table: Sequence[Row]) -> str:
    rows = [
        {
            "model": e["subject"],
            "mask": e["masking"],
            "layer": e["layer"],
            "tokens": e["map"],
            "lengths": f"{e['shortest']} … {e['longest']}",
            "samples": e["samples"],
            "L": f"{e['exponent']:.3f}",
            "L, 95 %": _ends(e["low"], e["high"]),
            "scripts": f"{e['scripts']:.3f}",
            "scripts, 95 %": _ends(e["scripts_low"], e["scripts_high"]),
            "L, n ≥ 49": "" if e["tail"] is None else f"{e['tail']:.3f}",
            "L, all lengths": "" if e["longer"] is None else f"{e['longer']:.3f}",
            "paper": "" if e["printed"] is None else f"{e['printed']:.2f}",
        }
        for e in table
    ]

    def cells(tag: str, values: dict[str, object]) -> str:
        words = {name: ' class="text"' if name in ("model", "mask", "tokens") else "" for name in values}
        return "<tr>" + "".join(f"<{tag}{words[name]}>{escape(str(v))}</{tag}>" for name, v in values.items()) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', {name: name for name in rows[0]})}</thead><tbody>{body}</tbody></table>"


def _ends(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f} … {high:.2f}"
