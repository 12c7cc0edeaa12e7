"""Bounds and intervals against the truth on layers made to break them (docs/explanation/point-bounds.md 4.9, theory.md 2.7)."""

from dataclasses import asdict
from typing import Any

from tests.problems.exact_layers import all_ends
from tests.problems.hostile_layers import Tally, at_points, hostile, over_ball

from benchmarks.harness import WrongAnswerError

TITLE = "Bounds and intervals on hostile layers, in both precisions, against Jacobians in extended precision"
BALL_EVERY = 5  # a table over the ball costs some times one at a point
ENDS_EVERY = 100  # a Jacobian of eighty digits costs many times one of twenty


def run(quick: bool) -> list[dict[str, Any]]:
    cases = 1_000 if quick else 100_000  # a case is a layer at an input
    points, ball, seed = Tally(), Tally(), 0
    while points.inputs + ball.inputs < cases:
        case = hostile(seed)
        truth = at_points(case, points)
        if seed % BALL_EVERY == 0:
            over_ball(case, truth, ball)
        if points.wrong or ball.wrong:
            raise WrongAnswerError((points.wrong + ball.wrong)[0])
        seed += 1
    ends = all_ends(cases // ENDS_EVERY)
    if ends.wrong:
        raise WrongAnswerError(ends.wrong[0])
    return [_row("at a point", points), _row("over the ball", ball), _row("intervals", ends)]


def _row(where: str, tally: Tally) -> dict[str, Any]:
    return {"bounds": where} | asdict(tally) | {"wrong": len(tally.wrong)}
