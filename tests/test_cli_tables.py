"""Tables in a terminal of 80 columns and piped: nothing is cut."""

import io
import random
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from howsmooth.cli import show_table
from howsmooth.study import questions
from howsmooth.study.jobs import Measured, row_of
from howsmooth_command import app, run
from problems.desks import Desk


class Terminal(io.TextIOWrapper):
    """A terminal that keeps what it shows."""

    def __init__(self):
        super().__init__(io.BytesIO(), "utf-8")

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        self.flush()
        return re.sub(r"\x1b\[[0-9;]*m", "", self.buffer.getvalue().decode())  # pyright: ignore[reportAttributeAccessIssue]


def in_a_terminal(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is printed in a terminal of 80 columns."""
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        screen = Terminal()
        patch.setattr(sys, "stdout", screen)
        work()
    return screen.text()


def check_whole(shown: str, piped: str) -> None:
    """No number of what is piped is cut."""
    assert "…" not in shown
    number = re.compile(r"(?<![\w.])-?\d[\d.]*(?:e[+-]?\d+)?%?(?![\w.])")
    assert set(number.findall(piped)) <= set(number.findall(shown))


def check_table(
    rows: list[dict[str, Any]], words: Collection[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_table("a title", rows, words=words)
    shown = in_a_terminal(lambda: show_table("a title", rows, words=words), monkeypatch)
    assert max(map(len, shown.splitlines())) <= 80
    check_whole(shown, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        "measure demo --n 8 --layers 0,1",
        "measure demo --n 8 --layer 0 --heads",
        "certify demo --n 6 --change 0.1 --map attention",
        "attack demo --n 6 --samples 1 --layers 0 --words 0 --steps 2",
        "worst --gamma -1 --radius 2 --n 3 --steps 2 --restarts 2",
        "split frequency --count 2 --lengths 2,3",
        "split growth --radii 0.5,1",
        "split map --points 9",
        "split convergence --longest 8 --seeds 1",
    ],
)
def test_no_table_is_cut_at_80_columns(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["howsmooth", *typed.split()])
    piped = CliRunner().invoke(app(), typed.split()).stdout
    check_whole(in_a_terminal(run, monkeypatch), piped)


def test_a_table_of_any_width_is_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    draw = random.Random(0)
    for _ in range(30):
        heads = [
            f"{draw.choice(('first', 'of a'))} {draw.choice(('order', 'relinearised'))} {k}" for k in range(draw.randrange(14))
        ]
        rows = [
            {"layer": layer}
            | {head: draw.uniform(-1, 1) * 10 ** draw.randint(-9, 9) for head in heads}
            | {"why": "some words " * draw.randrange(9)}
            for layer in range(3)
        ]
        check_table(rows, ("why",), monkeypatch, capsys)


@pytest.mark.slow
def test_no_table_of_a_study_is_cut_at_80_columns(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    measured = Measured(tuple(row for cells in desk.rows if (row := row_of(cells)) is not None), (), {})
    tables = [q for q in questions().values() if q.table is not None and measured.of(q.row)]
    assert len(tables) > 5
    for question in tables:
        assert question.table is not None
        check_table(question.table(measured), question.words, monkeypatch, capsys)
