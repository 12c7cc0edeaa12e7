"""The bar is for people: on a terminal, with rate and time left."""

import io
import sys

from rich.console import Console

from howsmooth.run import Plan, Progress, progress_bar, sweep
from howsmooth.run.sweeping import Bar
from problems import sweeps


def test_nothing_is_shown_when_piped_or_quiet(monkeypatch):
    assert type(progress_bar("work")) is Progress
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(progress_bar("work"), Bar)
    assert type(progress_bar("work", quiet=True)) is Progress


def test_the_bar_counts_what_was_done_before_and_shows_rate_time_left_and_failures(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, height=20)
    sweep(Plan.of(sweeps.fussy, [{"i": i} for i in range(4)]), tmp_path / "r.sqlite")
    bar = Bar("measuring", console)
    longer = Plan.of(sweeps.fussy, [{"i": i} for i in range(10)])
    sweep(longer, tmp_path / "r.sqlite", resume=True, progress=bar)
    last = screen.getvalue()
    for piece in ("measuring", "10/10", "/s", "left", "6 failed"):
        assert piece in last
