"""What every test starts from: seeds, types checked as code runs, and the reasons for which tests are skipped."""

import fcntl
import functools
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings

from shapes import install, shapes_checked

if TYPE_CHECKING:
    from problems.desks import Desk

Once = Callable[[str, Callable[[Path], object]], Path]

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # fused kernels then run on the CPU, slowly

# a job in the background ignores Ctrl-C, and would hand that down to all that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # what is imported and collected stays: `pytest_collection_finish`
install()
pytest.register_assert_rewrite("checks", "problems")

settings.register_profile("local", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def seed() -> None:
    """Start every generator that has a global state at the same place."""
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002, it is the global state that others draw from
    torch.manual_seed(0)


@functools.cache
def interpret_faster(interpreter: Any) -> None:
    """Let Triton's interpreter go through its language once a kernel, and not at every call of a device function inside."""
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton, which goes its own way
    patch, run, language = interpreter._patch_lang, interpreter.GridExecutor.__call__, (interpreter.tl, interpreter.tl.core)
    patched: list[object] = []

    def run_kernel(self: object, *args: object, **named: object) -> None:
        patched.clear()
        try:
            run(self, *args, **named)
        finally:
            patched.clear()

    def patch_once(function: Any) -> Any:
        used = [part for part in language if any(value is part for value in function.__globals__.values())]
        if used and all(part in patched for part in used):
            return interpreter._LangPatchScope()  # nothing to restore
        patched.extend(used)
        return patch(function)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_kernel


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What fixtures of any scope draw does not depend on the tests before."""
    seed()
    if "triton.runtime.interpreter" in sys.modules:
        interpret_faster(sys.modules["triton.runtime.interpreter"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test draws the same numbers whichever tests, or fixtures of a wider scope, ran before it.

    Machines with a GPU may lack POT, which does not run there: tests that come to it are skipped.
    """
    seed()
    try:
        with shapes_checked() if item.config.getoption("--weekly") else nullcontext():
            return (yield)
    except ModuleNotFoundError as error:
        if error.name != "ot":
            raise
        pytest.skip("needs POT: pip install POT")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Fill a folder by name once in a test run, however many processes run it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def fill_once(name: str, fill: Callable[[Path], object]) -> Path:
        folder, filled = shared / name, shared / f"{name}.filled"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not filled.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                filled.touch()
        return folder

    return fill_once


@pytest.fixture(scope="session")
def desk(once: Once) -> "Desk":
    """A model, a text, and the report of them: look at these, write elsewhere."""
    from problems import desks

    return desks.Desk(once("desk", desks.fill))


@pytest.fixture(scope="session")
def site(once: Once) -> Path:
    """The documentation, built without a warning. `--quiet` would undo `--strict`."""
    pytest.importorskip("mkdocs", reason="builds the site; pip install 'howsmooth[docs]' runs this")

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        ended = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr

    return once("site", build)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weekly", action="store_true", help="run the tests marked weekly too")
    parser.addoption("--shuffle", type=int, default=0, metavar="SEED", help="of the order of files and of tests in them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests come in an order that their names do not give away, file by file; pytest-xdist needs the same in each process."""
    draw = random.Random(config.getoption("--shuffle"))
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    items[:] = [item for group in groups for item in group]
    if not config.getoption("--weekly"):
        for item in items:
            if item.get_closest_marker("weekly") is not None:
                item.add_marker(pytest.mark.skip(reason="takes an hour with the others of its kind: pass --weekly"))


def pytest_collection_finish() -> None:
    """Libraries and tests, half a million objects, are nothing that each collection of garbage has to walk through.

    Nor need there be one for every 700 objects: those of a recorded model are tens of thousands.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # torch's own first use of forward mode says this of itself
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    # torch's own too, on a GPU: of its backward thread's first product, and of its profiler
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS, but there was no current:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:Warning. Profiler clears events:UserWarning")
