"""Bounds against the truth on layers made to break them: at a point, over the ball (docs/explanation/point-bounds.md 4.9)."""

from dataclasses import asdict
from typing import Any

from tests.problems.hostile_layers import Tally, at_points, hostile, over_ball

from benchmarks.harness import WrongAnswerError

TITLE = "Bounds on hostile layers, in both precisions, against Jacobians in extended precision"
BALL_EVERY = 5  # a table over the ball costs some times one at a point


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
    return [_row("at a point", points), _row("over the ball", ball)]


def _row(where: str, tally: Tally) -> dict[str, Any]:
    return {"bounds": where} | asdict(tally) | {"wrong": len(tally.wrong)}
