"""The command line, one file a question: parse, call, print; no logic."""

from howsmooth.cli import attack, ball, measure, report, reproduce, split, study  # noqa: F401  importing a command registers it
from howsmooth.cli.root import app

__all__ = ["app", "main"]


def main() -> None:
    app()
