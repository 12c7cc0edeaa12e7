"""The application that every command registers with, and how commands print."""

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from howsmooth import __version__
from howsmooth.errors import HowSmoothError
from howsmooth.report import finite
from howsmooth.settings import seed_of

app = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

_FLAGS = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, typer.Option(f"--{name}", help=text)]
    )
    for name, text in {"json": "print one JSON object and nothing else", "debug": "show a traceback on errors"}.items()
]


def _version(asked: bool) -> None:
    if asked:
        print(f"howsmooth {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """How smooth is attention? Lipschitz constants of attention layers, with certificates."""


class Told(NamedTuple):
    """What a command found: `value` for JSON, `show` to print it for a person, and `draw` where a figure is asked for."""

    value: Any
    show: Callable[[], None]
    draw: Callable[[], Path] | None = None


def command(name: str | None = None, of: typer.Typer = app) -> Callable[[Callable[..., Told]], Callable[..., Told]]:
    """Register a function as a command that prints what it returns, with the options `--json` and `--debug`.

    Bad input ends it with one sentence on stderr and exit code 2, Ctrl-C with one word and exit code 130; with `--debug`, both
    show a traceback. In JSON a number that is not finite is null.
    """

    def register(function: Callable[..., Told]) -> Callable[..., Told]:
        @wraps(function)
        def run(json: bool, debug: bool, **options: Any) -> None:
            try:
                if options.get("seed") is not None:
                    seed_of(options["seed"])  # before a model is loaded
                _print(function(**options), json)
            except (HowSmoothError, KeyboardInterrupt) as error:
                if debug:
                    raise
                stopped = isinstance(error, KeyboardInterrupt)
                typer.echo(f"howsmooth: {'stopped' if stopped else error}", err=True)
                raise typer.Exit(130 if stopped else 2) from None

        signature = inspect.signature(function)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *_FLAGS])  # pyright: ignore
        of.command(name)(run)
        return function

    return register


def _print(told: Told, as_json: bool) -> None:
    if as_json:
        print(json.dumps(finite(told.value), indent=1, allow_nan=False))
    else:
        told.show()
    if told.draw is not None:
        path = told.draw()
        if not as_json:
            print(path)


def show_table(title: str, rows: Sequence[dict[str, Any]], *, words: Collection[str] = (), digits: int = 4) -> None:
    """A table, with lines around it in a terminal, bare when piped. words: columns set to the left.  digits: of floats."""
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    watched = sys.stdout.isatty()
    console = Console(width=None if watched else 10_000)  # what is piped is never folded
    table = Table(box=HEAVY_HEAD if watched else None, pad_edge=watched)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name), digits)) for name in names))
    console.print(Text(title, style="bold"), table, sep="\n")


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def typed() -> str:
    """The command as it was typed."""
    return shlex.join(["howsmooth", *sys.argv[1:]])
