"""The command line, one file a command: parse, call, print; no logic."""

from howsmooth.cli import attack, bounds, measure, worst  # importing a command registers it
from howsmooth.cli.app import app

__all__ = ["app", "attack", "bounds", "main", "measure", "worst"]


def main() -> None:
    app()
