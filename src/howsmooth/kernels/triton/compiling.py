"""Launching kernels, and compiling several of them at once before they are needed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from threading import Thread
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

_THREADS = 8
# since Triton 3.3 what is compiled takes all arguments of a kernel in order; AMD's compiler asks more of tensors than `Launch`
_KEEPS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3) and torch.version.hip is None
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Run a kernel where its first tensor is, and give it compiled; inside `in_parallel`, only compile it and give nothing.

    Where a pipeline is too deep for the chip's shared memory, as with a bias to load beside keys or on a smaller GPU, it is
    made shallower.
    """
    first: Tensor = args[0]
    if not first.is_cuda:
        return kernel[grid](*args, **options)
    if first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            return launch(kernel, grid, *args, **options)
    if compiling():
        kernel.warmup(*args, grid=grid, **options)
        return None
    stages = options.get("num_stages", 1)
    try:
        return kernel[grid](*args, **options)
    except OutOfResources:
        if stages == 1:
            raise
    return launch(kernel, grid, *args, **options | {"num_stages": stages - 1})


class Launch:
    """A kernel with its grid and all of its arguments but the tensors, which come first.

    For each launch Triton finds out what it compiles a kernel for: of numbers, which stay here, their size and whether 16
    divides them or they are 1; of tensors, their dtypes and whether 16 divides their addresses. A kernel that has run is run
    again where the latter are the same, which is several times as fast.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[int | float, ...], options: dict[str, Any]):
        self.kernel, self.grid, self.numbers, self.options = kernel, grid, numbers, options
        self.ready: dict[tuple, tuple[Callable[..., None], tuple]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].get_device()
        key = (device, *[t.dtype for t in tensors], *[t.data_ptr() % 16 == 0 for t in tensors])
        if key in self.ready and device == torch.cuda.current_device() and not compiling():
            run, rest = self.ready[key]
            run(*tensors, *rest)
            return
        compiled = launch(self.kernel, self.grid, *tensors, *self.numbers, **self.options)
        if _KEEPS and isinstance(compiled, CompiledKernel):
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]  # compiled in, or left out
            self.ready[key] = compiled[self.grid], (*self.numbers, *map(self.options.get, names))


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
    """Compile in a thread of its own, while others go on."""
    thread = Thread(target=in_parallel, args=(work,), daemon=True)
    thread.start()
    return thread
