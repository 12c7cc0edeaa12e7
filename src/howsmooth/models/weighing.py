"""Steps from logits that are not formed to weights, by rows of them, and from weights to values."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from howsmooth.models.einsum import turned, values_of
from howsmooth.models.intercept import UncuttableError
from howsmooth.models.stand_ins import Logits, Row, StandIn, before, behind


class _Largest(NamedTuple):
    values: Row
    indices: None


def floor(logits: Any, least: Any) -> Logits:
    """A floor under all numbers that a mask writes is none."""
    before(logits)
    if not isinstance(least, Tensor) or least.numel() != 1 or not float(least) <= 0.5 * torch.finfo(torch.float32).min:
        raise UncuttableError("logits with a floor")
    return logits


def largest(logits: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest of a row, or a floor."""
    if not isinstance(dim, int):
        return floor(logits, dim)
    return _Largest(_row("max", logits, dim, keepdim), None)


def _row(what: Literal["max", "sum"], logits: Any, dim: Any, keepdim: bool) -> Row:
    fits = isinstance(logits, Logits) and keepdim and dim in (-1, logits.ndim - 1, [-1], (-1,))
    if not fits or logits.past.weights != {"max": None, "sum": "exp"}[what]:
        raise UncuttableError(f"the {what} of attention's logits")
    return Row.of(what, logits)


def row_max(logits: Any, dim: Any = None, keepdim: bool = False) -> Row:
    return _row("max", logits, dim, keepdim)


def total(logits: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    """The sum of a row of weights, or the squares of differences as a distance."""
    if isinstance(logits, Logits) and logits.past.form == "squares" and dim in (-1, logits.ndim - 1) and not keepdim:
        return Logits.of(replace(logits.past, form="squared distance"), logits.shape[:-1])
    return _row("sum", logits, dim, keepdim)


def softmax(logits: Any, dim: int | None = None, *_: Any, **__: Any) -> Logits:
    if not isinstance(logits, Logits) or logits.past.weights is not None:
        raise UncuttableError("a softmax of attention weights")
    if dim not in (-1, logits.ndim - 1):
        raise UncuttableError("a softmax over queries")
    return Logits.of(replace(logits.past, weights="softmax"), logits.shape)


def sigmoid(logits: Any) -> Logits:
    past = before(logits)
    if past.lowered:
        raise UncuttableError("a sigmoid of logits less their largest")
    return Logits.of(replace(past, weights="sigmoid"), logits.shape)


def exp(logits: Any) -> Logits:
    return Logits.of(replace(before(logits), weights="exp"), logits.shape)


def tanh(logits: Any) -> Logits:
    past = before(logits)
    if past.form != "product" or past.cap is not None or past.terms or past.shift or past.lowered:
        raise UncuttableError("a tanh of attention's logits")
    return Logits.of(replace(past, cap=1.0), logits.shape)


def dropout(weights: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Logits:
    if training and p:
        raise UncuttableError("dropout, as in training")
    return weights


def detached(row: Any) -> Row:
    """What is taken off a whole row may stand still: softmax does not see it."""
    if not isinstance(row, Row) or row.what != "max":
        raise UncuttableError("attention's logits without their derivative")
    return row


def values(weights: Any, v: Any) -> Tensor:
    past = behind(weights)
    m = past.k.shape[-2]
    if isinstance(v, StandIn) or weights.shape[-1] != m or v.shape[-2] != m or v.ndim > weights.ndim:
        raise UncuttableError("a product with attention's logits")
    return past.output(v.expand(*weights.shape[:-2], *v.shape[-2:]))


def summed(equation: Any, *operands: Any) -> Tensor:
    if len(operands) == 2 and isinstance(operands[1], Logits):
        operands = operands[::-1]
        equation = turned(equation)
    found = values_of(equation, *operands)
    if found is None:
        raise UncuttableError(f"einsum {equation!r} of attention's logits")
    weights, v, back = found
    return values(weights, v).permute(*back)
