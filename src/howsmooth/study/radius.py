"""`L` against the size of the tokens: the text's own tokens, all multiplied by one factor."""

import time
from collections.abc import Sequence

import torch

from howsmooth.errors import BadInputError
from howsmooth.study.jobs import Job, Row
from howsmooth.study.layers import Setting, map_name, row_of
from howsmooth.study.reader import Reader, entering
from howsmooth.verbs import lipschitz, lipschitz_batch

FACTORS = (0.125, 0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0, 8.0)


def radius_jobs(setting: Setting, factors: Sequence[float] = FACTORS) -> list[Job]:
    """Every layer, length and sample, over all factors at once."""
    wrong = [f for f in factors if not 0 < f < 1e6]
    if wrong or not factors:
        raise BadInputError(f"expected positive factors, got {list(factors)}; 1 leaves the tokens as they are")
    q = setting.question
    return [
        Job(measure_radius, {"n": n, "start": s, "sample": k, "layer": i, "map": q.map, "factors": list(factors)} | q.options())
        for n in sorted(set(q.lengths), reverse=True)
        for k, s in enumerate(setting.starts)
        for i in setting.layers
    ]


def measure_radius(
    reader: Reader,
    n: int,
    start: int,
    sample: int,
    layer: int,
    map: str,
    factors: list[float],
    tol: float,
    certify: float | None,
    seed: int,
) -> list[Row]:
    """A row for every factor. A layer in closed form takes them in lock step."""
    captured = reader.captures(n, [start])[0]
    closed = reader.closed(captured, layer) if map == "attention" else None
    options = {"tol": tol, "certify": certify, "seed": seed}
    began = time.perf_counter()
    if closed is not None:
        x = entering(captured, layer)
        found = list(lipschitz_batch(closed, torch.stack([f * x for f in factors]), **options))
    else:
        cut = reader.map(captured, layer, map_name(map))
        x = cut.start
        found = [lipschitz(cut, f * x, **options) for f in factors]
    seconds = (time.perf_counter() - began) / len(factors)
    lengths = x.double().norm(dim=-1)
    rms, most = float(lengths.square().mean().sqrt()), float(lengths.max())
    return [
        row_of(reader, "radius", layer, map, n, sample, estimate)
        | {"start": start, "factor": f, "radius": f * rms, "radius_max": f * most, "seconds": seconds}
        for f, estimate in zip(factors, found, strict=True)
    ]
