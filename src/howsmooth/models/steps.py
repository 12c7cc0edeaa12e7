"""What a model's code may do to attention's logits that are not formed, step by step, until values come.

A step that is not among these is refused, so what is followed to the end is the code's own function.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from howsmooth.models.einsum import turned, values_of
from howsmooth.models.intercept import UncuttableError
from howsmooth.models.past import LOW, Past, depends

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
LESS = (torch.sub, Tensor.sub, Tensor.__sub__)
# what says something of a tensor, and what hands on its numbers
_QUESTIONS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex)
_SAME = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.contiguous)


class StandIn(Tensor):
    """Stands for numbers that are not there. Whoever reads its entries is refused."""

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
        step = _STEPS.get(func)
        if step is None:
            raise UncuttableError(f"{getattr(func, '__name__', func)} of attention's logits")
        return step(*args, **kwargs)


class Logits(StandIn):
    """Stands for logits, or for attention weights; `past` says of what."""

    @classmethod
    def of(cls, past: Past, shape: Iterable[int]) -> "Logits":
        return cls._blank(past, shape)


class _Row(StandIn):
    """Stands for the largest logit of every query, or for the sum of its weights and of `more`."""

    what: Literal["max", "sum"]
    more: float | Tensor

    @classmethod
    def of(cls, what: Literal["max", "sum"], logits: Logits, more: float | Tensor = 0.0) -> "_Row":
        row = cls._blank(logits.past, (*logits.shape[:-1], 1))
        row.what, row.more = what, more
        return row


class _Largest(NamedTuple):
    values: _Row
    indices: None


def _before(logits: Any) -> Past:
    """What logits are, to which one may still do something."""
    if not isinstance(logits, Logits) or logits.past.weights is not None or logits.past.sink is not None:
        raise UncuttableError("arithmetic on attention weights")
    return logits.past


def _behind(weights: Any) -> Past:
    """What weights are that values may come to, or others beside them."""
    if not isinstance(weights, Logits) or weights.past.weights not in ("softmax", "sigmoid"):
        raise UncuttableError("something else than attention weights")
    return weights.past


def _number(t: Any) -> float | None:
    """A number that does not depend on the tokens, or nothing."""
    if isinstance(t, Tensor):
        return None if t.numel() != 1 or depends(t) or isinstance(t, StandIn) else float(t)
    return float(t)


def _with_axes(t: Tensor, logits: Logits) -> Tensor:
    """A tensor with as many axes as the logits that it broadcasts to."""
    short = t.shape[::-1]
    if t.ndim > logits.ndim or any(a not in (1, b) for a, b in zip(short, logits.shape[::-1], strict=False)):
        raise UncuttableError(f"a tensor of shape {tuple(t.shape)} beside logits of shape {tuple(logits.shape)}")
    return t[(None,) * (logits.ndim - t.ndim)]


def _times(logits: Any, factor: Any, *, inverse: bool = False) -> Logits:
    if not isinstance(logits, Logits):
        logits, factor = factor, logits
        if inverse:
            raise UncuttableError("one over attention's logits")
    if not isinstance(logits, Logits) or isinstance(factor, Logits):
        raise UncuttableError("a product of logits")
    if isinstance(factor, _Row):
        if not inverse:
            raise UncuttableError("logits times their sum")
        return _normalised(logits, factor)
    number = _number(factor)
    by: Any = factor if number is None else number
    by = 1 / by if inverse else by
    if logits.past.weights is not None:
        return _weights_times(logits, by)
    past = _before(logits)
    if past.form in ("differences", "squares"):
        raise UncuttableError("differences times something")
    if number is None:
        return Logits.of(_scaled(past, _with_axes(by, logits)), logits.shape)
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
    past = _behind(weights)
    if isinstance(by, Tensor):
        by = _with_axes(by, weights)
        if by.shape[-1] != 1:
            if depends(by) or not bool(((by == 0) | (by == 1)).all()):
                raise UncuttableError("attention weights times a tensor")
            return _hidden(weights, by == 0)
    parts = [replace(p, gain=p.gain * by, beside=()) for p in (past, *past.beside)]
    return Logits.of(replace(parts[0], beside=tuple(parts[1:])), weights.shape)


def _normalised(weights: Logits, row: _Row) -> Logits:
    """`exp(s)` over its own sum, and what is added to that: a sink."""
    past = weights.past
    if row.what != "sum" or row.past is not past or past.weights != "exp":
        raise UncuttableError("logits over something else than their sum")
    if isinstance(row.more, float) and row.more == 0:
        return Logits.of(replace(past, weights="softmax"), weights.shape)
    if past.lowered:
        raise UncuttableError("a sink beside logits less their largest")
    more = torch.as_tensor(row.more).to(past.q)
    sink = _with_axes(more, weights).log()
    if sink.shape[-1] != 1:
        raise UncuttableError("a sink for every key")
    return Logits.of(replace(past, weights="softmax", sink=sink), weights.shape)


def _divide(logits: Any, factor: Any) -> Logits:
    return _times(logits, factor, inverse=True)


def _negative(logits: Any) -> Logits:
    return _times(logits, -1.0)


def add(logits: Any, other: Any, *, alpha: float = 1, sign: float = 1.0) -> Any:
    """`logits + sign · alpha · other`."""
    sign = sign * alpha
    if isinstance(logits, _Row) or isinstance(other, _Row):
        return _add_row(logits, other, sign)
    if not isinstance(logits, Logits):
        logits, other = _times(other, sign), logits
        sign = 1.0
    if logits.past.weights is not None:
        past, more = _behind(logits), _behind(other)
        if more.q.shape != past.q.shape or logits.shape != other.shape:
            raise UncuttableError("attention weights of several shapes")
        added = _behind(_weights_times(other, sign))
        return Logits.of(replace(past, beside=(*past.beside, replace(added, beside=()), *added.beside)), logits.shape)
    past = _before(logits)
    if past.form in ("differences", "squares"):
        raise UncuttableError("differences and something else")
    if isinstance(other, Logits):
        return Logits.of(_side_by_side(past, _before(_times(other, sign))), logits.shape)
    number = _number(other)
    if number is not None:
        return Logits.of(replace(past, shift=past.shift + sign * number), logits.shape)
    return Logits.of(replace(past, terms=(*past.terms, sign * _with_axes(other, logits))), logits.shape)


def _side_by_side(a: Past, b: Past) -> Past:
    """The sum of two products: that of their vectors one behind the other."""
    if {a.form, b.form} != {"product"} or a.cap is not None or b.cap is not None or a.lead != b.lead or a.lowered or b.lowered:
        raise UncuttableError("a sum of logits")
    q, k = torch.cat([a.scale * a.q, b.scale * b.q], -1), torch.cat([a.k, b.k], -1)
    return replace(a, q=q, k=k, scale=1.0, shift=a.shift + b.shift, terms=a.terms + b.terms)


def _add_row(logits: Any, other: Any, sign: float) -> Any:
    """Logits less their largest, or a sum of weights and something more."""
    if isinstance(logits, Logits) and isinstance(other, _Row):
        past = logits.past
        if other.what != "max" or other.past is not past or past.weights is not None or sign != -1:
            raise UncuttableError("logits and something of their row")
        return Logits.of(replace(past, lowered=True), logits.shape)
    row, more = (logits, other) if isinstance(logits, _Row) else (other, logits)
    if row.what != "sum" or isinstance(more, StandIn) or sign != 1:
        raise UncuttableError("arithmetic on something of a row")
    return _Row.of("sum", Logits.of(row.past, (*row.shape[:-1], row.past.k.shape[-2])), row.more + more)


def _subtract(logits: Any, other: Any, *, alpha: float = 1) -> Any:
    return add(logits, other, alpha=alpha, sign=-1.0)


def _subtracted(logits: Any, other: Any, *, alpha: float = 1) -> Any:
    return add(other, logits, alpha=alpha, sign=-1.0)


def _hidden(logits: Logits, mask: Tensor) -> Logits:
    """Logits, or weights that a key does not share with others, with a mask's keys hidden."""
    if logits.past.weights not in (None, "sigmoid") or logits.past.beside:
        raise UncuttableError("attention weights that are overwritten")
    hidden = torch.zeros(mask.shape, dtype=logits.dtype, device=mask.device).masked_fill(mask.bool(), -torch.inf)
    return Logits.of(replace(logits.past, terms=(*logits.past.terms, _with_axes(hidden, logits))), logits.shape)


def _fill(logits: Any, mask: Tensor, value: Any) -> Logits:
    zeros = isinstance(logits, Logits) and logits.past.weights == "sigmoid" and float(value) == 0
    if not zeros and (not float(value) <= LOW or _before(logits).form in ("differences", "squares")):
        raise UncuttableError("logits that are overwritten")
    return _hidden(logits, mask)


def _floor(logits: Any, least: Any) -> Logits:
    """A floor under all numbers that a mask writes is none."""
    _before(logits)
    if not isinstance(least, Tensor) or least.numel() != 1 or not float(least) <= 0.5 * torch.finfo(torch.float32).min:
        raise UncuttableError("logits with a floor")
    return logits


def _largest(logits: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest of a row, or a floor."""
    if not isinstance(dim, int):
        return _floor(logits, dim)
    return _Largest(_row("max", logits, dim, keepdim), None)


def _row(what: Literal["max", "sum"], logits: Any, dim: Any, keepdim: bool) -> _Row:
    fits = isinstance(logits, Logits) and keepdim and dim in (-1, logits.ndim - 1, [-1], (-1,))
    if not fits or logits.past.weights != {"max": None, "sum": "exp"}[what]:
        raise UncuttableError(f"the {what} of attention's logits")
    return _Row.of(what, logits)


def _row_max(logits: Any, dim: Any = None, keepdim: bool = False) -> _Row:
    return _row("max", logits, dim, keepdim)


def _sum(logits: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    """The sum of a row of weights, or the squares of differences as a distance."""
    if isinstance(logits, Logits) and logits.past.form == "squares" and dim in (-1, logits.ndim - 1) and not keepdim:
        return Logits.of(replace(logits.past, form="squared distance"), logits.shape[:-1])
    return _row("sum", logits, dim, keepdim)


def _norm(logits: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, p: Any = None, **_: Any) -> Logits:
    past = _before(logits)
    if past.form != "differences" or (ord or p) not in (None, 2, 2.0, "fro") or dim not in (-1, logits.ndim - 1) or keepdim:
        raise UncuttableError("a norm of attention's logits")
    return Logits.of(replace(past, form="distance"), logits.shape[:-1])


def _power(logits: Any, exponent: Any = 2) -> Logits:
    past = _before(logits)
    squared = {"differences": "squares", "distance": "squared distance"}.get(past.form)
    if squared is None or exponent != 2 or past.terms or past.shift:
        raise UncuttableError("a power of attention's logits")
    return Logits.of(replace(past, form=squared, scale=past.scale**2), logits.shape)


def _where(mask: Tensor, logits: Any, value: Any) -> Logits:
    return _fill(logits, ~mask.bool(), value)


def _softmax(logits: Any, dim: int | None = None, *_: Any, **__: Any) -> Logits:
    if not isinstance(logits, Logits) or logits.past.weights is not None:
        raise UncuttableError("a softmax of attention weights")
    if dim not in (-1, logits.ndim - 1):
        raise UncuttableError("a softmax over queries")
    return Logits.of(replace(logits.past, weights="softmax"), logits.shape)


def _sigmoid(logits: Any) -> Logits:
    past = _before(logits)
    if past.lowered:
        raise UncuttableError("a sigmoid of logits less their largest")
    return Logits.of(replace(past, weights="sigmoid"), logits.shape)


def _exp(logits: Any) -> Logits:
    return Logits.of(replace(_before(logits), weights="exp"), logits.shape)


def _tanh(logits: Any) -> Logits:
    past = _before(logits)
    if past.form != "product" or past.cap is not None or past.terms or past.shift or past.lowered:
        raise UncuttableError("a tanh of attention's logits")
    return Logits.of(replace(past, cap=1.0), logits.shape)


def _dropout(weights: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Logits:
    if training and p:
        raise UncuttableError("dropout, as in training")
    return weights


def _joined(tensors: Any, dim: int = 0) -> Logits:
    """Logits with a column of their own beside the keys: a sink."""
    if len(tensors) != 2 or sum(isinstance(t, Logits) for t in tensors) != 1:
        raise UncuttableError("logits beside others")
    first = isinstance(tensors[1], Logits)
    logits, sink = (tensors[1], tensors[0]) if first else tensors
    past = _before(logits)
    if dim not in (-1, logits.ndim - 1) or sink.shape[-1] != 1 or past.lowered:
        raise UncuttableError("logits beside other numbers")
    return Logits.of(replace(past, sink=sink, sink_first=first), (*logits.shape[:-1], logits.shape[-1] + 1))


def _padded(logits: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Logits:
    """The same as a constant column."""
    if not isinstance(logits, Logits) or mode != "constant" or tuple(pad) not in ((0, 1), (1, 0)):
        raise UncuttableError("logits with a margin")
    column = torch.full((*logits.shape[:-1], 1), float(value or 0), dtype=logits.dtype, device=logits.device)
    return _joined((logits, column) if tuple(pad) == (0, 1) else (column, logits), -1)


def _item(logits: Any, index: Any) -> Logits:
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


def _parted(logits: Any, chunks: int, dim: int = 0) -> tuple[Logits, ...]:
    """Parts along an axis in front."""
    axis = dim % logits.ndim
    if not isinstance(logits, Logits) or axis >= logits.ndim - 2:
        raise UncuttableError("parts of attention's logits")
    pasts = (logits.past.over_lead(lambda t, i=i: t.chunk(chunks, axis)[i]) for i in range(min(chunks, logits.shape[axis])))
    return tuple(Logits.of(past, (*past.lead, *logits.shape[-2:])) for past in pasts)


def _shaped(func: Callable[..., Tensor]) -> Callable[..., Logits]:
    """The same with other axes in front."""

    def step(logits: Any, *args: Any, **kwargs: Any) -> Logits:
        wanted = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
        past = logits.past
        plain = isinstance(logits, Logits) and past.form not in ("differences", "squares")
        if not plain or wanted[-2:] != logits.shape[-2:] or len(wanted) < 2 or math.prod(wanted[:-2]) != math.prod(past.lead):
            raise UncuttableError(f"logits in the shape {tuple(wanted)}")
        return Logits.of(past.over_lead(lambda t: t.reshape(*wanted[:-2], *t.shape[-2:])), wanted)

    return step


def _values(weights: Any, v: Any) -> Tensor:
    past = _behind(weights)
    m = past.k.shape[-2]
    if isinstance(v, StandIn) or weights.shape[-1] != m or v.shape[-2] != m or v.ndim > weights.ndim:
        raise UncuttableError("a product with attention's logits")
    return past.output(v.expand(*weights.shape[:-2], *v.shape[-2:]))


def _summed(equation: Any, *operands: Any) -> Tensor:
    if len(operands) == 2 and isinstance(operands[1], Logits):
        operands = operands[::-1]
        equation = turned(equation)
    found = values_of(equation, *operands)
    if found is None:
        raise UncuttableError(f"einsum {equation!r} of attention's logits")
    weights, v, back = found
    return _values(weights, v).permute(*back)


def _unchanged(logits: Any, *_: Any, **__: Any) -> Any:
    return logits


def _detached(row: Any) -> _Row:
    """What is taken off a whole row may stand still: softmax does not see it."""
    if not isinstance(row, _Row) or row.what != "max":
        raise UncuttableError("attention's logits without their derivative")
    return row


def _in_place(step: Callable[..., Any]) -> Callable[..., Logits]:
    """The same written into the logits that it was done to."""

    def written(logits: Any, *args: Any, **kwargs: Any) -> Logits:
        found = step(logits, *args, **kwargs)
        if not isinstance(logits, Logits) or not isinstance(found, Logits) or found.shape != logits.shape:
            raise UncuttableError("logits written into something else")
        logits.past = found.past
        return logits

    return written


_SHAPES = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, Tensor.flatten, Tensor.unsqueeze, Tensor.squeeze)
_TABLE: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (_times, (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)),
    (_divide, (torch.div, Tensor.div, Tensor.__truediv__)),
    (_negative, (torch.neg, Tensor.neg, Tensor.__neg__)),
    (add, (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)),
    (_subtract, LESS),
    (_subtracted, (torch.rsub, Tensor.__rsub__)),
    (_power, (torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__)),
    (_fill, (torch.masked_fill, Tensor.masked_fill)),
    (_where, (torch.where,)),
    (_largest, (torch.max, Tensor.max)),
    (_floor, (torch.maximum, Tensor.maximum)),
    (_row_max, (torch.amax, Tensor.amax)),
    (_sum, (torch.sum, Tensor.sum)),
    (_norm, (torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm)),
    (_softmax, (torch.softmax, Tensor.softmax, nn.functional.softmax)),
    (_sigmoid, (torch.sigmoid, Tensor.sigmoid, nn.functional.sigmoid, torch.special.expit)),
    (_exp, (torch.exp, Tensor.exp)),
    (_tanh, (torch.tanh, Tensor.tanh, nn.functional.tanh)),
    (_dropout, (nn.functional.dropout,)),
    (_joined, (torch.cat, torch.concat, torch.concatenate)),
    (_padded, (nn.functional.pad,)),
    (_item, (Tensor.__getitem__,)),
    (_parted, (torch.chunk, Tensor.chunk)),
    (_values, PRODUCTS),
    (_summed, (torch.einsum,)),
    (_detached, (Tensor.detach,)),
    (_unchanged, _SAME),
)
_IN_PLACE: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
    (_times, (Tensor.mul_, Tensor.__imul__)),
    (_divide, (Tensor.div_, Tensor.__itruediv__)),
    (add, (Tensor.add_, Tensor.__iadd__)),
    (_subtract, (Tensor.sub_, Tensor.__isub__)),
    (_fill, (Tensor.masked_fill_,)),
)
_STEPS: dict[Any, Callable[..., Any]] = {func: step for step, funcs in _TABLE for func in funcs}
_STEPS |= {func: _shaped(func) for func in _SHAPES}
_STEPS |= {func: _in_place(step) for step, funcs in _IN_PLACE for func in funcs}
