"""Small modules as people write them: every question that has an answer is answered, all others refused, nothing is changed."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from howsmooth.errors import HowSmoothError
from howsmooth.program import Layers, Run, ends_of, record
from howsmooth.program.written_out import rewrite
from marks import sample
from problems.modules import QUESTIONS, Question, constants

HERE = {"layer", "map", "to", "stream", "call"}  # a side of a model and a single head are asked of others
ASKED = [q for q in QUESTIONS.values() if set(q.ask) <= HERE]
MODULES: dict[Any, list[Question]] = {}
for question in ASKED:
    MODULES.setdefault((question.build, question.inputs), []).append(question)
BY_NAME = {questions[0].name.partition(" · ")[0]: key for key, questions in MODULES.items()}


def layers_of(module: nn.Module, inputs: Any) -> Layers:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return Layers(record(module, args, kwargs))


def norm_of(layers: Layers, **ask: Any) -> float:
    """The norm of the dense Jacobian of a map."""
    ends = ends_of(layers, ask.pop("layer", 0), **ask)
    f = ends.way.at(Run.recorded(layers.program))
    points = f.start
    sizes = [p.numel() for p in points]

    def stacked(t: Tensor) -> Tensor:
        given = [part.reshape(p.shape) for part, p in zip(t.split(sizes), points, strict=True)]
        made = torch.cat([y.reshape(-1) for y in f(*given)])
        return made - t if ends.less else made

    at = torch.cat([p.reshape(-1) for p in points])
    dense = torch.autograd.functional.jacobian(stacked, at, vectorize=True)
    assert isinstance(dense, Tensor)
    return float(torch.linalg.matrix_norm(dense, 2))


def wrong(question: Question, layers: Layers | HowSmoothError) -> str:
    """What is wrong with the answer to a question; nothing where it is right."""
    truths = constants(question)
    try:
        if isinstance(layers, HowSmoothError):
            raise layers
        value = norm_of(layers, **question.ask)
    except HowSmoothError as refusal:
        said = str(refusal)
        fine = None in truths
        return "" if fine and said.startswith("expected ") else f"{question.name}: refused, {said!r}, the truth is {truths}"
    right = any(t is not None and abs(value - t) <= 1e-6 * t for t in truths)
    return "" if right else f"{question.name}: {value}, the truth is {truths}"


@cache
def same_state(key: Any) -> tuple[nn.Module, Any]:
    build, inputs = key
    return build(), inputs()


SLOW, WEEKLY = pytest.mark.slow, pytest.mark.weekly


@pytest.mark.parametrize("name", sample(BY_NAME, None, WEEKLY, WEEKLY, SLOW, WEEKLY, WEEKLY, SLOW, WEEKLY))
def test_answered_or_refused(name):
    """As it was recorded, and with attention as one operation."""
    build, inputs = key = BY_NAME[name]
    module = build()
    state = {name: t.clone() for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    try:
        recorded: Layers | HowSmoothError = layers_of(module, inputs())
        whole: Layers | HowSmoothError = Layers(rewrite(recorded.program, recorded.flow))
    except HowSmoothError as refusal:
        recorded = whole = refusal
    assert not list(filter(None, (wrong(q, layers) for layers in (recorded, whole) for q in MODULES[key])))
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items() if isinstance(t, Tensor))


def test_checker_refuses():
    question = next(q for q in ASKED if q.truth is not None and None not in q.either)
    layers = layers_of(question.build(), question.inputs())
    assert not wrong(question, layers)
    assert wrong(question, HowSmoothError("expected another"))
    other = next(q for q in ASKED if q.truth is None)
    assert wrong(Question(other.name, question.build, question.inputs, question.ask, None), layers)
