"""Launching kernels, and compiling several of them at once before they are needed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from threading import Thread
from typing import Any

import torch
import triton
from torch import Tensor

_THREADS = 8
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel where its first tensor is; inside `in_parallel`, only compile it."""
    first: Tensor = args[0]
    if not first.is_cuda:
        kernel[grid](*args, **options)
        return
    with torch.cuda.device(first.device):
        if compiling():
            kernel.warmup(*args, grid=grid, **options)
        else:
            kernel[grid](*args, **options)


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
