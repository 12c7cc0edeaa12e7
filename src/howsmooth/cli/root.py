"""The application that every command registers with, and how commands print."""

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from howsmooth.errors import HowSmoothError
from howsmooth.report import finite

app = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="show a traceback on errors")],
)


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


def command(name: str | None = None, of: typer.Typer = app) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command with the option `--debug`.

    Bad input ends it with one sentence on stderr and exit code 2; with `--debug`, with a traceback.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def guarded(debug: bool, **options: Any) -> None:
            try:
                function(**options)
            except HowSmoothError as error:
                if debug:
                    raise
                typer.echo(f"howsmooth: {error}", err=True)
                raise typer.Exit(2) from None

        signature = inspect.signature(function)
        guarded.__signature__ = signature.replace(parameters=[*signature.parameters.values(), _DEBUG])  # pyright: ignore
        of.command(name)(guarded)
        return function

    return register


def show_table(title: str, rows: Sequence[dict[str, Any]], *, words: Collection[str] = (), digits: int = 4) -> None:
    """A table: rich in a terminal, plain when piped. words: columns set to the left.  digits: of floats."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_cell(row.get(name), digits) for name in names] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold")
        for name in names:
            table.add_column(name, justify="left" if name in words else "right")
        for line in lines:
            table.add_row(*map(Text, line))
        Console().print(table)
        return
    print(title)
    sides = [str.ljust if name in words else str.rjust for name in names]
    widths = [max(map(len, column)) for column in zip(names, *lines, strict=True)]
    for line in (names, *lines):
        print("  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip())


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def print_json(value: Any) -> None:
    """One JSON object; what is not finite is null."""
    print(json.dumps(finite(value), indent=1, allow_nan=False))


def finish(
    value: Any,
    as_json: bool,
    show: Callable[[], None],
    figure: Path | None = None,
    draw: Callable[[Path], Path] = lambda path: path,
) -> None:
    """Print a result as JSON, or `show` it; then draw the figure, where one is asked for, and say where it is."""
    if as_json:
        print_json(value)
    else:
        show()
    if figure is not None:
        path = draw(figure)
        if not as_json:
            print(path)


def typed() -> str:
    """The command as it was typed."""
    return shlex.join(["howsmooth", *sys.argv[1:]])
