"""What stands for attention's logits that are not formed, and for what is made of a row of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from howsmooth.models.intercept import UncuttableError
from howsmooth.models.past import Past, depends

# what says something of a tensor
_QUESTIONS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex)


class StandIn(Tensor):
    """Stands for numbers that are not there. Whoever reads its entries is refused."""

    steps: ClassVar[Mapping[Any, Callable[..., Any]]] = {}  # by function of torch, as `howsmooth.models.steps` has them
    past: Past

    @classmethod
    def _blank(cls, past: Past, shape: Iterable[int]) -> Any:
        blank = torch.full((), torch.nan, dtype=past.q.dtype, device=past.q.device).expand(*shape).as_subclass(cls)
        blank.past = past
        return blank

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        step = cls.steps.get(func)
        if step is None:
            raise UncuttableError(f"{getattr(func, '__name__', func)} of attention's logits")
        return step(*args, **kwargs)


class Logits(StandIn):
    """Stands for logits, or for attention weights; `past` says of what."""

    @classmethod
    def of(cls, past: Past, shape: Iterable[int]) -> "Logits":
        return cls._blank(past, shape)


class Row(StandIn):
    """Stands for the largest logit of every query, or for the sum of its weights and of `more`."""

    what: Literal["max", "sum"]
    more: float | Tensor

    @classmethod
    def of(cls, what: Literal["max", "sum"], logits: Logits, more: float | Tensor = 0.0) -> "Row":
        row = cls._blank(logits.past, (*logits.shape[:-1], 1))
        row.what, row.more = what, more
        return row


def before(logits: Any) -> Past:
    """What logits are, to which one may still do something."""
    if not isinstance(logits, Logits) or logits.past.weights is not None or logits.past.sink is not None:
        raise UncuttableError("arithmetic on attention weights")
    return logits.past


def behind(weights: Any) -> Past:
    """What weights are that values may come to, or others beside them."""
    if not isinstance(weights, Logits) or weights.past.weights not in ("softmax", "sigmoid"):
        raise UncuttableError("something else than attention weights")
    return weights.past


def constant(t: Any) -> float | None:
    """A number that does not depend on the tokens, or nothing."""
    if isinstance(t, Tensor):
        return None if t.numel() != 1 or depends(t) or isinstance(t, StandIn) else float(t)
    return float(t)


def with_axes(t: Tensor, logits: Logits) -> Tensor:
    """A tensor with as many axes as the logits that it broadcasts to."""
    short = t.shape[::-1]
    if t.ndim > logits.ndim or any(a not in (1, b) for a, b in zip(short, logits.shape[::-1], strict=False)):
        raise UncuttableError(f"a tensor of shape {tuple(t.shape)} beside logits of shape {tuple(logits.shape)}")
    return t[(None,) * (logits.ndim - t.ndim)]
