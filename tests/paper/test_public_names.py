"""The experiments are written with public names alone: what a room's `__init__` exports, and their own modules."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PAPER = Path(__file__).parents[2] / "src" / "howsmooth" / "paper"


def violations(source: str) -> list[str]:
    """What one file of `howsmooth.paper` imports that is not public, one sentence each."""
    return [sentence for node in ast.walk(ast.parse(source)) for sentence in _of(node)]


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import names, not {a.name}" for a in node.names if a.name.partition(".")[0] == "howsmooth")
    if not isinstance(node, ast.ImportFrom):
        return
    parts = (node.module or "").split(".")
    if node.level:
        yield f"name the package instead of {'.' * node.level}{node.module or ''}"
    elif parts[:2] == ["howsmooth", "paper"] or parts[0] != "howsmooth":
        return
    elif len(parts) > 2:
        yield f"{node.module} is no room; import from howsmooth.{parts[1]}"
    else:
        room = importlib.import_module(".".join(parts))
        public = getattr(room, "__all__", None) or [n for n in vars(room) if not n.startswith("_")]  # errors.py is one file
        yield from (f"{node.module} does not export {a.name}" for a in node.names if a.name not in public)


@pytest.mark.parametrize("file", sorted(PAPER.glob("*.py")), ids=lambda p: p.name)
def test_only_public_names(file):
    assert violations(file.read_text("utf-8")) == []


def test_there_are_files():
    assert len(list(PAPER.glob("*.py"))) > 5


@pytest.mark.parametrize(
    "source",
    [
        "from howsmooth.models.affine import as_attention",
        "def f():\n    from howsmooth.report.page import _asset",
        "from howsmooth.maps import check_finite",
        "from howsmooth.report import _style",
        "from howsmooth.models import trace",
        "from howsmooth import kernels",
        "import howsmooth.models.trace",
        "import howsmooth",
        "from ..models import Model",
    ],
)
def test_checker_refuses(source):
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    [
        "from howsmooth.maps import Attention, Map",
        "from howsmooth.errors import BadInputError",
        "from howsmooth.verbs import lipschitz",
        "from howsmooth import Attention",
        "from howsmooth.paper.drawing import new_figure",
        "from howsmooth.paper import texts",
        "import torch\nfrom torch.nn.attention import sdpa_kernel",
    ],
)
def test_checker_accepts(source):
    assert violations(source) == []
