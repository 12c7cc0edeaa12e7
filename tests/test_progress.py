"""The bar is for people: in a terminal or a notebook, with rate and time left, one at a time, and gone at the end."""

import contextlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch

import howsmooth as hs
from howsmooth import progress
from howsmooth.errors import BadInputError
from howsmooth.progress import Bar, Progress, progress_bar
from howsmooth.run import Plan, sweep
from problems import sweeps


class Terminal(io.StringIO):
    """A terminal that keeps what it shows."""

    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal, until the test ends."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_nothing_is_shown_when_piped():
    assert type(progress_bar("work")) is Progress
    assert type(progress_bar("work", True)) is Progress


def test_a_bar_in_a_terminal_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    watched(monkeypatch)
    mine = Progress()
    assert isinstance(progress_bar("work"), Bar)
    assert type(progress_bar("work", False)) is Progress
    assert progress_bar("work", mine) is mine
    with pytest.raises(BadInputError, match="expected progress as True, False or a Progress, got 'no'"):
        progress_bar("work", "no")  # pyright: ignore[reportArgumentType]


def test_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch):
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert isinstance(progress_bar("work"), Bar)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert type(progress_bar("work")) is Progress


def test_workers_show_nothing(monkeypatch: pytest.MonkeyPatch):
    watched(monkeypatch)
    monkeypatch.setattr(progress.multiprocessing, "parent_process", lambda: "the first process")
    assert type(progress_bar("work")) is Progress


def test_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch):
    screen = watched(monkeypatch)
    with contextlib.suppress(ZeroDivisionError), progress_bar("outer") as outer:
        outer.begin(2)
        assert type(progress_bar("inner")) is Progress
        outer.advance()
        _ = 1 / 0
    assert isinstance(progress_bar("next"), Bar)
    assert "outer" in screen.getvalue()


def test_the_bar_counts_what_was_done_before_and_shows_rate_time_left_and_failures(tmp_path):
    screen = io.StringIO()
    sweep(Plan.of(sweeps.fussy, [{"i": i} for i in range(4)]), tmp_path / "r.sqlite")
    longer = Plan.of(sweeps.fussy, [{"i": i} for i in range(10)])
    sweep(longer, tmp_path / "r.sqlite", resume=True, progress=Bar("measuring", screen, every=0))
    *_, last = (line for line in screen.getvalue().split("\r") if line.strip())
    for piece in ("measuring", "10/10", "/s", "<", "6 failed"):
        assert piece in last


def test_layers_and_climbs_are_followed(monkeypatch: pytest.MonkeyPatch):
    screen = watched(monkeypatch)
    layers = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(4, 1, 4, batch_first=True), 2, enable_nested_tensor=False
    )
    _ = hs.load(layers).measure(inputs=torch.randn(1, 3, 4), layer=0)
    assert screen.getvalue() == ""
    _ = hs.load(layers).measure(inputs=torch.randn(1, 3, 4))
    assert "layers" in screen.getvalue()
    _ = hs.worst_case(hs.Attention.from_matrices(-torch.eye(1), torch.eye(1)), n=2, radius=1.0, steps=3, restarts=2)
    assert "climbing" in screen.getvalue()
