"""The command line prints tables and JSON, and refuses with one line and exit code 2."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from howsmooth.cli import options
from howsmooth.cli.options import SweepOptions
from howsmooth.errors import BadInputError
from howsmooth.run import Local, Ray
from howsmooth.study.reader import Source
from howsmooth_command import app


def run(*arguments: str):
    return CliRunner().invoke(app(), list(arguments))


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


@pytest.mark.slow
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


def test_debug_shows_the_traceback():
    result = run("bounds", "--radius", "-1", "--gamma", "1", "--debug")
    assert isinstance(result.exception, BadInputError)


def test_bounds_of_a_random_layer():
    result = run("bounds", "--random", "--width", "6", "--heads", "2", "--radius", "9", "--json")
    rows = {row["id"]: row for row in json.loads(result.stdout)["bounds"]}
    assert "2" in rows["B1"]["reason"]  # proved for one head
    assert rows["B7"]["value"] > 0


@pytest.mark.parametrize("command", ["measure", "report", "study growth", "attack"])
def test_commands_that_load_a_model_share_their_options(command):
    told = run(*command.split(), "--help").stdout
    assert all(option in told for option in ("--text", "--map", "--side", "--device", "--seed", "--json", "--debug"))


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta"])
@pytest.mark.parametrize("command", ["measure demo --layer 0 --text in.txt", "report demo", "study growth demo", "attack demo"])
def test_a_device_that_is_not_there_is_refused_in_one_line(command, device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("some words")
    result = run(*command.split(), "--device", device)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert device in line
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_a_study_takes_its_device_along():
    source = Source("demo", None, None, "weights", "digest")
    assert "device" not in source.to_dict()  # a worker's own choice: the same tasks on another machine
    assert Source(**source.to_dict()) == source
    there = replace(source, device="cuda:1")
    assert Source(**there.to_dict()) == there


def test_workers_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    class OnGpu:
        device, where = torch.device("cuda", 0), None
        module = torch.nn.Linear(2, 2)

    model: Any = OnGpu()
    monkeypatch.setattr(options, "cores", lambda: 16)
    monkeypatch.setattr(options, "free", lambda device: 100)
    for taken, held in ((0, 6), (5, 6), (10, 3), (17, 1), (99, 1)):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, taken=taken: taken)
        assert SweepOptions().engine_for(model) == Local(workers=held)
    on_ray = SweepOptions(engine="ray", workers=2)
    assert on_ray.engine_for(model) == Ray(workers=2, gpus=1.0)
    with pytest.raises(BadInputError, match="Ray gives each worker a GPU"):
        replace(on_ray, device="cuda:1").engine_for(model)


def test_weights_without_the_right_names(tmp_path):
    file = tmp_path / "other.safetensors"
    save_file({"B": torch.eye(2)}, file)
    result = run("bounds", "--weights", str(file), "--radius", "1")
    assert result.exit_code == 2
    assert "got B" in result.stderr


@pytest.mark.slow
def test_measure_table_and_json(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat and looked at the rabbit.")
    result = run("measure", "demo", "--layer", "1", "--text", str(text), "--n", "8", "--heads")
    assert result.exit_code == 0
    assert "attention of layer 1" in result.stdout
    assert "[CLS]" in result.stdout
    ids = tmp_path / "ids.json"
    ids.write_text("[101, 1996, 4937, 102]")
    result = run("measure", "demo", "--layer", "5", "--ids", str(ids), "--map", "block", "--json")
    found = json.loads(result.stdout)
    assert found["n"] == 4
    assert found["map"] == "block"
    assert found["tokens"] == ["[CLS]", "the", "cat", "[SEP]"]
    assert found["lower"] <= found["upper"]


@pytest.mark.slow
def test_measure_holds_tokens_fixed():
    told = {}
    for tokens in ("1-2,0", "1,2"):
        result = CliRunner().invoke(
            app(), ["measure", "demo", "--layer", "0", "--ids", "-", "--json", "--tokens", tokens], input="[101, 4937, 102]"
        )
        told[tokens] = json.loads(result.stdout)
    assert told["1,2"]["moving"] == [1, 2]
    assert told["1,2"]["input_share"][0] == 0
    assert 0 < told["1,2"]["value"] < told["1-2,0"]["value"]


def test_measure_reads_standard_input():
    result = CliRunner().invoke(app(), ["measure", "demo", "--layer", "0", "--ids", "-", "--json"], input="[101, 4937, 102]")
    assert json.loads(result.stdout)["n"] == 3


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("./missing", "--layer", "0", "--ids", "-"), "[1]"),
        (("demo", "--layer", "6", "--ids", "-"), "[101, 102]"),
        (("demo", "--layer", "0", "--ids", "-"), "[101, 99999]"),
        (("demo", "--layer", "0", "--ids", "-"), "{}"),
        (("demo", "--layer", "0", "--ids", "-"), "[1.5]"),
        (("demo", "--layer", "0", "--ids", "-"), "not json"),
        (("demo", "--layer", "0", "--text", "-", "--n", "9"), "too short"),
        (("demo", "--layer", "0", "--text", "missing.txt"), ""),
        (("demo", "--layer", "0", "--ids", "-", "--map", "mlp"), "[101]"),
        (("demo", "--layer", "0", "--ids", "-", "--tokens", "4-2"), "[101, 102]"),
        (("demo", "--layer", "0", "--ids", "-", "--tokens", "0-"), "[101, 102]"),
        (("demo", "--layer", "0", "--ids", "-", "--tokens", "0,2"), "[101, 102]"),
        (("demo", "--layer", "0", "--ids", "-", "--tokens", ","), "[101, 102]"),
        (("demo", "--layer", "0", "--ids", "-", "--text", "-"), "[101]"),
    ],
)
def test_measure_refuses_in_one_line(arguments, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app(), ["measure", *arguments], input=given)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "expected" in result.stderr
