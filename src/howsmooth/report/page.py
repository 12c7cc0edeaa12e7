"""The page of a report: its sentences, a section for every question that was answered, and what its script reads."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from howsmooth.errors import BadInputError
from howsmooth.report.answer import answer, as_html, plain
from howsmooth.report.shell import asset, check_page, encoded, save, whole_page
from howsmooth.run import check_folder, versions
from howsmooth.search import Radius
from howsmooth.study import Radii, questions
from howsmooth.study.advice import advice
from howsmooth.study.answers import ReportData
from howsmooth.study.changes import radii_by_layer
from howsmooth.study.charts import Column, Drawing, Section, Table, number, plain_cells
from howsmooth.study.jobs import Cells, grouped
from howsmooth.study.layers import LayerRow
from howsmooth.study.question import Question

LARGEST = 6_000_000  # bytes
_FEW = 8  # records that are written as they are
_MOST_ROWS = 20_000  # of the table of all measurements; what is drawn is always whole
_COLUMNS = ("layer", "n", "sample", "value", "upper", "confidence", "status", "radius")
_COLUMNS += ("relative", "top_share", "seconds", "seed")
_MORE = """
<section id="more" data-name="More">
<h2>More</h2>
$folded
</section>
"""
_NUMBERS = Section(
    id="numbers",
    name="Numbers",
    title="All numbers",
    place=900,
    text="<b>value</b> is attained by a direction, so never above L; <b>upper</b> holds with probability $confidence at least "
    "in every row; <b>radius</b> is the root mean square norm of the tokens.$cut",
    folded=True,
)
_METHODS = Section(
    id="methods",
    name="Methods",
    title="Methods",
    place=910,
    text="L = ‖D<sub>X</sub>f‖<sub>2</sub>, the largest singular value of the derivative of the map f at the tokens X, is "
    "found by block Golub–Kahan iteration on exact products with the derivative and its transpose, or by decomposing the "
    "whole derivative where it is small. The value is evaluated again in float64 along the direction found; the upper end "
    "follows from the random start alone, whatever the spectrum. Means over samples are geometric; the exponent is a "
    "least-squares slope of log L against log n.",
    below="<dl>$methods<dt>command</dt><dd><code>$command</code></dd></dl>",
    folded=True,
)


def render(data: ReportData) -> str:
    """The page as text."""
    m, sentences, rows = data.methods, answer(data), data.of(LayerRow)
    main, more = [], []
    for question, _ in drawings(data):
        if question.section:
            section = replace(question.section, folded=question.folded(data))
            (more if section.folded else main).append(_html_of(section, question.said_of(data), map=escape(m.map)))
    lowest = min(row.confidence for row in rows)
    cut = f" The first {_MOST_ROWS} of {len(rows)} are here." if len(rows) > _MOST_ROWS else ""
    methods = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _methods(data).items() if v)
    more.append(_html_of(_NUMBERS, "every measurement", confidence=escape(str(lowest)), cut=cut))
    more.append(_html_of(_METHODS, "versions, seeds, and the command", methods=methods, command=escape(m.command)))
    main.insert(1, _advice(data))
    folded = "\n".join(more)
    return whole_page(
        '<nav id="contents" aria-label="sections"></nav>\n' + "\n".join(main) + Template(_MORE).substitute(folded=folded),
        title=data.title,
        name=f"{data.title} {m.model}",
        meta=_meta(data),
        description=plain(sentences[0]),
        answer=[*map(as_html, sentences[:-1]), as_html(sentences[-1], code=True)],
        version=m.versions.get("howsmooth", ""),
        script=asset("page.js"),
        data=packed(payload(data)),
    )


def drawings(data: ReportData) -> list[tuple[Question[Any], Sequence[Drawing]]]:
    """The questions that have something to show, with their charts, in the order of the page."""
    drawn = [(question, question.drawings(data)) for question in questions().values()]
    shown = [(question, some) for question, some in drawn if some and question.section]
    return sorted(shown, key=lambda one: one[0].section.place if one[0].section else 0)


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
    """What the script reads: the charts of every section, the records that they show, and what the page has of its own."""
    sections = [(question.section, drawn) for question, drawn in drawings(data) if question.section]
    rows = [{k: _exact(v) for k, v in row.columns(*_COLUMNS).items()} for row in data.of(LayerRow)[:_MOST_ROWS]]
    columns = tuple(Column(name, name, text=name == "status") for name in _COLUMNS)
    table = Table(name="measurements", title="All numbers", source="measurements", rows=rows, columns=columns)
    texts = {n: words for n, words in data.texts.items() if n in data.shares}
    return _charts([*sections, (_NUMBERS, [Drawing((table,))])], data.layers) | {"texts": texts}


def packed(payload: dict[str, Any]) -> dict[str, Any]:
    """A page's data with records by column, and words that come often as numbers of a list."""
    return {name: _by_column(some) if _are_records(some) else some for name, some in payload.items()}


def _are_records(some: Any) -> bool:
    return isinstance(some, list) and len(some) > _FEW and all(isinstance(row, dict) for row in some)


def _by_column(rows: list[Cells]) -> dict[str, Any]:
    names, columns = list(dict.fromkeys(name for row in rows for name in row)), []
    for name in names:
        values = [row.get(name) for row in rows]
        words = list(dict.fromkeys(values)) if all(isinstance(v, str) or v is None for v in values) else []
        often = words and 2 * len(words) < len(values)
        columns.append({"words": words, "at": [words.index(v) for v in values]} if often else values)
    return {"names": names, "columns": columns}


def _charts(sections: Iterable[tuple[Section, Sequence[Drawing]]], layers: Sequence[int]) -> dict[str, Any]:
    """Charts by section, and their records by name, once each."""
    records: dict[str, Any] = {}
    built = []
    for section, drawn in sections:
        shown = [drawing for drawing in drawn if drawing.on_page]
        records = {chart.source: chart.rows for drawing in shown for chart in drawing.charts} | records
        charts = [chart.to_dict() | {"picked": [p.column for p in one.picks]} for one in shown for chart in one.charts]
        built.append({"id": section.id, "charts": charts, "picks": plain_cells([p for one in shown for p in one.picks])})
    return records | {"sections": built, "layers": layers}


def _advice(data: ReportData) -> str:
    """What to do, one piece of advice after the other, and the notes that came with the data."""
    given = advice(data)
    shown = {question.section.id for question, _ in drawings(data) if question.section}
    found = []
    for kind, some in grouped(given, lambda one: one.kind).items():
        for k, one in enumerate(some):
            link = f' <a href="#{one.section}">See the chart</a>' if one.section in shown else ""
            name = "" if k else f' id="advice-{kind}"'
            found.append(f'<div class="finding"{name}>{as_html(one.found)}<p>→ {as_html(one.do, code=True)}{link}</p></div>')
    found += [f'<div class="finding">{as_html(note)}</div>' for note in data.remarks]
    if not found:
        return ""
    return f'<section id="advice" data-name="Advice">\n<h2>What to do</h2>\n{"".join(found)}\n</section>\n'


def _html_of(section: Section, said: str = "", **words: str) -> str:
    """A section, with what is said of it; its script fills the places for its charts. A folded one shows that alone."""
    swatches = "".join(f'<li><i class="{look}"></i>{escape(said)}</li>' for look, said in section.swatches)
    about, sentence = f'id="{section.id}" data-name="{escape(section.name)}"', as_html(said)
    head = f"<section {about}>\n<h2>{escape(section.title)}</h2>"
    if section.folded:
        gist = '<span class="gist">$gist</span>'
        head = f"<details {about}>\n<summary><h3>{escape(section.title)}</h3> {gist}</summary>"
    parts = [
        head,
        f"<p>{section.text}</p>",
        f'<ul class="swatches">{swatches}</ul>' if swatches else "",
        f'<div class="controls" id="{section.id}-controls"></div>\n<div id="{section.id}-charts"></div>',
        section.below,
        "</details>\n" if section.folded else "</section>\n",
    ]
    words |= {"gist": sentence, "sentence": "" if section.folded else sentence}
    return Template("\n".join(filter(None, parts))).substitute(words)


def _exact(value: Any) -> Any:
    """A confidence of 0.999999 must not be rounded to 1, which would claim certainty."""
    return str(value) if isinstance(value, float) and 1 > value > 0.9999995 else value


def _meta(data: ReportData) -> str:
    lengths, m = data.lengths, data.methods
    span = f"n = {lengths[0]} … {lengths[-1]}" if len(lengths) > 1 else f"n = {lengths[0]}"
    parts = (m.model, m.text, _many(len(data.layers), "layer"), span, m.date)
    return " · ".join(filter(None, parts))


def _many(count: int, what: str) -> str:
    return f"{number(count)} {what}{'s' * (count != 1)}"


def _methods(data: ReportData) -> dict[str, str]:
    m, samples = data.methods, sorted({level.samples for level in data.summary})
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


def write_radii_page(radii: Radii, page: Path, *, model: str, command: str, change: float | None, force: bool = False) -> Path:
    """Write the page of certified radii, by layer and by input, as one file.

    change: the part of its length that an output may move by; nothing where an answer must hold.
    """
    check_page(page, force)
    return save(render_radii(radii, model=model, command=command, change=change), page)


def render_radii(radii: Radii, *, model: str, command: str, change: float | None) -> str:
    """The page of certified radii as text."""
    found = radii.found()
    layers, inputs = sorted({k for _, k, _ in radii.rows}), {w for w, _, _ in radii.rows}
    said, sections = _smallest(found), []
    what = "the answer changes" if change is None else f"the output moves by more than {100 * change:g} % of its length"
    together = bool(found) and found[0][2].per == "sequence"
    refused = [f"Input {w + 1}, layer {k}: {r}" for w, k, r in radii.rows if isinstance(r, str)]
    chart = Section(
        id="radii",
        name="Radii",
        title="Layer by layer",
        place=1,
        text=f"How far may {'all tokens together' if together else 'every one of the tokens'} that enter a layer move before "
        f"{what}? No change up to the certified radius does it, the attack does, and the truth lies between them; "
        f"<b>first order</b> "
        "is what the derivative at the input alone would promise. Radii are parts of a token's mean length.",
        swatches=(("ball", "certified"), ("", "first order"), ("hot", "attack")),
    )
    numbers = Section(
        id="numbers",
        name="Numbers",
        title="All numbers",
        place=2,
        text="Radii here are lengths; <b>size</b> is the mean length of a token. Certified radii hold with the given "
        "confidence over random starts.",
        below=f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in refused).replace('$', '$$')}</ul>",
    )
    if found:
        rows: list[Cells] = [{"layer": k, "sample": w, "input": w + 1} | r.to_dict() for w, k, r in found]
        names = ("layer", "input", "label", "certified", "first_order", "attacked", "margin", "size", "confidence")
        kept = [name for name in names if name != "label" or any(r.label is not None for _, _, r in found)]
        columns = tuple(Column(name.replace("_", " "), name) for name in kept)
        short = [{name: row[name] for name in (*kept, "sample")} for row in rows]
        whole = Table(name="radii", title="", source="change", rows=short, columns=columns)
        drawing = radii_by_layer(short, "log scale; shaded: range over inputs")
        sections = [(chart, [drawing]), (numbers, [Drawing((whole,))])]
    return whole_page(
        "\n".join(_html_of(section) for section in ([chart] if found else []) + [numbers]),
        title="How far does it hold?",
        meta=f"{model} · {_many(len(layers), 'layer')} · {_many(len(inputs), 'input')}",
        description=said,
        answer=[escape(said)],
        version=versions().get("howsmooth", ""),
        command=command,
        script=asset("page.js"),
        data=_charts(sections, layers),
    )


def _smallest(found: Sequence[tuple[int, int, Radius]]) -> str:
    if not found:
        return "No radius could be certified; the reasons stand below."
    w, k, least = min(found, key=lambda row: row[2].certified / row[2].size)
    shown = [f"{r / least.size:.2g}" for r in (least.certified, least.attacked)]
    attack = f"an attack needs {shown[1]}" if least.attacked < float("inf") else "no attack was found"
    return f"The smallest certified radius is {shown[0]} of a token's length, for input {w + 1} at layer {k}, where {attack}."
