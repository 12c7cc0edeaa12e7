"""Bounds of every kind of attention against measured constants, on layers and inputs made to break them."""

import time
from typing import Any

from tests.problems.kind_cases import KINDS, fuzz
from tests.problems.kind_hostile import HOSTILE, fuzz_hostile
from tests.problems.kind_saturated import fuzz_saturated

from benchmarks.harness import WrongAnswerError

TITLE = "Bounds of every kind of attention: no upper row below a measured L, no lower row above what its input attains"
_FIRST = 1_000  # other layers than the tests take


def run(quick: bool, cases: int | None = None) -> list[dict[str, Any]]:
    """cases: layers at an input, for each kind."""
    cases = cases or (300 if quick else 20_000)
    rows, looks = [], [*((name, fuzz) for name in KINDS), *((name, fuzz_hostile) for name in HOSTILE)]
    for name, look in [*looks, ("sigmoid, saturated", fuzz_saturated)]:
        start = time.perf_counter()
        tally = look(name, range(_FIRST, _FIRST + cases), cases)
        if tally.wrong:
            raise WrongAnswerError(tally.wrong[0])
        tightest = ", ".join(f"{id} {ratio:.2f}" for id, ratio in sorted(tally.tightest.items()))
        counts = {k: getattr(tally, k) for k in ("layers", "inputs", "upper", "lower", "infinite", "refused")}
        seconds = round(time.perf_counter() - start)
        rows.append({"kind": name, **counts, "wrong": len(tally.wrong), "largest L/bound": tightest, "seconds": seconds})
    return rows
