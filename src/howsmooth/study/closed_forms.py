"""Tasks that need the weights of a layer: they have rows for layers in closed form alone, and for the map `attention`."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from howsmooth.kernels.kinds import Kind
from howsmooth.study.jobs import Cells, EstimateRow, Job
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

WIDEST = 1024  # wider layers take longer near an input than everything else on a page
Why = Callable[[Kind], str | None]


def task_of_layer(widest: float = math.inf) -> Callable[[Callable[..., EstimateRow]], Callable[..., list[Cells]]]:
    """A task that gives the row of one layer at one window, from its measurement, the columns of the window, the layer and its
    tokens; none for a layer that has no closed form, or is wider than the widest."""

    def mark(row: Callable[..., EstimateRow]) -> Callable[..., list[Cells]]:
        @task_of_part
        @functools.wraps(row)
        def measure(reader: Reader, part: Part, **more: Any) -> list[EstimateRow]:
            captured, (layer,) = part.capture(reader), part.layers
            attn = captured.closed(layer)
            if attn is None or attn.width > widest:
                return []
            began = time.perf_counter()
            (measurement, window), *_ = part.measure(reader)
            found = row(measurement, window, attn, captured.tokens(layer), **more)
            return [replace(found, seconds=time.perf_counter() - began)]

        return measure

    return mark


def layer_tasks(
    function: Callable[..., list[Cells]],
    setting: Setting,
    lengths: Sequence[int] | None,
    samples: int | None,
    why: Why = lambda _: None,
    **more: Any,
) -> list[Job]:
    """One layer and one window a job, since each takes long. why: kinds of attention have no answer, if they have none."""
    if setting.scope.map != "attention":
        return []
    without = _lacking(setting, why)
    whole = parts(setting, lengths, samples=samples, layers=1)
    return [one.job(function, **more) for part in whole for one in part.windows() if one.layers[0] not in without]


def unanswered(setting: Setting, what: str, why: Why) -> tuple[str, ...]:
    """A sentence for each reason why some layers have no answer. what: they lack."""
    said, lacking = [], _lacking(setting, why) if setting.scope.map == "attention" else {}
    for reason in dict.fromkeys(lacking.values()):
        layers = [str(k) for k, own in lacking.items() if own == reason]
        named = f"layers {', '.join(layers)} have" if len(layers) > 1 else f"layer {layers[0]} has"
        said.append(f"{named} no {what}: {reason}")
    return tuple(said)


def _lacking(setting: Setting, why: Why) -> dict[int, str]:
    """By layer, why there is no answer."""
    reasons = {k: why(kind) for k, kind in zip(setting.layers, setting.kinds, strict=True) if kind is not None}
    return {k: reason for k, reason in reasons.items() if reason is not None}
