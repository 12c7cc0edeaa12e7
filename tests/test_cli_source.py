"""Commands are read from their source: without the package, in a moment, and exactly as the functions are."""

import importlib
import inspect
import os
import resource
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

import howsmooth
from howsmooth.cli import several
from howsmooth.study import questions
from howsmooth.study.choices import KINDS
from howsmooth_command import Command, Names, app, commands

COMMANDS = {f"{command.group} {command.name}".strip(): command for command in commands()}


def test_every_command_is_there():
    groups = {
        "": "attack bounds worst certify measure report demo reproduce training",
        "split ": "ask map growth convergence frequency",
        "study ": "bounds growth layers norms radius splitting variants worst",
    }
    assert {group + name for group, names in groups.items() for name in names.split()} <= set(COMMANDS)
    studies = {name for name, question in questions().items() if question.table is not None}
    assert {name.removeprefix("study ") for name in COMMANDS if name.startswith("study ")} == studies
    (kinds,) = (p.annotation.__metadata__[0].help for p in COMMANDS["study variants"].parameters if p.name == "kinds")
    assert kinds.endswith(": " + ", ".join(KINDS))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_what_is_read_is_what_is_imported(command: Command):
    real: dict[str, Any] = {}
    first, *others = command.functions()
    for function in (first, *others):
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            if is_dataclass(parameter.annotation) and function is first:
                real |= {field.name: field.default for field in fields(parameter.annotation)}
            elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                real[name] = parameter.default
    given = [parameter.name for parameter in command.parameters]
    assert set(given) == set(real) - {"question", "setting"}
    assert len(given) == len(set(given))
    for parameter in command.parameters:
        default = real[parameter.name]
        if isinstance(default, tuple):
            kind = type(default[0])
            assert several(parameter.default, "", float) == pytest.approx(default)
            assert kind in (int, float)
        else:
            assert parameter.default == default


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_tells_every_option(command: str):
    told = " ".join(CliRunner().invoke(app(), [*command.split(), "--help"]).stdout.split())
    for parameter in COMMANDS[command].parameters:
        (about,) = parameter.annotation.__metadata__
        assert about.help
        assert about.help.split(":")[0].split()[0] in told
    assert f"Example: howsmooth {command}" in told
    assert all(flag in told for flag in ("--json", "--debug", "--help"))


@pytest.mark.parametrize("arguments", ["--help", "--version", "study worst --help", "bounds --help"])
def test_help_takes_no_package_and_no_time(arguments: str):
    code = f"""
import sys
from howsmooth_command import run
sys.argv = ["howsmooth", *{arguments.split()!r}]
assert run() == 0
print(*(name for name in ("howsmooth", "torch", "numpy", "rich") if name in sys.modules), file=sys.stderr)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout
    assert done.stderr.split() == []
    # a tenth of this on an idle machine; importing torch takes more on any
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.2


def test_names_are_found_through_imports():
    names = Names("howsmooth.cli.attack")
    assert names["MapName"] == importlib.import_module("howsmooth.models").MapName
    assert "_GROUP" not in names
    assert "no_such_name" not in names
    assert Names("howsmooth")["__version__"] == howsmooth.__version__
