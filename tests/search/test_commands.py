"""`howsmooth worst` and `howsmooth attack`: tables, JSON, figures, and one line on bad input."""

import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from howsmooth.paper.ball import draw_worst, in_plane
from howsmooth.search import BallAround
from howsmooth.verbs import worst_case
from howsmooth_command import app
from problems.layers import gaussian

QUICK = ("--steps", "3", "--restarts", "4", "--lengths", "2,4")


def run(*arguments: str):
    return CliRunner().invoke(app(), list(arguments))


@pytest.mark.slow
def test_worst_table_and_figure(tmp_path):
    path = tmp_path / "worst.png"
    result = run("worst", "--gamma", "-1", "--radius", "2", "--n", "4", "--best", "--figure", str(path), *QUICK)
    assert result.exit_code == 0
    assert "worst configuration of 4 tokens: L = " in result.stdout
    assert "L grows like n^" in result.stdout
    assert "worst of 4 tokens: L = " in result.stdout
    assert path.read_bytes().startswith(b"\x89PNG")


def test_worst_json_of_a_random_layer():
    result = run("worst", "--random", "--width", "6", "--heads", "2", "--radius", "9", "--n", "3", "--json", *QUICK)
    answer = json.loads(result.stdout)
    assert len(answer["growth"]["rows"]) == 2
    assert len(answer["worst"]["tokens"]) == 3


@pytest.mark.parametrize("names", [("A", "V"), ("w_q", "w_k", "w_v", "w_o", "b_q")])
def test_worst_of_given_weights(tmp_path, names):
    file = tmp_path / "layer.safetensors"
    save_file({n: gaussian(*((4,) if n == "b_q" else (4, 4)), seed=i) for i, n in enumerate(names)}, file)
    result = run("worst", "--weights", str(file), "--radius", "1", "--n", "0", "--causal", "--lengths", "2,4", "--json")
    if result.exit_code == 2:  # no real eigenvalue to build tokens from
        assert "real eigenvalue" in result.stderr
        result = run("worst", "--weights", str(file), "--radius", "1", "--n", "3", "--steps", "1", "--lengths", "", "--json")
    assert json.loads(result.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ("worst", "--radius", "1"),
        ("worst", "--radius", "0", "--gamma", "-1"),
        ("worst", "--radius", "1", "--gamma", "-1", "--random"),
        ("worst", "--radius", "1", "--gamma", "-1", "--lengths", "8,x"),
        ("worst", "--radius", "1", "--gamma", "-1", "--lengths", "", "--n", "0"),
        ("worst", "--radius", "1", "--gamma", "-1", "--width", "0"),
        ("worst", "--radius", "1", "--gamma", "-1", "--figure", "worst.txt"),
        ("worst", "--radius", "1", "--weights", "missing.safetensors"),
        ("attack", "demo", "--text", "missing.txt"),
        ("attack", "demo", "--budgets", "a"),
        ("attack", "demo", "--budgets", "-1"),
        ("attack", "demo", "--layers", "x"),
        ("attack", "no such model"),
        ("attack", "demo", "--map", "magic"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "expected" in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_attack_command(tmp_path):
    path, text = tmp_path / "attack.svg", tmp_path / "text.txt"
    text.write_text("The cat sat on the mat while the dog slept under the old table near the warm kitchen stove.")
    options = ("--text", str(text), "--n", "10", "--samples", "1", "--layers", "1", "--budgets", "0.01", "--scored", "3")
    result = run("attack", "demo", *options, "--steps", "2", "--figure", str(path))
    assert result.exit_code == 0
    assert "relinearised beats projected gradient" in result.stdout
    assert "moves the output by" in result.stdout
    assert path.read_text().startswith("<?xml")


def test_figures_of_results(tmp_path):
    attn_in = gaussian(4, 3, seed=1)
    found = worst_case(lambda t: torch.tanh(t @ t.mT) @ t, over=BallAround(attn_in, 0.2), steps=2, restarts=2)
    assert draw_worst(tmp_path / "around.pdf", None, found).exists()
    flat, _ = in_plane(gaussian(3, 1, seed=0), gaussian(3, 1, seed=1))
    assert flat.shape == (3, 2)
    wide, _ = in_plane(gaussian(3, 9, seed=0), gaussian(3, 9, seed=1))
    assert wide.shape == (3, 2)
