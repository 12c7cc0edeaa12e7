"""The documentation runs: examples give what they say, plain blocks raise nothing, commands end well, the names are complete.

A block of commands that is not run says why on the line above: `<!-- not run: … -->`. Its commands are read all the same, and
`pytest -rs` lists them.
"""

import doctest
import html
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import howsmooth
from howsmooth_command import app
from marks import first
from problems import readers

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS).with_suffix("")): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))}
RUN_ELSEWHERE = ("howto/diffusers", "howto/parallel")  # by tests of what they show, under processes or with another package
TYPED = "tutorial"  # typed word for word in tests/test_wheel.py
EXAMPLES = {
    name: len(re.findall(r"^>>> (?!.*# doctest: \+SKIP)", page, re.M))
    for name, page in PAGES.items()
    if ">>>" in page and name != TYPED
}
SHELL = ("bash", "sh", "console")
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page: str) -> list[str]:
    """The Python blocks of a page that show no output."""
    return [code for language, code in FENCE.findall(page) if language == "python" and ">>>" not in code]


def commands(page: str) -> dict[str, str | None]:
    """The commands of a page, and why they are not run where they are not."""
    found: dict[str, str | None] = {}
    reason = None
    for block in re.split(r"\n\s*\n", FENCE.sub(_indented, page)):
        lines = [line[4:].removeprefix("$ ") for line in block.splitlines() if line.startswith("    ")]
        found |= {shlex.join(shlex.split(line, comments=True)): reason for line in lines if line.startswith("howsmooth ")}
        mark = re.search(r"<!-- not run: (.+) -->$", block)
        reason = None if mark is None else mark[1]
    return found


def _indented(fence: re.Match[str]) -> str:
    """A block of the shell as the other way to write it; nothing of other blocks."""
    return textwrap.indent(fence[2], "    ").rstrip() if fence[1] in SHELL else ""


def check(command: str, whole: bool = True) -> None:
    """Refuse a command that the command line would not take; where it is not `whole`, only names of options are looked at."""
    words = shlex.split(command)[1:]
    found: Any = typer.main.get_command(app())
    while words and hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    if whole:
        found.make_context("howsmooth", words)
    assert {w for w in words if w.startswith("--")} <= {name for option in found.params for name in option.opts}


TEXTS = [*(page for name, page in PAGES.items() if name != TYPED), (ROOT / "README.md").read_text("utf-8")]
COMMANDS = {command: reason for text in TEXTS for command, reason in commands(text).items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("place")
    readers.save(folder / "path" / "to" / "model")
    (folder / "my.txt").write_text(readers.text(60))
    (folder / "ids.json").write_text(json.dumps(readers.ids(8)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_end_well(command, desk, place, monkeypatch):
    check(command)
    if COMMANDS[command] is not None:
        pytest.skip(f"{command}: {COMMANDS[command]}; run it by hand")
    if command.startswith("howsmooth report "):  # the desk's, with fewer options
        assert {word for word in shlex.split(command) if word.startswith("--")} <= set(desk.command)
        assert desk.stdout
        return
    monkeypatch.chdir(place)
    ended = CliRunner().invoke(app(), shlex.split(command)[1:])
    assert ended.exit_code == 0, ended.output
    assert ended.stdout


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_a_sentence_name_what_there_is(name):
    for command in re.findall(r"`(howsmooth [^`]*)`", FENCE.sub("", PAGES[name])):
        check(command, whole=False)
    for benchmark in re.findall(r"python -m benchmarks (\w+)", PAGES[name]):
        assert (ROOT / "benchmarks" / f"{benchmark}.py").is_file()


@pytest.mark.parametrize("name", PAGES)
def test_python_stands_in_blocks_that_are_run(name):
    rest = FENCE.sub("", PAGES[name])
    assert not re.search(r"^ {4}(>>> |import |from \w[\w.]* import )", rest, re.M)
    assert {language for language, _ in FENCE.findall(PAGES[name])} <= {"python", "text", "json", "", *SHELL}
    told = "\n".join(body for language, body in FENCE.findall(PAGES[name]) if language == "text" and name not in RUN_ELSEWHERE)
    assert not re.search(r"^(import|from \w+ import|with hs\.|\w+ = hs\.|hs\.)\b", told, re.M)


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("howto/") and name != "howto/page"])
def test_a_how_to_is_short(name):
    """Records and explanations have pages of their own. What each part of the report says is a list as long as the report."""
    assert PAGES[name].count("\n") <= 80


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("about/")])
def test_pages_use_the_fields_words(name):
    prose = re.sub(r"`[^`]*`", "", FENCE.sub("", PAGES[name]))
    assert not re.search(r"\b(settled|settles|from (below|above))\b", prose, re.I)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_give_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(DOCS / f"{name}.md"), module_relative=False)
    assert tried == EXAMPLES[name]
    assert failed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.filterwarnings("ignore") if "import lightning" in page else ())
        for name, page in PAGES.items()
        if blocks(page)
    ],
)
def test_plain_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"__name__": "page"}
    for code in blocks(PAGES[name]):
        exec(compile(code, f"docs/{name}.md", "exec"), known)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is non-interactive")
@pytest.mark.parametrize("path", [*first(NOTEBOOKS, 1)])
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """Its code, from top to bottom; what it shows is left to who runs it."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    known = {"__name__": "__main__"}
    with matplotlib.rc_context({"backend": "agg"}):
        for cell in notebook["cells"]:
            assert cell["id"]
            assert cell["source"]
            if cell["cell_type"] == "code":
                assert not cell["outputs"]
                assert cell["execution_count"] is None
                exec(compile("".join(cell["source"]), path.name, "exec"), known)


def test_notebooks_are_in_the_gallery():
    assert len(NOTEBOOKS) == 4
    assert all(f"(notebooks/{path.name})" in PAGES["gallery"] for path in NOTEBOOKS)


@pytest.mark.parametrize("name", ["long_context", "hessian"])
def test_the_example_runs(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "32"])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert "32 tokens on" in capsys.readouterr().out


@pytest.mark.slow
def test_kinds_train_in_the_example_and_are_measured_as_what_they_train(tmp_path, monkeypatch):
    sys_argv = ["kinds.py", "--quick", "--out", str(tmp_path / "kinds.json"), "--figure", str(tmp_path / "kinds.svg")]
    monkeypatch.setattr(sys, "argv", sys_argv)
    known = runpy.run_path(str(ROOT / "examples" / "kinds.py"), run_name="__main__")
    rows = json.loads((tmp_path / "kinds.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == list(known["KINDS"])
    assert (tmp_path / "kinds.svg").exists()
    for row in rows:
        assert 0 < row["loss"] < 10
        assert all(0 < mean <= most for mean, most in zip(row["mean_L"], row["largest_L"], strict=True))
        assert 0 < row["raised at 0.05"] < row["raised at 0.1"]
    for kind in known["KINDS"].values():
        layer = known["SelfAttention"](kind).double()
        x = torch.randn(2, 5, known["WIDTH"], dtype=torch.float64)
        torch.testing.assert_close(layer.as_map()(x), layer(x).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site):
    assert all((site / f"{name}.html").is_file() for name in PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("dead", ["none.md", "index.md#none", "/none.md"])
def test_a_dead_link_ends_the_build(dead, tmp_path):
    """With the settings of the site, and no pages but one."""
    pytest.importorskip("mkdocs", reason="builds the site; pip install 'howsmooth[docs]' runs this")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[dead]({dead})\n")
    settings = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": "docs", "nav": ["index.md"], "plugins": [], "hooks": []}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(tmp_path / "mkdocs.yml")]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"link '{dead}'" in ended.stderr


def dead_links(folder: Path) -> list[str]:
    """Links and pictures of a built site that lead nowhere inside it, those of docstrings and of plain HTML too."""
    pages = {path: path.read_text("utf-8") for path in folder.rglob("*.html") if "live" not in path.parts}
    names = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    found = []
    for path, text in pages.items():
        for link in re.findall(r'<(?:a|img|iframe|script|link)\b[^>]*?\b(?:href|src)="([^"]*)"', text):
            target = urllib.parse.urlsplit(html.unescape(link))
            if target.scheme or target.netloc or path.name == "404.html":  # of another host; for a server alone
                continue
            to = (path.parent / urllib.parse.unquote(target.path)).resolve() if target.path else path
            anchor = urllib.parse.unquote(target.fragment)
            if not to.exists() or (anchor and to in names and anchor not in names[to] | {"__comments"}):
                found.append(f"{path.relative_to(folder)}: {link}")
    return found


@pytest.mark.slow
def test_no_link_of_the_site_is_dead(site, tmp_path):
    assert dead_links(site) == []
    (tmp_path / "a.html").write_text('<p id="x"><a href="#x"></a><a href="#y"></a><a href="b.html"></a><img src="c.png"></p>')
    assert dead_links(tmp_path) == ["a.html: #y", "a.html: b.html", "a.html: c.png"]


def test_what_the_readme_points_at_is_there():
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 120
    paths = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(paths) > 20
    for path in paths:
        assert (ROOT / path).exists(), path


def results(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))["rows"]


def test_figures_told_in_passing_are_those_of_the_benchmarks():
    """Tables are written by `python -m benchmarks.tables`; these sentences and short tables are not."""
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    times = [row["power/ours"] for row in results("solve") if row["n"] == 1024 and row["seed"] != "mean"]
    assert f"power iteration needs {min(times):.1f} to {max(times):.0f} times as long" in readme
    solved = {(row["n"], row["asked"]): row for row in results("gpu_solve")}
    assert f"at 131 072 tokens in {solved[131072, 'certify 0.02']['seconds']:.0f} s" in readme
    for n, digits in {1024: 1, 16384: 1, 131072: 0}.items():
        row = solved[n, "certify 0.02"]
        told = f"| {n:_} | H200 | {row['seconds']:.{digits}f} s | {row['peak GiB']:.{digits}f} GiB |".replace("_", " ")
        assert told in PAGES["howto/long-context"]
    models = {(row["shape"], row["map"], row["n"]): row for row in results("gpu_models")}
    lines = re.findall(r"^\| (\S+)'s shape \| (\w+) \| ([\d ]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGES["howto/gpu"], re.M)
    assert len(lines) == 5
    for shape, map_name, n, seconds, peak in lines:
        row = models[shape, map_name, int(n.replace(" ", ""))]
        assert float(seconds) == pytest.approx(row["seconds"], rel=0.02)
        assert float(peak) == pytest.approx(row["peak GiB"], rel=0.02)
    settled = results("settle")
    solved_in_all, off = sum(row["solved"] for row in settled), sum(row["off"] for row in settled)
    assert f"{off} times in {solved_in_all:_} runs".replace("_", " ") in PAGES["howto/reading-an-estimate"]
    assert max(row["worst error"] for row in settled) < 0.03


def test_one_version_everywhere():
    version = re.escape(howsmooth.__version__)
    assert re.search(rf"^## \[{version}\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    assert f"\nhowsmooth {howsmooth.__version__}\n" in PAGES[TYPED]


def test_pages_are_looked_at():
    """Should a page lose its examples, or blocks no longer be seen, this says so."""
    assert {"index", "howto/models", "howto/sweeps", "howto/own-module", "reference/api/measure"} <= set(EXAMPLES)
    plain = {"reference/api/certify", "explanation/meanfield", "howto/page", "explanation/worst-inputs"}
    assert plain <= {name for name, page in PAGES.items() if blocks(page)}
    assert blocks("```python\n1 / 0\n```\n```python\n>>> 1\n1\n```\n") == ["1 / 0\n"]
    page = "Text\n\n    howsmooth a  # b\n\n<!-- not run: hours -->\n\n    howsmooth c\n    other\n\n    howsmooth d\n"
    assert commands(page) == {"howsmooth a": None, "howsmooth c": "hours", "howsmooth d": None}
    fenced = "```bash\nhowsmooth a\n```\n\n<!-- not run: hours -->\n\n```console\n$ howsmooth b\n```\n"
    assert commands(fenced) == {"howsmooth a": None, "howsmooth b": "hours"}
    assert sum(reason is None for reason in COMMANDS.values()) >= 6
    with pytest.raises(AssertionError):
        check("howsmooth worst --no-such", whole=False)
    with pytest.raises(KeyError):
        check("howsmooth no-such", whole=False)
    with pytest.raises(Exception, match="Missing"):
        check("howsmooth measure")
