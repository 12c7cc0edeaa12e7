"""A batch that a model is measured at: its arguments, its rows, which of their tokens are real."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import check_dense
from howsmooth.models import Model

Inputs = Tensor | Mapping[str, Any]


@final
@dataclass(frozen=True, eq=False)
class Probe:
    """Rows of a batch, one sequence in each, as a model takes them.

    args, kwargs: of the model's `forward`.  rows: how many.  real: which tokens are not padding; nothing where all are.
    """

    args: tuple[Tensor, ...]
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
        accepted = inspect.signature(model.module.forward).parameters
        fixed = {"use_cache": False} if "use_cache" in accepted else {}
        kind = next((p.dtype for p in model.module.parameters() if p.is_floating_point()), torch.float32)

        def fit(t: Any) -> Any:
            return t.to(model.device, kind if t.is_floating_point() else None) if isinstance(t, Tensor) else t

        if isinstance(batch, Tensor):
            tokens = fit(batch)
            own = isinstance(model.module, nn.MultiheadAttention)  # the tokens are queries, keys and values
            return cls((tokens,) * 3 if own else (tokens,), fixed, len(batch) if batch.ndim else 1)
        sizes = [len(t) for t in batch.values() if isinstance(t, Tensor) and t.ndim]
        mask = batch.get("attention_mask") if "input_ids" in batch else None
        padded = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all())
        real = fit(mask).bool() if padded else None
        return cls((), {name: fit(t) for name, t in batch.items()} | fixed, sizes[0] if sizes else 1, real)

    def row(self, i: int) -> "Probe":
        """One row alone."""
        one = self._mapped(lambda t: t[i : i + 1])
        return replace(one, rows=1, real=None if self.real is None else self.real[i : i + 1])

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
        listed = inspect.signature(model.module.forward).parameters.values()
        names = [p.name for p in listed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        unknown = [name for name in batch if names and name not in names]
        if unknown:
            raise BadInputError(
                f"expected inputs that {type(model.module).__name__} takes ({', '.join(names)}), got {unknown[0]!r}; "
                "check the name"
            )
    ids, size = named.get("input_ids"), getattr(getattr(model.module, "config", None), "vocab_size", None)
    if isinstance(ids, Tensor) and not ids.is_floating_point() and isinstance(size, int):
        least, most = (int(t) for t in ids.aminmax())
        if least < 0 or most >= size:
            raise BadInputError(
                f"expected token ids from 0 to {size - 1}, got {least if least < 0 else most}; use the model's own tokenizer"
            )
