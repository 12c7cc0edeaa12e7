"""The question of depth: rows are what the model says, on the page for a few layers, and a sentence and charts of them."""

import math

import pytest

from howsmooth.report import write_page
from howsmooth.study import questions
from howsmooth.study.answers import ReportData
from howsmooth.study.depth import DEPTH, DepthRow
from howsmooth.study.jobs import Measured, run_here
from howsmooth.study.question import Extras
from howsmooth.study.scope import Scope, Setting, settle
from problems import readers, reports


def row(layer: int, value: float, misalignment: float | None = None, exponents: tuple[float | None, ...] = (-0.1,)) -> DepthRow:
    more = {"from_first": 2.0, "from_first_gain": 0.5, "blocks": 2, "misalignment": misalignment}
    return DepthRow(layer=layer, n=16, value=value, gain=value / 10, exponents=exponents, **more)


def test_rows_are_what_the_model_says():
    reader = readers.reader()
    setting = settle(reader, Scope((6,), samples=2, tol=1e-6))
    steps = DEPTH.tasks(setting, directions=2, coupling=2)
    found = DEPTH.ask(steps, lambda jobs: run_here(reader, jobs)).of(DepthRow)
    assert [(r.layer, r.sample) for r in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    one = found[2]
    truth = reader.model.depth(ids=reader.window(6, setting.starts[1]), k=2, tol=1e-6)
    assert one.value == pytest.approx(truth.to_end[0].value, rel=1e-5)
    assert one.from_first == pytest.approx(truth.from_first[0].value, rel=1e-5)
    assert one.gain == pytest.approx(float(truth.to_end[0].gain or 0), rel=1e-5)
    assert one.exponents == pytest.approx(truth.exponents.tolist(), rel=1e-4)
    coupled = reader.model.depth(ids=reader.window(6, setting.starts[0]), k=0, coupling=2, tol=1e-6)
    assert [r.misalignment for r in found[:2]] == [pytest.approx((coupled.misalignments or (None,))[0], rel=1e-3), None]
    assert found[2].misalignment is None


def test_a_page_has_a_few_layers_of_one_short_passage():
    layers = tuple(range(30))
    setting = Setting(Scope((8, 16, 64), samples=2), layers, (0, 9), (None,) * 30)
    (job,) = next(questions()["depth"].on_page(setting, Extras()))
    assert (job.arguments["part"]["n"], job.arguments["coupling"]) == (16, 0)
    assert job.arguments["part"]["layers"] == (0, 5, 11, 17, 23, 29)
    few = next(DEPTH.on_page(Setting(Scope((8,)), (3,), (0,), (None,)), Extras()))
    assert [job.arguments["part"]["layers"] for job in few] == [(3,)]


def test_a_sentence_a_table_and_charts_say_how_changes_grow(tmp_path):
    rows = [row(0, 4.0, 0.5), row(1, 9.0)]
    data = ReportData([*reports.layers(2, 1, (16,)), *rows], reports.METHODS)
    said = DEPTH.said_of(data)
    assert said.startswith("**From layer 0 to the end** a change grows at most 4 times, a random one 0.4 times.")
    assert f"grows {math.exp(-0.1):.3f} times: the first Lyapunov exponent is -0.1." in said
    assert said.endswith("What enters layer 1 can still grow most, 9 times.")
    assert [chart.name for drawing in DEPTH.drawings(data) for chart in drawing.charts] == ["depth", "coupling"]
    assert DEPTH.table is not None
    lines = DEPTH.table(Measured(tuple(rows)))
    assert [(line["layer"], round(line["L to end"], 9), line["misalignment"]) for line in lines] == [(0, 4, 0.5), (1, 9, None)]
    text = write_page(data, tmp_path / "page").read_text("utf-8")
    assert "How do changes grow from layer to layer?" in text


def test_what_was_not_measured_is_not_said():
    data = ReportData([*reports.layers(1, 1, (16,)), row(0, 0.0)], reports.METHODS)
    assert DEPTH.said_of(data) == ""
    assert DEPTH.drawings(data) == []
    shrunk = ReportData([*reports.layers(1, 1, (16,)), row(0, 1.0, exponents=(None,))], reports.METHODS)
    assert "Lyapunov" not in DEPTH.said_of(shrunk)
    assert DepthRow.of(row(0, 1.0, exponents=(None,)).to_dict()).exponents == (None,)
