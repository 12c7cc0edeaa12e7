"""The words of the code: names that mean one thing, docstrings that stand alone, and the field's words."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import howsmooth

SRC = Path(howsmooth.__file__).parent
FILES = {str(path.relative_to(SRC)): path for path in sorted(SRC.rglob("*.py"))}
ROOMS = sorted({name.split("/")[0] for name in FILES})


RETIRED = {"pushed", "pulled", "settled", "held", "lost", "aside", "past", "seen", "made", "asked"}
FOREIGN = {"past_key_values", "past_key_value", "use_past"}  # names of other libraries
POINTS_BACK = re.compile(
    r"(The (same|others?|two|rest|former|latter)|Those|These|This|That|They|It|Its|Both|Such|Likewise|Others|Theirs|Them"
    r"|As above|And|So)\b"
)


def words(name: str) -> set[str]:
    """The words an identifier is made of: `most_seen` and `MostSeen` both hold `seen`."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name that code gives or uses: variables, attributes, parameters, functions, classes, imports."""
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name.rpartition(".")[2]


def retired(tree: ast.AST) -> set[str]:
    """Identifiers that hold a word the package does not use."""
    names = set(identifiers(tree)) - FOREIGN
    return {name for name in names if words(name) & RETIRED or "from_above" in name.lower()}


def classes(tree: ast.AST) -> list[str]:
    """Names of all classes, without leading underscores."""
    return [node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def constants(tree: ast.Module) -> list[str]:
    """Public constants of a module."""
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return [t.id for t in targets if isinstance(t, ast.Name) and t.id.isupper() and not t.id.startswith("_")]


def leaning(tree: ast.Module) -> list[str]:
    """First sentences of docstrings that point at a neighbour, with the name of what they describe."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [(node, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, documented)]
    return [f"{getattr(node, 'name', 'module')}: {d.splitlines()[0]}" for node, d in found if d and POINTS_BACK.match(d)]


def twice(names: dict[str, list[str]]) -> dict[str, list[str]]:
    """Names given more than once, with the files that give them."""
    places = defaultdict(list)
    for file, given in names.items():
        for name in given:
            places[name].append(file)
    return {name: files for name, files in places.items() if len(files) > 1}


def tree(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text())


def test_class_names_are_unique():
    assert twice({file: classes(tree(file)) for file in FILES}) == {}


def test_public_constants_are_unique():
    assert twice({file: constants(tree(file)) for file in FILES}) == {}


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_stand_alone(room: str):
    assert [f"{file}: {text}" for file in FILES if file.split("/")[0] == room for text in leaning(tree(file))] == []


@pytest.mark.parametrize("room", ROOMS)
def test_identifiers_use_the_fields_words(room: str):
    found = {file: sorted(retired(tree(file))) for file in FILES if file.split("/")[0] == room}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("code", "check", "found"),
    [
        ("most_seen = 1", retired, {"most_seen"}),
        ("def f(x, *, held=0): ...", retired, {"held"}),
        ("class LostValues: ...", retired, {"LostValues"}),
        ("f(past_key_values=0); x.from_above", retired, {"from_above"}),
        ("machine_made_of = unseen = pastel = 0", retired, {"machine_made_of"}),
        ("class _A:\n    class A: ...", classes, ["A", "A"]),
        ("ONE = 1\nTWO: int = 2\n_NO = 3\nno = 4", constants, ["ONE", "TWO"]),
        ('"""Those that are none."""', leaning, ["module: Those that are none."]),
        ('def f():\n    """Thoseable things."""', leaning, []),
    ],
)
def test_checkers_refuse(code: str, check, found):
    assert check(ast.parse(code)) == found


def test_checker_finds_a_name_given_twice():
    assert twice({"a.py": ["A"], "b.py": ["A", "B"]}) == {"A": ["a.py", "b.py"]}
