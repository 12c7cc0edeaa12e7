"""What is typed at the command `howsmooth`: completed, read, and refused in one sentence, without the package or torch."""

import functools
import glob
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin


def group_class(order: Sequence[str]) -> type:
    """Typer's class of commands with commands below them, where what was typed wrong is one sentence."""
    from typer.core import TyperGroup

    class Commands(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(order) if set(order) == set(self.commands) else list(self.commands)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args[0] not in self.commands and args[0][:1] != "-" and not ctx.resilient_parsing:
                ctx.fail(_refusal(ctx, f"a command of {ctx.command_path}", args[0], self.list_commands(ctx)))
            return super().resolve_command(ctx, args)

        def main(self, *args: Any, **settings: Any) -> NoReturn:
            try:
                code = super().main(*args, **settings | {"standalone_mode": False, "prog_name": "howsmooth"})
            except Exception as error:
                if not hasattr(error, "format_message"):
                    raise
                alone = type(error).__name__ == "NoArgsIsHelpError"
                sys.stderr.write(f"{error}\n" if alone else f"howsmooth: {_wrong(error)}\n")
                code = 2
            sys.exit(code or 0)

    return Commands


@functools.cache
def command_class() -> type:
    """Typer's class of a command, whose usage names arguments as its table does."""
    from typer.core import TyperCommand

    class Leaf(TyperCommand):
        def collect_usage_pieces(self, ctx: Any) -> list[str]:
            return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    return Leaf


def _wrong(error: Any) -> str:
    """What was typed wrong: what was expected, what came, what to do."""
    command = error.ctx.command_path if error.ctx else "howsmooth"
    look = f"{command} --help shows how"
    if error.message.startswith("expected "):
        return error.message
    match type(error).__name__:
        case "NoSuchOption":
            known = [name for param in error.ctx.command.params for name in (*param.opts, *param.secondary_opts)]
            return _refusal(error.ctx, f"an option of {command}", error.option_name, [n for n in known if n[:1] == "-"])
        case "MissingParameter":
            name = error.param.metavar if error.param.param_type_name == "argument" else error.param.opts[0]
            return f"expected {name} ({error.param.help}), got none; {look}"
        case "BadOptionUsage" if "does not take" in error.message:
            return f"expected {error.option_name} without a value, got one; leave the value out"
        case "BadOptionUsage":
            return f"expected a value behind {error.option_name}, got none; write one after it"
        case _ if "unexpected extra argument" in error.message:
            given = error.message.rpartition("(")[2].rstrip(".)")
            return f"expected {error.ctx.get_usage().removeprefix('Usage: ')}, got {given!r} beside it; leave it out"
        case _:
            return f"expected what {command} takes, got a mistake ({error.format_message().rstrip('.')}); {look}"


def _refusal(ctx: Any, expected: str, given: str, known: Sequence[str]) -> str:
    """A name that is not known, with the one that was probably meant."""
    import difflib

    near = difflib.get_close_matches(given, known, 1)
    return f"expected {expected}, got {given!r}; " + (
        f"did you mean {near[0]}?" if near else f"{ctx.command_path} --help lists them"
    )


def names_of(kind: Any) -> tuple[str, ...]:
    """The names that a choice, or a list of choices, is made among."""
    inner = get_args(kind)[0] if get_origin(kind) is Sequence else kind
    return get_args(inner) if get_origin(inner) is Literal else ()


def completion(name: str, kind: Any) -> Callable[[str], list[str]] | None:
    """How a shell completes what is typed for a parameter: names, several with commas between them, and files."""
    files = name in ("model", "text", "ids", "forbid")
    known = names_of(kind) or {"device": ("auto", "cpu", "cuda"), "model": ("demo", "smollm2")}.get(name, ())
    if not known and not files:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if get_origin(kind) is Sequence else ("", "", incomplete)
        found = [before + comma + word for word in known if word.startswith(last)]
        paths = glob.glob(glob.escape(incomplete) + "*") if files else []
        return found + sorted(path + "/" * os.path.isdir(path) for path in paths)

    return complete


def reader(kind: type[int] | type[float], option: str) -> Callable[[Any], int | float]:
    """What makes a number of an option's text."""
    import typer

    def number(text: Any) -> int | float:
        try:
            return kind(text)
        except ValueError:
            what, example = ("a whole number", "8") if kind is int else ("a number", "0.5")
            raise typer.BadParameter(f"expected {option} as {what}, got {text!r}; write it like {option} {example}") from None

    return number
