"""The demo's page: one HTML file, nothing fetched."""

import json
import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

TUNED_LENGTH = 128  # the model card: "The sequence length was limited to 128 tokens."


@dataclass(frozen=True)
class Token:
    gap: str  # the text between the previous token and this one
    text: str
    special: bool = False


@dataclass(frozen=True)
class Cell:
    """One measurement: one layer at one window."""

    layer: int
    n: int
    value: float
    upper: float
    confidence: float  # the probability with which the upper end holds
    status: str
    radius: float
    shares: list[float]  # each token's share of the worst direction, sums to 1


def fit(cells: list[Cell], layer: int) -> float:
    """The exponent a of the least-squares fit log L = a log n + b."""
    points = [(math.log(c.n), math.log(c.value)) for c in cells if c.layer == layer]
    return float(np.polyfit(*zip(*points, strict=True), deg=1)[0])


def steepest(cells: list[Cell]) -> tuple[Cell, Cell] | None:
    """The steepest step between consecutive lengths of a layer, if it more than doubles L."""
    by_layer = sorted(cells, key=lambda c: (c.layer, c.n))
    steps = [(a, b) for a, b in pairwise(by_layer) if a.layer == b.layer]
    doubled = [(a, b) for a, b in steps if b.value > 2 * a.value]
    return max(doubled, key=lambda s: math.log(s[1].value / s[0].value) / math.log(s[1].n / s[0].n), default=None)


def summary(cells: list[Cell]) -> str:
    worst = max(cells, key=lambda c: c.value)
    layers = sorted({c.layer for c in cells})
    exponents = [fit(cells, layer) for layer in layers]
    lengths = sorted({c.n for c in cells})
    return (
        f"<b>Layer {worst.layer} is the least smooth</b>: at n = {worst.n} tokens, a small change of its input can "
        f"come out {worst.value:.1f} times as large. From {lengths[0]} to {lengths[-1]} tokens its constant grows "
        f"about like <b>n<sup>{exponents[layers.index(worst.layer)]:.2f}</sup></b>; over all layers the exponent goes "
        f"from {min(exponents):.2f} to {max(exponents):.2f}. What was measured is the local Lipschitz constant "
        f"L = ‖D<sub>X</sub>f‖<sub>2</sub> of each attention layer f of all-MiniLM-L6-v2, output projection included, "
        f"residual and LayerNorm left out, on the opening of <i>Alice in Wonderland</i>."
    )


def jump_note(cells: list[Cell]) -> str:
    step = steepest(cells)
    if step is None:
        return ""
    a, b = step
    return (
        f'<p class="note"><b>A jump.</b> Layer {a.layer} goes from L = {a.value:.2f} at n = {a.n} to {b.value:.2f} at '
        f"n = {b.n}: {b.n - a.n} more tokens multiply it by {b.value / a.value:.1f} (ringed below), and the new "
        f"positions carry {100 * sum(b.shares[a.n :]):.0f} % of the worst direction. The model was tuned on windows of "
        f"at most {TUNED_LENGTH} tokens. The exponent fitted to layer {a.layer} averages over this jump.</p>"
    )


def heat_map(cells: list[Cell]) -> str:
    lengths, layers = sorted({c.n for c in cells}), sorted({c.layer for c in cells})
    low, high = (math.log(pick(c.value for c in cells)) for pick in (min, max))
    at = {(c.layer, c.n): c for c in cells}
    head = "".join(f'<th scope="col">{n}</th>' for n in lengths)
    rows = []
    for layer in layers:
        row = f'<tr><th scope="row">layer {layer}</th>'
        for n in lengths:
            c = at[layer, n]
            heat = (math.log(c.value) - low) / ((high - low) or 1)
            row += f'<td style="--a:{0.8 * heat:.3f}">{c.value:.2f}</td>'
        rows.append(f"{row}<td>{fit(cells, layer):.2f}</td></tr>")
    return (
        f'<div class="scroll"><table class="heat"><thead><tr><th scope="col">n =</th>{head}'
        f'<th scope="col" title="L ~ n^a">a</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def all_numbers(cells: list[Cell]) -> str:
    rows = "".join(
        f"<tr><td>{c.layer}</td><td>{c.n}</td><td>{c.value:.3f}</td><td>{c.upper:.3f}</td><td>{c.radius:.2f}</td>"
        f"<td>{escape(c.status)}</td></tr>"
        for c in cells
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("layer", "n", "L", "upper", "R", "status"))
    return (
        '<details><summary>All numbers</summary><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def curves(cells: list[Cell]) -> str:
    lengths, layers = sorted({c.n for c in cells}), sorted({c.layer for c in cells})
    left, right, top, bottom = 46, 430, 12, 290
    low, high = (math.log(pick(c.value for c in cells)) for pick in (min, max))
    low, high = low - 0.05 * (high - low + 1), high + 0.05 * (high - low + 1)

    def px(n: float) -> float:
        return left + (right - left) * math.log(n / lengths[0]) / math.log(lengths[-1] / lengths[0])

    def py(value: float) -> float:
        return bottom - (bottom - top) * (math.log(value) - low) / (high - low)

    marks = []
    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for value in (m * 10.0**e for e in decades for m in (1, 2, 5)):
        if low <= math.log(value) <= high:
            y = py(value)
            marks.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            marks.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for n in lengths:
        marks.append(f'<line class="grid" x1="{px(n):.1f}" x2="{px(n):.1f}" y1="{top}" y2="{bottom}"/>')
        if n & (n - 1) == 0:  # only powers of two are labelled, or the labels collide
            marks.append(f'<text x="{px(n):.1f}" y="{bottom + 16}" text-anchor="middle">{n}</text>')
    for layer in layers:
        line = sorted((c for c in cells if c.layer == layer), key=lambda c: c.n)
        path = " ".join(f"{px(c.n):.1f},{py(c.value):.1f}" for c in line)
        marks.append(f'<polyline class="s{layer % 6}" points="{path}"/>')
        marks += [
            f'<circle class="s{layer % 6}" cx="{px(c.n):.1f}" cy="{py(c.value):.1f}" r="3">'
            f"<title>layer {c.layer}, n = {c.n}: L = {c.value:.3f}</title></circle>"
            for c in line
        ]
    if step := steepest(cells):
        marks += [f'<circle class="ring" cx="{px(c.n):.1f}" cy="{py(c.value):.1f}" r="7"/>' for c in step]
    middle = (top + bottom) / 2
    legend = "".join(f'<li><i class="s{layer % 6}"></i>layer {layer}</li>' for layer in layers)
    return (
        '<figure><svg viewBox="0 0 440 325" role="img" aria-label="Growth of L with n, one curve per layer">'
        f'{"".join(marks)}<text x="{(left + right) / 2}" y="322" text-anchor="middle">n, tokens (log scale)</text>'
        f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">L (log scale)</text></svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def squeeze(gap: str) -> str:
    """White space between tokens: paragraphs stay apart, line ends inside them go."""
    return "\n" if gap.count("\n") > 1 else " " if gap.isspace() else escape(gap)


def token_view(cells: list[Cell], tokens: list[Token], n: int) -> str:
    shown = sorted((c for c in cells if c.n == n), key=lambda c: c.layer)
    options = "".join(f'<option value="{i}">layer {c.layer}</option>' for i, c in enumerate(shown))
    spans = "".join(f'{squeeze(t.gap)}<span class="t{" special" if t.special else ""}">{escape(t.text)}</span>' for t in tokens)
    tops = []
    for c in shown:
        order = sorted(range(n), key=lambda i: -c.shares[i])[:5]
        tops.append(", ".join(f"{tokens[i].text} {100 * c.shares[i]:.0f} %" for i in order))
    data = json.dumps({"shares": [[round(s, 5) for s in c.shares] for c in shown], "tops": tops}).replace("<", "\\u003c")
    return (
        f'<label>Show <select id="pick">{options}</select></label> <span id="tops"></span>'
        f'<p class="text" id="text">{spans}</p>'
        f'<script type="application/json" id="data">{data}</script><script>{SCRIPT}</script>'
    )


def render(cells: list[Cell], tokens: list[Token], n: int) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>How smooth is attention?</title>
<style>{STYLE}</style>
</head>
<body>
<h1>How smooth is attention?</h1>
<p>{summary(cells)}</p>
{jump_note(cells)}
<h2>L by layer and window length</h2>
{heat_map(cells)}
<p class="small">The last column is the exponent a of the fit L ~ n<sup>a</sup>. The numbers shown are
lower ends, each attained by a direction; the upper ends, listed below, hold with probability
{min(c.confidence for c in cells):.6g} each. R is the root mean square token norm.</p>
{all_numbers(cells)}
<h2>Growth with n</h2>
{curves(cells)}
<h2>Where the worst direction acts, n = {n}</h2>
<p class="small">Each token is shaded by its share |v<sub>i</sub>|² of the unit direction v that the layer stretches
most; the darkest token of a layer sets its scale.</p>
{token_view(cells, tokens, n)}
</body>
</html>
"""


SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const pick = document.getElementById("pick"), spans = document.querySelectorAll("#text .t");
function show() {
  const shares = data.shares[pick.value], top = Math.max(...shares);
  spans.forEach((span, i) => {
    span.style.setProperty("--a", 0.85 * Math.sqrt(shares[i] / top));
    span.title = (100 * shares[i]).toFixed(2) + " %";
  });
  document.getElementById("tops").textContent = "Largest shares: " + data.tops[pick.value];
}
pick.addEventListener("change", show);
show();
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6475; --paper: #fcfcfa; --line: #d9dce3; --hot: 226 97 35;
  --c0: #c2410c; --c1: #1d6fb8; --c2: #2f8f4e; --c3: #8a4bb3; --c4: #a3781a; --c5: #0f8b8d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ee; --soft: #a3abba; --paper: #14171d; --line: #333a47;
  --hot: 235 110 50; --c0: #ff8a55; --c1: #6db5f2; --c2: #6fce8d; --c3: #c995ec; --c4: #e0ba5c; --c5: #5bcfd1; } }
body { font: 17px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 46rem;
  margin: 0 auto; padding: 1.2rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.small { font-size: .88rem; color: var(--soft); }
.note { border-left: 4px solid rgb(var(--hot)); padding-left: .8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .5rem; text-align: right; font-size: .92rem; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
td { background: rgb(var(--hot) / var(--a, 0)); border: 1px solid var(--paper); }
figure { margin: 0; max-width: 40rem; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--soft); } .grid { stroke: var(--line); stroke-width: .7; }
polyline { fill: none; stroke: currentColor; stroke-width: 2; } circle { fill: currentColor; }
.ring { fill: none; stroke: var(--ink); stroke-width: 1.3; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; margin: .5rem 0; }
.legend i { display: inline-block; background: currentColor; width: 1.1rem; height: .25rem; margin-right: .4rem;
  vertical-align: middle; }
.s0 { color: var(--c0); } .s1 { color: var(--c1); } .s2 { color: var(--c2); }
.s3 { color: var(--c3); } .s4 { color: var(--c4); } .s5 { color: var(--c5); }
.text { white-space: pre-wrap; font-family: Georgia, serif; line-height: 1.8; overflow-wrap: anywhere; }
.t { background: rgb(var(--hot) / var(--a)); border-radius: 3px; }
.special { font: .8rem system-ui, sans-serif; color: var(--ink); border: 1px solid var(--line); padding: 0 .2rem; }
@media (max-width: 560px) { .heat th, .heat td { font-size: .72rem; padding: .35rem .15rem; } }
select { font: inherit; padding: .15rem .3rem; }
#tops { font-size: .88rem; color: var(--soft); }
"""
