"""What one token carries: the constant of a layer while the token that leads its worst direction is frozen."""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from howsmooth.models import Capture, FallbackWarning, Measurement
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Bars, Drawing, Lines, Section, number
from howsmooth.study.jobs import Cells, EstimateRow, grouped
from howsmooth.study.maps_beside import ROUGH
from howsmooth.study.question import Beside, Question
from howsmooth.study.scope import Part

_MOST = 0.5  # share above which one token carries a direction
_LAYERS = 5  # one layer out of so many with the same such token, and two at least, make it a sink
_TELLING = 1.05  # times, that are told apart in a picture


@final
@dataclass(frozen=True, kw_only=True)
class FrozenRow(EstimateRow):
    """A layer whose leading token is frozen: `value` there, `whole` where it may move too.

    received: how much of all attention the token draws, nothing where that is not known.
    """

    kind = "held"
    token: int
    word: str
    share: float
    received: float | None = None
    whole: float


def frozen_row(captured: Capture, m: Measurement, part: Part, window: Cells) -> Iterator[FrozenRow]:
    """One row for a layer of more tokens than one."""
    if m.n == 1:
        return
    began, ((token, word, share), *_) = time.perf_counter(), m.top_tokens(1)
    others = [i for i in range(m.n) if i != token]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        rest = captured.measure(m.layer, part.map, tokens=others, closed=True, tol=max(part.tol, ROUGH), certify=part.certify)
    received = None if m.received is None else m.received[token]
    top = {"token": token, "word": word, "share": share, "received": received, "whole": m.value}
    yield FrozenRow.measured(rest, window, **top, seconds=time.perf_counter() - began)


@final
@dataclass(frozen=True)
class Sink:
    """The token that carries most of the worst direction in many layers. rows: those layers."""

    token: int
    word: str
    rows: Sequence[FrozenRow]


def sink_of(data: ReportData) -> Sink | None:
    """The token that carries more than half of the worst direction in many layers, if there is one."""
    carried = grouped([row for row in data.of(FrozenRow) if row.share > _MOST], lambda row: row.token)
    layers = len(data.layers)
    token = max(carried, key=lambda t: len(carried[t]), default=None)
    if token is None or len(carried[token]) < max(min(2, layers), math.ceil(layers / _LAYERS)):
        return None
    return Sink(token, carried[token][0].word, carried[token])


def sentence(rows: list[FrozenRow], data: ReportData) -> str:
    """Which layer owes most to one token."""
    some = [row for row in rows if row.value > 0]
    if not some:
        return ""
    most = max(some, key=lambda row: row.whole / row.value)
    gain = most.whole / most.value
    if gain < _TELLING:
        return "Here no layer owes much of its constant to one token."
    named = f"layer {most.layer}: with token {most.token + 1} held fixed"
    return f"It matters most in {named} L is {number(gain)} times smaller."


def figure(rows: list[FrozenRow], data: ReportData) -> list[Drawing]:
    """Above, the largest share of one token in every layer; below, L where that token may move and where it is frozen."""
    names = ("layer", "n", "token", "word", "share", "whole", "value")
    cells = [row.columns(*names) | {"position": row.token + 1} for row in rows]
    share = Bars(
        name="token-share",
        title="Largest share of one token, n = {n}",
        unit="of the worst direction; a full bar is 100 %",
        source="held",
        rows=cells,
        x="layer",
        y="share",
        tip=("layer {layer}", "token {position} “{word:short}” carries {share:%}"),
    )
    lines = Lines(
        name="held",
        title="L with that token held fixed, n = {n}",
        unit="log scale",
        source="held",
        rows=cells,
        curves=(("all move", "whole", "point"), ("one held", "value", "hot")),
        tip=("layer {layer}", "all tokens may move: L = {whole}", "token {position} “{word:short}” held fixed: {value}"),
    )
    return [Drawing((share, lines), file="held")] if rows else []


TOKEN = Question(
    name="token",
    row=FrozenRow,
    beside=Beside(frozen_row, lambda setting: [setting.longest]),
    sentence=sentence,
    figure=figure,
    section=Section(
        id="token",
        name="One token",
        title="What one token carries",
        place=30,
        text="In each layer, the token with the largest share of the direction that is stretched most (bars), and L "
        "when that token "
        "is held fixed and only the others may move. $sentence",
        swatches=(("", "all tokens may move"), ("hot", "that token is held fixed")),
    ),
)
