"""How far does it hold? The largest constant of a layer near the text, attained and certified."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from howsmooth.kernels.kinds.kind import not_softmax
from howsmooth.maps import Attention
from howsmooth.models import Measurement
from howsmooth.search import find_near, slope_at
from howsmooth.solve import Options
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Lines, Option, Pick, Section, number
from howsmooth.study.closed_forms import WIDEST, layer_tasks, task_of_layer, unanswered
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.question import Extras, Question, Steps
from howsmooth.study.scope import Setting
from howsmooth.theory.around import AroundAttention, Neighbourhood

NEAR = (1e-4, 1e-3, 1e-2)  # radii, in lengths of a token
SHORT = 16  # tokens, where each layer and sample costs seconds
_CLIMB = 1  # steps of ascent from each start: near an input its gradient is nearly all there is
_SPACED = 12  # layers that are asked what is certified near the text


@final
@dataclass(frozen=True, kw_only=True)
class NearRow(EstimateRow):
    """A layer on the first sample.

    size: the mean length of a token.  within: radii in such lengths, and of each the constant that is attained
    (`lower_ends`), and certified (`upper_ends`), nothing where that is not finite.
    """

    kind = "near"
    size: float
    within: Sequence[float]
    lower_ends: Sequence[float]
    upper_ends: Sequence[float | None]

    def lines(self) -> list[Cells]:
        """One line for each radius, in lengths of a token: the constant at the text, attained and certified within it."""
        about = self.columns("layer", "n") | {"at_text": self.value, "token_length": self.size}
        ends = zip(self.within, self.lower_ends, self.upper_ends, strict=True)
        return [about | {"r": r, "attained": low, "certified": high} for r, low, high in ends]


def near_jobs(setting: Setting, n: int) -> list[Job]:
    """The first sample at one length; of the layers, at most twelve that are evenly spaced."""
    last, count = len(setting.layers) - 1, min(len(setting.layers), _SPACED)
    chosen = [round(k * last / max(1, count - 1)) for k in range(count)]
    layers, kinds = (tuple(every[i] for i in chosen) for every in (setting.layers, setting.kinds))
    return layer_tasks(measure_near, replace(setting, layers=layers, kinds=kinds), [n], 1, not_softmax)


@task_of_layer(WIDEST)
def measure_near(m: Measurement, window: Cells, attn: Attention, x: Tensor) -> NearRow:
    """What is attained and what is certified within each of a few radii."""
    layer, x = attn.to("cpu", torch.float64), x.double().cpu()
    bounds, size = AroundAttention(layer, x, seed=m.estimate.seed), float(x.norm(dim=-1).mean())
    best, lower, upper, slope = m.lower, [], [], slope_at(layer, Neighbourhood.of(x, 0.0), None, m.estimate)
    for share in NEAR:
        area = Neighbourhood.of(x, share * size)
        found = find_near(layer, area, None, _CLIMB, Options(tol=m.estimate.tol), m.estimate, slope)
        best, around = max(best, found.estimate.lower), bounds.within(area)
        # the constant at the text is the model's own code's, whose rounding is not the layer's
        here = found.estimate is m.estimate
        certified = max(best, around.slope if here else around.upper_end(found.estimate.lower, found.estimate.noise))
        lower.append(best)
        upper.append(certified if math.isfinite(certified) else None)
    return NearRow.measured(m, window, size=size, within=list(NEAR), lower_ends=lower, upper_ends=upper)


def on_page(setting: Setting, extras: Extras) -> Steps:
    """The first sample, at the longest length up to 16."""
    yield near_jobs(setting, setting.nearest(SHORT))


def sentence(rows: list[NearRow], data: ReportData) -> str:
    """The layer whose certified constant is furthest from the one at the text, at the middle radius."""
    rows = [row for row in rows if row.value > 0]
    if not rows:
        return ""
    k = min(1, len(rows[0].within) - 1)
    share = number(rows[0].within[k])
    known = [(row, up) for row in rows if (up := row.upper_ends[k]) is not None]
    if not known:
        return f"Nothing is certified within r = {share}."
    furthest, most = max(known, key=lambda end: end[1] / end[0].value)
    up, found = (number(end / furthest.value) for end in (most, furthest.lower_ends[k]))
    where = f"layer {furthest.layer}, where {found} times is attained"
    none = "no layer's L" if len(known) == len(data.layers) else f"no L of the {len(known)} layers asked"
    return f"Within r = {share} {none} is more than {up} times that at the text ({where})."


def figure(rows: list[NearRow], data: ReportData) -> list[Drawing]:
    """L at the text, and what is attained and certified within each radius, layer by layer."""
    if not rows:
        return []
    radii = rows[0].within
    chart = Lines(
        name="near",
        title="L within {r} of a token's length, n = {n}",
        unit="first sample, log scale",
        source="near",
        rows=[line for row in rows for line in row.lines()],
        curves=(("at the text", "at_text", "ink"), ("attained", "attained", "point"), ("certified", "certified", "ball")),
        tip=(
            "layer {layer}, r = {r} |x|",
            "at the text: L = {at_text}",
            "attained: {attained}",
            "certified: at most {certified}",
        ),
    )
    options = tuple(Option(r, f"{r:g} of a token's length", f"{r:g}") for r in radii)
    pick = Pick("near-radius", "Radius r", "r", options, radii[min(1, len(radii) - 1)], panels=True)
    return [Drawing((chart,), (pick,), file="near")]


NEARBY = Question(
    name="near",
    row=NearRow,
    lacking=lambda setting: unanswered(setting, "bounds near the text", not_softmax),
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="near",
        name="Nearby",
        title="How far it holds",
        place=70,
        folded=True,
        text="L is a number at one input. Let every token of the first sample move by up to r, a part of a token's "
        "mean length: the "
        "largest L that ascent found in there, and the largest that any input in there can have, certified. $sentence",
        swatches=(("ink", "at the text"), ("", "attained within r"), ("ball", "certified within r")),
    ),
)
