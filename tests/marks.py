"""Which cases of a test run each time, and which are slow or weekly."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def first(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The first cases as they are, the rest marked weekly; a tuple is a value for each argument."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.weekly] * (i >= count)) for i, case in enumerate(found)]


def sample(cases: Iterable[Any], *marks: pytest.MarkDecorator | None) -> list[Any]:
    """Cases with these marks in turn, None for those that run each time; a tuple is a value for each argument."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=mark or ()) for case, mark in zip(found, itertools.cycle(marks))]
