"""The command line, one file a command: parse, call, print; no logic."""

from howsmooth.cli import bounds, split  # importing a command registers it
from howsmooth.cli.app import app

__all__ = ["app", "bounds", "main", "split"]


def main() -> None:
    app()
