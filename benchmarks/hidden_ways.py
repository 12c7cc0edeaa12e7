"""Certified radii and slopes of functions that hide from autograd how they move (docs/explanation/around-blocks.md §1)."""

import statistics
from typing import Any

from tests.problems.hidden_ways import Looked, case, examine

from benchmarks.around import check

TITLE = "Functions with detach, no_grad and backward passes of their own: no point of the ball refutes a certified radius"


def run(quick: bool, cases: int | None = None) -> list[dict[str, Any]]:
    """cases: functions that are looked at."""
    looked = Looked()
    for seed in range(1_000, 1_000 + (cases or (60 if quick else 1_000))):  # other ones than the tests take
        examine(case(seed), looked)
    check(looked.wrong)
    counts = {name: getattr(looked, name) for name in ("certified", "slopes", "refused")}
    median = statistics.median(looked.tightness) if looked.tightness else ""
    rows = [{"of": "functions", "count": looked.cases, "median attack/certified": median} | counts | {"wrong": 0}]
    empty = dict.fromkeys([*counts, "median attack/certified", "wrong"], "")
    return rows + [{"of": kind, "count": count} | empty for kind, count in looked.kinds.most_common()]
