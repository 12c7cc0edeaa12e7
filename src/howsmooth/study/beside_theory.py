"""A layer on text beside theory: what is certified near it, whether splitting a token pays, and the worst input of the same
size.

All of these need the layer's weights, so they have rows for layers in closed form alone, and for the map `attention`.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.kernels.kinds.kind import Kind, counts_tokens, not_softmax
from howsmooth.maps import Attention
from howsmooth.models import Measurement
from howsmooth.models.measurement import estimate_columns
from howsmooth.search import find_near, slope_at
from howsmooth.solve import Options
from howsmooth.study.jobs import Job, Row
from howsmooth.study.layers import Part, Setting, parts
from howsmooth.study.radius import certified_radius
from howsmooth.study.reader import Reader
from howsmooth.theory.around import AroundAttention, Neighbourhood
from howsmooth.verbs import splitting, worst_case

NEAR = (1e-4, 1e-3, 1e-2)  # radii, in lengths of a token
_CLIMB = 1  # steps of ascent from each start: near an input its gradient is nearly all there is
_SPACED = 12  # layers that are asked what is certified near the text
_WIDEST = 1024  # wider layers take longer near an input than everything else on a page
_WORDS = {
    "tie": "most tokens alike and undecided between two",
    "clusters": "a few tokens against all others, which are alike",
    "opposite": "one token opposite to all others, which are alike",
    "half": "all tokens on one line, one twice as long",
}


def near_jobs(setting: Setting, n: int) -> list[Job]:
    """The largest constant near the text, attained and certified, on the first sample at one length; of the layers, at most
    twelve that are evenly spaced."""
    last, count = len(setting.layers) - 1, min(len(setting.layers), _SPACED)
    chosen = [round(k * last / max(1, count - 1)) for k in range(count)]
    layers, kinds = (tuple(every[i] for i in chosen) for every in (setting.layers, setting.kinds))
    return _jobs(measure_near, replace(setting, layers=layers, kinds=kinds), [n], 1)


def measure_near(reader: Reader, part: dict[str, Any]) -> list[Row]:
    """One row with what is attained and what is certified within each of a few radii, as parts of a token's length."""

    def row(m: Measurement, attn: Attention, x: Tensor) -> Row:
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
        return m.row("near", size=size, within=list(NEAR), lower_ends=lower, upper_ends=upper)

    return _rows(reader, part, row, _WIDEST)


def change_jobs(setting: Setting, n: int, change: float) -> list[Job]:
    """Within which radius the output moves by at most this part of its length; every layer and sample, at one length."""
    return _jobs(measure_change, setting, [n], None, change=change)


def measure_change(reader: Reader, part: dict[str, Any], change: float) -> list[Row]:
    """One row with the radius that is certified, the one that the norm at the text promises, and an attack's."""

    def row(m: Measurement, attn: Attention, x: Tensor) -> Row:
        radius = certified_radius(attn, x, change=change)
        attacked = radius.attacked if math.isfinite(radius.attacked) else None
        ends = {"certified": radius.certified, "first_order": radius.first_order, "attacked": attacked}
        return m.row("change", change=change, size=radius.size, **ends)

    return _rows(reader, part, row, _WIDEST)


def splitting_jobs(setting: Setting, lengths: Sequence[int] | None = None, samples: int | None = None) -> list[Job]:
    """Does splitting a token pay? Every layer, length and sample, or the first few samples."""
    return _jobs(measure_splitting, setting, lengths, samples)


def measure_splitting(reader: Reader, part: dict[str, Any]) -> list[Row]:
    """One row: what splitting a token does, and what moving them does."""

    def row(m: Measurement, attn: Attention, x: Tensor) -> Row:
        s = splitting(attn, x, tol=m.estimate.tol, seed=m.estimate.seed)
        gain = s.gain if math.isfinite(s.gain) else None
        more = {"moved": s.moved.value, "gain": gain, "pays": s.pays, "certain": s.certain, "token": s.token}
        return m.row("splitting", **estimate_columns(s.split), **more)

    return _rows(reader, part, row)


def worst_jobs(setting: Setting, n: int, steps: int = 5, restarts: int = 4) -> list[Job]:
    """The worst input found beside the text, as many tokens, none longer than the text's longest; every layer at one length.

    steps, restarts: as in `howsmooth.worst_case`.
    """
    return _jobs(measure_worst, setting, [n], 1, steps=steps, restarts=restarts)


def measure_worst(reader: Reader, part: dict[str, Any], steps: int, restarts: int) -> list[Row]:
    """One row with the text's constant and the worst found."""

    def row(m: Measurement, attn: Attention, x: Tensor) -> Row:
        worst = worst_case(attn, n=m.n, radius=m.radius_max, steps=steps, restarts=restarts, seed=m.estimate.seed)
        more = {
            "text": m.value,
            "log_ceiling": None if worst.bound is None else worst.bound.log_value,
            "ceiling": None if worst.bound is None else worst.bound.id,
            "how": in_words(worst.start),
            "improved": worst.status == "improved",
        }
        return m.row("worst", **estimate_columns(worst.estimate), **more)

    return _rows(reader, part, row)


def _jobs(
    function: Callable[..., list[Row]], setting: Setting, lengths: Sequence[int] | None, samples: int | None, **more: Any
) -> list[Job]:
    """One layer and one window a job: each takes long."""
    if setting.question.map != "attention":
        return []
    without = _lacking(function, setting)
    return [
        Job(function, {"part": asdict(one), **more})
        for part in parts(setting, lengths, samples=samples, layers=1)
        for one in part.windows()
        if one.layers[0] not in without
    ]


# what is not known of every kind of attention: its name, and why a kind has none
_KNOWN: dict[Callable[..., list[Row]], tuple[str, Callable[[Kind], str | None]]] = {
    measure_near: ("bounds near the text", not_softmax),
    measure_splitting: ("splitting", counts_tokens),
}


def _lacking(function: Callable[..., list[Row]], setting: Setting) -> dict[int, str]:
    """By layer, why there is no answer to a question."""
    why = _KNOWN[function][1] if function in _KNOWN else lambda _: None
    reasons = {k: why(kind) for k, kind in zip(setting.layers, setting.kinds, strict=True) if kind is not None}
    return {k: reason for k, reason in reasons.items() if reason is not None}


def unanswered(setting: Setting, *functions: Callable[..., list[Row]]) -> tuple[str, ...]:
    """What has no answer in some layers, a sentence for each reason; of all questions, or of these alone."""
    said = []
    for function in (functions or _KNOWN) if setting.question.map == "attention" else ():
        lacking = _lacking(function, setting)
        for reason in dict.fromkeys(lacking.values()):
            layers = [str(k) for k, own in lacking.items() if own == reason]
            named = f"layers {', '.join(layers)} have" if len(layers) > 1 else f"layer {layers[0]} has"
            said.append(f"{named} no {_KNOWN[function][0]}: {reason}")
    return tuple(said)


def _rows(
    reader: Reader, part: dict[str, Any], row: Callable[[Measurement, Attention, Tensor], Row], widest: float = math.inf
) -> list[Row]:
    """The row of one layer at one window; none for a layer that has no closed form, or is wider than the widest."""
    one = Part.of(part)
    captured, (layer,) = one.capture(reader), one.layers
    attn = captured.closed(layer)
    if attn is None or attn.width > widest:
        return []
    began = time.perf_counter()
    (measurement, window), *_ = one.measure(reader)
    cells = row(measurement, attn, captured.tokens(layer))
    return [cells | window | {"seconds": time.perf_counter() - began}]


def in_words(start: str) -> str:
    """Where a climb began, for a reader.

    >>> in_words("tie: 1 and 1 against the rest (head 2), shaken")
    'most tokens alike and undecided between two, built from head 2'
    """
    family, _, rest = start.partition(":")
    if family not in _WORDS:
        return start
    head = re.search(r"\(head (\d+)", rest)
    return _WORDS[family] + (f", built from head {head[1]}" if head else "")
