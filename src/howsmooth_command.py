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
    import importlib
    import inspect
    import io
    import re
    import signal
    import traceback
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path
    from types import NoneType, UnionType
    from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn, TypeAlias, Union, get_args, get_origin

    from howsmooth_typed import command_class, completion, group_class, names_of, reader
except KeyboardInterrupt:
    os._exit(130)

if TYPE_CHECKING:
    import typer

PACKAGE = Path(__file__).with_name("howsmooth")
CLI, SHARED = "howsmooth.cli", "howsmooth.cli.options"

Described: TypeAlias = tuple[str, list[inspect.Parameter]]

_ENTRY = re.compile(r"(?:^|\n|  +)(\w+)(?: \((--[^)]+)\))?: ")


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


def _stop() -> NoReturn:
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

    names, plain = (
        Names("howsmooth"),
        {"cls": group_class(Names(CLI)["ORDER"]), "no_args_is_help": True, "rich_markup_mode": None},
    )
    root = typer.Typer(add_completion=True, pretty_exceptions_enable=False, **plain)

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
            groups[command.group] = typer.Typer(help=command.group_help, **plain)
            root.add_typer(groups[command.group], name=command.group)
        first = re.split(r"(?<=[.?])\s", command.help, maxsplit=1)[0]
        groups[command.group].command(command.name, cls=command_class(), help=command.help, short_help=first)(_runner(command))
    return root


class Command(NamedTuple):
    """A command as it is written: the function behind it, what is passed to it in any case, and the parameters that are typed.

    tasks: a second function, module and name, whose options are passed on.
    """

    name: str
    module: str
    function: str
    help: str
    parameters: list[inspect.Parameter]
    group: str = ""
    group_help: str = ""
    preset: dict[str, str] = {}  # noqa: RUF012, nobody writes to it
    tasks: tuple[str, str] | None = None

    def functions(self) -> list[Callable[..., Any]]:
        """The function behind it and the one that takes some of its options, imported."""
        places = [(self.module, self.function), *([self.tasks] if self.tasks else [])]
        return [getattr(importlib.import_module(module), name) for module, name in places]


def commands() -> Iterator[Command]:
    """Every command, files in the order of their names.

    A file with `_GROUP`, its help, holds commands of a group. With `_QUESTIONS`, a room, they are its questions: each is
    answered by the function of its own name, or else of the group's, and takes the options of its tasks too.
    """
    for path in sorted(PACKAGE.joinpath("cli").glob("[!_]*.py")):
        module = f"{CLI}.{path.stem}"
        names = Names(module)
        there = {f.name: f for f in _functions(module) if ast.unparse(f.returns or f.args) == "Answer" and f.name[0] != "_"}
        group = (path.stem, names["_GROUP"]) if "_GROUP" in names else ("", "")
        if "_QUESTIONS" not in names:
            for name, function in there.items():
                yield Command(name.strip("_"), module, name, *described(names, function), *group)
            continue
        for name, place, tasks, text in sorted(_questions(names["_QUESTIONS"])):
            function = there.get(name) or there[path.stem]
            options = described(names, function)[1] + described(Names(place), _function(place, tasks), positional=False)[1]
            said = f"{text}\n\nExample: howsmooth {path.stem} {name} demo --lengths 8,16 --samples 2"
            yield Command(name, module, function.name, said, options, *group, {"question": name}, (place, tasks))


def _questions(room: str) -> Iterator[tuple[str, str, str, str]]:
    """Every question with a table that a file of a room holds: its name, module, the name of its tasks, and what it asks."""
    for path in PACKAGE.joinpath(room.partition(".")[2]).glob("*.py"):
        module = f"{room}.{path.stem}"
        for node in source(module).body if "= Question(" in path.read_text("utf-8") else []:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "Question":
                given = {str(k.arg): ast.unparse(k.value) for k in node.value.keywords}
                if "table" in given:
                    text = (ast.get_docstring(source(module)) or "").split("\n\n")[0]
                    yield ast.literal_eval(given["name"]), module, given["tasks"], text


def described(names: "Names", written: "ast.FunctionDef | ast.ClassDef", *, positional: bool = True) -> Described:
    """What a docstring says of a function or of a group of options, and what it takes.

    positional: with its arguments, not its options alone. A parameter whose type is a class of the package stands for the
    fields of that class.
    """
    shared = _entries(ast.get_docstring(source(SHARED)) or "")[1]
    if isinstance(written, ast.ClassDef):
        fields = [node for node in written.body if isinstance(node, ast.AnnAssign)]
        taken = [(ast.unparse(node.target), node.annotation, node.value, True) for node in fields]
    else:
        given = written.args
        defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
        pairs = zip(given.args, defaults, strict=True) if positional else ()
        taken = [(arg.arg, arg.annotation, default, False) for arg, default in pairs]
        options = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        taken += [(arg.arg, arg.annotation, default, True) for arg, default in options]
    said, own = _entries(ast.get_docstring(written) or "", {name for name, *_ in taken})
    parameters = []
    for name, annotation, default, is_option in taken:
        kind = names.value(annotation)
        if isinstance(kind, Written):
            parameters += described(Names(kind.module), kind.node)[1]
        elif name != "question":
            value = inspect.Parameter.empty if default is None else names.value(default)
            parameters.append(_parameter(name, kind, value, is_option, *(shared | own)[name]))
    return said, parameters


def _entries(text: str, names: Collection[str] | None = None) -> tuple[str, dict[str, tuple[list[str], str]]]:
    """A docstring without its lines `name: text`, and these: how an option is spelled where that is told, and the text.

    names: of parameters, so that a paragraph that begins otherwise is left in the text.
    """
    said, entries = [], {}
    for part in re.split(r"\n\s*\n", text):
        first = _ENTRY.match(part)
        if first is None or (names is not None and first[1] not in names):
            said.append(part.replace("\nExample:", "\n\nExample:"))
            continue
        found = _ENTRY.split(part)[1:]
        for name, spelled, about in zip(found[::3], found[1::3], found[2::3], strict=True):
            entries[name] = (re.split(r",\s*", spelled) if spelled else [], " ".join(about.split()).removesuffix("."))
    return "\n\n".join(said), entries


def _parameter(name: str, kind: Any, value: Any, is_option: bool, spelled: list[str], text: str) -> inspect.Parameter:
    """An argument or option as typer takes it; lists and choices as text, which the package reads and checks."""
    import typer

    kinds = [k for k in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)) if k is not NoneType]
    if names := names_of(kinds[0]):
        text += f": {', '.join(names)}"
    plain = str if get_origin(kinds[0]) in (tuple, Sequence, Literal) else kinds[0]
    if isinstance(value, tuple):
        value = ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    if value is False and not spelled:
        spelled = [f"--{name.replace('_', '-')}"]
    completed = completion(name, kinds[0])
    if not is_option:
        about = typer.Argument(help=text, metavar=name.upper(), autocompletion=completed)
    elif plain in (int, float):
        read = reader(plain, spelled[0] if spelled else f"--{name.replace('_', '-')}")
        about = typer.Option(*spelled, help=text, parser=read, metavar=f"<{plain.__name__}>")
    else:
        shape = "<str>" if get_origin(plain) is list else None
        about = typer.Option(*spelled, help=text, metavar=shape, autocompletion=completed)
    annotation = Annotated[plain | None if value is None else plain, about]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)


def _runner(command: Command) -> Callable[..., None]:
    """What typer calls: it imports the function and prints its answer, in the way that the flags of every command ask for."""
    import typer

    flags = described(Names(CLI), _function(CLI, "answer"), positional=False)[1]

    def execute(**given: Any) -> None:
        answer, functions = importlib.import_module(CLI).answer, command.functions()
        chosen = {flag.name: given.pop(flag.name) for flag in flags}
        try:
            _State.working = True
            code = answer(functions, given | command.preset, **chosen)
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


def _functions(module: str) -> list[ast.FunctionDef]:
    return [node for node in source(module).body if isinstance(node, ast.FunctionDef)]


def _function(module: str, name: str) -> ast.FunctionDef:
    return next(function for function in _functions(module) if function.name == name)


class Written(NamedTuple):
    """A class as a module has it."""

    module: str
    node: ast.ClassDef


class Names(dict[str, Any]):
    """What names mean in a module, found in its source: what it assigns, its classes, and what it imports from this package."""

    def __init__(self, module: str):
        super().__init__(Path=Path, Sequence=Sequence, Literal=Literal, get_args=get_args)
        self.module = module

    def __missing__(self, name: str) -> Any:
        for node in source(self.module).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Written(self.module, node)
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

    def value(self, expression: ast.expr | None) -> Any:
        """What an expression of the module is worth."""
        assert expression is not None
        return eval(compile(ast.Expression(expression), self.module, "eval"), {}, self)
