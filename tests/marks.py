"""Which cases of a test run each time, and which with --weekly alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The first cases as they are, the rest marked weekly."""
    return [case if i < count else pytest.param(case, marks=pytest.mark.weekly) for i, case in enumerate(cases)]
