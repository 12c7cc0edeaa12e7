"""Figures from the data of the page."""

import re

import pytest

from howsmooth.errors import BadInputError, ResultsError
from howsmooth.report import ReportData, draw_figures
from howsmooth.report.page import drawings
from marks import first
from problems import reports


def files(data: ReportData) -> list[str]:
    """The figures that there are."""
    return [drawing.file for _, some in drawings(data) for drawing in some if drawing.file]


@pytest.mark.slow
def test_every_figure_is_written_in_every_format_and_growth_names_exponents_and_the_jump(tmp_path):
    names = files(reports.full())
    assert len(set(names)) == len(names) == 13
    written = draw_figures(reports.full(), tmp_path / "figures", formats=("pdf", "png", "svg"))
    assert {p.stem for p in written} == set(names)
    assert len(written) == 3 * len(names)
    starts = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}
    assert all(p.read_bytes().startswith(starts[p.suffix]) for p in written)
    text = re.sub(r"<[^>]+>", "", (tmp_path / "figures" / "growth.svg").read_text("utf-8"))
    assert re.search(r"layer 0: ×(2\.9|3\.0)\d", text)
    (growth,) = [drawing.charts[0] for _, some in drawings(reports.full()) for drawing in some if drawing.file == "growth"]
    assert re.fullmatch(r"layer 0: n\^0\.\d\d \[0\.\d\d, 0\.\d\d\]", growth.rows[0]["legend"])


def test_what_was_not_measured_is_not_drawn(tmp_path):
    data = reports.report(reports.layers(1, 1, (8,)))
    assert [p.name for p in draw_figures(data, tmp_path, formats=("svg",))] == ["layers-by-length.svg", "maps.svg"]
    assert len(draw_figures(reports.report(reports.zeros()), tmp_path / "zeros", formats=("png",))) == 2


def test_global_settings_are_left_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw_figures(reports.report(reports.layers(1, 1)), tmp_path, formats=("png",))
    assert dict(matplotlib.rcParams) == before


def test_what_cannot_be_drawn_is_one_sentence(tmp_path):
    with pytest.raises(BadInputError, match="formats"):
        draw_figures(reports.full(), tmp_path, formats=("gif",))
    with pytest.raises(ResultsError, match="choose another"):
        draw_figures(reports.full(), "/dev/null/figures")


@pytest.mark.slow
@pytest.mark.parametrize("layers", first([36, 80]))  # the most that have a name each, and more
def test_many_layers_stay_readable_and_nothing_is_printed(tmp_path, capfd, layers):
    """Warnings are errors here, so a layout that collapses fails."""
    parts = (reports.heads(layers, 32), reports.bounds(layers), reports.splits(layers), reports.worst(layers))
    more = (reports.held(layers), reports.maps(layers), reports.near(layers), reports.changes(layers), reports.influence(300))
    more += (reports.variants(layers),)
    data = reports.full(reports.layers(layers, 2), *parts, *more)
    written = draw_figures(data, tmp_path, formats=("svg", "png"))
    assert {p.stem for p in written} == set(files(data))
    assert capfd.readouterr() == ("", "")
    named = len(re.findall(r"layer \d+: ", (tmp_path / "growth.svg").read_text("utf-8")))
    assert named <= 6  # notes at jumps; the legend names no layer
    from matplotlib.image import imread

    for path in tmp_path.glob("*.png"):
        height, width = imread(path).shape[:2]
        assert 200 < height <= 9 * 200
        assert 200 < width <= 9 * 200
