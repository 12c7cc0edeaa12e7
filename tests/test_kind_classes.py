"""Nobody asks a kind of attention for its class: outside `kernels/kinds`, what it says of itself (`traits`) decides."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import howsmooth

SRC = Path(howsmooth.__file__).parent
HOME = SRC / "kernels" / "kinds"
FILES = [path for path in sorted(SRC.rglob("*.py")) if HOME not in path.parents]


def kinds() -> set[str]:
    """The names of all kinds of attention, from the classes in their room and what they derive from."""
    classes = [
        node for path in HOME.glob("*.py") for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    found = {"Kind"}
    while more := {c.name for c in classes if any(isinstance(b, ast.Name) and b.id in found for b in c.bases)} - found:
        found |= more
    return found


NAMES = kinds()


def looked_at(node: ast.AST) -> Iterator[ast.AST]:
    """What a node compares with, looks up or tests for being a class."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
        yield from node.args[1:]
    elif isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.MatchClass):
        yield node.cls


def class_tests(tree: ast.AST) -> list[int]:
    """The lines on which code asks for the class of a kind: names from the room of kinds, or `kinds.Name`."""
    imports = [
        n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("howsmooth.kernels.kinds")
    ]
    known = {alias.asname or alias.name for n in imports for alias in n.names if alias.name in NAMES}
    lines = []
    for node in ast.walk(tree):
        for part in (part for test in looked_at(node) for part in ast.walk(test)):
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "kinds" and part.attr in NAMES:
                lines.append(part.lineno)
            if isinstance(part, ast.Name) and part.id in known:
                lines.append(part.lineno)
    return sorted(lines)


def test_every_kind_is_known():
    assert {"Kind", "Pointwise", "Softmax", "Sinkhorn", "L2", "Differential"} <= NAMES


def test_no_room_asks_a_kind_for_its_class():
    found = {str(path.relative_to(SRC)): class_tests(ast.parse(path.read_text())) for path in FILES}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("isinstance(kind, Softmax)", 1),
        ("isinstance(kind, L2 | Cosine)", 2),
        ("isinstance(kind, (Kind, int))", 1),
        ("kind == Softmax()", 1),
        ("type(kind) is not Sinkhorn", 1),
        ("type(kind) in (L2, Linear)", 2),
        ("{L2: 1}[type(kind)]", 1),
        ("isinstance(kind, kinds.Hard)", 1),
        ("match kind:\n    case Sigmoid(): pass", 1),
        ("def f(kind: Kind = Softmax()): return isinstance(kind, nn.Linear)", 0),
        ("kind.traits.softmax and isinstance(x, Pair)", 0),
        ('{"l2": L2()}', 0),
    ],
)
def test_checker_refuses(code: str, count: int):
    names = "from howsmooth.kernels.kinds import L2, Cosine, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax\n"
    assert len(class_tests(ast.parse(names + code))) == count
    assert class_tests(ast.parse(code.replace("kinds.", "other."))) == []
