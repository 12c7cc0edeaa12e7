"""The documentation of sweeps is run."""

import doctest
from pathlib import Path


def test_the_examples_give_what_they_say():
    page = Path(__file__).parents[2] / "docs" / "sweeps.md"
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert tried >= 8
    assert failed == 0
