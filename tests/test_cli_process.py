"""The command as a process: Ctrl-C from the first moment, and standard streams that are full, closed, binary or plain ASCII."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from howsmooth import verbs
from howsmooth.cli.options import read_stdin
from howsmooth.errors import BadInputError
from howsmooth_command import app
from howsmooth_command import run as run_command
from marks import first

START = "from howsmooth_command import main; print('on', file=sys.stderr, flush=True); main()"
BOUNDS = ("bounds", "--gamma", "-1", "--radius", "2")
REFUSED = ("bounds", "--gamma", "-1", "--radius", "-1")


def start(*arguments: str, stdout: int, **variables: str) -> subprocess.Popen[str]:
    """The command in a process of its own, once it has begun."""
    code = [sys.executable, "-c", f"import sys; {START}", *arguments]
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        code, stdout=stdout, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths} | variables
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "on\n"
    return process


def interrupted_after(delay: float, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command that gets Ctrl-C after so many seconds."""
    process = start(*arguments, stdout=subprocess.PIPE)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    return process.returncode, out, said


@pytest.mark.parametrize("delay", [0.1, 0.4])  # at 0 the interpreter may not have come to our first line
def test_an_interrupt_while_it_starts_is_one_word(delay: float):
    """Imports take a second or more, and their code must not be interrupted into a traceback."""
    assert interrupted_after(delay, *BOUNDS) == (130, "", "howsmooth: stopped\n")


@pytest.mark.slow
def test_no_moment_of_an_interrupt_ends_with_a_signal():
    """From the start of the command to the end of the interpreter."""
    for k in range(16):
        code, out, said = interrupted_after(0.01 + 0.02 * k, "--version")
        assert (code, said) in ((0, ""), (130, "howsmooth: stopped\n"))
        assert code or out


@pytest.mark.weekly
def test_an_interrupt_in_the_middle_of_a_search_is_one_word():
    search = ("worst", "--gamma", "-1", "--radius", "2", "--n", "64", "--steps", "100000", "--lengths", "")
    for delay in (4.0, 6.0):
        assert interrupted_after(delay, *search) == (130, "", "howsmooth: stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "joined"),
    first(
        [
            (BOUNDS, False),
            (REFUSED, True),
            (("--help",), False),
            (("--help",), True),
            (BOUNDS, True),
            (REFUSED, False),
            ((*BOUNDS, "--json"), False),
            ((*BOUNDS, "--json"), True),
        ],
        4,
    ),
)
def test_a_closed_pipe_is_quiet(command: tuple[str, ...], joined: bool):
    """As in `howsmooth … | head -1`, and with `2>&1` before the bar."""
    paths = os.pathsep.join(filter(None, sys.path))
    read, write = os.pipe()
    os.close(read)
    errors = write if joined else subprocess.PIPE
    process = subprocess.run(
        [sys.executable, "-c", "from howsmooth_command import main; main()", *command],
        stdout=write,
        stderr=errors,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=60,
        check=False,
    )
    os.close(write)
    refused = command == REFUSED  # says so on standard error, where that is open
    assert process.returncode == (2 if refused and not joined else 1)
    assert joined or process.stderr.count("\n") == refused


@pytest.mark.parametrize("command", [BOUNDS, ("split", "ask", "--weights", "missing")])
def test_an_interrupt_while_it_works_is_one_word(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "bounds", interrupted)
    monkeypatch.setattr("howsmooth.cli.split.read_matrices", interrupted)
    result = CliRunner().invoke(app(), command)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "howsmooth: stopped\n")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_device_is_one_sentence():
    with open("/dev/full", "w") as full:
        process = start("--version", stdout=full.fileno())
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.splitlines() == [
        f"howsmooth: expected a standard output that takes the answer, got {os.strerror(errno.ENOSPC)}; send it elsewhere"
    ]


@pytest.mark.slow
def test_an_ascii_terminal_shows_what_it_can():
    process = start(*BOUNDS, stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    out, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    assert out.isascii()
    assert "?" in out  # for a root sign, say


class Device(io.RawIOBase):
    """A device that refuses to be written to."""

    def __init__(self, why: int):
        self.why: int | None = why

    def writable(self) -> bool:
        return True

    def write(self, _: object) -> int:
        if self.why is None:
            return 1
        raise OSError(self.why, os.strerror(self.why))


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("command", [BOUNDS, (*BOUNDS, "--json"), ("--help",), ("--version",)])
@pytest.mark.parametrize(("why", "code"), [(errno.ENOSPC, 2), (errno.EIO, 2), (errno.EPIPE, 1)])
def test_output_that_cannot_be_written(
    command: tuple[str, ...], why: int, code: int, through: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    device = Device(why)
    out = io.TextIOWrapper(io.BufferedWriter(device), write_through=through)
    monkeypatch.setattr(sys, "argv", ["howsmooth", *command])
    monkeypatch.setattr(sys, "stdout", out)
    ended = run_command()
    device.why = None  # what is left in the buffer can go now
    assert ended == code
    said = capsys.readouterr().err
    assert said == "" if why == errno.EPIPE else said.startswith("howsmooth: expected a standard output")
    assert said.count("\n") <= 1


def test_no_output_at_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(sys, "stdout", None)
    assert run_command() == 2
    assert "got a closed one" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["closed from the start", "closed since", "binary"])
def test_input_that_cannot_be_read(given: str, monkeypatch: pytest.MonkeyPatch):
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00\x80"))
    if given == "closed since":
        stream.close()
    monkeypatch.setattr(sys, "stdin", None if given == "closed from the start" else stream)
    with pytest.raises(BadInputError, match="expected a text on standard input"):
        read_stdin()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ids", ["[[[1]]]", "[[1, 2], [3]]", "[[101, [102]]]", "[-1, 2]", "[1e3]", "[NaN]", "[null]", "[" * 99999]
)
def test_lists_that_are_no_ids(ids: str):
    result = CliRunner().invoke(app(), ["measure", "demo", "--layer", "0", "--ids", "-"], input=ids)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "token ids" in result.stderr


@pytest.mark.parametrize("figure", ["/proc/x.png", "missing/x.png", "x" * 300 + ".png", "folder.png"])
@pytest.mark.parametrize("command", [BOUNDS, ("worst", "--gamma", "-1", "--radius", "2"), ("attack", "demo")])
def test_a_figure_that_cannot_be_written_is_found_before_the_work(
    command: tuple[str, ...], figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()

    def work(*_: object, **__: object) -> None:
        pytest.fail("work was done")

    for name in ("cli.ball.LayerOptions.attention", "cli.attack.load", "cli.attack.read_text"):
        monkeypatch.setattr(f"howsmooth.{name}", work)
    result = CliRunner().invoke(app(), [*command, "--figure", figure])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize("options", [("--radius", "1e400"), ("--radius", "nan"), ("--radius", "1", "--seed", "-1")])
def test_numbers_out_of_range(options: tuple[str, ...]):
    for command in ("bounds", "worst"):
        result = CliRunner().invoke(app(), [command, "--gamma", "-1", *options])
        assert result.exit_code == 2
        assert result.stderr.startswith("howsmooth: expected ")


@pytest.mark.parametrize("options", [("--gamma", "0", "--radius", "1"), ("--gamma", "-1", "--radius", "1e100")])
def test_json_has_no_infinity(options: tuple[str, ...]):
    result = CliRunner().invoke(app(), ["bounds", *options, "--json"])
    rows = json.loads(result.stdout, parse_constant=pytest.fail)["bounds"]
    assert any(row["log_value"] is None or row["value"] is None for row in rows)
