"""Launching kernels, and compiling several of them at once before they are needed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from threading import Thread
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

_THREADS = 8
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel where its first tensor is; inside `in_parallel`, only compile it.

    Where a pipeline is too deep for the chip's shared memory, as with a bias to load beside keys or on a smaller GPU, it is
    made shallower.
    """
    first: Tensor = args[0]
    if not first.is_cuda:
        kernel[grid](*args, **options)
        return
    with torch.cuda.device(first.device):
        if compiling():
            kernel.warmup(*args, grid=grid, **options)
            return
        for stages in range(options.get("num_stages", 1), 0, -1):
            try:
                kernel[grid](*args, **options | {"num_stages": stages})
                return
            except OutOfResources:
                if stages == 1:
                    raise


def compiling() -> bool:
    """Whether kernels are compiled only."""
    return _compiling.get()


def in_parallel(work: Callable[[], None]) -> None:
    """Compile all kernels that `work` launches, side by side, and run none. An older Triton compiles them as they come."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    token = _compiling.set(True)
    try:
        with ThreadPoolExecutor(_THREADS) as threads, mode(threads):
            work()
    finally:
        _compiling.reset(token)


def soon(work: Callable[[], None]) -> Thread:
    """The same in a thread of its own, while others go on."""
    thread = Thread(target=in_parallel, args=(work,), daemon=True)
    thread.start()
    return thread
