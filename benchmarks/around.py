"""Bounds around an input against points inside: random ones, and where gradient ascent leads (docs/explanation/around.md)."""

import statistics
from typing import Any

from tests.problems.neighbourhoods import Looked, examine, near

from benchmarks.harness import WrongAnswerError

TITLE = "Neighbourhoods of hostile inputs: no point inside is above a bound, lower ends are attained inside"
DECADES = ((0.0, 1e-5), (1e-5, 1e-4), (1e-4, 1e-3), (1e-3, 1e-2), (1e-2, 1e-1), (1e-1, float("inf")))


def run(quick: bool, cases: int | None = None) -> list[dict[str, Any]]:
    """cases: neighbourhoods that are looked into, beside those that are refused."""
    cases, looked, seed = cases or (200 if quick else 10_000), Looked(), 1_000  # other ones than the tests take
    while looked.neighbourhoods < cases:
        examine(near(seed), looked)
        if looked.wrong:
            raise WrongAnswerError(looked.wrong[0])
        seed += 1
    rows = []
    for low, high in DECADES:
        widths = [upper / lower for share, lower, upper in looked.widths if low <= share < high]
        rows.append(
            {
                "r/|x|": f"{low:g} to {high:g}",
                "neighbourhoods": len(widths),
                "median upper/lower": statistics.median(widths) if widths else float("nan"),
                "all neighbourhoods": looked.neighbourhoods,
                "points": looked.points,
                "infinite": looked.infinite,
                "refused": looked.refused,
                "wrong": len(looked.wrong),
            }
        )
    return rows
