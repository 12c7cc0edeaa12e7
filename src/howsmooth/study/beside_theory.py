"""What was measured beside each bound that theory has for a layer there."""

import time

from howsmooth.study.jobs import Job, Row
from howsmooth.study.layers import Setting, row_of
from howsmooth.study.reader import Reader, entering
from howsmooth.theory.ball import ball_bounds
from howsmooth.theory.bound import Bound
from howsmooth.theory.point import point_bounds
from howsmooth.verbs import lipschitz


def bound_jobs(setting: Setting, lengths: list[int]) -> list[Job]:
    """Every layer on the first sample, at these lengths. Bounds are for the map `attention`."""
    q = setting.question
    if q.map != "attention":
        return []
    start = setting.starts[0]
    return [
        Job(measure_bounds, {"n": n, "start": start, "layer": layer, **q.options()})
        for n in sorted(set(lengths), reverse=True)
        for layer in setting.layers
    ]


def measure_bounds(reader: Reader, n: int, start: int, layer: int, tol: float, certify: float | None, seed: int) -> list[Row]:
    """One row with every bound at the input, and over the ball that just holds its tokens; none for a layer that is no
    `Attention`: bounds need its weights."""
    captured = reader.captures(n, [start])[0]
    attn, x = reader.closed(captured, layer), entering(captured, layer)
    if attn is None:
        return []
    began = time.perf_counter()
    estimate = lipschitz(attn, x, tol=tol, certify=certify, seed=seed)
    radius = float(x.double().norm(dim=-1).max())
    found = [_cells("point", b) for b in point_bounds(attn, x)]
    found += [_cells("ball", b) for b in ball_bounds(attn, n, radius)]
    row = row_of(reader, "bounds", layer, "attention", n, 0, estimate)
    return [row | {"start": start, "radius_max": radius, "bounds": found, "seconds": time.perf_counter() - began}]


def _cells(where: str, bound: Bound) -> Row:
    names = ("id", "name", "side", "log_value", "statement", "source", "reason")
    return {"where": where, **{name: getattr(bound, name) for name in names}}
