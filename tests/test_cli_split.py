"""`howsmooth split`: tables, figures, JSON, and refusals that leave nothing behind."""

import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from howsmooth_command import app

SMALL = {
    "map": ("--points", "9", "--masses", "0.5,0.9"),
    "growth": ("--radii", "0.5,1"),
    "convergence": ("--longest", "8", "--seeds", "1"),
    "frequency": ("--count", "2", "--lengths", "2,3", "--logits", "1,4"),
}
NAMES = {
    "map": "splitting-map",
    "growth": "meanfield-growth",
    "convergence": "meanfield-convergence",
    "frequency": "splitting-frequency",
}


def run(*arguments: str):
    return CliRunner().invoke(app(), ["split", *arguments])


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_experiments_write_a_table_and_a_figure(name, tmp_path):
    result = run(name, *SMALL[name], "--out", str(tmp_path / "deep" / "out"))
    assert result.exit_code == 0, result.output
    stem = tmp_path / "deep" / "out" / NAMES[name]
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert stem.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    lines = stem.with_suffix(".csv").read_text().splitlines()
    assert len(lines) > 2
    assert len({line.count(",") for line in lines if '"' not in line}) == 1
    assert len(list(stem.parent.iterdir())) == 3
    assert NAMES[name] in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["growth", "map"])
def test_json_is_all_there_is_on_stdout(name, tmp_path):
    result = run(name, *SMALL[name], "--out", str(tmp_path), "--json")
    found = json.loads(result.stdout)
    assert found["rows"]
    assert len(found["files"]) == 3


def test_overflowing_bounds_are_null(tmp_path):
    result = run("growth", "--radii", "24", "--out", str(tmp_path), "--json")
    row = json.loads(result.stdout, parse_constant=pytest.fail)["rows"][0]
    assert row["B4"] is None
    assert row["B5"] < row["value"] < row["B8m"]
    result = run("growth", "--radii", "30", "--out", str(tmp_path / "far"))
    assert result.exit_code == 2
    assert "leaves the range of float64" in result.stderr
    assert not (tmp_path / "far").exists()


def problem(tmp_path, **tensors: torch.Tensor) -> str:
    file = tmp_path / "head.safetensors"
    save_file({"A": -torch.eye(1), "V": torch.eye(1), "points": torch.tensor([[0.0], [4.0]])} | tensors, file)
    return str(file)


def test_ask(tmp_path):
    file = problem(tmp_path, masses=torch.tensor([15 / 16, 1 / 16]))
    assert run("ask", "--weights", file).stdout.startswith("splitting pays: token 0")
    found = json.loads(run("ask", "--weights", file, "--json").stdout)
    assert found["pays"]
    assert found["gain"] == pytest.approx(3.631, rel=1e-3)


def test_ask_masked(tmp_path):
    file = problem(tmp_path, positions=torch.tensor([0.5, 1.0]))
    assert run("ask", "--weights", file, "--causal").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("map", "--alphas", "one"),
        ("map", "--alphas", "0"),
        ("map", "--masses", "2"),
        ("map", "--points", "1"),
        ("growth", "--radii=-1"),
        ("growth", "--alpha", "0"),
        ("convergence", "--longest", "1"),
        ("convergence", "--seeds", "0"),
        ("frequency", "--count", "0"),
        ("frequency", "--lengths", "0"),
        ("frequency", "--heads", "3"),
        ("ask", "--weights", "missing.safetensors"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "expected" in lines[0]
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "out").write_text("mine")
    result = run("growth", "--radii", "1", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert (tmp_path / "out").read_text() == "mine"


def test_names_that_are_missing(tmp_path):
    file = tmp_path / "other.safetensors"
    save_file({"A": torch.eye(1)}, file)
    result = run("ask", "--weights", str(file))
    assert result.exit_code == 2
    assert "got A" in result.stderr
    result = run("ask", "--weights", problem(tmp_path), "--causal")
    assert result.exit_code == 2
    assert "positions" in result.stderr
