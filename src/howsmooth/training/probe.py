"""A model that trains, run so that its training never learns of it, and the batch that it is measured at."""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import check_dense
from howsmooth.models import Model, Window
from howsmooth.models.model_input import ModelInput
from howsmooth.models.recorded import Recordings
from howsmooth.program.modules import bare, unchanged
from howsmooth.training.sharded import Call, gathered

Inputs = Tensor | Mapping[str, Any]
FORWARD_MODE = "`torch.jit.script` is deprecated"  # torch's own, on first use of forward mode


def model_that_trains(model: nn.Module | Model) -> Model:
    """A module, compiled or wrapped as it may be, as a model to be measured, with all of its weights here."""
    if isinstance(model, Model):
        return model
    if not isinstance(model, nn.Module):
        raise BadInputError(f"expected a torch module that trains, got {type(model).__name__}; pass the model")
    module = bare(model)
    if any(type(part).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine") for part in module.modules()):
        raise BadInputError(
            f"expected a model whose weights are whole or sharded by fully_shard or parallelize_module, got a "
            f"{type(module).__name__}; shard it by one of them"
        )
    return Model.of(module, type(module).__name__, None, None)


@contextmanager
def untouched(model: nn.Module, *, derives: bool = False, at: Call | None = None) -> Iterator[None]:
    """Inside it a model is in eval mode, in eager code, full precision and whole; afterwards everything is as it was.

    That is: modes, attributes, buffers, random numbers (torch's, NumPy's, Python's), mixed precision, compiled code, shards.
    derives, at: as `gathered` takes them.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda and p.device.index is not None})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  what others draw from must stay as it is
    try:
        with ExitStack() as stack:
            stack.enter_context(gathered(model, derives=derives, at=at))
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


@final
@dataclass(frozen=True, eq=False)
class Probe:
    """Rows of a batch, one sequence in each, as a model takes them.

    args, kwargs: of the model's `forward`.  rows: how many.  real: which tokens are not padding; nothing where all are.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int
    real: Bool[Tensor, "rows n"] | None = None

    @classmethod
    def of(cls, model: Model, batch: Inputs, *, check: bool = True) -> "Probe":
        """From a batch by the names of the model's `forward`, or its only tensor. check: its names and numbers too."""
        if not isinstance(batch, Tensor | Mapping):
            raise BadInputError(
                f"expected a probe by the names of the model's forward, as a batch of its training has them, got "
                f"{type(batch).__name__}; pass a dictionary or a tensor"
            )
        if check:
            _check(model, batch)
        args, kwargs = model.fitted(batch)
        sizes = [len(t) for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim]
        mask = kwargs.get("attention_mask") if "input_ids" in kwargs else None
        real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        return cls(args, kwargs, sizes[0] if sizes else 1, None if real is None or bool(real.all()) else real)

    def first(self, rows: int) -> "Probe":
        """The first rows, so many."""
        return self._cut(slice(0, rows))

    def row(self, i: int) -> "Probe":
        """One row alone."""
        return self._cut(slice(i, i + 1))

    def _cut(self, rows: slice) -> "Probe":
        one, real = self._mapped(lambda t: t[rows]), None if self.real is None else self.real[rows]
        return replace(one, rows=len(range(self.rows)[rows]), real=real)

    def inputs(self, model: Model, recordings: Recordings, work: torch.dtype | None = None) -> list[ModelInput]:
        """The rows as inputs of a model, whose runs are compared with the model. work: another precision than the model's."""
        rows = [self.row(i) for i in range(self.rows)]
        masks = [None if row.real is None else tuple(row.real[0].tolist()) for row in rows]
        return [
            ModelInput(
                model.name, model.module, row.args, dict(row.kwargs), Window((), (), mask), work or model.dtype, recordings
            )
            for row, mask in zip(rows, masks, strict=True)
        ]

    def repeated(self, times: int) -> "Probe":
        """Every row so many times, one copy behind the other."""
        real = None if self.real is None else self.real.repeat_interleave(times, 0)
        return replace(self._mapped(lambda t: t.repeat_interleave(times, 0)), rows=self.rows * times, real=real)

    def _mapped(self, f: Any) -> "Probe":
        def own(t: Any) -> Any:
            return f(t) if isinstance(t, Tensor) and t.ndim and len(t) == self.rows else t

        return replace(self, args=tuple(map(own, self.args)), kwargs={name: own(t) for name, t in self.kwargs.items()})


def _check(model: Model, batch: Inputs) -> None:
    """Refuse what the model cannot be run on."""
    named = batch if isinstance(batch, Mapping) else {"the probe": batch}
    for name, t in named.items():
        check_dense(t, str(name))
        if isinstance(t, Tensor) and not t.numel():
            raise BadInputError(f"expected a row or more with tokens in {name}, got shape {tuple(t.shape)}; pass a longer one")
    if isinstance(batch, Mapping):
        model.check_names(batch)
    ids = named.get("input_ids")
    if isinstance(ids, Tensor) and not ids.is_floating_point():
        model.check_vocabulary(ids.flatten().tolist())
