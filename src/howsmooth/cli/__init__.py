"""The command line, one file a command: parse, call, print; no logic."""

from howsmooth.cli import (  # noqa: F401  importing a command registers it
    attack,
    bounds,
    measure,
    report,
    reproduce,
    split,
    study,
    worst,
)
from howsmooth.cli.root import app

__all__ = ["app", "main"]


def main() -> None:
    app()
