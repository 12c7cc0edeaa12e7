"""The command line, one file a question: parse, call, print; no logic."""

import contextlib
import io
import os
import sys

from howsmooth.cli import attack, ball, measure, report, reproduce, split, study  # noqa: F401  importing a command registers it
from howsmooth.cli.root import app

__all__ = ["app", "main"]


def main() -> None:
    """The command line as a process, whatever its standard output is: closed, full, or of a few characters only."""
    if sys.stdout is None:
        sys.stderr.write("howsmooth: expected a standard output to write to, got a closed one; send it somewhere\n")
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a terminal cannot show becomes a question mark
    try:
        app()
    finally:
        _flush()


def _flush() -> None:
    """Write out what was printed. Where that fails the answer is lost: say so, unless the reader has left."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # or Python itself tries again, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        sys.stderr.write(
            f"howsmooth: expected a standard output that takes the answer, got {error.strerror}; send it elsewhere\n"
        )
        sys.exit(2)
