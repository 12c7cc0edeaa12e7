"""Shapes are checked as the tests run, in the inner packages whose input the outer ones have validated."""

import os
import random
import signal
from collections.abc import Callable, Generator
from types import FunctionType
from typing import Any, get_args

import jaxtyping
import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # fused kernels then run on the CPU, slowly

# a job in the background ignores Ctrl-C, and would hand that down to all that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

KERNELS = ["base", "balanced", "dispatch", "autograd", "mapped", "masks", "naive", "summed", "tiled", "tiles", "triton.fused"]
CHECKED = [
    *(f"howsmooth.kernels.{name}" for name in KERNELS),
    "howsmooth.maps.operator",
    "howsmooth.maps.jacobian",
    "howsmooth.spectral.certificate",
]

_jaxtyped = jaxtyping.jaxtyped


def names_a_shape(hint: Any) -> bool:
    array = isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    return array or any(map(names_a_shape, get_args(hint)))


def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """jaxtyping's own, which compiles a checker; not at every call anew, for inner functions whose types name no shape."""

    def decorate(item: Any) -> Any:
        inner = isinstance(item, FunctionType) and "<locals>" in item.__qualname__
        if inner and not any(map(names_a_shape, item.__annotations__.values())):
            return item
        return _jaxtyped(item, typechecker=typechecker)

    return decorate


jaxtyping.jaxtyped = jaxtyped  # what modules under the hook call
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")
pytest.register_assert_rewrite("checks", "problems")

settings.register_profile("local", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def seed() -> None:
    """Start every generator that has a global state at the same place."""
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002, it is the global state that others draw from
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What fixtures of any scope draw does not depend on the tests before."""
    seed()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test draws the same numbers whichever tests, or fixtures of a wider scope, ran before it.

    Machines with a GPU may lack POT, which does not run there: tests that come to it are skipped.
    """
    seed()
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name != "ot":
            raise
        pytest.skip("needs POT: pip install POT")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weekly", action="store_true", help="run the tests marked weekly too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--weekly"):
        for item in items:
            if item.get_closest_marker("weekly") is not None:
                item.add_marker(pytest.mark.skip(reason="takes an hour with the others of its kind: pass --weekly"))


def pytest_configure(config: pytest.Config) -> None:
    # torch's own first use of forward mode says this of itself
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    # torch's own too, on a GPU: of its backward thread's first product, and of its profiler
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS, but there was no current:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:Warning. Profiler clears events:UserWarning")
