"""Attacks on a model, layer by layer: what first order says, what attacks gained, and what is refused."""

from typing import Any

import pytest

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import Model, Window
from howsmooth.paper.attacks import robustness, spearman
from howsmooth.study import alice


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load("demo", device="cpu")


@pytest.fixture(scope="module")
def windows(model) -> tuple[Window, ...]:
    return model.text(alice()[2000:60000]).windows(14, 1, seed=0)


@pytest.mark.slow
def test_robustness(model, windows):
    results = robustness(model, windows[:1], layers=[0, 3, 5], budgets=[1e-4, 0.1], steps=3, ways=["gradient"], scored=3)
    assert [case.layer for case in results.cases] == [0, 3, 5]
    for case in results.cases:
        small = [row for row in case.attacks if row.epsilon == pytest.approx(1e-4 * case.length)]
        shares = {row.method: row.share or 0.0 for row in small}
        assert shares["singular"] >= 0.98
        assert shares["splitting"] >= 0.98
        assert max(shares.values()) <= 1.01
        assert not [row.note for row in case.attacks if "twice" in row.note]
    assert results.correlations["singular"][1e-4] == 1.0
    assert results.guided_wins[0.1][1] > 0.95
    assert set(results.word_wins) == {"gradient"}
    assert results.to_dict()["cases"][0]["words"]


def test_robustness_refuses(model, windows):
    refused: list[tuple[dict[str, Any], str]] = [
        ({"budgets": [0.0]}, "between 0 and 10"),
        ({"budgets": []}, "between 0 and 10"),
        ({"words": -1}, "whole number of words"),
    ]
    for options, sentence in refused:
        with pytest.raises(BadInputError, match=sentence):
            robustness(model, windows, **options)
    with pytest.raises(BadInputError, match="window of text"):
        robustness(model, [])


def test_ranks():
    assert spearman([1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 2.0, 4.0]) == 1.0
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1.0
    assert spearman([1.0, 1.0, 1.0], [3.0, 2.0, 1.0]) is None
    assert spearman([1.0], [1.0]) is None
