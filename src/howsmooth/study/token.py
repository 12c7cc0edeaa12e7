"""What one token carries: the constant of a layer while the token that leads its worst direction is frozen."""

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from howsmooth.models import Capture, FallbackWarning, Measurement
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Bars, Drawing, Lines, Section, number
from howsmooth.study.jobs import Cells, EstimateRow
from howsmooth.study.maps_beside import ROUGH
from howsmooth.study.question import Beside, Question
from howsmooth.study.scope import Part

CARRIES = 0.5  # share above which one token carries a direction
_DRAWN = 0.25  # share of all attention above which a token is a sink,
_EVEN = 20  # or times an even share; under a causal mask the first of 1 024 tokens has 7.5 of them from uniform weights
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


def is_sink(received: Sequence[float], n: int) -> bool:
    """Whether a token that carries layers draws much attention there, as far as that is known.

    >>> is_sink([0.3, 0.4], 512), is_sink([0.01], 512)
    (True, False)
    """
    return not received or median(received) > min(_DRAWN, _EVEN / n)


def _times(row: FrozenRow) -> float:
    """By how much L falls with the token frozen."""
    return row.whole / row.value if row.value > 0 else 1.0


def sentence(rows: list[FrozenRow], data: ReportData) -> str:
    """Which layer owes most to one token."""
    most = max(rows, key=_times)
    if not found(rows, data):
        return "No layer owes much of its constant to one token."
    return f"It matters most in layer {most.layer}: with token {most.token} frozen L is {number(_times(most))} times smaller."


def found(rows: list[FrozenRow], data: ReportData) -> bool:
    """Whether some layer owes much to one token."""
    return any(_times(row) >= _TELLING for row in rows)


def figure(rows: list[FrozenRow], data: ReportData) -> list[Drawing]:
    """Above, the largest share of one token in every layer; below, L where that token may move and where it is frozen."""
    names = ("layer", "n", "token", "word", "share", "whole", "value")
    cells = [row.columns(*names) for row in rows]
    share = Bars(
        name="token-share",
        title="Largest share of one token, n = {n}",
        unit="of the worst direction; a full bar is 100 %",
        source="held",
        rows=cells,
        x="layer",
        y="share",
        tip=("layer {layer}", "token {token} “{word:short}” carries {share:%}"),
    )
    lines = Lines(
        name="held",
        title="L with that token frozen, n = {n}",
        unit="log scale",
        source="held",
        rows=cells,
        curves=(("all move", "whole", "point"), ("one frozen", "value", "hot")),
        tip=("layer {layer}", "all tokens may move: L = {whole}", "token {token} “{word:short}” frozen: {value}"),
    )
    return [Drawing((share, lines), file="held")] if rows else []


TOKEN = Question(
    name="token",
    row=FrozenRow,
    beside=Beside(frozen_row, lambda setting: [setting.longest]),
    sentence=sentence,
    figure=figure,
    found=found,
    section=Section(
        id="token",
        name="One token",
        title="What one token carries",
        place=30,
        text="In each layer, the token with the largest share of the direction that is stretched most (bars), and L when that "
        "token is frozen and only the others may move. $sentence",
        swatches=(("", "all tokens may move"), ("hot", "that token is frozen")),
    ),
)
