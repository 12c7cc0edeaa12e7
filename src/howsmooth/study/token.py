"""What one token carries: the constant of a layer while the token that leads its worst direction is frozen."""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from howsmooth.models import Capture, FallbackWarning, Measurement
from howsmooth.study.jobs import Cells, EstimateRow
from howsmooth.study.maps_beside import ROUGH
from howsmooth.study.question import Beside, Question, Steps
from howsmooth.study.scope import Part, Setting


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


def tasks(setting: Setting) -> Steps:
    """Every layer at every length, and at the longest its leading token frozen."""
    from howsmooth.study.layers import layer_jobs

    yield layer_jobs(setting, beside={"token": [setting.longest]})


TOKEN = Question(
    name="token",
    row=FrozenRow,
    tasks=tasks,
    beside=Beside(frozen_row, lambda setting: [setting.longest]),
)
