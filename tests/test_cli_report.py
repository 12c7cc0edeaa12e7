"""`report`, `demo` and `study`: a page from a model folder, and one line with exit code 2 on everything that cannot be."""

import json
import math
import shutil
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import howsmooth
from howsmooth.cli import report as cli
from howsmooth.cli.options import SweepOptions
from howsmooth.errors import BadInputError
from howsmooth.study import halves, questions
from howsmooth.study.ceilings import BOUNDS
from howsmooth.study.choices import USUAL
from howsmooth_command import app
from problems import readers

SMALL = ("--lengths", "8,16", "--samples", "1", "--layers", "0", "--workers", "1")


def run(*arguments: str | Path):
    return CliRunner().invoke(app(), [str(a) for a in arguments])


def fill(folder: Path) -> None:
    readers.save(folder / "model")
    (folder / "text.txt").write_text(readers.text())


@pytest.fixture(scope="module")
def place(once) -> Path:
    """A model folder and a text."""
    return once("place", fill)


@pytest.fixture(scope="module")
def small(once, place: Path) -> Path:
    """A finished report of one layer, to be copied."""
    inputs = ("report", place / "model", "--text", place / "text.txt", *SMALL, "--no-figures")
    return once("small", lambda folder: run(*inputs, "--out", folder / "report")) / "report"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_a_report_ends_with_the_path_of_its_page(desk):
    assert "constrained" not in desk.stderr
    lines = desk.stdout.splitlines()
    page = Path(lines[-1])
    assert page == desk.report / "index.html"
    assert lines[0] == "L, geometric mean over samples"
    assert any("amplifies most" in line for line in lines)
    tables = {"measurements.csv", "bounds.csv", "near.csv", "radii.csv", "influence.csv", "variants.csv"}
    assert {"index.html", "results.sqlite", "figures/growth.pdf", "figures/growth.png"} | tables <= set(contents(desk.report))
    header = (desk.report / "measurements.csv").read_text().splitlines()[0].split(",")
    wanted = "kind model layer map n sample value lower upper confidence radius exponent seconds version_howsmooth seed "
    wanted += "relative top_token top_word top_share top_received token share whole"
    assert set(wanted.split()) <= set(header)
    assert "text.txt" in page.read_text()


@pytest.mark.slow
def test_a_report_of_a_rotary_model_is_complete(desk):
    assert desk.answer["failures"] == []
    assert {row["variant"] for row in desk.rows if row["kind"] in ("variant", "left out")} == set(USUAL)
    assert len({row["variant"] for row in desk.data["variants"]}) >= 5
    for kind in ("bounds", "splitting", "worst"):
        assert {row["layer"] for row in desk.rows if row["kind"] == kind} == {0, 1}, kind
    for row in desk.rows:
        for bound in row.get("bounds") or []:
            if bound["side"] == "upper" and bound["log_value"] is not None:
                assert bound["log_value"] >= math.log(row["value"] * (1 - 1e-6))
    page = (desk.report / "index.html").read_text("utf-8")
    assert "theory proves L ≤" in page
    assert "at this input" in page
    assert "over the ball" in page


@pytest.mark.slow
def test_quiet_prints_the_path_alone_and_json_one_object(place, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/howsmooth", "report", "a model", "--quiet"])
    inputs = (place / "model", "--text", place / "text.txt", "--lengths", "8,16", "--samples", "1", "--workers", "1")
    inputs += ("--no-figures",)
    result = run("report", *inputs, "--out", tmp_path / "q", "--quiet", "--layers", "0")
    assert result.stdout.splitlines() == [str(tmp_path / "q" / "index.html")]
    page = (tmp_path / "q" / "index.html").read_text()
    assert "howsmooth report &#x27;a model&#x27; --quiet" in page  # the command that made it, ready to be typed again
    result = run("report", *inputs, "--out", tmp_path / "j", "--json", "--layers", "1", "--map", "block")
    found = json.loads(result.stdout)
    assert found["page"] == str(tmp_path / "j" / "index.html")
    assert {row["layer"] for row in found["rows"]} == {1}
    assert len(found["answer"]) == 4


@pytest.mark.slow
def test_a_report_that_exists_is_kept_resumed_or_replaced(place, small, tmp_path):
    inputs = ("report", place / "model", "--text", place / "text.txt", *SMALL, "--no-figures", "--out", tmp_path / "r")
    shutil.copytree(small, tmp_path / "r")
    before = contents(tmp_path / "r")
    with sqlite3.connect(tmp_path / "r" / "results.sqlite") as db:
        runs = db.execute("SELECT key, run FROM results ORDER BY key").fetchall()
    result = run(*inputs)
    assert result.exit_code == 2
    assert "--resume" in result.stderr
    assert "--force" in result.stderr
    assert contents(tmp_path / "r") == before

    result = run(*inputs, "--resume", "--json")
    assert result.exit_code == 0
    again = json.loads(result.stdout)["rows"]
    with sqlite3.connect(tmp_path / "r" / "results.sqlite") as db:
        assert db.execute("SELECT key, run FROM results ORDER BY key").fetchall() == runs  # nothing was measured twice
    assert "influence" in {row["kind"] for row in again}
    result = run(*inputs, "--force", "--json")
    assert result.exit_code == 0
    fresh = json.loads(result.stdout)["rows"]
    assert [r["value"] for r in fresh] == [r["value"] for r in again]
    assert [r["seconds"] for r in fresh] != [r["seconds"] for r in again]


@pytest.mark.slow
@pytest.mark.parametrize("extra", [("--resume",), ("--force",)])
def test_results_of_another_version_are_refused_and_left_alone(place, small, tmp_path, extra):
    out = tmp_path / "r"
    inputs = ("report", place / "model", "--text", place / "text.txt", *SMALL, "--out", out)
    shutil.copytree(small, out)
    with sqlite3.connect(out / "results.sqlite") as db:
        db.execute("PRAGMA user_version=99")
    before = contents(out)
    result = run(*inputs, *extra)
    assert result.exit_code == 2
    assert "version 99" in result.stderr
    assert contents(out) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "2"), "layers from 0 to 1"),
        (("--layers", "first"), "--layers like"),
        (("--map", "mlp"), "--map among"),
        (("--map", "normed"), "normalises before"),
        (("--lengths", "8,1000"), "a text with"),
        (("--lengths", "60", "--samples", "1"), "at most 48 tokens"),
        (("--lengths", "eight"), "--lengths like"),
        (("--lengths", "2"), "special tokens"),
        (("--samples", "0"), "one sample"),
        (("--text", "missing.txt"), "expected a text file"),
        (("--text", "."), "expected a text file"),
        (("--engine", "slurm"), "among local, ray"),
        (("--address", "auto"), "--engine ray"),
        (("--workers", "0"), "workers of at least 1"),
        (("--resume", "--force"), "got both"),
        (("--tol", "0"), "tol"),
        (("--radii", "0"), "radii as a part"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(place, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    inputs = {"--text": str(place / "text.txt"), "--lengths": "8", "--workers": "1"}
    given = [part for k, v in inputs.items() if k not in options for part in (k, v)]
    result = run("report", place / "model", *given, *options, "--out", "out")
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_folders_that_are_no_place_for_a_report(place, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    inputs = ("report", place / "model", "--text", place / "text.txt", *SMALL, "--no-figures")
    for out, extra in (("file", ()), ("file", ("--force",)), ("full", ()), ("full", ("--resume",))):
        result = run(*inputs, "--out", tmp_path / out, *extra)
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1
    assert contents(tmp_path / "full") == {"thesis.tex": b"years of work"}
    assert run(*inputs, "--out", tmp_path / "full", "--force").exit_code == 0
    assert contents(tmp_path / "full")["thesis.tex"] == b"years of work"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, question in questions().items() if question.table is not None])
def test_every_study_prints_a_table_and_keeps_its_rows(place, tmp_path, name):
    results, table = tmp_path / "rows.sqlite", tmp_path / "rows.csv"
    inputs = ("study", name, place / "model", "--text", place / "text.txt", "--samples", "1", "--workers", "1")
    inputs += ("--steps", "3") if name == "worst" else ("--kinds", "linear,cosine") if name == "variants" else ()
    result = run(*inputs, "--lengths", "8,12", "--out", results, "--table", table)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert Path(lines[-1]) == results
    assert lines[1].split()[0] == ("kind" if name == "variants" else "layer")
    assert len(lines) >= 2 + 2 + 1
    header = table.read_text().splitlines()[0].split(",")
    assert {"layer", "n", "value", "seed", "version_howsmooth"} <= set(header)
    resumed = run(*inputs, "--lengths", "8,12", "--out", results, "--resume", "--json")
    assert len(json.loads(resumed.stdout)["rows"]) >= 2
    again = run(*inputs, "--lengths", "8,12", "--out", results)
    assert again.exit_code == 2
    assert "resume" in again.stderr


@pytest.mark.slow
def test_kinds_have_a_page_of_their_own(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = (place / "model", "--text", place / "text.txt", *SMALL)
    result = run("study", "variants", *where, "--kinds", "linear,cosine", "--page", "page", "--factors", "2")
    assert result.exit_code == 0, result.output
    assert {"index.html", "measurements.csv", "variants.csv", "figures/variants.png"} <= set(contents(tmp_path / "page"))
    assert run("study", "variants", *where, "--page", "page", "--out", "other.sqlite").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("radius", "model", "--factors", "big"), "--factors like"),
        (("radius", "model", "--factors", "-1"), "positive factors"),
        (("bounds", "model", "--map", "block"), "the map attention"),
        (("variants", "no model is loaded", "--kinds", "sofmax"), "did you mean softmax?"),
        (("variants", "model", "--map", "block"), "the map attention"),
        (("growth", "model", "--table", "rows.txt"), ".csv or .parquet"),
        (("growth", "no model is loaded", "--table", "/proc/rows.csv"), "a file that can be written, got /proc/rows.csv"),
        (("growth", "no model is loaded", "--table", "x" * 300 + ".csv"), "a file that can be written"),
        (("growth", "nowhere/at/all"), "got 'nowhere/at/all'"),
    ],
)
def test_studies_that_cannot_be(place, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    named = [place / "model" if a == "model" else a for a in arguments]
    result = run("study", *named, "--text", place / "text.txt", "--lengths", "8", "--samples", "1", "--workers", "1")
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("growing", "model"),
        ("growth", "model", "--factors", "1,2"),
        ("growth", "model", "--kinds", "linear"),
        ("radius", "model", "--page", "page"),
        ("radius", "model", "--steps", "3"),
    ],
)
def test_a_study_takes_its_own_options_alone(arguments):
    result = run("study", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        ("howsmooth: expected an option of howsmooth study ", "howsmooth: expected a command of howsmooth study")
    )


def test_bounds_of_a_model_without_formulas_are_refused(place, tmp_path, monkeypatch):
    assert BOUNDS.beside is not None
    none = replace(BOUNDS, beside=replace(BOUNDS.beside, rows=lambda *_: iter(())))
    monkeypatch.setitem(questions(), "bounds", none)
    where, table = (place / "model", "--text", place / "text.txt"), tmp_path / "rows.csv"
    more = ("--lengths", "8", "--samples", "1", "--workers", "1", "--out", tmp_path / "rows.sqlite", "--table", table)
    result = run("study", "bounds", *where, *more)
    assert result.exit_code == 2
    assert "expected a layer that is a formula of its weights, got none" in result.stderr
    assert not table.exists()


@pytest.mark.parametrize(
    ("arguments", "model", "lengths", "layers", "samples"),
    [
        ((), "demo", None, None, 8),
        (("smollm2",), "smollm2", (8, 32, 128), None, 2),
        (("smollm2", "--quick"), "smollm2", (8, 12, 16), (0, 3), 2),
    ],
)
def test_the_demo_of_a_model_is_its_report(arguments, model, lengths, layers, samples, monkeypatch):
    given: list[Any] = []

    def write(name: str, *, sweep: SweepOptions, **_: Any) -> None:
        given.extend((name, sweep.lengths, sweep.layers, sweep.samples))
        raise BadInputError("expected nothing, got enough; stop")

    monkeypatch.setattr(cli, "report", write)
    assert run("demo", *arguments).exit_code == 2
    assert given == [model, lengths, layers, samples]
    other = run("demo", "./model")
    assert (other.exit_code, other.stderr) == (
        2,
        "howsmooth: expected a model that comes in a package among demo, smollm2, got './model'; pick one of them\n",
    )


@pytest.mark.parametrize("command", ["report", "demo", "study growth"])
def test_help_has_an_example(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: howsmooth {command}" in " ".join(result.stdout.split())


def test_the_version_is_one_line():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"howsmooth {howsmooth.__version__}\n"


@pytest.mark.slow
def test_certified_radii_are_told_and_become_a_page(place, tmp_path):
    page = tmp_path / "radii.html"
    asked = ("certify", place / "model", "--text", place / "text.txt", "--n", "6", "--samples", "2", "--change", "0.1")
    asked += ("--map", "attention", "--layers", "0,1", "--page", page)
    result = run(*asked)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(page)
    assert "moves by more than 10 % of its length" in page.read_text()
    again = run(*asked)
    assert again.exit_code == 2
    assert "--force" in again.stderr
    rows = json.loads(run(*asked, "--force", "--json").stdout)["rows"]
    assert [(row["window"], row["layer"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(0 < row["certified"] <= row["attacked"] for row in rows)


def test_a_study_of_splitting_says_which_layers_have_none(place, tmp_path, monkeypatch):
    study = ("study", "splitting", place / "model", "--text", place / "text.txt", "--lengths", "8", "--samples", "1")
    monkeypatch.setattr(halves, "counts_tokens", lambda _: "they count")
    result = run(*study, "--workers", "1", "--out", tmp_path / "results.sqlite")
    assert result.exit_code == 2
    assert "expected a layer that has an answer, got none (layers 0, 1 have no splitting: they count" in result.stderr
    assert not (tmp_path / "results.sqlite").exists()
