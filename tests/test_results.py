"""What results are in the hand: a number, a table in a notebook, a figure, a short line."""

import math
from html.parser import HTMLParser
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.measures import Distance
from howsmooth.models import Measurements
from howsmooth.results import OneNumber, draw_intervals, html_table, shares
from howsmooth.study import Growth
from howsmooth.theory import Bound

matplotlib.use("agg")
X = torch.tensor([[-2.0, 0.0]] + 3 * [[2.0, 0.0]], dtype=torch.float64)
ATTN = hs.Attention.from_matrices(-torch.eye(2).double(), torch.eye(2).double())


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return hs.load("demo", device="cpu").measure("<b>Cats</b> cost $5 & $6.", layers=[0, 3])


@pytest.fixture(scope="module")
def results(measured) -> dict[str, Any]:
    grown = hs.growth(hs.load("demo", device="cpu"), lengths=[8, 12, 16], samples=1, layers=[0])
    return {
        "Estimate": hs.lipschitz(ATTN, X),
        "Estimates": hs.lipschitz_batch(ATTN, torch.stack([X, 2 * X])),
        "Gain": hs.gain(ATTN, X),
        "Spectrum": hs.lipschitz(ATTN, X, k=3),
        "Measurement": measured[0],
        "Measurements": measured,
        "no Measurements": measured[:0],
        "Bounds": hs.bounds(ATTN, X),
        "Bounds that nothing is measured beside": hs.bounds(ATTN, n=4, radius=2.0),
        "Growth": grown,
        "no Growth": Growth(()),
    }


NAMES = [
    *("Estimate", "Estimates", "Gain", "Spectrum", "Measurement", "Measurements", "no Measurements"),
    *("Bounds", "Bounds that nothing is measured beside", "Growth", "no Growth"),
]


def test_a_result_that_is_one_number_is_one(measured):
    distance = hs.wasserstein(hs.Measure(X), hs.Measure(2 * X))
    results: list[Any] = [
        hs.lipschitz(ATTN, X),
        hs.gain(ATTN, X),
        hs.lipschitz(ATTN, X, k=3),
        measured[0],
        distance,
        hs.bounds(ATTN, X).upper,
    ]
    for r in results:
        assert float(r) == r.value
        assert f"{r:.2f}" == f"{r.value:.2f}"
        assert f"{r}" == str(r)
        assert [r > r.value - 1, r >= r.value, r < r.value + 1, r <= r.value, r < 1e9] == [True] * 5
        assert [r > r.value, r < r.value, r >= r.value + 1, r <= r.value - 1] == [False] * 4
        assert [r > torch.tensor(0.0), r < torch.tensor([1e9]), r <= r] == [True] * 3
        assert math.log(r) == math.log(r.value)
        assert r != r.value  # it is more than a number


def test_what_is_no_number_is_not_compared():
    one: Any = hs.lipschitz(ATTN, X)
    with pytest.raises(TypeError):
        _ = one > "3"
    with pytest.raises(TypeError):
        _ = one < torch.ones(2)
    none = next(row for row in hs.bounds(ATTN, n=4, radius=2.0) if not row.applies)
    with pytest.raises(BadInputError, match=f"expected a Bound with a number, got one without; .*{none.id}.*does not apply"):
        float(none)


def test_numbers_of_many_measurements_are_tensors(measured):
    for name in ("value", "lower", "upper"):
        assert getattr(measured, name).tolist() == [getattr(m, name) for m in measured]
    assert measured[:0].value.shape == (0,)


class Cells(HTMLParser):
    """The text of every cell, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_a_table(results, name: str):
    cells = Cells()
    cells.feed(results[name]._repr_html_())
    assert set(cells.tags) <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    lines = {"Estimates": 2, "Spectrum": 3, "Measurements": 2, "no Measurements": 0, "no Growth": 0}
    expected = len(results[name]) if name.startswith("Bounds") else lines.get(name, 1)
    assert cells.tags.count("tr") == 1 + expected


def test_text_of_others_is_text():
    word = "<img src=x onerror=alert(1)>&"
    cells = Cells()
    cells.feed(html_table(word, [{word: word, "value": 1.23456789, "none": None}]))
    assert cells.tags == ["table", "caption", "thead", "tr", "th", "th", "th", "tbody", "tr", "td", "td", "td"]
    assert [t for t in cells.texts if t.strip()] == [word, word, "value", "none", word, "1.2346"]


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_drawn_on_given_axes(results, name: str):
    figure = Figure()
    ax = figure.add_subplot()
    assert results[name].plot(ax=ax) is ax
    figure.canvas.draw()  # labels are read as they are: a dollar sign begins no formula
    assert bool(ax.lines or ax.patches) is not name.startswith("no ")


def test_a_figure_is_made_where_no_axes_are_given(results):
    from matplotlib import pyplot

    ax = results["Estimate"].plot()
    assert [p.get_height() for p in ax.patches] == pytest.approx(shares(results["Estimate"].direction))
    pyplot.close(ax.figure)


def test_an_infinite_upper_end_is_left_out():
    ax = Figure().add_subplot()
    draw_intervals(ax, [0, 1], [Distance(1.0, math.inf, 2.0, "exact"), Distance(1.0, 2.0, 2.0, "exact")])
    drawn: Any = ax.collections[0]
    assert [segment[:, 1].tolist() for segment in drawn.get_segments()] == [[1.0, 1.0], [1.0, 2.0]]


def test_shares_sum_to_one():
    assert shares(torch.tensor([[3.0, 0.0], [0.0, 4.0]])) == pytest.approx((9 / 25, 16 / 25))
    assert shares(torch.tensor(2.0)) == (1.0,)
    assert shares(torch.zeros(2)) == (0.0, 0.0)


def test_every_result_of_one_number_says_so():
    assert {kind.__name__ for kind in OneNumber.__subclasses__()} >= {
        "Estimate",
        "Measurement",
        "WorstCase",
        "Distance",
        "Bound",
        "Gain",
        "Spectrum",
    }


def test_a_bound_is_one_line():
    row = hs.bounds(ATTN, n=4, radius=2.0)[0]
    assert isinstance(row, Bound)
    assert "\n" not in repr(row)
    assert len(repr(row)) < 200
