"""Which layer's L changes most when the text is shuffled? The same tokens in a random order, special tokens where they are.

A layer without positions of its own may still change: what enters it behind the first layer is made of other contexts, and
position embeddings meet other tokens. What changes is the input alone; the model, its weights and the set of tokens stay.
"""

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch

from howsmooth.models import FallbackWarning, Window
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Lines, Section, number
from howsmooth.study.jobs import Cells, EstimateRow, Measured
from howsmooth.study.maps_beside import ROUGH
from howsmooth.study.question import Extras, Question, Steps, lines_by_place, mean
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

_SHUFFLES = 4
_MIDDLE = 64  # tokens on a page


@final
@dataclass(frozen=True, kw_only=True)
class ShuffledRow(EstimateRow):
    """A layer on one random order of a window's tokens (`value`), beside the order of the text (`in_order`)."""

    kind = "shuffled"
    shuffle: int
    in_order: float


def shuffled(window: Window, seed: int) -> Window:
    """The tokens of a window in a random order; special tokens stay where they are."""
    places = [i for i, piece in enumerate(window.pieces) if not piece.special]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
    ids, pieces = list(window.ids), list(window.pieces)
    for place, k in zip(places, order, strict=True):
        ids[place], pieces[place] = window.ids[places[k]], window.pieces[places[k]]
    return replace(window, ids=tuple(ids), pieces=tuple(pieces))


@task_of_part
def measure_shuffled(reader: Reader, part: Part, shuffles: int, seed: int) -> Iterator[ShuffledRow]:
    """A row for every layer, window and shuffle."""
    for one in part.windows():
        began, (start,) = time.perf_counter(), one.starts
        window = reader.window(one.n, start)
        orders = [window, *(shuffled(window, seed + k) for k in range(shuffles))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            captured = reader.model.capture(orders)
            measured = captured.measure(one.layers, one.map, closed=True, tol=one.tol, certify=one.certify)
        about: Cells = {"sample": one.first, "start": start, "seconds": (time.perf_counter() - began) / len(measured)}
        for k in range(0, len(measured), len(orders)):
            text, *others = measured[k : k + len(orders)]
            for i, m in enumerate(others):
                yield ShuffledRow.measured(m, about, shuffle=i, in_order=text.value)


def tasks(setting: Setting, *, shuffles: int = _SHUFFLES) -> Steps:
    """Every layer, length and sample.

    shuffles: random orders of every window.
    """
    yield [part.job(measure_shuffled, shuffles=shuffles, seed=setting.scope.seed) for part in parts(setting)]


def on_page(setting: Setting, extras: Extras) -> Steps:
    """The first sample at one length, as exactly as what is only compared needs."""
    scope = replace(setting.scope, tol=max(setting.scope.tol, ROUGH), certify=None)
    there = parts(replace(setting, scope=scope), [setting.nearest(_MIDDLE)], samples=1)
    yield [part.job(measure_shuffled, shuffles=_SHUFFLES, seed=scope.seed) for part in there]


def lines(rows: list[ShuffledRow]) -> list[Cells]:
    """One line for each layer and length: L in order, and how many times that it is where tokens are shuffled."""
    return [line for line in lines_by_place(_line, rows) if "times" in line]


def _line(rows: list[ShuffledRow]) -> Cells:
    if any(row.in_order <= 0 for row in rows):  # nothing to compare with
        return {}
    ratios = [row.value / row.in_order for row in rows]
    both = {"in_order": mean([row.in_order for row in rows]), "shuffled": mean([row.value for row in rows])}
    return both | {"times": mean(ratios), "low": min(ratios), "high": max(ratios), "shuffles": len(rows)}


def table(measured: Measured) -> list[Cells]:
    """A line for each layer and length."""
    return lines(measured.of(ShuffledRow))


def sentence(rows: list[ShuffledRow], data: ReportData) -> str:
    """The layer whose constant changes most, either way."""
    there = [line for line in lines(rows) if line["times"] > 0]
    if not there:
        return ""
    most = max(there, key=lambda line: abs(math.log(line["times"])))
    times, low, high = (number(most[name]) for name in ("times", "low", "high"))
    return (
        f"**Layer {most['layer']} changes most:** shuffled, its L is {times} times that of the text in order, in the "
        f"geometric mean ({low} to {high} over {most['shuffles']} random orders of one passage)."
    )


def figure(rows: list[ShuffledRow], data: ReportData) -> list[Drawing]:
    """How many times the constant of the text in order, layer by layer, with the range over the shuffles."""
    chart = Lines(
        name="shuffled",
        title="L of shuffled tokens over L in order, n = {n}",
        unit="first sample; shaded: range over shuffles",
        source="shuffled",
        rows=lines(rows),
        curves=(("shuffled", "times", "point"),),
        low="low",
        high="high",
        y_label="L shuffled / L in order",
        tip=("layer {layer}", "in order: L = {in_order}", "shuffled: {shuffled}", "{times} times ({low} to {high})"),
    )
    return [Drawing((chart,), file="shuffled")] if chart.rows else []


SHUFFLED = Question(
    name="shuffled",
    row=ShuffledRow,
    tasks=tasks,
    title="L in the order of the text and with the same tokens in random orders, special tokens in place",
    table=table,
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="shuffled",
        name="Order",
        title="Does the order of the words matter?",
        place=115,
        folded=True,
        text="The tokens of the first sample in a few random orders, special tokens where they are: what L becomes of, and how "
        "much orders differ. One passage says nothing of other texts. $sentence",
    ),
)
