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
from howsmooth.study.closed_forms import WIDEST, layer_tasks, task_of_layer, unanswered
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.question import Question, Steps
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


def tasks(setting: Setting) -> Steps:
    """The first sample, at the longest length up to 16."""
    yield near_jobs(setting, setting.nearest(SHORT))


NEARBY = Question(
    name="near",
    row=NearRow,
    tasks=tasks,
    lacking=lambda setting: unanswered(setting, "bounds near the text", not_softmax),
)
