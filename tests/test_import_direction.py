"""A lower floor never imports an upper one, and the numerics need torch alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "howsmooth"

FLOORS = (
    "errors",
    "settings",
    "results",
    "progress",
    "parallel",
    "kernels",
    "spectral",
    "measures",
    "maps",
    "program",
    "theory",
    "solve",
    "search",
    "verbs",
    "models",
    "run",
    "study",
    "report",
    "training",
    "paper",
    "cli",
)
NUMERICS = {"errors", "settings", "parallel", "kernels", "maps", "spectral", "program", "theory", "solve"}
NUMERICS_MAY_IMPORT = {"torch", "jaxtyping", "triton", "scipy"} | sys.stdlib_module_names
HEAVY = ("triton", "transformers", "ot", "pandas", "matplotlib", "plotly", "ray", "scipy")


def imported(source: str, path: Path) -> Iterator[str]:
    """Absolute dotted names a module imports, at any depth; `path` is relative to the package root."""
    package = ("howsmooth", *path.parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            # `from howsmooth import kernels` names a floor only in the alias.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations(source: str, path: Path) -> list[str]:
    """What is wrong with the imports of one module, one sentence each."""
    floor = path.parts[0].removesuffix(".py")
    if floor == "__init__":  # the front door: public names from any floor
        return []
    if floor not in FLOORS:
        return [f"{path}: {floor!r} is on no floor; add it to FLOORS"]
    found = []
    for name in imported(source, path):
        top, _, rest = name.partition(".")
        if top != "howsmooth":
            if floor in NUMERICS and top not in NUMERICS_MAY_IMPORT:
                found.append(f"{path}: {floor} may not import {top}")
            continue
        target = rest.partition(".")[0]
        if name == "howsmooth.__version__":  # defined there
            continue
        if target not in FLOORS:
            found.append(f"{path}: import from the defining module, not from {name!r}")
        elif FLOORS.index(target) > FLOORS.index(floor):
            found.append(f"{path}: {floor} may not import {target}, which is above it")
    return found


def test_source_imports_downward_only():
    files = sorted(SRC.rglob("*.py"))
    assert files
    assert [v for f in files for v in violations(f.read_text("utf-8"), f.relative_to(SRC))] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/dense.py", "from howsmooth.spectral import dense"),
        ("kernels/dense.py", "import howsmooth.cli"),
        ("kernels/dense.py", "from howsmooth import maps"),
        ("kernels/dense.py", "from .. import maps"),
        ("kernels/dense.py", "from ..maps.attention import Attention"),
        ("kernels/deep/inner.py", "from ...maps import Attention"),
        ("kernels/__init__.py", "from ..maps import Operator"),
        ("spectral.py", "from .maps import Attention"),
        ("errors.py", "from .kernels import dense"),
        ("spectral/dense.py", "def f():\n    from ..theory import Bounds"),
        ("spectral/dense.py", "import pandas"),
        ("spectral/dense.py", "def f():\n    import numpy as np"),
        ("maps/attention.py", "from transformers import BertModel"),
        ("maps/attention.py", "from .. import Attention"),
        ("maps/attention.py", "import howsmooth"),
        ("report/page.py", "from howsmooth.cli import app"),
        ("attic.py", ""),
    ],
)
def test_checker_refuses(path: str, source: str):
    assert violations(source, Path(path))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "from .cli import app"),
        ("maps.py", "from .kernels import dense\nimport torch"),
        ("maps/jacobian.py", "from ..kernels import dense\nfrom .operator import Operator"),
        ("maps/attention.py", "from howsmooth.maps import Jacobian\nfrom . import masks"),
        ("maps/attention.py", "import math\nfrom torch.nn import functional\nfrom jaxtyping import Float"),
        ("models/load.py", "def f():\n    import transformers"),
        ("cli.py", "from howsmooth import report, errors"),
    ],
)
def test_checker_accepts(path: str, source: str):
    assert violations(source, Path(path)) == []


@pytest.mark.slow
def test_import_is_light():
    code = f"import sys, howsmooth; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SRC.parent, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
