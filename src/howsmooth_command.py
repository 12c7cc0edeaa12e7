"""The command `howsmooth`: commands made from the functions of `howsmooth/cli` as they are written, without importing them.

A function that returns an `Answer` is a command. Its positional parameters are arguments, those after `*` options; names, types
and defaults stand in the signature, what `--help` says in the docstring, in lines `name: text`; what several commands share is
described once, in `howsmooth/cli/options.py`. `name (--one, --two): text` spells an option differently. The package, and torch
with it, is imported when a command runs.
"""

import os
import sys

try:  # Ctrl-C ends the process quietly, at any moment
    import ast
    import contextlib
    import functools
    import inspect
    import io
    import re
    import signal
    import traceback
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path
    from types import NoneType, UnionType
    from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin
except KeyboardInterrupt:
    os._exit(130)

if TYPE_CHECKING:
    import typer

PACKAGE = Path(__file__).with_name("howsmooth")
CLI, SHARED = "howsmooth.cli", "howsmooth.cli.options"

_ENTRY = re.compile(r"(?:^|\n)(\w+)(?: \((--[^)]+)\))?: ")


def main() -> None:
    """The command as a process."""
    try:
        import atexit

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
            signal.signal(signal.SIGINT, _interrupted)
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # called last: nothing is left to stop
        code = run()
    except KeyboardInterrupt:
        _stop()
    sys.exit(code)


class _State:
    working = False  # within a command, which closes what it opened when it is interrupted


def _interrupted(*_: object) -> None:
    if _State.working:
        raise KeyboardInterrupt
    _stop()


def _stop() -> None:
    """End at once: nothing is open that would have to be closed."""
    with contextlib.suppress(OSError):
        os.write(2, b"howsmooth: stopped\n")
    os._exit(130)


def run() -> int:
    """The exit code of the command line, whatever its standard output is: closed, full, or of a few characters only."""
    if sys.stdout is None:
        sys.stderr.write("howsmooth: expected a standard output to write to, got a closed one; send it somewhere\n")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a terminal cannot show becomes a question mark
    code: Any = 0
    try:
        try:
            app()()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # files have names, standard output has none
            raise
        for stream in (sys.stdout, sys.stderr) if isinstance(error, BrokenPipeError) else (sys.stdout,):
            with contextlib.suppress(OSError, AttributeError):  # or Python itself tries again when it ends, and complains
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has enough
            return 1
        said = f"expected a standard output that takes the answer, got {error.strerror}; send it elsewhere"
        sys.stderr.write(f"howsmooth: {said}\n")
        return 2
    return code or 0


@functools.cache
def app() -> "typer.Typer":
    """The command line."""
    import typer

    names = Names("howsmooth")
    root = typer.Typer(add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"howsmooth {names['__version__']}")
            raise typer.Exit

    version = typer.Option("--version", callback=show_version, is_eager=True, help="print the version and exit")

    def callback(version: Annotated[bool, version] = False) -> None: ...

    root.callback(help=ast.get_docstring(source("howsmooth")))(callback)
    groups: dict[str, typer.Typer] = {"": root}
    for command in commands():
        if command.group not in groups:
            groups[command.group] = typer.Typer(no_args_is_help=True, help=command.group_help)
            root.add_typer(groups[command.group], name=command.group)
        groups[command.group].command(command.name, help=command.help)(_runner(command))
    return root


class Command(NamedTuple):
    """A command as it is written: the function behind it, and the parameters it has on the command line."""

    name: str
    module: str
    function: str
    help: str
    parameters: list[inspect.Parameter]
    group: str = ""
    group_help: str = ""


def commands() -> Iterator[Command]:
    """Every command, files in the order of their names."""
    for path in sorted(PACKAGE.joinpath("cli").glob("[!_]*.py")):
        module = f"{CLI}.{path.stem}"
        names = Names(module)
        group = (path.stem, names["GROUP"]) if "GROUP" in names else ()
        for node in source(module).body:
            if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node.args) == "Answer" and node.name[0] != "_":
                yield Command(node.name.strip("_"), module, node.name, *described(names, node), *group)


def described(names: "Names", function: ast.FunctionDef, *, positional: bool = True) -> tuple[str, list[inspect.Parameter]]:
    """What a function's docstring says of it, and its parameters as arguments, where they are `positional`, and options."""
    shared = _entries(ast.get_docstring(source(SHARED)) or "")[1]
    given = function.args
    said, own = _entries(ast.get_docstring(function) or "", {arg.arg for arg in given.args + given.kwonlyargs})
    entries = shared | own
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    written = [(arg, default, False) for arg, default in zip(given.args, defaults, strict=True)] if positional else []
    written += [(arg, default, True) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return said, [_parameter(names, *one, entries[one[0].arg]) for one in written]


def _entries(text: str, names: Collection[str] | None = None) -> tuple[str, dict[str, tuple[list[str], str]]]:
    """A docstring without its lines `name: text`, and these: how an option is spelled where that is told, and the text.

    names: of parameters, so that a paragraph that begins otherwise is left in the text.
    """
    said, entries = [], {}
    for part in re.split(r"\n\s*\n", text):
        first = _ENTRY.match(part)
        if first is None or (names is not None and first[1] not in names):
            said.append(part)
            continue
        found = _ENTRY.split(part)[1:]
        for name, spelled, about in zip(found[::3], found[1::3], found[2::3], strict=True):
            entries[name] = (re.split(r",\s*", spelled) if spelled else [], " ".join(about.split()))
    return "\n\n".join(said), entries


def _parameter(
    names: "Names", arg: ast.arg, default: ast.expr | None, is_option: bool, entry: tuple[list[str], str]
) -> inspect.Parameter:
    import typer

    assert arg.annotation is not None
    kind, value = names.value(arg.annotation), inspect.Parameter.empty if default is None else names.value(default)
    kinds = [k for k in (get_args(kind) if get_origin(kind) is UnionType else (kind,)) if k is not NoneType]
    spelled, text = entry
    if get_origin(kinds[0]) is Literal:
        text += f": {', '.join(get_args(kinds[0]))}"
    if get_origin(kinds[0]) in (tuple, Literal):  # the package reads and checks these
        kinds = [str]
    if isinstance(value, tuple):
        value = ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    if value is False and not spelled:
        spelled = [f"--{arg.arg.replace('_', '-')}"]
    kind = kinds[0] | None if kind is not kinds[0] and value is None else kinds[0]
    about = typer.Option(*spelled, help=text) if is_option else typer.Argument(help=text)
    return inspect.Parameter(arg.arg, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=Annotated[kind, about])


def _runner(command: Command) -> Callable[..., None]:
    """What typer calls: it imports the function and prints its answer, in the way that the flags of every command ask for."""
    import typer

    printing = next(n for n in source(CLI).body if isinstance(n, ast.FunctionDef) and n.name == "answer")
    flags = described(Names(CLI), printing, positional=False)[1]

    def execute(**given: Any) -> None:
        from importlib import import_module

        answer = import_module(CLI).answer
        function = getattr(import_module(command.module), command.function)
        chosen = {flag.name: given.pop(flag.name) for flag in flags}
        try:
            _State.working = True
            code = answer(function, given, **chosen)
        except KeyboardInterrupt:
            _State.working = False
            if chosen["debug"]:
                traceback.print_exc()
            typer.echo("howsmooth: stopped", err=True)
            code = 130
        finally:
            _State.working = False
        raise typer.Exit(code)

    execute.__signature__ = inspect.Signature([*command.parameters, *flags])  # pyright: ignore[reportFunctionMemberAccess]
    return execute


@functools.cache
def source(module: str) -> ast.Module:
    """A module of the package as it is written."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8"))


class Names(dict[str, Any]):
    """What names mean in a module, found in its source: what it assigns, and what it imports from this package."""

    def __init__(self, module: str):
        super().__init__(Path=Path, Literal=Literal, get_args=get_args)
        self.module = module

    def __missing__(self, name: str) -> Any:
        for node in source(self.module).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "howsmooth":
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return Names(str(node.module))[alias.name]
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return self.value(node.value)  # pyright: ignore[reportAttributeAccessIssue]  an assignment has one
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        try:
            self[str(name)]
        except KeyError:
            return False
        return True

    def value(self, expression: ast.expr) -> Any:
        """What an expression of the module is worth."""
        return eval(compile(ast.Expression(expression), self.module, "eval"), {}, self)
