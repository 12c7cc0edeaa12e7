"""A model, a text and their report as the command line makes it: once a test run, looked at by many tests."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers as t
from typer.testing import CliRunner

from howsmooth_command import app
from problems import readers
from problems.zoo import randomize

LENGTHS = (8, 16, 24, 32)
OPTIONS = ("--lengths", ",".join(map(str, LENGTHS)), "--samples", "1", "--radii", "0.1", "--variants", "--workers", "1")


@dataclass(frozen=True)
class Desk:
    """Where things lie: `model`, a rotary one; `text.txt`; `report`, with figures; what the command printed."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    @property
    def report(self) -> Path:
        return self.folder / "report"

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text("utf-8")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text("utf-8")

    @cached_property
    def answer(self) -> dict[str, Any]:
        """What the command says in JSON."""
        return json.loads((self.folder / "answer.json").read_text("utf-8"))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.answer["rows"]

    @cached_property
    def data(self) -> dict[str, Any]:
        """What the page shows."""
        page = (self.report / "index.html").read_text("utf-8")
        shown = json.loads(page.split('id="data">')[1].split("</script>")[0])
        return {name: records(some) if isinstance(some, dict) and "columns" in some else some for name, some in shown.items()}

    @property
    def command(self) -> tuple[str, ...]:
        """Makes the report, or with --resume looks at what was measured."""
        return ("report", str(self.model), "--text", str(self.text), *OPTIONS, "--out", str(self.report))


def records(some: dict[str, Any]) -> list[dict[str, Any]]:
    """Records that a page has by column, words as numbers of a list."""
    lists = [[c["words"][k] for k in c["at"]] if isinstance(c, dict) else c for c in some["columns"]]
    return [dict(zip(some["names"], values, strict=True)) for values in zip(*lists, strict=True)]


def llama() -> t.LlamaModel:
    return randomize(t.LlamaModel(t.LlamaConfig(**readers.SHAPE, num_key_value_heads=1)), scale=0.25)


def fill(folder: Path) -> None:
    """Put everything there."""
    desk = Desk(folder)
    readers.save(desk.model, llama())
    desk.text.write_text(readers.text())
    for name, more in {"stdout": (), "answer.json": ("--resume", "--no-figures", "--json")}.items():
        ended = CliRunner().invoke(app(), [*desk.command, *more])
        assert ended.exit_code == 0, ended.output
        (folder / name).write_text(ended.stdout, "utf-8")
        (folder / "stderr").write_text(ended.stderr, "utf-8")
