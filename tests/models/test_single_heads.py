"""Single heads of small modules: every question that has an answer is answered, all others refused, nothing is changed."""

from functools import cache
from typing import Any

import pytest
import torch

import howsmooth as hs
from problems.modules import QUESTIONS, Question, constants

ASKED = [q for q in QUESTIONS.values() if "head" in q.ask and "side" not in q.ask]


@cache
def capture_of(build: Any, inputs: Any) -> hs.Capture | hs.HowSmoothError:
    try:
        return hs.load(build()).capture(inputs=inputs())
    except hs.HowSmoothError as refusal:
        return refusal


def wrong(question: Question, captured: hs.Capture | hs.HowSmoothError) -> str:
    """What is wrong with the answer to a question; nothing where it is right."""
    truths = constants(question)
    try:
        if isinstance(captured, hs.HowSmoothError):
            raise captured
        value = captured.measure(**question.ask, tol=1e-8).value
    except hs.HowSmoothError as refusal:
        fine = None in truths and str(refusal).startswith("expected ")
        return "" if fine else f"refused, {str(refusal)!r}, the truth is {truths}"
    right = any(t is not None and abs(value - t) <= 1e-6 * t for t in truths)
    return "" if right else f"{value}, the truth is {truths}"


@pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")
@pytest.mark.parametrize("question", ASKED, ids=lambda q: q.name)
def test_answered_or_refused(question: Question):
    captured = capture_of(question.build, question.inputs)
    assert not wrong(question, captured)


ANSWERED = {
    (q.build, q.inputs): q for q in ASKED if q.truth is not None and None not in q.either and q.ask["map"] == "attention"
}


@pytest.mark.parametrize("question", ANSWERED.values(), ids=lambda q: q.name.partition(" · ")[0])
def test_all_heads_at_once(question: Question):
    """They are as many as there are, and each is what it is alone; weights are left as they were."""
    module = question.build()
    state = {name: t.clone() for name, t in module.state_dict().items()}
    found = hs.load(module).capture(inputs=question.inputs()).measure(question.ask["layer"], heads=True, tol=1e-8)
    alike = [q for q in ASKED if (q.build, q.inputs, q.ask["map"]) == (question.build, question.inputs, "attention")]
    truths = [constants(q)[0] for q in alike if q.truth is not None]
    assert [h.value for h in found.heads] == pytest.approx(truths, rel=1e-6)
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())


def test_checker_refuses():
    question = QUESTIONS["heads in the batch, sdpa · attention head=0"]
    captured = capture_of(question.build, question.inputs)
    assert not wrong(question, captured)
    assert wrong(question, hs.HowSmoothError("expected another"))
    other = QUESTIONS["heads in the batch, sdpa · attention head=1"]
    assert wrong(Question(other.name, other.build, other.inputs, question.ask, other.truth), captured)
    assert wrong(Question(other.name, other.build, other.inputs, other.ask, None), captured)
