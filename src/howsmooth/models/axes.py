"""Steps on the axes of logits that are not formed: a column beside the keys, some of what lies in front, other shapes."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.models.intercept import UncuttableError
from howsmooth.models.stand_ins import Logits, before


def joined(tensors: Any, dim: int = 0) -> Logits:
    """Logits with a column of their own beside the keys: a sink."""
    if len(tensors) != 2 or sum(isinstance(t, Logits) for t in tensors) != 1:
        raise UncuttableError("logits beside others")
    first = isinstance(tensors[1], Logits)
    logits, sink = (tensors[1], tensors[0]) if first else tensors
    past = before(logits)
    if dim not in (-1, logits.ndim - 1) or sink.shape[-1] != 1 or past.lowered:
        raise UncuttableError("logits beside other numbers")
    return Logits.of(replace(past, sink=sink, sink_first=first), (*logits.shape[:-1], logits.shape[-1] + 1))


def padded(logits: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Logits:
    """The same as a constant column."""
    if not isinstance(logits, Logits) or mode != "constant" or tuple(pad) not in ((0, 1), (1, 0)):
        raise UncuttableError("logits with a margin")
    column = torch.full((*logits.shape[:-1], 1), float(value or 0), dtype=logits.dtype, device=logits.device)
    return joined((logits, column) if tuple(pad) == (0, 1) else (column, logits), -1)


def item(logits: Any, index: Any) -> Logits:
    """All keys but the sink, or some of what lies in front."""
    if not isinstance(logits, Logits):
        raise UncuttableError("something of a row")
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or isinstance(i, int | slice) for i in index):
        raise UncuttableError("some of attention's logits")
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *(slice(None),) * (logits.ndim - len(index) + 1), *index[at + 1 :])
    index = (*index, *(slice(None),) * (logits.ndim - len(index)))
    *front, rows, cols = index
    m, past = logits.past.k.shape[-2], logits.past
    whole = [isinstance(i, slice) and range(*i.indices(s)) == range(s) for i, s in zip(index, logits.shape, strict=True)]
    if whole[-1] and whole[-2]:
        kept = past.over_lead(lambda t: t[tuple(front)])
        return Logits.of(kept, (*kept.lead, *logits.shape[-2:]))
    keys = range(1, m + 1) if past.sink_first else range(m)
    shared = past.weights == "softmax" and past.sink is not None and logits.shape[-1] == m + 1
    if all(whole[:-1]) and shared and isinstance(cols, slice) and range(*cols.indices(m + 1)) == keys:
        return Logits.of(past, (*logits.shape[:-1], m))
    raise UncuttableError("some of attention's logits")


def parted(logits: Any, chunks: int, dim: int = 0) -> tuple[Logits, ...]:
    """Parts along an axis in front."""
    axis = dim % logits.ndim
    if not isinstance(logits, Logits) or axis >= logits.ndim - 2:
        raise UncuttableError("parts of attention's logits")
    pasts = (logits.past.over_lead(lambda t, i=i: t.chunk(chunks, axis)[i]) for i in range(min(chunks, logits.shape[axis])))
    return tuple(Logits.of(past, (*past.lead, *logits.shape[-2:])) for past in pasts)


def shaped(func: Callable[..., Tensor]) -> Callable[..., Logits]:
    """The same with other axes in front."""

    def step(logits: Any, *args: Any, **kwargs: Any) -> Logits:
        wanted = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
        past = logits.past
        plain = isinstance(logits, Logits) and past.form not in ("differences", "squares")
        if not plain or wanted[-2:] != logits.shape[-2:] or len(wanted) < 2 or math.prod(wanted[:-2]) != math.prod(past.lead):
            raise UncuttableError(f"logits in the shape {tuple(wanted)}")
        return Logits.of(past.over_lead(lambda t: t.reshape(*wanted[:-2], *t.shape[-2:])), wanted)

    return step
