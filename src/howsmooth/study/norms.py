"""Attention with and without the norm in front. It measures attention at the tokens that enter it, the norm, and both together.

The norm in front of a layer is what leads from an earlier node of the recorded run to where its attention begins: the block's
own norm where a block normalises before it attends, that of the block before, or of the embeddings, where it normalises
afterwards.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from howsmooth.maps import Map
from howsmooth.models import Capture
from howsmooth.models.measurement import estimate_columns
from howsmooth.program.operations import name, shape
from howsmooth.program.sides import Norm, PartOfRun, features_last, read_norm
from howsmooth.study.jobs import EstimateRow
from howsmooth.study.question import Question, Steps, mean_lines
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part
from howsmooth.verbs import lipschitz

_VIEWS = {"view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze"}  # the same tokens in the same order
_NEAR = 8  # places in front of a layer where its norm may begin


@final
@dataclass(frozen=True, kw_only=True)
class NormRow(EstimateRow):
    """A layer's attention, the norm in front of it, or both, by `map`: `attention`, `norm`, `normed`."""

    kind = "norms"
    map: str = field()


def tasks(setting: Setting) -> Steps:
    """Every layer, length and sample."""
    yield [one.job(measure_norms) for part in parts(setting) for one in part.windows()]


@task_of_part
def measure_norms(reader: Reader, part: Part) -> Iterator[NormRow]:
    """Rows with map `attention`, `norm` and `normed` (the norm, then attention); the last two where a norm is in front."""
    one = replace(part, map="attention")
    captured = one.capture(reader)
    for m, window in one.measure(reader):
        row = NormRow.measured(m, window)
        yield row
        attn: Map = captured.closed(m.layer) or captured.map(m.layer)
        front = norm_in_front(captured, m.layer)
        if front is None:
            continue
        norm, tokens = front
        lengths = tokens.double().norm(dim=-1)
        radius, largest = float(lengths.square().mean().sqrt()), float(lengths.max())
        for kind, f in (("norm", norm), ("normed", attn @ norm)):
            began = time.perf_counter()
            estimate = lipschitz(f, tokens, tol=one.tol, certify=one.certify)
            seconds = time.perf_counter() - began
            found = replace(row, **estimate_columns(estimate), map=kind, seconds=seconds)
            yield replace(found, radius=radius, radius_max=largest)


@torch.no_grad()
def norm_in_front(captured: Capture, layer: int) -> tuple[Norm, Tensor] | None:
    """The norm whose output enters a layer, and what it took, (n, d); nothing where there is none of a form we know."""
    segment, run = captured.map(layer), captured.sample.run.at(torch.float64)
    flow, (enter, *more) = segment.ends.flow, segment.ends.enter
    while name(enter) in _VIEWS and len(feeds := flow.feeds(enter)) == 1:
        enter = feeds[0]
    tokens = features_last(enter, len(segment.start))
    if more or tokens is None:
        return None
    tokens = tokens.to(segment.device)
    for before in reversed(flow.waists([enter])[:-1][-_NEAR:]):
        if shape(before) != shape(enter):
            continue
        part = PartOfRun.of(flow, before, enter, run)
        taken: Tensor = part.known[before].reshape(-1)[tokens]
        norm = read_norm(part, before, enter, tokens, taken)
        if norm is not None:
            return norm.to(dtype=captured.sample.work), taken.to(captured.sample.work)
    return None


NORMS = Question(
    name="norms",
    row=NormRow,
    tasks=tasks,
    title="L of attention alone, of the norm in front alone, and of both",
    table=lambda measured: mean_lines(lambda row: row.map, measured.of(NormRow)),
)
