"""Types of tensors are checked as code runs: inside the operators' contract, and everywhere with --weekly."""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any, get_args

import jaxtyping

KERNELS = ["base", "balanced", "dispatch", "autograd", "mapped", "masks", "naive", "summed", "tiled", "tiles", "triton.fused"]
CHECKED = [
    *(f"howsmooth.kernels.{name}" for name in KERNELS),
    "howsmooth.spectral.operator",
    "howsmooth.maps.jacobian",
    "howsmooth.spectral.certificate",
]

_jaxtyped = jaxtyping.jaxtyped
_depth = 0


@contextmanager
def shapes_checked() -> Generator[None, None, None]:
    """Compare every argument and result in `CHECKED` with its annotation."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def names_a_shape(hint: Any) -> bool:
    array = isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    return array or any(map(names_a_shape, get_args(hint)))


def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorate like jaxtyping, with checks that run inside `shapes_checked` alone.

    Inner functions whose types name no shape stay as they are: a checker would be compiled at every call anew.
    """

    def decorate(item: Any) -> Any:
        if is_dataclass(item):
            item.__init__ = decorate(item.__init__)
            return item
        if not isinstance(item, FunctionType):
            return _jaxtyped(item, typechecker=typechecker)
        if "<locals>" in item.__qualname__ and not any(map(names_a_shape, item.__annotations__.values())):
            return item
        checked = _jaxtyped(item, typechecker=typechecker)

        @functools.wraps(item)
        def call(*args: Any, **named: Any) -> Any:
            return (checked if _depth else item)(*args, **named)

        return call

    return decorate


def install() -> None:
    """Watch the modules named in `CHECKED`, which must not be imported yet."""
    jaxtyping.jaxtyped = jaxtyped  # what modules under the hook call
    jaxtyping.install_import_hook(CHECKED, "beartype.beartype")
