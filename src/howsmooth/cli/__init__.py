"""The command line, one file a question: call, print; no logic. `howsmooth_command` makes the commands from these files."""

import json as json_text
import shlex
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.report import finite
from howsmooth.settings import choice, seed_of

# Commands and groups as they are listed: a look, a model, a training run, one question, one layer, the paper.
ORDER = ["demo", "measure", "report", "training", "study", "certify", "attack", "bounds", "worst", "split", "reproduce"]

_WORD = 20  # characters of a word that are not cut

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
            inner = get_args(kind)[0]
            if value in ("", "all") and len(kinds) > 1:
                return None
            if get_origin(inner) is Literal:
                return tuple(choice(name, option, get_args(inner)) for name in several(value, option, str))
            return several(value, option, inner)
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


def show_table(
    title: str, rows: Sequence[dict[str, Any]], *, words: Collection[str] = (), keys: int = 1, digits: int = 4
) -> None:
    """A table, bare when piped, with lines around it in a terminal.

    No number is cut. In a narrow terminal there are no lines, heads and words are folded, and columns that still have no room
    follow in a table below. words: columns set to the left.  keys: columns in front that are repeated below.  digits: of floats
    """
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    watched = sys.stdout.isatty()
    console = Console(width=None if watched else 10_000)  # what is piped is never folded
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [_cell(row.get(name), digits) for row in rows] for name in names}
    longest = {
        name: max((len(part) for text in cells[name] for part in _parts(text, name in words)), default=0) for name in names
    }
    tight = sum(max(longest[name], len(name)) + 3 for name in names) >= console.width
    widths = {name: max(longest[name], *map(len, _parts(name, tight))) for name in names}
    tables: list[list[str]] = [[]]
    for name in names:
        if sum(widths[n] + 3 for n in [*tables[-1], name]) - tight * len(tables[-1]) > console.width and len(tables[-1]) > keys:
            tables.append(names[:keys])
        tables[-1].append(name)
    console.print(Text(title, style="bold"))
    for some in tables:
        if some is not tables[0]:
            console.print()
        table = Table(box=HEAVY_HEAD if watched and not tight else None, pad_edge=watched and not tight)
        for name in some:
            head, is_words = "\n".join(textwrap.wrap(name, widths[name])), name in words
            table.add_column(head, justify="left" if is_words else "right", no_wrap=not is_words, overflow="fold")
        for row in zip(*(cells[name] for name in some), strict=True):
            table.add_row(*map(Text, row))
        console.print(table)


def _parts(text: str, folded: bool) -> list[str]:
    """What is never cut of a text: its words, of which long ones are, or the whole."""
    return [part[:_WORD] for part in text.split()] or [""] if folded else [text]


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def typed() -> str:
    """The command as it was typed."""
    return shlex.join(["howsmooth", *sys.argv[1:]])
