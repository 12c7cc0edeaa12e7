"""The command line prints tables and JSON, and refuses with one line and exit code 2."""

import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from howsmooth.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_bounds_table():
    result = run("bounds", "--gamma", "-1", "--radius", "2", "--n", "64")
    assert result.exit_code == 0
    assert result.stdout.startswith("bounds over 64 tokens in the ball of radius 2")
    assert "B8" in result.stdout


def test_bounds_json_is_all_there_is_on_stdout():
    result = run("bounds", "--gamma", "-1", "--radius", "30", "--json")
    rows = json.loads(result.stdout)["bounds"]
    assert {"B1", "B8"} <= {row["id"] for row in rows}


def test_bounds_of_given_matrices(tmp_path):
    file = tmp_path / "head.safetensors"
    save_file({"A": torch.diag(torch.tensor([1.0, -2.0])), "V": torch.eye(2)}, file)
    result = run("bounds", "--weights", str(file), "--radius", "1", "--causal", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["bounds"]


def test_figure(tmp_path):
    path = tmp_path / "ladder.png"
    result = run("bounds", "--gamma", "-1", "--radius", "1.5", "--figure", str(path))
    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--radius", "1"),
        ("--radius", "-1", "--gamma", "1"),
        ("--radius", "1", "--gamma", "1", "--n", "0"),
        ("--radius", "1", "--gamma", "1", "--dim", "0"),
        ("--radius", "1", "--weights", "missing.safetensors"),
        ("--radius", "1", "--gamma", "1", "--figure", "ladder.txt"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("bounds", *arguments)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "expected" in lines[0]
    assert not list(tmp_path.iterdir())


def test_weights_without_the_right_names(tmp_path):
    file = tmp_path / "other.safetensors"
    save_file({"B": torch.eye(2)}, file)
    result = run("bounds", "--weights", str(file), "--radius", "1")
    assert result.exit_code == 2
    assert "got B" in result.stderr
