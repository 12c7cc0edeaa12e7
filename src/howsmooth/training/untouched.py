"""Running a model that is being trained, so that the training never learns of it."""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.program.tracing import bare, unchanged

FORWARD_MODE = "`torch.jit.script` is deprecated"  # torch's own, on first use of forward mode


def whole_model(model: nn.Module) -> nn.Module:
    """The module that a user wrote, behind what compiles it or spreads it over devices, with all of its weights here."""
    model = bare(model)
    if any(type(part).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine") for part in model.modules()):
        raise BadInputError(
            f"expected a model whose weights are whole on this device, got a sharded {type(model).__name__}; gather them first"
        )
    return model


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside it a model is in eval mode, in eager code and full precision; afterwards everything is as it was.

    That is: modes, attributes, buffers, random numbers (torch's, NumPy's, Python's), mixed precision, compiled code.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda and p.device.index is not None})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  what others draw from must stay as it is
    try:
        with ExitStack() as stack:
            stack.enter_context(unchanged(model))
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(torch.inference_mode(False))
            for kind in ("cpu", "cuda") if devices else ("cpu",):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # an old kind of checkpoint's
            warnings.filterwarnings("ignore", FORWARD_MODE, DeprecationWarning)
            if any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in model.modules()):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def first_bad(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds something not finite."""
    return next((name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())), None)
