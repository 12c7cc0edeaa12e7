"""Does splitting a token pay on a model's own inputs?"""

import math
import time
from collections.abc import Sequence

from howsmooth.study.jobs import Job, Row
from howsmooth.study.layers import Setting, row_of
from howsmooth.study.reader import Reader, entering
from howsmooth.verbs import splitting


def splitting_jobs(setting: Setting, lengths: Sequence[int] | None = None, samples: int | None = None) -> list[Job]:
    """Does splitting pay on a model's own inputs? Every layer, length and sample, or the first few samples."""
    q = setting.question
    if q.map != "attention":
        return []
    shared = {"tol": q.tol, "seed": q.seed}
    return [
        Job(measure_splitting, {"n": n, "start": s, "sample": k, "layer": layer, **shared})
        for n in sorted(set(lengths or q.lengths), reverse=True)
        for k, s in enumerate(setting.starts[:samples])
        for layer in setting.layers
    ]


def measure_splitting(reader: Reader, n: int, start: int, sample: int, layer: int, tol: float, seed: int) -> list[Row]:
    """One row: what splitting a token does, and what moving them does; none for a layer that is no `Attention`."""
    captured = reader.captures(n, [start])[0]
    attn = reader.closed(captured, layer)
    if attn is None:
        return []
    began = time.perf_counter()
    s = splitting(attn, entering(captured, layer), tol=tol, seed=seed)
    found = {
        "start": start,
        "moved": s.moved.value,
        "gain": s.gain if math.isfinite(s.gain) else None,
        "pays": s.pays,
        "certain": s.certain,
        "token": s.token,
        "seconds": time.perf_counter() - began,
    }
    return [row_of(reader, "splitting", layer, "attention", n, sample, s.split) | found]
