"""A batch that a model is measured at: its rows, how they are run, which of their tokens are real."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import check_dense
from howsmooth.models import Capture, Model
from howsmooth.models.sample import Sample
from howsmooth.training.positions import Positions

Inputs = Tensor | Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@final
@dataclass(frozen=True, eq=False)
class Probe:
    """Rows of a batch, ready to be run.

    rows: one sequence in each.  together: in one run, since the model keeps rows apart along its first axis; else one by one.
    runs: the arguments of each run.  real: for each run, which tokens are not padding, (rows, n, 1); nothing where all are.
    positions: what is known of each run's.
    """

    rows: list[Inputs]
    together: bool
    runs: list[Arguments]
    real: list[Tensor | None]
    positions: list[Positions] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "positions", [Positions() for _ in self.runs])

    @classmethod
    def of(cls, rows: list[Inputs], samples: Sequence[Sample]) -> "Probe":
        """From the samples that were made of the rows."""
        together = all(_batch_first(s) for s in samples)
        runs = [_joined(samples)] if together else [(s.args, s.kwargs) for s in samples]
        masks: list[Tensor | None] = [None if s.real is None else torch.tensor(s.window.mask)[None, :, None] for s in samples]
        if together and any(m is not None for m in masks):
            n = max(m.shape[1] for m in masks if m is not None)
            real: list[Tensor | None] = [torch.cat([torch.ones(1, n, 1, dtype=torch.bool) if m is None else m for m in masks])]
        else:
            real = masks[:1] if together else masks
        return cls(rows, together, runs, real)

    @property
    def rows_a_run(self) -> int:
        return len(self.rows) if self.together else 1

    def fed(self, batch: Inputs, device: torch.device, dtype: torch.dtype) -> "Probe":
        """Another batch that is run as this one is. dtype: of its floating-point numbers."""
        rows = rows_of(batch)

        def fit(t: Any) -> Any:
            return t.to(device, dtype if t.is_floating_point() else None) if isinstance(t, Tensor) else t

        fixed = {} if "use_cache" not in self.runs[0][1] else {"use_cache": False}

        def ready(row: Inputs) -> Arguments:
            return ((fit(row),), fixed) if isinstance(row, Tensor) else ((), {k: fit(t) for k, t in row.items()} | fixed)

        mask = None if isinstance(batch, Tensor) or "input_ids" not in batch else batch.get("attention_mask")
        padded = mask if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()) else None
        masks = None if padded is None else padded.bool()[:, :, None]
        apart: list[Tensor | None] = [None] * len(rows) if masks is None else [own[None] for own in masks]
        runs = [ready(batch)] if self.together else [ready(row) for row in rows]
        return Probe(rows, self.together, runs, [masks] if self.together else apart)


def captured(model: Model, row: Inputs) -> Capture:
    """A model at one row."""
    return model.capture(inputs=row) if isinstance(row, Tensor) else model.capture(**row)


def _batch_first(sample: Sample) -> bool:
    """Whether the rows of a batch stay apart along the first axis of all blocks."""
    return all(layer.block.hidden.ndim == 3 and layer.block.hidden.shape[0] == 1 for layer in sample.trace.layers)


def rows_of(probe: Inputs) -> list[Inputs]:
    """The rows of a batch, one sequence in each."""
    for name, t in probe.items() if isinstance(probe, Mapping) else (("the probe", probe),):
        check_dense(t, str(name))
        if isinstance(t, Tensor) and not t.numel():
            raise BadInputError(f"expected a row or more with tokens in {name}, got shape {tuple(t.shape)}; pass a longer one")
    if isinstance(probe, Tensor):
        return [probe[i : i + 1] for i in range(len(probe))] if probe.ndim else [probe]
    if not isinstance(probe, Mapping):
        raise BadInputError(
            f"expected a probe by the names of the model's forward, as a batch of its training has them, got "
            f"{type(probe).__name__}; pass a dictionary or a tensor"
        )
    sizes = [t.shape[0] for t in probe.values() if isinstance(t, Tensor) and t.ndim]
    count = sizes[0] if sizes else 1

    def row(t: Any, i: int) -> Any:
        return t[i : i + 1] if isinstance(t, Tensor) and t.ndim and t.shape[0] == count else t

    return [{name: row(t, i) for name, t in probe.items()} for i in range(count)]


def _joined(samples: Sequence[Sample]) -> Arguments:
    """The arguments of all rows at once."""
    first = samples[0]

    def join(values: list[Any]) -> Any:
        several = len(values) > 1 and all(isinstance(t, Tensor) and t.ndim and len(t) == 1 for t in values)
        return torch.cat(values) if several else values[0]

    args = tuple(join([s.args[i] for s in samples]) for i in range(len(first.args)))
    return args, {name: join([s.kwargs[name] for s in samples]) for name in first.kwargs}
