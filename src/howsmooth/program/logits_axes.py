"""Products that attention's logits begin with, and steps on the axes of logits: columns beside the keys, what lies in front."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from howsmooth.program.editing import size
from howsmooth.program.equations import equation_of
from howsmooth.program.lazy_logits import LazyLogits, LazyRow, LogitsReader, NotAttentionError, need
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
    lead = [c for c in eq.out if c not in (rows[-1], cols[-1])]
    q, k = r.arranged(eq, [*lead, rows[-1]], inner), r.arranged(eq.turned(), [*lead, cols[-1]], inner)
    return LazyLogits(q, k, eq.out.index(rows[-1]), eq.out.index(cols[-1]))


def _pair(r: LogitsReader, q: Node, k: Node, form: Literal["distance", "squared"]) -> LazyLogits:
    """The logits of pairs of vectors."""
    lead = torch.broadcast_shapes(size(q)[:-2], size(k)[:-2])
    return LazyLogits(r.spread(q, lead), r.spread(k, lead), len(lead), len(lead) + 1, form)


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
    need(logits.cols == dim % len(size(a)) and size(sink)[dim] == 1)
    return replace(logits, sink=r.own_axes(sink, logits), sink_first=first)


def padded(r: LogitsReader, n: Node, a: Any, pad: Any, *rest: Any, value: float | None = None) -> LazyLogits:
    """Logits with a column of one number beside the keys."""
    logits, number = r.before(a), next((t for t in rest if isinstance(t, int | float)), value)
    need(list(pad) in ([0, 1], [1, 0]) and logits.keys_last)
    return replace(logits, sink=float(number or 0), sink_first=list(pad) == [1, 0])


def viewed(r: LogitsReader, n: Node, a: Any, *_: Any, **__: Any) -> LazyLogits | LazyRow | tuple[LazyLogits, ...]:
    """The same, or parts of it, in other places, or in another precision."""
    known = r.known.get(a)
    if known is None or isinstance(known, tuple) or not is_float(n):
        raise NotAttentionError
    if isinstance(known, LazyRow):
        need(math.prod(size(n)) == math.prod(size(a)))
        return known
    before, after = torch.empty(size(a), device="meta"), r.edit.outcome(n)
    return r.view(known, before, after) if isinstance(after, Tensor) else tuple(r.view(known, before, t) for t in after)


def item(r: LogitsReader, n: Node, a: Any, index: int) -> LazyLogits:
    """One of several parts."""
    parts = r.known.get(a)
    if not isinstance(parts, tuple):
        raise NotAttentionError
    return parts[index]


def selected(r: LogitsReader, n: Node, a: Any, dim: int, index: Node) -> LazyLogits:
    """Some of what lies in front, by their places."""
    logits = r.logits(a)
    *front, _, _ = logits.order
    need(dim % len(size(a)) in front)
    axis, lead = front.index(dim % len(size(a))), tuple(size(n)[d] for d in front)
    return r.in_front(logits, lead, lambda t: r.edit.call(n.target, t, axis, index))
