"""Which cases of a test run each time, and which are slow or weekly."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The first cases as they are, the rest marked weekly; a tuple is a value for each argument."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.weekly] * (i >= count)) for i, case in enumerate(found)]


def sample(cases: Iterable[Any], step: int, mark: pytest.MarkDecorator) -> list[Any]:
    """Every `step`-th case as it is, the others with a mark; a tuple is a value for each argument."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[mark] * (i % step > 0)) for i, case in enumerate(found)]


def three_in_eight(cases: Iterable[Any]) -> list[Any]:
    """One case in eight as it is, two slow, the others weekly."""
    marks = {0: [], 3: [pytest.mark.slow], 6: [pytest.mark.slow]}
    return [pytest.param(case, marks=marks.get(i % 8, [pytest.mark.weekly])) for i, case in enumerate(cases)]
