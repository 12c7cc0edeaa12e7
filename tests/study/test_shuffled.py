"""Shuffled tokens: the same ones in another order, special tokens in place, and constants that are the model's own."""

from collections import Counter

import pytest

from howsmooth.models.tokens import TextPiece, Window
from howsmooth.report import write_page
from howsmooth.study import questions
from howsmooth.study.answers import ReportData
from howsmooth.study.jobs import Measured, run_here
from howsmooth.study.question import Extras
from howsmooth.study.scope import Scope, settle
from howsmooth.study.shuffled import SHUFFLED, ShuffledRow, shuffled
from problems import readers, reports

WORDS = ("[CLS]", *"abcdefgh", "[SEP]")
WINDOW = Window(tuple(range(10)), tuple(TextPiece(" ", word, word.startswith("[")) for word in WORDS))


def row(layer: int, shuffle: int, value: float, in_order: float = 4.0) -> ShuffledRow:
    return ShuffledRow(layer=layer, n=16, shuffle=shuffle, value=value, in_order=in_order)


def test_tokens_are_the_same_in_another_order_and_special_ones_stay():
    found = shuffled(WINDOW, seed=0)
    assert found.ids != WINDOW.ids
    assert Counter(found.ids) == Counter(WINDOW.ids)
    assert (found.ids[0], found.ids[-1]) == (0, 9)
    assert found.words == tuple(WORDS[i] for i in found.ids)
    assert shuffled(WINDOW, seed=0) == found
    assert shuffled(WINDOW, seed=1) != found


def test_rows_are_what_the_model_says():
    reader = readers.reader()
    setting = settle(reader, Scope((12,), samples=2, tol=1e-6))
    found = SHUFFLED.ask(SHUFFLED.tasks(setting, shuffles=3), lambda jobs: run_here(reader, jobs)).of(ShuffledRow)
    assert len(found) == 2 * 2 * 3
    one = next(r for r in found if (r.layer, r.sample, r.shuffle) == (1, 1, 2))
    window = reader.window(12, setting.starts[1])
    assert one.in_order == pytest.approx(reader.model.capture(ids=window).measure(1, tol=1e-6).value, rel=1e-5)
    truth = reader.model.capture(ids=shuffled(window, setting.scope.seed + 2)).measure(1, tol=1e-6)
    assert one.value == pytest.approx(truth.value, rel=1e-5)


def test_the_layer_that_changes_most_is_named_with_its_spread_whichever_way_it_goes(tmp_path):
    rows = [row(0, 0, 4.0), row(0, 1, 5.0), row(1, 0, 1.0), row(1, 1, 2.0)]
    data = ReportData([*reports.layers(2, 1, (16,)), *rows], reports.METHODS)
    said = SHUFFLED.said_of(data)
    assert said.startswith("**Layer 1 changes most:** shuffled, its L is 0.354 times that of the text in order")
    assert "(0.25 to 0.5 over 2 random orders of one passage)" in said
    assert SHUFFLED.table is not None
    lines = SHUFFLED.table(Measured(tuple(rows)))
    assert [(line["layer"], line["low"], line["high"]) for line in lines] == [(0, 1.0, 1.25), (1, 0.25, 0.5)]
    text = write_page(data, tmp_path / "page").read_text("utf-8")
    assert "Does the order of the words matter?" in text
    assert '"name":"shuffled"' in text


def test_nothing_is_said_where_nothing_was_measured():
    data = ReportData([*reports.layers(1, 1, (16,)), row(0, 0, 0.0, in_order=0.0)], reports.METHODS)
    assert SHUFFLED.said_of(data) == ""
    assert SHUFFLED.drawings(data) == []


def test_a_page_has_it_from_the_registry_alone():
    setting = settle(readers.reader(), Scope((8, 16), samples=2))
    (job,) = next(questions()["shuffled"].on_page(setting, Extras()))
    assert job.arguments["part"]["n"] == 16
