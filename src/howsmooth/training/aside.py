"""Running a model that is being trained, so that the training never learns of it."""

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from howsmooth.errors import BadInputError

FORWARD_MODE = "`torch.jit.script` is deprecated"  # torch's own, on first use of forward mode


def bare(model: nn.Module) -> nn.Module:
    """The module that a user wrote, behind what compiles it or spreads it over devices."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            break
        model = inner
    if any(type(part).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine") for part in model.modules()):
        raise BadInputError(
            f"expected a model whose weights are whole on this device, got a sharded {type(model).__name__}; gather them first"
        )
    return model


class _Recorded:
    """A checkpoint that records what it runs, in place of torch's older kind."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args)


def _recorded(*args: Any, **kwargs: Any) -> Iterator[None]:
    """The same in place of its newer kind, which waits at this point while the function runs."""
    yield


# checkpoints run the model again, later, when it is no longer looked at; the second is the first one's name from torch 2.15 on
_CHECKPOINTS = {
    "_checkpoint_without_reentrant_generator": _recorded,
    "_checkpoint_without_reentrant_generator_impl": _recorded,
    "CheckpointFunction": _Recorded,
}


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """Inside it a model may be run in eager code and full precision; afterwards everything is as it was.

    That is: random numbers (torch's, NumPy's, Python's), buffers, mixed precision, compiled code, checkpoints. Modes and hooks
    are the business of whoever sets them. Gradients are safe from all that asks for them by `torch.autograd.grad`.
    """
    parts = list(model.modules())
    weights = [p for part in parts for p in part._parameters.values() if p is not None]
    devices = sorted({p.device.index for p in weights if p.is_cuda and p.device.index is not None})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  what others draw from must stay as it is
    kept = [(part, dict(part._buffers)) for part in parts if part._buffers]
    copies = [(t, t.clone(), t._version) for _, own in kept for t in own.values() if t is not None and t.dtype != torch.bool]
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(torch.inference_mode(False))
            for kind in ("cpu", "cuda") if devices else ("cpu",):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # an old kind of checkpoint's
            warnings.filterwarnings("ignore", FORWARD_MODE, DeprecationWarning)
            for name in _CHECKPOINTS.keys() & vars(torch.utils.checkpoint).keys():
                stack.enter_context(mock.patch.object(torch.utils.checkpoint, name, _CHECKPOINTS[name]))
            if any(_compiled(part) for part in parts):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for part, own in kept:
            if any(part._buffers.get(name) is not t for name, t in own.items()) or len(part._buffers) != len(own):
                part._buffers.clear()
                part._buffers.update(own)
        for t, copy, version in copies:
            if t._version != version:
                with torch.no_grad():
                    t.copy_(copy)


def _compiled(part: Any) -> bool:
    return part._compiled_call_impl is not None or "_orig_mod" in part._modules


def first_bad(tensors: dict[str, Tensor]) -> str | None:
    """The name of the first tensor that holds something not finite."""
    return next((name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())), None)
