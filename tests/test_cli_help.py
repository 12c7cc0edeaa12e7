"""What the help says is whole, in order, and runs as it is printed; what is typed wrong is one sentence."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import howsmooth as hs
from howsmooth.training import Recorder
from howsmooth_command import app, commands

MINUTES = ("demo", "report", "attack", "study", "reproduce")
EXAMPLES = [
    " ".join(part.removeprefix("Example: howsmooth ").split())
    for command in commands()
    for part in command.help.split("\n\n")
    if part.startswith("Example: howsmooth ")
]


def run(*arguments: str):
    return CliRunner().invoke(app(), list(arguments))


@pytest.mark.parametrize("group", [[], ["study"], ["split"]])
def test_lists_of_commands_tell_whole_sentences(group: list[str]):
    told = run(*group, "--help").stdout
    assert told.count("\n  ") > 5
    assert "..." not in told.split("Commands:")[1]


def test_commands_are_listed_in_the_order_in_which_people_need_them():
    listed = re.findall(r"^  (\w+)  ", run("--help").stdout.split("Commands:")[1], re.M)
    assert listed[:4] == ["demo", "measure", "report", "training"]
    assert set(listed) == {command.group or command.name for command in commands()}


def test_usage_names_arguments_as_the_table_does():
    assert run("measure", "--help").stdout.startswith("Usage: howsmooth measure [OPTIONS] MODEL\n")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("stdy", "expected a command of howsmooth, got 'stdy'; did you mean study?"),
        ("zzz", "expected a command of howsmooth, got 'zzz'; howsmooth --help lists them"),
        ("study grwth demo", "expected a command of howsmooth study, got 'grwth'; did you mean growth?"),
        ("--vrsion", "expected an option of howsmooth, got '--vrsion'; did you mean --version?"),
        ("bounds --radus 2", "expected an option of howsmooth bounds, got '--radus'; did you mean --radius?"),
        ("bounds --radius", "expected a value behind --radius, got none; write one after it"),
        ("bounds --radius two", "expected --radius as a number, got 'two'; write it like --radius 0.5"),
        ("bounds --radius 2 --n 8.5", "expected --n as a whole number, got '8.5'; write it like --n 8"),
        ("bounds --json=3 --radius 2", "expected --json without a value, got one; leave the value out"),
        ("bounds", "expected --radius (radius of the ball of tokens), got none; howsmooth bounds --help shows how"),
        ("measure", "expected MODEL (demo, "),
        ("measure demo other", "expected howsmooth measure [OPTIONS] MODEL, got 'other' beside it; leave it out"),
        ("measure demo --map atention", "did you mean attention?"),
    ],
)
def test_what_is_typed_wrong_is_one_sentence(typed: str, told: str):
    result = run(*typed.split())
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert line.startswith("howsmooth: expected ")
    assert told in line


def test_a_group_alone_shows_its_help():
    result = run("study")
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: howsmooth study")


@pytest.mark.slow
@pytest.mark.parametrize("example", [pytest.param(e, marks=[pytest.mark.weekly] * (e.split()[0] in MINUTES)) for e in EXAMPLES])
def test_an_example_of_the_help_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    points = torch.tensor([[0.0], [1.0], [2.0]])
    save_file({"A": torch.tensor([[1.0]]), "V": torch.tensor([[1.0]]), "points": points}, "head.safetensors")
    if example.startswith("training"):
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2, enable_nested_tensor=False)
        with Recorder(hs.Tracker(layers, torch.randn(1, 5, 8)), 1, folder="runs/alice") as record:
            record(0)
            record(1)
    result = run(*shlex.split(example))
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_every_command_has_an_example():
    assert {" ".join(f"{command.group} {command.name}".split()) for command in commands()} <= {
        " ".join(example.split()[: 1 + (example.split()[0] in ("study", "split"))]) for example in EXAMPLES
    }


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("measu", {"measure"}),
        ("measure demo --ma", {"--map"}),
        ("measure demo --map n", {"normed"}),
        ("study variants demo --kinds hard,linear-", {"hard,linear-relu", "hard,linear-sum"}),
        ("reproduce ra", {"random"}),
        ("reproduce all --only real,tr", {"real,trap"}),
        ("report d", {"demo", "drawer/", "draft.gguf"}),
        ("measure demo --text drawer/", {"drawer/text.txt"}),
        ("certify demo --device c", {"cpu", "cuda"}),
    ],
)
def test_names_are_completed(typed: str, completed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawer").mkdir()
    (tmp_path / "drawer" / "text.txt").write_text("words")
    (tmp_path / "draft.gguf").write_text("")
    words = {"COMP_WORDS": f"howsmooth {typed}", "COMP_CWORD": str(len(typed.split()))}
    result = CliRunner().invoke(app(), [], env={"_HOWSMOOTH_COMPLETE": "complete_bash"} | words)
    assert set(result.stdout.split()) == completed
