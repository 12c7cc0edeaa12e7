"""Figures from the data of the page."""

import re

import pytest

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.report.data import Measurement, ReportData
from howsmooth.report.figures import FIGURES, draw_figures
from problems import reports


def test_every_figure_is_written_in_every_format_and_growth_names_exponents_and_the_jump(tmp_path):
    written = draw_figures(reports.full(), tmp_path / "figures", formats=("pdf", "png", "svg"))
    assert {p.stem for p in written} == set(FIGURES)
    assert len(written) == 3 * len(FIGURES)
    starts = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}
    assert all(p.read_bytes().startswith(starts[p.suffix]) for p in written)
    text = re.sub(r"<[^>]+>", "", (tmp_path / "figures" / "growth.svg").read_text("utf-8"))
    assert re.search(r"layer 0: ×(2\.9|3\.0)\d", text)
    assert "95 % intervals" in text


def test_what_was_not_measured_is_not_drawn(tmp_path):
    data = ReportData(reports.measurements(1, 1, (8,)), reports.METHODS)
    assert [p.name for p in draw_figures(data, tmp_path, formats=("svg",))] == ["layers-by-length.svg"]
    zeros = ReportData(tuple(Measurement(0, n, 0, 0.0, 0.0, 1.0, "dense", 1.0) for n in (8, 16)), reports.METHODS)
    assert len(draw_figures(zeros, tmp_path / "zeros", formats=("png",))) == 2


def test_global_settings_are_left_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw_figures(ReportData(reports.measurements(1, 1), reports.METHODS), tmp_path, formats=("png",))
    assert dict(matplotlib.rcParams) == before


def test_what_cannot_be_drawn_is_one_sentence(tmp_path):
    with pytest.raises(BadInputError, match="formats"):
        draw_figures(reports.full(), tmp_path, formats=("gif",))
    with pytest.raises(ResultsError, match="choose another"):
        draw_figures(reports.full(), "/dev/null/figures")
