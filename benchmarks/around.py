"""Bounds around an input against points inside: random ones, and where gradient ascent leads (docs/explanation/around.md)."""

import statistics
from collections import Counter
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
        seed += 1
    check(looked.wrong)
    whole = {name: getattr(looked, name) for name in ("points", "infinite", "refused", "unmeasured")}
    return record(looked.neighbourhoods, looked.widths, whole, looked.kinds)


def check(wrong: list[str]) -> None:
    """Refuse to go on unless nothing is wrong."""
    if wrong:
        raise WrongAnswerError(
            f"{len(wrong)} bounds are wrong, nothing is recorded; the first of them:\n" + "\n".join(wrong[:10])
        )


def record(
    neighbourhoods: int, widths: list[tuple[float, float, float]], whole: dict[str, int], kinds: Counter[str]
) -> list[dict[str, Any]]:
    """A row for all, one for every decade of radii, one for every kind.

    widths: `r/|x|`, the largest norm seen and the upper end.  whole: what else was counted.
    """
    known = [(share, upper / lower) for share, lower, upper in widths if lower > 0 and upper < float("inf")]

    def row(of: str, count: int, ratios: list[float], more: dict[str, Any]) -> dict[str, Any]:
        return {"of": of, "count": count, "median upper/lower": statistics.median(ratios) if ratios else ""} | more

    empty = dict.fromkeys([*whole, "wrong"], "")
    rows = [row("neighbourhoods", neighbourhoods, [w for _, w in known], whole | {"wrong": 0})]
    for low, high in DECADES:
        own = [w for share, w in known if low <= share < high]
        rows.append(row(f"r from {low:g} to {high:g} of a token", len(own), own, empty))
    return rows + [row(kind, count, [], empty) for kind, count in kinds.most_common()]
