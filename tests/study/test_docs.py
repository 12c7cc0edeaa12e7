"""The page on reports runs as it is printed."""

import doctest
from pathlib import Path


def test_the_quickstart_runs():
    path = Path(__file__).parents[2] / "docs" / "quickstart.md"
    failed, tried = doctest.testfile(str(path), module_relative=False)
    assert tried >= 5
    assert not failed
