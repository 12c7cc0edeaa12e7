"""The command line, one file a question: parse, call, print; no logic."""

import contextlib
import io
import os
import sys

from howsmooth.cli import (  # noqa: F401  importing a command registers it
    attack,
    ball,
    certify,
    measure,
    report,
    reproduce,
    split,
    study,
    training,
)
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
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # files have names, standard output has none
            raise
        with contextlib.suppress(OSError):  # or Python itself tries again when it ends, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            sys.exit(1)
        said = f"expected a standard output that takes the answer, got {error.strerror}; send it elsewhere"
        sys.stderr.write(f"howsmooth: {said}\n")
        sys.exit(2)
