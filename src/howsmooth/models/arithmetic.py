"""Steps on logits that are not formed: factors, sums, differences, powers, keys that are hidden."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.models.intercept import UncuttableError
from howsmooth.models.past import LOW, Past, depends
from howsmooth.models.stand_ins import Logits, Row, StandIn, before, behind, constant, with_axes


def times(logits: Any, factor: Any, *, inverse: bool = False) -> Logits:
    if not isinstance(logits, Logits):
        logits, factor = factor, logits
        if inverse:
            raise UncuttableError("one over attention's logits")
    if not isinstance(logits, Logits) or isinstance(factor, Logits):
        raise UncuttableError("a product of logits")
    if isinstance(factor, Row):
        if not inverse:
            raise UncuttableError("logits times their sum")
        return _normalised(logits, factor)
    number = constant(factor)
    by: Any = factor if number is None else number
    by = 1 / by if inverse else by
    if logits.past.weights is not None:
        return _weights_times(logits, by)
    past = before(logits)
    if past.form in ("differences", "squares"):
        raise UncuttableError("differences times something")
    if number is None:
        return Logits.of(_scaled(past, with_axes(by, logits)), logits.shape)
    scaled = {"scale": past.scale * by} if past.cap is None else {"cap": past.cap * by}
    return Logits.of(replace(past, **scaled, shift=past.shift * by, terms=tuple(t * by for t in past.terms)), logits.shape)


def _scaled(past: Past, by: Tensor) -> Past:
    """Logits times a tensor that is the same for all keys, or for all queries: a factor of the vectors on the other side."""
    if past.cap is not None or past.lowered or 1 not in by.shape[-2:]:
        raise UncuttableError("logits times a tensor")
    terms = tuple(t * by for t in past.terms) + ((past.shift * by,) if past.shift else ())
    past = replace(past, shift=0.0, terms=terms)
    if past.form == "product":
        return replace(past, q=past.q * by) if by.shape[-1] == 1 else replace(past, k=past.k * by.mT)
    if past.form != "squared distance" or by.shape[-2:] != (1, 1) or not bool((by > 0).all()):
        raise UncuttableError("distances times a tensor")
    return replace(past, q=past.q * by.sqrt(), k=past.k * by.sqrt())


def _weights_times(weights: Logits, by: Any) -> Logits:
    past = behind(weights)
    if isinstance(by, Tensor):
        by = with_axes(by, weights)
        if by.shape[-1] != 1:
            if depends(by) or not bool(((by == 0) | (by == 1)).all()):
                raise UncuttableError("attention weights times a tensor")
            return _hidden(weights, by == 0)
    parts = [replace(p, gain=p.gain * by, beside=()) for p in (past, *past.beside)]
    return Logits.of(replace(parts[0], beside=tuple(parts[1:])), weights.shape)


def _normalised(weights: Logits, row: Row) -> Logits:
    """`exp(s)` over its own sum, and what is added to that: a sink."""
    past = weights.past
    if row.what != "sum" or row.past is not past or past.weights != "exp":
        raise UncuttableError("logits over something else than their sum")
    if isinstance(row.more, float) and row.more == 0:
        return Logits.of(replace(past, weights="softmax"), weights.shape)
    if past.lowered:
        raise UncuttableError("a sink beside logits less their largest")
    more = torch.as_tensor(row.more).to(past.q)
    sink = with_axes(more, weights).log()
    if sink.shape[-1] != 1:
        raise UncuttableError("a sink for every key")
    return Logits.of(replace(past, weights="softmax", sink=sink), weights.shape)


def divide(logits: Any, factor: Any) -> Logits:
    return times(logits, factor, inverse=True)


def negative(logits: Any) -> Logits:
    return times(logits, -1.0)


def add(logits: Any, other: Any, *, alpha: float = 1, sign: float = 1.0) -> Any:
    """`logits + sign · alpha · other`."""
    sign = sign * alpha
    if isinstance(logits, Row) or isinstance(other, Row):
        return _add_row(logits, other, sign)
    if not isinstance(logits, Logits):
        logits, other = times(other, sign), logits
        sign = 1.0
    if logits.past.weights is not None:
        past, more = behind(logits), behind(other)
        if more.q.shape != past.q.shape or logits.shape != other.shape:
            raise UncuttableError("attention weights of several shapes")
        added = behind(_weights_times(other, sign))
        return Logits.of(replace(past, beside=(*past.beside, replace(added, beside=()), *added.beside)), logits.shape)
    past = before(logits)
    if past.form in ("differences", "squares"):
        raise UncuttableError("differences and something else")
    if isinstance(other, Logits):
        return Logits.of(_side_by_side(past, before(times(other, sign))), logits.shape)
    number = constant(other)
    if number is not None:
        return Logits.of(replace(past, shift=past.shift + sign * number), logits.shape)
    return Logits.of(replace(past, terms=(*past.terms, sign * with_axes(other, logits))), logits.shape)


def _side_by_side(a: Past, b: Past) -> Past:
    """The sum of two products: that of their vectors one behind the other."""
    if {a.form, b.form} != {"product"} or a.cap is not None or b.cap is not None or a.lead != b.lead or a.lowered or b.lowered:
        raise UncuttableError("a sum of logits")
    q, k = torch.cat([a.scale * a.q, b.scale * b.q], -1), torch.cat([a.k, b.k], -1)
    return replace(a, q=q, k=k, scale=1.0, shift=a.shift + b.shift, terms=a.terms + b.terms)


def _add_row(logits: Any, other: Any, sign: float) -> Any:
    """Logits less their largest, or a sum of weights and something more."""
    if isinstance(logits, Logits) and isinstance(other, Row):
        past = logits.past
        if other.what != "max" or other.past is not past or past.weights is not None or sign != -1:
            raise UncuttableError("logits and something of their row")
        return Logits.of(replace(past, lowered=True), logits.shape)
    row, more = (logits, other) if isinstance(logits, Row) else (other, logits)
    if row.what != "sum" or isinstance(more, StandIn) or sign != 1:
        raise UncuttableError("arithmetic on something of a row")
    return Row.of("sum", Logits.of(row.past, (*row.shape[:-1], row.past.k.shape[-2])), row.more + more)


def subtract(logits: Any, other: Any, *, alpha: float = 1) -> Any:
    return add(logits, other, alpha=alpha, sign=-1.0)


def subtracted(logits: Any, other: Any, *, alpha: float = 1) -> Any:
    return add(other, logits, alpha=alpha, sign=-1.0)


def _hidden(logits: Logits, mask: Tensor) -> Logits:
    """Logits, or weights that a key does not share with others, with a mask's keys hidden."""
    if logits.past.weights not in (None, "sigmoid") or logits.past.beside:
        raise UncuttableError("attention weights that are overwritten")
    hidden = torch.zeros(mask.shape, dtype=logits.dtype, device=mask.device).masked_fill(mask.bool(), -torch.inf)
    return Logits.of(replace(logits.past, terms=(*logits.past.terms, with_axes(hidden, logits))), logits.shape)


def fill(logits: Any, mask: Tensor, value: Any) -> Logits:
    zeros = isinstance(logits, Logits) and logits.past.weights == "sigmoid" and float(value) == 0
    if not zeros and (not float(value) <= LOW or before(logits).form in ("differences", "squares")):
        raise UncuttableError("logits that are overwritten")
    return _hidden(logits, mask)


def where(mask: Tensor, logits: Any, value: Any) -> Logits:
    return fill(logits, ~mask.bool(), value)


def power(logits: Any, exponent: Any = 2) -> Logits:
    past = before(logits)
    squared = {"differences": "squares", "distance": "squared distance"}.get(past.form)
    if squared is None or exponent != 2 or past.terms or past.shift:
        raise UncuttableError("a power of attention's logits")
    return Logits.of(replace(past, form=squared, scale=past.scale**2), logits.shape)


def norm(logits: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, p: Any = None, **_: Any) -> Logits:
    past = before(logits)
    if past.form != "differences" or (ord or p) not in (None, 2, 2.0, "fro") or dim not in (-1, logits.ndim - 1) or keepdim:
        raise UncuttableError("a norm of attention's logits")
    return Logits.of(replace(past, form="distance"), logits.shape[:-1])
