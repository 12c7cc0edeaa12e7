"""Bounds of whole blocks around an input against points inside, as `around` does (docs/explanation/around-blocks.md)."""

from typing import Any

from tests.problems.gates import gated
from tests.problems.small_functions import Looked, case, examine

from benchmarks.around import check, record
from howsmooth.errors import HowSmoothError

TITLE = "Neighbourhoods of inputs of hostile blocks: no point inside is above a bound, lower ends are attained inside"
LOWER_EVERY = 2  # functions: a lower end costs about as much as the bounds at three radii


def run(quick: bool, cases: int | None = None) -> list[dict[str, Any]]:
    """cases: neighbourhoods that are looked into, three of each function; half of the functions are products of two shapes."""
    cases, looked, seed = cases or (60 if quick else 6_000), Looked(), 2_000  # other ones than the tests take
    while looked.neighbourhoods < cases:
        try:
            examine((case, gated)[seed % 2](seed // 2), looked, lower=seed // 2 % LOWER_EVERY == 0)
        except HowSmoothError:
            looked.refused += 1
        seed += 1
    check(looked.wrong)
    whole = {name: getattr(looked, name) for name in ("functions", "points", "lower_ends", "infinite", "refused")}
    return record(looked.neighbourhoods, looked.widths, whole, looked.kinds)
