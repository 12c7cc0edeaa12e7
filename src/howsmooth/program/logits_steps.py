"""Steps from products to weights, by the name of the operation.

Products that attention's logits begin with, steps on the axes of logits, arithmetic, keys that are hidden, rows of weights.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from howsmooth.program.lazy_logits import LazyLogits, LazyRow, LogitsReader, NotAttentionError, aten, equation_of, need, size
from howsmooth.program.operations import DISTANCES, MATMULS, PADS, SLICES, SOFTMAXES, VIEWS, is_float, name, order, value, walk

LOW = -1e4  # a fill this low hides a key
_FLOOR = -1e30  # a floor this low is none
_BEGINS = MATMULS | DISTANCES | {"einsum", "linalg_vector_norm", "norm", "sum"}


def read(r: LogitsReader, n: Node) -> None:
    """Take notice of a node; the editor is at it."""
    step = _STEPS.get(name(n)) if n.op == "call_function" else None
    if step is None or not (name(n) in _BEGINS or any(m in r.known for m in n.all_input_nodes)):
        return
    try:
        given = signature(step).bind(r, n, *n.args, **n.kwargs)
    except TypeError:  # other arguments than those that attention is written with
        return
    try:
        r.known[n] = step(*given.args, **given.kwargs)
    except NotAttentionError:
        return


# products that logits begin with


def _product(r: LogitsReader, n: Node, *_: Any, **__: Any) -> LazyLogits:
    """The product of two batches of vectors."""
    eq = equation_of(n)
    if eq is None or r.weights(eq.a) is not None or r.weights(eq.b) is not None:
        raise NotAttentionError
    inner = [c for c in eq.left if c in eq.right and c not in eq.out]
    rows, cols = ([c for c in eq.out if c in a and c not in b] for a, b in ((eq.left, eq.right), (eq.right, eq.left)))
    need(bool(inner and rows and cols) and len(eq.out) == len({*eq.left, *eq.right} - {*inner}))
    need(eq.a in r.edit.moving or eq.b in r.edit.moving)
    lead = [c for c in eq.out if c not in (rows[-1], cols[-1])]
    q, k = r.arranged(eq, [*lead, rows[-1]], inner), r.arranged(eq.turned(), [*lead, cols[-1]], inner)
    return LazyLogits(q, k, eq.out.index(rows[-1]), eq.out.index(cols[-1]))


def _pair(r: LogitsReader, q: Node, k: Node, form: Literal["distance", "squared"]) -> LazyLogits:
    """The logits of pairs of vectors."""
    lead = torch.broadcast_shapes(size(q)[:-2], size(k)[:-2])
    return LazyLogits(r.spread(q, lead), r.spread(k, lead), len(lead), len(lead) + 1, form)


def _cdist(r: LogitsReader, _: Node, a: Node, b: Node, p: float = 2.0, *__: Any) -> LazyLogits:
    """The distances of two batches of vectors."""
    need(p == 2)
    return _pair(r, a, b, "distance")


def _differences(r: LogitsReader, d: Any, form: Literal["distance", "squared"]) -> LazyLogits:
    """`a_i − b_j` for all i and j, in whichever order they come, of which the last axis is summed."""
    need(isinstance(d, Node) and name(d) == "sub" and not d.kwargs)
    a, b = d.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        raise NotAttentionError
    need(len(size(a)) == len(size(b)) >= 3)
    if size(a)[-3] == 1:
        a, b = b, a
    need(size(a)[-2] == 1 == size(b)[-3])
    ndim = len(size(a))
    return _pair(r, r.edit.squeeze(a, ndim - 2), r.edit.squeeze(b, ndim - 3), form)


def _norm(r: LogitsReader, n: Node, d: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> LazyLogits:
    """The lengths of differences."""
    need(ord in (2, None) and dim in ([-1], [len(size(d)) - 1]) and not keepdim)
    return _differences(r, d, "distance")


# axes: columns beside the keys, what lies in front


def _cat(r: LogitsReader, n: Node, tensors: Any, dim: int = 0) -> LazyLogits:
    """Logits with a column of their own beside the keys: a sink."""
    need(len(tensors) == 2)
    first = isinstance(r.known.get(tensors[1]), LazyLogits)
    a, sink = (tensors[1], tensors[0]) if first else tensors
    logits = r.before(a)
    need(logits.cols == dim % len(size(a)) and size(sink)[dim] == 1)
    return replace(logits, sink=r.own_axes(sink, logits), sink_first=first)


def _padded(r: LogitsReader, n: Node, a: Any, pad: Any, *rest: Any, value: float | None = None) -> LazyLogits:
    """Logits with a column of one number beside the keys."""
    logits, number = r.before(a), next((t for t in rest if isinstance(t, int | float)), value)
    need(list(pad) in ([0, 1], [1, 0]) and logits.keys_last)
    return replace(logits, sink=float(number or 0), sink_first=list(pad) == [1, 0])


def _viewed(r: LogitsReader, n: Node, a: Any, *_: Any, **__: Any) -> LazyLogits | LazyRow | tuple[LazyLogits, ...]:
    """What is known of a node, or a part of it, in other places or in another precision."""
    known = r.known.get(a)
    if known is None or isinstance(known, tuple) or not is_float(n):
        raise NotAttentionError
    if isinstance(known, LazyRow):
        need(math.prod(size(n)) == math.prod(size(a)))
        return known
    before, after = torch.empty(size(a), device="meta"), r.edit.outcome(n)
    return r.view(known, before, after) if isinstance(after, Tensor) else tuple(r.view(known, before, t) for t in after)


def _item(r: LogitsReader, n: Node, a: Any, index: int) -> LazyLogits:
    """One of several parts."""
    parts = r.known.get(a)
    if not isinstance(parts, tuple):
        raise NotAttentionError
    return parts[index]


def _selected(r: LogitsReader, n: Node, a: Any, dim: int, index: Node) -> LazyLogits:
    """Some of what lies in front, by their places."""
    logits = r.logits(a)
    *front, _, _ = logits.order
    need(dim % len(size(a)) in front)
    axis, lead = front.index(dim % len(size(a))), tuple(size(n)[d] for d in front)
    return r.in_front(logits, lead, lambda t: r.edit.call(n.target, t, axis, index))


# arithmetic


def _times(r: LogitsReader, n: Node, a: Any, b: Any, *, inverse: bool = False) -> LazyLogits:
    if a is b:
        return _power(r, n, a, 2)
    if not isinstance(r.known.get(a), LazyLogits) and not inverse:
        a, b = b, a
    logits, row = r.logits(a), r.known.get(b) if isinstance(b, Node) else None
    if isinstance(row, LazyRow):
        return _normalised(r, n, logits, b, row)
    number = r.number(b)
    by = r.own_axes(b, logits) if number is None else number
    if isinstance(by, Node) and (size(by)[-1] > 1 if logits.weights else 1 not in size(by)[-2:]):
        need(not inverse and logits.weights != "softmax")  # a mask of 0 and 1, with a low number added where it is 0
        return _hidden(r, logits, r.edit.call(aten.ne.Scalar, by, 0))
    if inverse:
        by = r.edit.call(aten.reciprocal.default, by) if isinstance(by, Node) else 1 / by
    if logits.weights is None:
        return _scaled(r, logits, by)
    need(logits.weights != "exp" and not (isinstance(by, Node) and _is_of(r, by, logits)))
    more = [replace(part, gains=(*part.gains, by)) for part in (logits, *logits.beside)]
    return replace(more[0], beside=tuple(more[1:]))


def _scaled(r: LogitsReader, logits: LazyLogits, by: Node | float) -> LazyLogits:
    """Logits times what is the same for all keys, or for all queries: a factor of the vectors on the other side."""
    need(logits.sink is None)
    terms = [t if value(t).dtype is torch.bool else r.edit.times(t, by) for t in logits.terms]
    if not isinstance(by, Node):
        scaled = {"scale": logits.scale * by} if logits.cap is None else {"cap": logits.cap * by}
        return replace(logits, **scaled, shift=logits.shift * by, terms=tuple(terms))
    need(logits.cap is None)
    terms += [r.edit.times(by, logits.shift)] * bool(logits.shift)
    logits = replace(logits, shift=0.0, terms=tuple(terms))
    if logits.form != "product":
        need(logits.form == "squared" and size(by)[-2:] == (1, 1))
        by = r.edit.call(aten.sqrt.default, by)
        return replace(logits, q=r.edit.times(logits.q, by), k=r.edit.times(logits.k, by))
    if size(by)[-1] == 1:
        return replace(logits, q=r.edit.times(logits.q, by))
    return replace(logits, k=r.edit.times(logits.k, r.edit.swapped(by)))


def _is_of(r: LogitsReader, n: Node, logits: LazyLogits) -> bool:
    """Whether a tensor is made of logits of the same keys, which then are there in any case."""
    for m in walk([n], lambda m: m.all_input_nodes if order(m) > order(logits.k) else ()):
        known = r.known.get(m)
        if isinstance(known, LazyLogits) and known.k is logits.k:
            return True
    return False


def _normalised(r: LogitsReader, n: Node, logits: LazyLogits, b: Node, row: LazyRow) -> LazyLogits:
    """`exp(s)` over its own sum, and what is added to that: a sink."""
    need(row.of is logits and logits.weights == "exp" and logits.keys_last and size(b) == (*size(n)[:-1], 1))
    if row.more == 0:
        return replace(logits, weights="softmax")
    if not isinstance(row.more, Node):
        return replace(logits, weights="softmax", sink=math.log(row.more) if row.more > 0 else math.nan)
    return replace(logits, weights="softmax", sink=r.edit.call(aten.log.default, r.own_axes(row.more, logits)))


def _divide(r: LogitsReader, n: Node, a: Any, b: Any, *, rounding_mode: str | None = None) -> LazyLogits:
    need(not rounding_mode)
    return _times(r, n, a, b, inverse=True)


def _add(r: LogitsReader, n: Node, a: Any, b: Any, *, alpha: float = 1) -> LazyLogits | LazyRow:
    known_a, known_b = (r.known.get(t) if isinstance(t, Node) else None for t in (a, b))
    for row, more in ((known_a, b), (known_b, a)):
        if isinstance(row, LazyRow):
            need(row.more == 0 and alpha == 1)
            number = r.number(more)
            return replace(row, more=more if number is None else number)
    alike = (
        isinstance(known_a, LazyLogits) and isinstance(known_b, LazyLogits) and bool(known_a.weights) == bool(known_b.weights)
    )
    if isinstance(known_b, LazyLogits) and not alike:
        return _plus(r, _times(r, n, b, float(alpha)), a, 1.0)
    logits = r.logits(a)
    if isinstance(known_b, LazyLogits) and known_b.order == logits.order:
        other = _times(r, n, b, float(alpha))
        if logits.weights is not None:
            need(other.lead == logits.lead and (other.n, other.m) == (logits.n, logits.m) and other.weights != "exp")
            return replace(logits, beside=(*logits.beside, replace(other, beside=()), *other.beside))
        if all(s.form == "product" and s.cap is None and s.sink is None for s in (logits, other)):
            return _side_by_side(r, logits, other)
    return _plus(r, logits, b, float(alpha))


def _plus(r: LogitsReader, logits: LazyLogits, b: Any, sign: float) -> LazyLogits:
    """Logits and a term."""
    need(logits.weights is None)
    number = r.number(b)
    if number is not None and logits.sink is None:
        return replace(logits, shift=logits.shift + sign * number)
    if number is not None:  # which logits and their sink share
        return logits
    term = r.own_axes(b, logits)
    if logits.sink is not None:
        need(size(term)[-1] == 1)
        return logits
    lead = torch.broadcast_shapes(logits.lead, size(term)[:-2])
    q, k = r.spread(logits.q, lead), r.spread(logits.k, lead)
    return replace(logits, q=q, k=k, terms=(*logits.terms, r.edit.times(term, sign)))


def _side_by_side(r: LogitsReader, a: LazyLogits, b: LazyLogits) -> LazyLogits:
    """The sum of two products: that of their vectors one behind the other."""
    lead = torch.broadcast_shapes(a.lead, b.lead)
    need((a.n, a.m) == (b.n, b.m))
    q = r.edit.call(aten.cat.default, [r.edit.times(r.spread(s.q, lead), s.scale) for s in (a, b)], -1)
    k = r.edit.call(aten.cat.default, [r.spread(s.k, lead) for s in (a, b)], -1)
    return replace(a, q=q, k=k, scale=1.0, shift=a.shift + b.shift, terms=a.terms + b.terms)


def _power(r: LogitsReader, n: Node, a: Any, exponent: Any = 2) -> LazyLogits:
    logits = r.before(a)
    need(logits.form == "distance" and exponent == 2 and not logits.terms and not logits.shift and logits.cap is None)
    return replace(logits, form="squared", scale=logits.scale**2)


def _tanh(r: LogitsReader, n: Node, a: Any) -> LazyLogits:
    logits = r.before(a)
    need(logits.form == "product" and logits.cap is None and not logits.terms and not logits.shift)
    return replace(logits, cap=1.0)


def _fill(r: LogitsReader, n: Node, a: Any, mask: Node, fill: Any) -> LazyLogits:
    logits, low = r.logits(a), r.number(fill, weights=True)
    if logits.weights == "softmax":  # of keys that are hidden already
        need(low == 0)
        return logits
    need(low is not None and (low == 0 if logits.weights else low <= LOW))
    return _hidden(r, logits, r.own_axes(r.edit.call(aten.logical_not.default, mask), logits))


def _where(r: LogitsReader, n: Node, shown: Node, a: Any, b: Any) -> LazyLogits:
    if isinstance(b, Node) and isinstance(r.known.get(b), LazyLogits):
        return _fill(r, n, b, shown, a)
    return _fill(r, n, a, r.edit.call(aten.logical_not.default, shown), b)


def _hidden(r: LogitsReader, logits: LazyLogits, shown: Node) -> LazyLogits:
    """Logits, or weights that a key does not share with others, of the keys that a mask shows."""
    need(logits.sink is None and not logits.beside)
    return replace(logits, terms=(*logits.terms, shown))


def _floor(r: LogitsReader, n: Node, a: Any, least: Any = None, most: Any = None) -> LazyLogits:
    if not isinstance(r.known.get(a), LazyLogits):
        a, least = least, a
    low = r.number(least, weights=True)
    need(low is not None and low <= _FLOOR and most is None)
    return r.before(a)


def _softmax(r: LogitsReader, n: Node, a: Any, dim: int, *_: Any, **__: Any) -> LazyLogits:
    logits = r.logits(a)
    need(logits.weights is None)
    along = dim % len(size(a))
    if along == logits.rows:  # keys then are what was queries
        need(logits.sink is None)
        terms = tuple(map(r.edit.swapped, logits.terms))
        logits = replace(logits, q=logits.k, k=logits.q, rows=logits.cols, cols=logits.rows, terms=terms)
    need(along == logits.cols)
    return replace(logits, weights="softmax")


def _sum(r: LogitsReader, n: Node, a: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> LazyRow | LazyLogits:
    need(dim in ([-1], [len(size(a)) - 1]))
    if a not in r.known:
        squares = name(a) == "square" or (name(a) == "pow" and a.args[1] == 2)
        need((squares or (name(a) == "mul" and a.args[0] is a.args[1])) and not keepdim)
        return _differences(r, a.args[0], "squared")
    logits = r.logits(a)
    need(logits.weights == "exp" and logits.keys_last)
    return LazyRow(logits)


_STEPS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*MATMULS, "einsum"), _product),
    **dict.fromkeys(DISTANCES, _cdist),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(("mul", "multiply"), _times),
    **dict.fromkeys(("div", "true_divide", "divide"), _divide),
    **dict.fromkeys(("sub", "subtract"), lambda r, n, a, b, *, alpha=1: _add(r, n, a, b, alpha=-alpha)),
    **dict.fromkeys(("maximum", "clamp_min", "clamp"), _floor),
    **dict.fromkeys(SOFTMAXES, _softmax),
    **dict.fromkeys(("sigmoid", "special_expit"), lambda r, n, a: replace(r.before(a), weights="sigmoid")),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(PADS, _padded),
    **dict.fromkeys(VIEWS | SLICES | {"nan_to_num"}, _viewed),
    "add": _add,
    "rsub": lambda r, n, a, b, alpha=1: _add(r, n, b, a, alpha=-alpha),
    "neg": lambda r, n, a: _times(r, n, a, -1.0),
    "exp": lambda r, n, a: replace(r.before(a), weights="exp"),
    "pow": _power, "square": _power, "tanh": _tanh, "masked_fill": _fill, "where": _where, "max": _floor, "sum": _sum,
    "index_select": _selected, "getitem": _item,
}  # fmt: skip
