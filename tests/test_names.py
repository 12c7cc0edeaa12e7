"""A name means one thing: no module shares its name with something its package exports."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import howsmooth


def packages(name: str) -> Iterator[str]:
    """A package and those inside it."""
    yield name
    for module in pkgutil.iter_modules(importlib.import_module(name).__path__):
        if module.ispkg:
            yield from packages(f"{name}.{module.name}")


def clashes(name: str) -> set[str]:
    """Names that are both a module or package in `name` and something it exports."""
    package = importlib.import_module(name)
    inside = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return inside & set(getattr(package, "__all__", ()))


@pytest.mark.parametrize("name", list(packages("howsmooth")))
def test_no_module_is_called_like_an_export(name):
    assert clashes(name) == set()


def test_every_room_is_looked_at():
    rooms = {f"howsmooth.{path.parent.name}" for path in Path(howsmooth.__file__).parent.glob("*/__init__.py")}
    assert rooms < set(packages("howsmooth"))


def test_checker_refuses(tmp_path, monkeypatch):
    inside = tmp_path / "a_house" / "a_room"
    inside.mkdir(parents=True)
    (inside.parent / "__init__.py").write_text("")
    (inside / "__init__.py").write_text("from a_house.a_room.load import load\n__all__ = ['load']\n")
    (inside / "load.py").write_text("def load(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert list(packages("a_house")) == ["a_house", "a_house.a_room"]
        assert clashes("a_house") == set()
        assert clashes("a_house.a_room") == {"load"}
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "a_house"]:
            del sys.modules[name]
