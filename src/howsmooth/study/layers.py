"""Every layer at every length on every sample. Most of a page is made of these measurements."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from howsmooth.study.charts import Drawing, Heat, Section
from howsmooth.study.heads import head_jobs
from howsmooth.study.jobs import EstimateRow, Job, Row, rare
from howsmooth.study.question import Extras, Question, Steps, mean_lines, questions
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

if TYPE_CHECKING:
    from howsmooth.study.answers import ReportData


@final
@dataclass(frozen=True, kw_only=True)
class LayerRow(EstimateRow):
    """A layer at one window, with its relative constant and the token that carries most of the worst direction.

    shares: of the direction that the layer stretches most, every token's `|v_i|²`.
    """

    kind = "layer"
    upper: float = field()
    confidence: float = field()
    status: str = field()
    radius: float = field()
    sample: int = field()
    relative: float | None = None
    top_token: int | None = None
    top_word: str | None = None
    top_share: float | None = None
    top_received: float | None = None
    shares: Sequence[float] | None = rare()


def layer_jobs(setting: Setting, shares: bool = False, beside: Mapping[str, Sequence[int]] | None = None) -> list[Job]:
    """Every layer at every length on every sample.

    shares: also how much of the worst direction falls on each token, for the first sample.
    beside: questions whose rows come with those of the first sample, by name, and at which lengths.
    """
    jobs = []
    for part in parts(setting):
        there = [name for name, lengths in (beside or {}).items() if part.n in lengths and part.first == 0]
        slow = any(own.slow for name in there if (own := questions()[name].beside))
        for one in part.split(1) if slow else [part]:
            jobs.append(one.job(measure_layers, shares=shares and part.first == 0, beside=there))
    return jobs


@task_of_part
def measure_layers(reader: Reader, part: Part, shares: bool, beside: list[str]) -> Iterator[Row]:
    """A row for every layer and window, and of the first sample what else is wanted."""
    makers = [own.rows for name in beside if (own := questions()[name].beside)]
    for m, window in part.measure(reader):
        first = window["sample"] == 0
        about = m.about() | ({"shares": [round(s, 7) for s in m.input_share]} if shares and first else {})
        yield LayerRow.measured(m, window, **about)
        for rows in makers if first else []:
            yield from rows(part.capture(reader)[0], m, part, window)


def tasks(setting: Setting) -> Steps:
    """Every layer, and every head alone."""
    yield layer_jobs(setting) + head_jobs(setting)


def on_page(setting: Setting, extras: Extras) -> Steps:
    """Every layer, with what comes beside it."""
    yield layer_jobs(setting, True, {name: q.beside.lengths(setting) for name, q in questions().items() if q.beside})


def figure(rows: list[LayerRow], data: "ReportData") -> list[Drawing]:
    """L by layer and length."""
    jumped = {(layer, jump.after) for layer, jump in data.jumps}
    chart = Heat(
        name="layers-by-length",
        title="L by layer and length",
        unit="times, geometric mean over samples",
        source="summary",
        rows=[vars(level) | {"jumped": (level.layer, level.n) in jumped} for level in data.summary],
        x="n",
        x_label="n, tokens",
        y="mean",
        mark="jumped",
        tip=(
            "layer {layer}, n = {n}",
            "L = {mean} ({low} to {high} over {samples})",
            "upper end at most {upper}",
            "R = {radius}",
        ),
    )
    return [Drawing((chart,), file="layers-by-length")]


LAYERS = Question(
    name="layers",
    row=LayerRow,
    tasks=tasks,
    title="L of every layer, geometric mean over samples, and of every head alone on the first",
    table=lambda measured: mean_lines(lambda row: f"head {row.head}" if row.kind == "head" else "L", measured.of(EstimateRow)),
    on_page=on_page,
    sentence=lambda rows, data: "An outlined cell is where a layer has just jumped." if data.jumps else "",
    figure=figure,
    section=Section(
        id="heat",
        name="Lengths",
        title="Which layers, at which length",
        place=10,
        text="<b>L</b> is the largest factor by which a small change of what enters a layer's $map map can come out larger: "
        "the stronger the colour, the less smooth the layer. $sentence",
    ),
)
