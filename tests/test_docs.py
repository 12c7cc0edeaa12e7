"""The documentation runs: examples give what they say, plain blocks raise nothing, and the list of names is complete."""

import doctest
import re
import runpy
import sys
from pathlib import Path

import pytest

import howsmooth

ROOT = Path(__file__).parents[1]
EXAMPLES = {"index": 5, "models": 15, "quickstart": 5, "sweeps": 8}  # how many at least; no page loses them unseen
PAGES = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}


def blocks(page: str) -> list[str]:
    """The Python blocks of a page that show no output."""
    return [code for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if ">>>" not in code]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_give_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(ROOT / "docs" / f"{name}.md"), module_relative=False)
    assert tried >= EXAMPLES[name]
    assert failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page)])
def test_plain_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"__name__": "page"}
    for code in blocks(PAGES[name]):
        exec(compile(code, f"docs/{name}.md", "exec"), known)


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["long_context.py", "32"])
    runpy.run_path(str(ROOT / "examples" / "long_context.py"), run_name="__main__")
    assert "32 tokens on" in capsys.readouterr().out


def test_every_public_name_is_listed_once():
    listed = re.findall(r"^::: howsmooth\.(\w+)$", PAGES["api"], re.M)
    assert sorted(listed) == sorted(howsmooth.__all__)


def test_pages_are_looked_at():
    """Should a page lose its examples, or blocks no longer be seen, this says so."""
    assert set(EXAMPLES) == {name for name, page in PAGES.items() if ">>>" in page}
    assert {"api", "meanfield", "page", "worst-inputs"} <= {name for name, page in PAGES.items() if blocks(page)}
    assert blocks("```python\n1 / 0\n```\n```python\n>>> 1\n1\n```\n") == ["1 / 0\n"]
