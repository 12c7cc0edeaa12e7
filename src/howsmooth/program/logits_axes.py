"""Products that attention's logits begin with, and steps on the axes of logits: columns beside the keys, what lies in front."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.fx import Node

from howsmooth.program.editing import permutation, size
from howsmooth.program.equations import equation_of
from howsmooth.program.lazy_logits import LazyLogits, LazyParts, LazyRow, LogitsReader, NotAttentionError, need
from howsmooth.program.nodes import is_float, name


def product(r: LogitsReader, n: Node, *_: Any, **__: Any) -> LazyLogits:
    """The product of two batches of vectors."""
    eq = equation_of(n)
    if eq is None or r.weights(eq.a) is not None or r.weights(eq.b) is not None:
        raise NotAttentionError
    inner = [c for c in eq.left if c in eq.right and c not in eq.out]
    rows, cols = ([c for c in eq.out if c in a and c not in b] for a, b in ((eq.left, eq.right), (eq.right, eq.left)))
    need(bool(inner and rows and cols) and len(eq.out) == len({*eq.left, *eq.right} - {*inner}))
    need(eq.a in r.edit.moving or eq.b in r.edit.moving)
    order = [*(c for c in eq.out if c not in (rows[-1], cols[-1])), rows[-1], cols[-1]]
    lead = order[:-2]
    q, k = r.arranged(eq, [*lead, rows[-1]], inner), r.arranged(eq.turned(), [*lead, cols[-1]], inner)
    return LazyLogits(q, k, tuple(order.index(c) for c in eq.out))


def _pair(r: LogitsReader, q: Node, k: Node, form: Literal["distance", "squared"]) -> LazyLogits:
    """The logits of pairs of vectors."""
    lead = torch.broadcast_shapes(size(q)[:-2], size(k)[:-2])
    q, k = (r.edit.expand(t, (*lead, *size(t)[-2:])) for t in (q, k))
    return LazyLogits(q, k, tuple(range(len(lead) + 2)), form)


def cdist(r: LogitsReader, _: Node, a: Node, b: Node, p: float = 2.0, *__: Any) -> LazyLogits:
    """The distances of two batches of vectors."""
    need(p == 2)
    return _pair(r, a, b, "distance")


def differences(r: LogitsReader, d: Any, form: Literal["distance", "squared"]) -> LazyLogits:
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


def norm(r: LogitsReader, n: Node, d: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> LazyLogits:
    """The lengths of differences."""
    need(ord in (2, None) and dim in ([-1], [len(size(d)) - 1]) and not keepdim)
    return differences(r, d, "distance")


def cat(r: LogitsReader, n: Node, tensors: Any, dim: int = 0) -> LazyLogits:
    """Logits with a column of their own beside the keys: a sink."""
    need(len(tensors) == 2)
    first = isinstance(r.known.get(tensors[1]), LazyLogits)
    a, sink = (tensors[1], tensors[0]) if first else tensors
    logits = r.before(a)
    need(logits.axes[dim] == len(logits.axes) - 1 and size(sink)[dim] == 1)
    return replace(logits, sink=r.own_axes(sink, logits), sink_first=first)


def padded(r: LogitsReader, n: Node, a: Any, pad: Any, *rest: Any, value: float | None = None) -> LazyLogits:
    """Logits with a column of one number beside the keys."""
    logits, number = r.before(a), next((t for t in rest if isinstance(t, int | float)), value)
    need(list(pad) in ([0, 1], [1, 0]) and logits.axes[-1] == len(logits.axes) - 1)
    return replace(logits, sink=float(number or 0), sink_first=list(pad) == [1, 0])


def sliced(r: LogitsReader, n: Node, a: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> LazyLogits:
    """All keys but the column beside them, or some of what lies in front."""
    logits, length = r.logits(a), size(a)[dim]
    kept = range(*slice(start, end, step).indices(length))
    if kept == range(length):
        return logits
    if logits.axes[dim] < len(logits.axes) - 2:
        return selected(r, n, a, dim, start, end, step)
    keys = range(1, logits.m + 1) if logits.sink_first else range(logits.m)
    need(logits.axes[dim] == len(logits.axes) - 1 and logits.weights == "softmax" and length == logits.m + 1)
    need(kept == keys)
    return logits


def narrow(r: LogitsReader, n: Node, a: Any, dim: int, start: int, length: int) -> LazyLogits:
    """Some of the keys, or of what lies in front."""
    return sliced(r, n, a, dim, start, start + length)


def selected(r: LogitsReader, n: Node, a: Any, dim: int = 0, *rest: Any) -> LazyLogits:
    """Some of what lies in front."""
    logits, dim = r.logits(a), dim % len(size(a))
    need(dim < len(logits.axes) - 2)
    lead = size(n)[:-2]
    return r.in_front(logits, lead, lambda t: r.edit.call(n.target, t, dim, *rest))


def cut(r: LogitsReader, n: Node, a: Any, *rest: Any, **given: int) -> LazyParts:
    """Parts along an axis in front."""
    logits, counts = r.logits(a), rest[: name(n) != "unbind"]
    axis = (*rest[len(counts) :], given.get("dim", 0))[0] % len(size(a))
    need(axis < len(logits.axes) - 2)
    return LazyParts(logits, lambda t, i: r.edit.item(r.edit.call(n.target, t, *counts, axis), i))


def item(r: LogitsReader, n: Node, a: Any, index: int) -> LazyLogits:
    """One of those parts."""
    parts = r.known.get(a)
    if not isinstance(parts, LazyParts):
        raise NotAttentionError
    return r.in_front(parts.of, size(n)[:-2], lambda t: parts.cut(t, index))


def turned(r: LogitsReader, n: Node, a: Any, *_: Any) -> LazyLogits:
    """The same with axes in another order."""
    logits = r.logits(a)
    return replace(logits, axes=tuple(logits.axes[p] for p in permutation(n)))


def shaped(r: LogitsReader, n: Node, a: Any, *_: Any, **__: Any) -> LazyLogits | LazyRow:
    """The same with other axes in front, or in another precision."""
    known = r.known.get(a)
    if known is None or isinstance(known, LazyParts) or not is_float(n):
        raise NotAttentionError
    old, new = size(a), size(n)
    if isinstance(known, LazyRow):
        need(math.prod(old) == math.prod(new))
        return known
    if old == new:
        return r.logits(a)
    logits, lead = r.logits(a), new[:-2]
    need(len(new) >= 2 and old[-2:] == new[-2:] and math.prod(lead) == math.prod(old[:-2]))
    return r.in_front(logits, lead, lambda t: r.edit.reshape(t, (*lead, *size(t)[-2:])))


def spread_out(r: LogitsReader, n: Node, a: Any, *_: Any, **__: Any) -> LazyLogits:
    """The same for all along an axis in front."""
    logits, lead = r.logits(a), size(n)[:-2]
    need(size(a)[-2:] == size(n)[-2:])
    return r.in_front(logits, lead, lambda t: r.edit.expand(t, (*lead, *size(t)[-2:])))
