"""The command line, one file a question: call, print; no logic. `howsmooth_command` makes the commands from these files."""

import json as json_text
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.report import finite
from howsmooth.settings import choice, seed_of

# Commands and groups as they are listed: a look, a model, a training run, one question, one layer, the paper.
ORDER = ["demo", "measure", "report", "training", "study", "certify", "attack", "bounds", "worst", "split", "reproduce"]

__all__ = ["ORDER", "Answer", "answer", "note", "several", "show_table", "typed"]


class Answer(NamedTuple):
    """What a command found: `value` for JSON, `show` to print it for a person, and `draw` where a figure is wanted."""

    value: Any
    show: Callable[[], None]
    draw: Callable[[], Path] | None = None


def answer(
    functions: Sequence[Callable[..., Any]], given: Mapping[str, Any], *, json: bool = False, debug: bool = False
) -> int:
    """Call the first of the functions of a command with what was typed, print what it finds, and return the exit code.

    The others take some of the options. Bad input is one sentence on stderr and exit code 2. In JSON a number that is not
    finite is null.

    json: print one JSON object and nothing else
    debug: show a traceback on errors
    """
    try:
        if given.get("seed") is not None:
            seed_of(given["seed"])  # before a model is loaded
        found: Answer = functions[0](**_options(functions, given))
        if json:
            print(json_text.dumps(finite(found.value), indent=1, allow_nan=False))
        else:
            found.show()
        if found.draw is not None:
            path = found.draw()
            if not json:
                print(path)
    except HowSmoothError as error:
        if debug:
            raise
        note(str(error))
        return 2
    return 0


def _options(functions: Sequence[Callable[..., Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed, as the functions' annotations want it; a parameter whose type is a dataclass takes the options it has."""
    groups: dict[str, Any] = {name: hint for name, hint in get_type_hints(functions[0]).items() if is_dataclass(hint)}
    hints = {name: hint for some in (*functions, *groups.values()) for name, hint in get_type_hints(some).items()}
    options = {name: _read(value, hints[name], f"--{name.replace('_', '-')}") for name, value in given.items()}
    for name, group in groups.items():
        options[name] = group(**{field: options.pop(field) for field in get_type_hints(group)})
    return options


def _read(value: Any, hint: Any, option: str) -> Any:
    """An option's text as its annotation wants it: lists of numbers or words, and choices; all other types are typer's."""
    if not isinstance(value, str):
        return value
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Literal:
            return choice(value, option, get_args(kind))
        if get_origin(kind) in (tuple, Sequence):
            return None if value in ("", "all") and len(kinds) > 1 else several(value, option, get_args(kind)[0])
    return value


def several(text: str, option: str, kind: type[int] | type[float] | type[str] = float) -> tuple[Any, ...]:
    """Numbers or words with commas between them, one at least."""
    try:
        found = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found:
        example, what = {int: ("8,16,32", "whole numbers"), float: ("0.5,1,2", "numbers"), str: ("one,other", "names")}[kind]
        raise BadInputError(f"expected {option} like {example}, got {text!r}; give {what} with commas")
    return found


def note(text: str) -> None:
    """A remark beside the answer, on standard error."""
    print(f"howsmooth: {text}", file=sys.stderr)


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
