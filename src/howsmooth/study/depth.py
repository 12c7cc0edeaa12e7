"""How do changes grow from layer to layer? L and the mean gain of the maps from each layer to the end of the model and from the
first layer to each, finite-time Lyapunov exponents, and how well neighbouring blocks share their top directions.

What is measured is defined in `howsmooth.models.depth`; the map that a study is asked of plays no part.
"""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import final

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.models import FallbackWarning
from howsmooth.models.capture import HowMeasured
from howsmooth.models.depth import depth_of
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Lines, Section, number
from howsmooth.study.jobs import Cells, EstimateRow, Measured, rare
from howsmooth.study.maps_beside import ROUGH
from howsmooth.study.question import Extras, Question, Steps, lines_by_place, mean
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

_DIRECTIONS = 8
_MIDDLE = 32  # tokens on a page
_LAYERS = 6  # on a page at most, since the work grows with their number times the depth


@final
@dataclass(frozen=True, kw_only=True)
class DepthRow(EstimateRow):
    """The map from what enters a layer to the end (`value`), and that from what enters the first layer to what leaves this one.

    gain, from_first_gain: their mean gains.  exponents: finite-time Lyapunov exponents over all `blocks` blocks, in every
    row, None where nothing of a direction is left.
    misalignment: with the next block, 0 where they share their top directions.
    """

    kind = "depth"
    gain: float
    from_first: float
    from_first_gain: float
    exponents: Sequence[float | None]
    blocks: int
    misalignment: float | None = rare()


@task_of_part
def measure_depth(reader: Reader, part: Part, directions: int, coupling: int, optional: bool = False) -> Iterator[DepthRow]:
    """A row for every layer at one window.  optional: none for a model whose layers do not follow each other."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        exact: HowMeasured = {"tol": part.tol, "certify": part.certify}
        try:
            found = depth_of(part.capture(reader)[0], part.layers, k=directions, coupling=coupling or None, exact=exact)
        except (BadInputError, BadFunctionError):
            if not optional:
                raise
            return
    window: Cells = {"sample": part.first, "start": part.starts[0], "blocks": len(found.blocks)}
    exponents = [e if math.isfinite(e) else None for e in found.exponents.tolist()]
    window |= {"exponents": exponents, "seconds": (time.perf_counter() - began) / len(found.layers)}
    for m, line in zip(found.to_end, found.lines(), strict=True):
        more = {"gain": line["to_end_gain"], "misalignment": line["misalignment"]}
        yield DepthRow.measured(m, window, **more, **{k: line[k] for k in ("from_first", "from_first_gain")})


def tasks(setting: Setting, *, directions: int = _DIRECTIONS, coupling: int = _DIRECTIONS) -> Steps:
    """Every layer at every length on every sample.

    directions: that the Lyapunov exponents follow, 0 for none.
    coupling: top directions of which neighbouring blocks are compared, on the first sample; 0 for none.
    """
    yield [
        one.job(measure_depth, directions=directions, coupling=0 if one.first else coupling)
        for part in parts(setting, layers=len(setting.layers))
        for one in part.windows()
    ]


def on_page(setting: Setting, extras: Extras) -> Steps:
    """The first sample at one length, of a few layers evenly spaced, as exactly as what is only compared needs."""
    scope, count = replace(setting.scope, tol=max(setting.scope.tol, ROUGH), certify=None), len(setting.layers)
    steps = max(1, min(_LAYERS, count) - 1)
    chosen = tuple(setting.layers[k * (count - 1) // steps] for k in range(min(_LAYERS, count)))
    there = parts(replace(setting, scope=scope), [setting.nearest(_MIDDLE)], samples=1, layers=count)
    yield [replace(part, layers=chosen).job(measure_depth, directions=_DIRECTIONS, coupling=0, optional=True) for part in there]


def _line(rows: list[DepthRow]) -> Cells:
    means = {name: mean([getattr(row, name) for row in rows]) for name in ("value", "gain", "from_first", "from_first_gain")}
    off = [row.misalignment for row in rows if row.misalignment is not None]
    first = [row.exponents[0] for row in rows if row.exponents and row.exponents[0] is not None]
    return means | {"exponent": fmean(first) if first else None, "misalignment": fmean(off) if off else None}


def lines(rows: list[DepthRow]) -> list[Cells]:
    """One line for each layer and length: geometric means over samples; of exponents and misalignments, the mean."""
    return lines_by_place(_line, rows)


def table(measured: Measured) -> list[Cells]:
    """A line for each layer and length, its columns as they are read."""
    named = {"value": "L to end", "gain": "gain to end", "from_first": "L from first", "from_first_gain": "gain from first"}
    return [{named.get(k, k): v for k, v in line.items()} for line in lines(measured.of(DepthRow))]


def sentence(rows: list[DepthRow], data: ReportData) -> str:
    """How much a change grows from the first layer to the end, at worst and at random, and where most is left to come."""
    there = lines(rows)
    if not there or there[0]["value"] <= 0:
        return ""
    first, most = there[0], max(there, key=lambda line: line["value"])
    said = (
        f"**From layer {first['layer']} to the end** a change grows at most {number(first['value'])} times, a random one "
        f"{number(first['gain'])} times."
    )
    if first["exponent"] is not None:
        said += (
            f" Per block a random direction grows {number(math.exp(first['exponent']))} times: the first Lyapunov exponent is "
            f"{first['exponent']:.2g}."
        )
    return said + f" What enters layer {most['layer']} can still grow most, {number(most['value'])} times."


def figure(rows: list[DepthRow], data: ReportData) -> list[Drawing]:
    """Constants and gains of both maps, layer by layer; beside them misalignments, where they were measured."""
    found = lines(rows)
    grown = Lines(
        name="depth",
        title="Growth over depth, n = {n}",
        unit="log scale",
        source="depth",
        rows=[line for line in found if line["value"] > 0 and line["from_first"] > 0],
        curves=(
            ("L to the end", "value", "hot"),
            ("gain to the end", "gain", "point"),
            ("L from the first layer", "from_first", "ink"),
            ("gain from the first layer", "from_first_gain", "ball"),
        ),
        y_label="times",
        tip=(
            "layer {layer}",
            "to the end: L = {value}, gain {gain}",
            "from the first layer: L = {from_first}, gain {from_first_gain}",
        ),
    )
    off = Lines(
        name="coupling",
        title="Misalignment of each block with the next, n = {n}",
        unit="0: they share their top directions",
        source="coupling",
        rows=[line for line in found if line["misalignment"] is not None],
        curves=(("misalignment", "misalignment", "point"),),
        y_label="misalignment",
        linear=True,
        tip=("layers {layer} and the next", "misalignment {misalignment}"),
    )
    return [Drawing((chart,), file=chart.name) for chart in (grown, off) if chart.rows]


DEPTH = Question(
    name="depth",
    row=DepthRow,
    tasks=tasks,
    title="L and mean gain from each layer to the end and from the first layer to each, geometric mean over samples",
    table=table,
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="depth",
        name="Depth",
        title="How do changes grow from layer to layer?",
        place=117,
        folded=True,
        text="From what enters a layer to what leaves the last block, and from what enters the first layer to what leaves a "
        "layer: the largest factor by which a small change can grow (L), and that of a random change (the gain). $sentence",
    ),
)
