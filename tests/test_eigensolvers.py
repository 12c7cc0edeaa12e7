"""Eigenvalues and singular values are found in one room, `spectral`, whose functions all others call."""

import ast
from pathlib import Path

import pytest

import howsmooth

SRC = Path(howsmooth.__file__).parent
ROOMS = sorted({path.relative_to(SRC).parts[0].removesuffix(".py") for path in SRC.rglob("*.py")} - {"spectral"})
REPRODUCES = {"paper"}  # the paper's own scripts, as they are
SOLVERS = {
    *("eig", "eigh", "eigvals", "eigvalsh", "eigs", "eigsh", "svd", "svdvals", "svds"),
    *("cond", "lobpcg", "pca_lowrank", "svd_lowrank", "symeig"),
}
NORMS = {"matrix_norm", "norm"}


def solvers(source: str) -> list[str]:
    """Eigensolvers of torch, numpy and scipy that a module calls or imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in SOLVERS:
            found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("howsmooth"):
            found += [alias.name for alias in node.names if alias.name in SOLVERS]
        if isinstance(node, ast.Call) and "linalg" in (name := ast.unparse(node.func)) and name.split(".")[-1] in NORMS:
            orders = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "ord")]
            found += [name for order in orders if isinstance(order, ast.Constant) and order.value in (2, -2, "nuc")]
    return found


@pytest.mark.parametrize("room", sorted(set(ROOMS) - REPRODUCES))
def test_a_room_leaves_spectra_to_spectral(room: str):
    files = [SRC / f"{room}.py"] if (SRC / f"{room}.py").exists() else sorted((SRC / room).rglob("*.py"))
    found = {str(file.relative_to(SRC)): solvers(file.read_text()) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


def test_every_exception_is_needed():
    for room in REPRODUCES:
        assert any(solvers(file.read_text()) for file in (SRC / room).rglob("*.py")), room


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.linalg.eigvalsh(m)", ["torch.linalg.eigvalsh"]),
        ("import torch.linalg as la\nla.svd(m)", ["la.svd"]),
        ("from scipy.sparse.linalg import svds", ["svds"]),
        ("m.svd()", ["m.svd"]),
        ("torch.linalg.matrix_norm(m, 2)", ["torch.linalg.matrix_norm"]),
        ("torch.linalg.norm(m, ord='nuc')", ["torch.linalg.norm"]),
        ("torch.linalg.matrix_norm(m); torch.linalg.norm(m, 1); torch.linalg.qr(m)", []),
        ("from howsmooth.spectral import svd\nsvd(m)", []),
    ],
)
def test_checker_refuses(source: str, found: list[str]):
    assert solvers(source) == found
