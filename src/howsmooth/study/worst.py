"""The worst input found for a layer beside the text: as many tokens, none longer than the text's longest."""

import re
import time

from howsmooth.study.jobs import Job, Row
from howsmooth.study.layers import Setting, row_of
from howsmooth.study.reader import Reader, entering
from howsmooth.verbs import lipschitz, worst_case

_WORDS = {
    "tie": "most tokens alike and undecided between two",
    "clusters": "a few tokens against all others, which are alike",
    "opposite": "one token opposite to all others, which are alike",
    "half": "all tokens on one line, one twice as long",
}


def worst_jobs(setting: Setting, n: int, steps: int = 5, restarts: int = 4) -> list[Job]:
    """Every layer at one length. steps, restarts: as in `howsmooth.worst_case`. Searches are for the map `attention`."""
    q = setting.question
    if q.map != "attention":
        return []
    shared = {"n": n, "start": setting.starts[0], "steps": steps, "restarts": restarts, "tol": q.tol, "seed": q.seed}
    return [Job(measure_worst, {"layer": layer, **shared}) for layer in setting.layers]


def measure_worst(
    reader: Reader, n: int, start: int, layer: int, steps: int, restarts: int, tol: float, seed: int
) -> list[Row]:
    """One row with the text's constant and the worst found; none for a layer that is no `Attention`."""
    captured = reader.captures(n, [start])[0]
    attn, x = reader.closed(captured, layer), entering(captured, layer)
    if attn is None:
        return []
    began = time.perf_counter()
    text = lipschitz(attn, x, tol=tol, seed=seed)
    radius = float(x.double().norm(dim=-1).max())
    worst = worst_case(attn, n=n, radius=radius, steps=steps, restarts=restarts, seed=seed)
    found = {
        "radius_max": radius,
        "start": start,
        "text": text.value,
        "log_ceiling": None if worst.bound is None else worst.bound.log_value,
        "ceiling": None if worst.bound is None else worst.bound.id,
        "how": in_words(worst.start),
        "improved": worst.status == "improved",
        "seconds": time.perf_counter() - began,
    }
    return [row_of(reader, "worst", layer, "attention", n, 0, worst.estimate) | found]


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
