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
        seed += 1
    if looked.wrong:
        raise WrongAnswerError(f"{len(looked.wrong)} are wrong: " + "\n".join(looked.wrong[:10]))
    rows = [_row("all", looked.neighbourhoods, [upper / lower for _, lower, upper in looked.widths], looked)]
    for low, high in DECADES:
        widths = [upper / lower for share, lower, upper in looked.widths if low <= share < high]
        rows.append(_row(f"r from {low:g} to {high:g} |x|", len(widths), widths, None))
    return rows + [_row(kind, count, [], None) for kind, count in looked.kinds.most_common()]


def _row(of: str, count: int, widths: list[float], looked: Looked | None) -> dict[str, Any]:
    """widths: `upper / lower` where both are known and neither is zero or infinite."""
    whole = {name: "" if looked is None else getattr(looked, name) for name in ("points", "infinite", "refused", "unmeasured")}
    width = {"median upper/lower": statistics.median(widths) if widths else ""}
    return {"of": of, "neighbourhoods": count} | width | whole | {"wrong": "" if looked is None else len(looked.wrong)}
