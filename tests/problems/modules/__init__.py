"""Questions about small modules as people write them, each with its true answer."""

from problems.modules import (
    behind,
    blocks,
    conditions,
    cross,
    depth,
    gradients,
    layouts,
    models,
    own_blocks,
    padding,
    pictures,
    places,
    positions,
    refused,
    softmax,
    streams,
    torch_modules,
    vision,
    widths,
    wrapped,
)
from problems.modules.base import Question, constant, constants

FAMILIES: dict[str, list[Question]] = {
    "softmax": softmax.QUESTIONS,
    "positions": positions.QUESTIONS,
    "layouts": layouts.QUESTIONS,
    "behind": behind.QUESTIONS,
    "blocks": blocks.QUESTIONS,
    "own_blocks": own_blocks.QUESTIONS,
    "models": models.QUESTIONS,
    "places": places.QUESTIONS,
    "vision": vision.QUESTIONS,
    "torch_modules": torch_modules.QUESTIONS,
    "cross": cross.QUESTIONS,
    "conditions": conditions.QUESTIONS,
    "streams": streams.QUESTIONS,
    "pictures": pictures.QUESTIONS,
    "depth": depth.QUESTIONS,
    "widths": widths.QUESTIONS,
    "wrapped": wrapped.QUESTIONS,
    "gradients": gradients.QUESTIONS,
    "refused": refused.QUESTIONS,
    "padding": padding.QUESTIONS,
}
_ALL = [question for family in FAMILIES.values() for question in family]
QUESTIONS: dict[str, Question] = {question.name: question for question in _ALL}
assert len(QUESTIONS) == len(_ALL), "two questions have one name"

__all__ = ["FAMILIES", "QUESTIONS", "Question", "constant", "constants"]
