"""The application every command registers with, and what the commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated

import typer

from howsmooth.errors import HowSmoothError

app = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Debug = Annotated[bool, typer.Option("--debug", help="show a traceback on errors")]


def _version(asked: bool) -> None:
    if asked:
        print(f"howsmooth {metadata.version('howsmooth')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """How smooth is attention? Lipschitz constants of attention layers, with certificates."""


@contextmanager
def one_sentence(debug: bool) -> Iterator[None]:
    """Bad input ends the command with one sentence on stderr and exit code 2; with `debug`, with a traceback."""
    try:
        yield
    except HowSmoothError as error:
        if debug:
            raise
        typer.echo(f"howsmooth: {error}", err=True)
        raise typer.Exit(2) from None
