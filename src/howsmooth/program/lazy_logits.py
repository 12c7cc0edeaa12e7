"""What attention that is written out has become so far: which vectors its logits are made of, and what was done to them.

`LogitsReader` walks a graph and knows of each node whether it is logits, or weights made of them: `LazyLogits`. What it cannot
follow is a plain tensor to it. It proposes; whether a reading is right, numbers decide (`howsmooth.program.written_out`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal

import torch
from torch.fx import Node

from howsmooth.program.editing import TURNS, Editor, aten, permutation, size
from howsmooth.program.equations import MATMULS, Equation, equation_of
from howsmooth.program.nodes import is_float, name, order, value

LOW = -1e4  # a fill this low hides a key
_FLOOR = -1e30  # a floor this low is none


class NotAttentionError(Exception):
    """What a node does to logits is no part of attention."""


@dataclass(frozen=True, eq=False)
class LazyLogits:
    """Logits `cap·tanh(scale·form(q, k)) + shift + terms`, without the tanh where there is no cap; their weights once there.

    q, k: (…, n, d) and (…, m, d), the same axes in front.  axes: the node's axis i is the logits' `axes[i]`.  terms: each has
    the axes of the logits, or 1; true hides no key where one is boolean.  sink: a column beside the keys, the first or the
    last.  weights: of logits behind that function.  gain, gains: factors of the output.  beside: further weights, added.
    """

    q: Node
    k: Node
    axes: tuple[int, ...]
    form: Literal["product", "distance", "squared"] = "product"
    scale: float = 1.0
    cap: float | None = None
    shift: float = 0.0
    terms: tuple[Node, ...] = ()
    sink: Node | float | None = None
    sink_first: bool = False
    weights: Literal["exp", "softmax", "sigmoid"] | None = None
    gain: float = 1.0
    gains: tuple[Node, ...] = ()
    beside: "tuple[LazyLogits, ...]" = ()

    @property
    def lead(self) -> tuple[int, ...]:
        return size(self.q)[:-2]

    @property
    def n(self) -> int:
        return size(self.q)[-2]

    @property
    def m(self) -> int:
        return size(self.k)[-2]


@dataclass(frozen=True, eq=False)
class LazyRow:
    """The sum of a row of weights, and of `more`."""

    of: LazyLogits
    more: Node | float = 0.0


@dataclass(frozen=True, eq=False)
class LazyParts:
    """The parts that a node cuts logits into along an axis in front."""

    of: LazyLogits
    cut: Callable[[Node, int], Node]


def _need(fits: bool) -> None:
    if not fits:
        raise NotAttentionError


class LogitsReader:
    """Reads logits and weights off a graph, node by node, in order.

    constant: the number that a node of one entry is; with `weights`, also where it depends on those.
    """

    def __init__(self, edit: Editor, constant: Callable[[Node, bool], float | None]):
        self.edit, self._constant = edit, constant
        self._known: dict[Node, LazyLogits | LazyRow | LazyParts] = {}

    def read(self, n: Node) -> None:
        """Take notice of a node; the editor is at it."""
        step = _STEPS.get(name(n)) if n.op == "call_function" else None
        if step is None or not (name(n) in _BEGINS or any(m in self._known for m in n.all_input_nodes)):
            return
        try:
            given = signature(step).bind(self, n, *n.args, **n.kwargs)
        except TypeError:  # other arguments than those that attention is written with
            return
        try:
            self._known[n] = step(*given.args, **given.kwargs)
        except NotAttentionError:
            return

    def weights(self, n: Node) -> LazyLogits | None:
        """The attention weights that a node is."""
        found = self._known.get(n)
        done = isinstance(found, LazyLogits) and found.weights in ("softmax", "sigmoid")
        return found if done else None

    # what arguments are

    def _logits(self, n: Any) -> LazyLogits:
        found = self._known.get(n) if isinstance(n, Node) else None
        if not isinstance(found, LazyLogits):
            raise NotAttentionError
        return found

    def _before(self, n: Any) -> LazyLogits:
        """Logits, to which one may still do something."""
        found = self._logits(n)
        _need(found.weights is None and found.sink is None)
        return found

    def _number(self, n: Any, weights: bool = False) -> float | None:
        """A number; with `weights` also one that depends on those, or that fills a tensor."""
        if not isinstance(n, Node):
            return None if n is None or isinstance(n, list | tuple) else float(n)
        if weights and name(n) in ("full_like", "full", "new_full"):
            fill = n.args[2 if name(n) == "new_full" else 1]
            return float(fill) if isinstance(fill, int | float) else None
        return self._constant(n, weights) if math.prod(size(n)) == 1 else None

    def _own_axes(self, n: Any, logits: LazyLogits) -> Node:
        """A tensor beside logits, with their axes in their order."""
        _need(isinstance(n, Node) and len(size(n)) <= len(logits.axes))
        while len(size(n)) < len(logits.axes):
            n = self.edit.unsqueeze(n, 0)
        return self.edit.permute(n, [logits.axes.index(c) for c in range(len(logits.axes))])

    # products

    def _product(self, n: Node, *_: Any, **__: Any) -> LazyLogits:
        """The product of two batches of vectors."""
        eq = equation_of(n)
        if eq is None or self.weights(eq.a) is not None or self.weights(eq.b) is not None:
            raise NotAttentionError
        inner = [c for c in eq.left if c in eq.right and c not in eq.out]
        rows, cols = ([c for c in eq.out if c in a and c not in b] for a, b in ((eq.left, eq.right), (eq.right, eq.left)))
        _need(bool(inner and rows and cols) and len(eq.out) == len({*eq.left, *eq.right} - {*inner}))
        _need(eq.a in self.edit.moving or eq.b in self.edit.moving)
        order = [*(c for c in eq.out if c not in (rows[-1], cols[-1])), rows[-1], cols[-1]]
        lead = order[:-2]
        q, k = self.arranged(eq, [*lead, rows[-1]], inner), self.arranged(eq.turned(), [*lead, cols[-1]], inner)
        return LazyLogits(q, k, tuple(order.index(c) for c in eq.out))

    def arranged(self, eq: Equation, front: list[str], last: list[str]) -> Node:
        """The first operand of an equation with its axes in an order, those in front spread out, the last ones as one."""
        order = [c for c in (*front, *last) if c in eq.left]
        n = self.edit.permute(eq.a, [eq.left.index(c) for c in order])
        for i, c in enumerate(front):
            if c not in eq.left:
                n = self.edit.unsqueeze(n, i)
        n = self.edit.expand(n, [*map(eq.size, front), *size(n)[len(front) :]])
        return self.edit.reshape(n, (*size(n)[: len(front)], math.prod(size(n)[len(front) :])))

    def _pair(self, q: Node, k: Node, form: Literal["distance", "squared"]) -> LazyLogits:
        lead = torch.broadcast_shapes(size(q)[:-2], size(k)[:-2])
        q, k = (self.edit.expand(t, (*lead, *size(t)[-2:])) for t in (q, k))
        return LazyLogits(q, k, tuple(range(len(lead) + 2)), form)

    def _cdist(self, _: Node, a: Node, b: Node, p: float = 2.0, *__: Any) -> LazyLogits:
        _need(p == 2)
        return self._pair(a, b, "distance")

    def _differences(self, d: Any, form: Literal["distance", "squared"]) -> LazyLogits:
        """`a_i − b_j` for all i and j, in whichever order they come, of which the last axis is summed."""
        _need(isinstance(d, Node) and name(d) == "sub" and all(isinstance(a, Node) for a in d.args))
        a, b = d.args
        _need(len(size(a)) == len(size(b)) >= 3 and not d.kwargs)
        if size(a)[-3] == 1:
            a, b = b, a
        _need(size(a)[-2] == 1 == size(b)[-3])
        ndim = len(size(a))
        return self._pair(self.edit.squeeze(a, ndim - 2), self.edit.squeeze(b, ndim - 3), form)

    def _norm(self, n: Node, d: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> LazyLogits:
        _need(ord in (2, None) and dim in ([-1], [len(size(d)) - 1]) and not keepdim)
        return self._differences(d, "distance")

    # arithmetic

    def _times(self, n: Node, a: Any, b: Any, *, inverse: bool = False) -> LazyLogits:
        if a is b:
            return self._power(n, a, 2)
        if not isinstance(self._known.get(a), LazyLogits) and not inverse:
            a, b = b, a
        logits, row = self._logits(a), self._known.get(b) if isinstance(b, Node) else None
        if isinstance(row, LazyRow):
            return self._normalised(n, logits, b, row)
        number = self._number(b)
        if number is None:
            return self._times_tensor(logits, self._own_axes(b, logits), inverse)
        number = 1 / number if inverse else number
        if logits.weights is not None:
            return self._all(logits, lambda part: replace(part, gain=part.gain * number))
        _need(logits.sink is None)
        terms = tuple(t if value(t).dtype is torch.bool else self.edit.times(t, number) for t in logits.terms)
        scaled = {"scale": logits.scale * number} if logits.cap is None else {"cap": logits.cap * number}
        return replace(logits, **scaled, shift=logits.shift * number, terms=terms)

    def _all(self, logits: LazyLogits, change: Callable[[LazyLogits], LazyLogits]) -> LazyLogits:
        """A change of weights, those beside them too."""
        _need(logits.weights != "exp")
        return replace(change(logits), beside=tuple(map(change, logits.beside)))

    def _times_tensor(self, logits: LazyLogits, by: Node, inverse: bool) -> LazyLogits:
        """Logits times a tensor that is the same for all keys, or for all queries: a factor of the vectors on the other side."""
        op = aten.div.Tensor if inverse else aten.mul.Tensor
        if logits.weights is not None:
            if size(by)[-1] == 1:
                _need(not self._made_of(by, logits))
                by = self.edit.call(aten.reciprocal.default, by) if inverse else by
                return self._all(logits, lambda part: replace(part, gains=(*part.gains, by)))
            _need(not inverse and logits.weights != "softmax" and not logits.beside)
            return replace(logits, terms=(*logits.terms, self.edit.call(aten.ne.Scalar, by, 0)))  # a mask of 0 and 1
        _need(logits.cap is None and logits.sink is None and 1 in size(by)[-2:])
        terms = [t if value(t).dtype is torch.bool else self.edit.call(op, t, by) for t in logits.terms]
        if logits.shift:
            one = self.edit.call(aten.full_like.default, by, logits.shift)
            terms.append(self.edit.call(op, one, by))
        logits = replace(logits, shift=0.0, terms=tuple(terms))
        if logits.form != "product":
            _need(logits.form == "squared" and size(by)[-2:] == (1, 1))
            by = self.edit.call(aten.sqrt.default, by)
            return replace(logits, q=self.edit.call(op, logits.q, by), k=self.edit.call(op, logits.k, by))
        if size(by)[-1] == 1:
            return replace(logits, q=self.edit.call(op, logits.q, by))
        return replace(logits, k=self.edit.call(op, logits.k, self.edit.swapped(by)))

    def _made_of(self, n: Node, logits: LazyLogits) -> bool:
        """Whether a tensor is made of logits of the same keys, which then are there in any case."""
        todo, visited = [n], set[Node]()
        while todo:
            m = todo.pop()
            known = self._known.get(m)
            if isinstance(known, LazyLogits) and known.k is logits.k:
                return True
            if m not in visited and order(m) > order(logits.k):
                visited.add(m)
                todo += m.all_input_nodes
        return False

    def _normalised(self, n: Node, logits: LazyLogits, b: Node, row: LazyRow) -> LazyLogits:
        """`exp(s)` over its own sum, and what is added to that: a sink."""
        last = logits.axes[-1] == len(logits.axes) - 1
        _need(row.of is logits and logits.weights == "exp" and last and size(b) == (*size(n)[:-1], 1))
        if row.more == 0:
            return replace(logits, weights="softmax")
        if not isinstance(row.more, Node):
            return replace(logits, weights="softmax", sink=math.log(row.more) if row.more > 0 else math.nan)
        return replace(logits, weights="softmax", sink=self.edit.call(aten.log.default, self._own_axes(row.more, logits)))

    def _negative(self, n: Node, a: Any) -> LazyLogits:
        return self._times(n, a, -1.0)

    def _divide(self, n: Node, a: Any, b: Any, **_: Any) -> LazyLogits:
        _need(not _.get("rounding_mode"))
        return self._times(n, a, b, inverse=True)

    def _add(self, n: Node, a: Any, b: Any, *, alpha: float = 1) -> LazyLogits | LazyRow:
        known_a, known_b = (self._known.get(t) if isinstance(t, Node) else None for t in (a, b))
        for row, more in ((known_a, b), (known_b, a)):
            if isinstance(row, LazyRow):
                _need(row.more == 0 and alpha == 1)
                number = self._number(more)
                return replace(row, more=more if number is None else number)
        if isinstance(known_b, LazyLogits) and (
            not isinstance(known_a, LazyLogits) or (known_a.weights is None) != (known_b.weights is None)
        ):
            return self._plus(self._times(n, b, float(alpha)), a, 1.0)
        logits = self._logits(a)
        if isinstance(known_b, LazyLogits) and known_b.axes == logits.axes and len(logits.axes) == len(known_b.axes):
            other = self._times(n, b, float(alpha))
            if logits.weights is not None:
                _need(other.lead == logits.lead and (other.n, other.m) == (logits.n, logits.m) and other.weights != "exp")
                return replace(logits, beside=(*logits.beside, replace(other, beside=()), *other.beside))
            if all(s.form == "product" and s.cap is None and s.sink is None for s in (logits, other)):
                return self._side_by_side(logits, other)
        return self._plus(logits, b, float(alpha))

    def _subtract(self, n: Node, a: Any, b: Any, *, alpha: float = 1) -> LazyLogits | LazyRow:
        return self._add(n, a, b, alpha=-alpha)

    def _subtracted(self, n: Node, a: Any, b: Any, alpha: float = 1) -> LazyLogits | LazyRow:
        return self._add(n, b, a, alpha=-alpha)

    def _plus(self, logits: LazyLogits, b: Any, sign: float) -> LazyLogits:
        """Logits and a term."""
        _need(logits.weights is None)
        number = self._number(b)
        if number is not None and logits.sink is None:
            return replace(logits, shift=logits.shift + sign * number)
        if number is not None:  # which logits and their sink share
            return logits
        term = self._own_axes(b, logits)
        if logits.sink is not None:
            _need(size(term)[-1] == 1)
            return logits
        lead = torch.broadcast_shapes(logits.lead, size(term)[:-2])
        logits = self._in_front(logits, lead, lambda t: self.edit.expand(t, (*lead, *size(t)[-2:])))
        return replace(logits, terms=(*logits.terms, self.edit.times(term, sign)))

    def _side_by_side(self, a: LazyLogits, b: LazyLogits) -> LazyLogits:
        """The sum of two products: that of their vectors one behind the other."""
        lead = torch.broadcast_shapes(a.lead, b.lead)
        a, b = (self._in_front(s, lead, lambda t: self.edit.expand(t, (*lead, *size(t)[-2:]))) for s in (a, b))
        _need((a.n, a.m) == (b.n, b.m))
        q = self.edit.call(aten.cat.default, [self.edit.times(a.q, a.scale), self.edit.times(b.q, b.scale)], -1)
        k = self.edit.call(aten.cat.default, [a.k, b.k], -1)
        return replace(a, q=q, k=k, scale=1.0, shift=a.shift + b.shift, terms=a.terms + b.terms)

    def _power(self, n: Node, a: Any, exponent: Any = 2) -> LazyLogits:
        logits = self._before(a)
        _need(logits.form == "distance" and exponent == 2 and not logits.terms and not logits.shift and logits.cap is None)
        return replace(logits, form="squared", scale=logits.scale**2)

    def _tanh(self, n: Node, a: Any) -> LazyLogits:
        logits = self._before(a)
        _need(logits.form == "product" and logits.cap is None and not logits.terms and not logits.shift)
        return replace(logits, cap=1.0)

    # keys that are hidden

    def _fill(self, n: Node, a: Any, mask: Node, fill: Any) -> LazyLogits:
        logits, low = self._logits(a), self._number(fill, weights=True)
        if logits.weights == "softmax":  # of keys that are hidden already
            _need(low == 0)
            return logits
        _need(low is not None and (low == 0 if logits.weights else low <= LOW))
        return self._hidden(logits, self.edit.call(aten.logical_not.default, mask))

    def _where(self, n: Node, shown: Node, a: Any, b: Any) -> LazyLogits:
        if isinstance(b, Node) and isinstance(self._known.get(b), LazyLogits):
            return self._fill(n, b, shown, a)
        return self._fill(n, a, self.edit.call(aten.logical_not.default, shown), b)

    def _hidden(self, logits: LazyLogits, shown: Node) -> LazyLogits:
        _need(logits.sink is None and not logits.beside)
        return replace(logits, terms=(*logits.terms, self._own_axes(shown, logits)))

    def _floor(self, n: Node, a: Any, least: Any = None, most: Any = None) -> LazyLogits:
        if not isinstance(self._known.get(a), LazyLogits):
            a, least = least, a
        low = self._number(least, weights=True)
        _need(low is not None and low <= _FLOOR and most is None)
        return self._before(a)

    # weights

    def _softmax(self, n: Node, a: Any, dim: int, *_: Any, **__: Any) -> LazyLogits:
        logits = self._logits(a)
        _need(logits.weights is None)
        along, last = logits.axes[dim], len(logits.axes) - 1
        if along == last - 1:  # over queries: keys then are what was queries
            _need(logits.sink is None)
            axes = tuple({last: last - 1, last - 1: last}.get(c, c) for c in logits.axes)
            terms = tuple(self.edit.swapped(t) for t in logits.terms)
            logits, along = replace(logits, q=logits.k, k=logits.q, axes=axes, terms=terms), last
        _need(along == last)
        return replace(logits, weights="softmax")

    def _sigmoid(self, n: Node, a: Any) -> LazyLogits:
        return replace(self._before(a), weights="sigmoid")

    def _exp(self, n: Node, a: Any) -> LazyLogits:
        return replace(self._before(a), weights="exp")

    def _sum(self, n: Node, a: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> LazyRow | LazyLogits:
        _need(dim in ([-1], [len(size(a)) - 1]))
        if a not in self._known:
            squares = name(a) == "square" or (name(a) == "pow" and a.args[1] == 2)
            _need((squares or (name(a) == "mul" and a.args[0] is a.args[1])) and not keepdim)
            return self._differences(a.args[0], "squared")
        logits = self._logits(a)
        _need(logits.weights == "exp" and logits.axes[-1] == len(logits.axes) - 1)
        return LazyRow(logits)

    # axes

    def _cat(self, n: Node, tensors: Any, dim: int = 0) -> LazyLogits:
        """Logits with a column of their own beside the keys: a sink."""
        _need(len(tensors) == 2)
        first = isinstance(self._known.get(tensors[1]), LazyLogits)
        a, sink = (tensors[1], tensors[0]) if first else tensors
        logits = self._before(a)
        _need(logits.axes[dim] == len(logits.axes) - 1 and size(sink)[dim] == 1)
        return replace(logits, sink=self._own_axes(sink, logits), sink_first=first)

    def _pad(self, n: Node, a: Any, pad: Any, *rest: Any, **given: Any) -> LazyLogits:
        """The same with a constant column."""
        logits, number = self._before(a), {"value": rest[-1] if rest else None, **given}["value"]
        number = 0 if isinstance(number, str) or number is None else number
        _need(
            list(pad) in ([0, 1], [1, 0])
            and logits.axes[-1] == len(logits.axes) - 1
            and given.get("mode", 0) in (0, "constant")
        )
        return replace(logits, sink=float(number), sink_first=list(pad) == [1, 0])

    def _slice(self, n: Node, a: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> LazyLogits:
        """All keys but the sink, or some of what lies in front."""
        logits, length = self._logits(a), size(a)[dim]
        kept = range(*slice(start, end, step).indices(length))
        if kept == range(length):
            return logits
        if logits.axes[dim] < len(logits.axes) - 2:
            return self._part(n, a, dim, start, end, step)
        keys = range(1, logits.m + 1) if logits.sink_first else range(logits.m)
        _need(logits.axes[dim] == len(logits.axes) - 1 and logits.weights == "softmax" and length == logits.m + 1)
        _need(kept == keys)
        return logits

    def _narrow(self, n: Node, a: Any, dim: int, start: int, length: int) -> LazyLogits:
        return self._slice(n, a, dim, start, start + length)

    def _part(self, n: Node, a: Any, dim: int = 0, *rest: Any) -> LazyLogits:
        """Some of what lies in front."""
        logits, dim = self._logits(a), dim % len(size(a))
        _need(dim < len(logits.axes) - 2)
        lead = size(n)[:-2]
        return self._in_front(logits, lead, lambda t: self.edit.call(n.target, t, dim, *rest))

    def _parts(self, n: Node, a: Any, *rest: Any, **given: int) -> LazyParts:
        logits, counts = self._logits(a), rest[: name(n) != "unbind"]
        axis = (*rest[len(counts) :], given.get("dim", 0))[0] % len(size(a))
        _need(axis < len(logits.axes) - 2)
        return LazyParts(logits, lambda t, i: self.edit.item(self.edit.call(n.target, t, *counts, axis), i))

    def _item(self, n: Node, a: Any, index: int) -> LazyLogits:
        parts = self._known.get(a)
        if not isinstance(parts, LazyParts):
            raise NotAttentionError
        return self._in_front(parts.of, size(n)[:-2], lambda t: parts.cut(t, index))

    def _turned(self, n: Node, a: Any, *_: Any) -> LazyLogits:
        logits = self._logits(a)
        return replace(logits, axes=tuple(logits.axes[p] for p in permutation(n)))

    def _shaped(self, n: Node, a: Any, *_: Any, **__: Any) -> LazyLogits | LazyRow:
        """The same with other axes in front, or in another precision."""
        known = self._known.get(a)
        if known is None or isinstance(known, LazyParts) or not is_float(n):
            raise NotAttentionError
        old, new = size(a), size(n)
        if isinstance(known, LazyRow):
            _need(math.prod(old) == math.prod(new))
            return known
        if old == new:
            return self._logits(a)
        logits, lead = self._logits(a), new[:-2]
        _need(len(new) >= 2 and old[-2:] == new[-2:] and math.prod(lead) == math.prod(old[:-2]))
        return self._in_front(logits, lead, lambda t: self.edit.reshape(t, (*lead, *size(t)[-2:])))

    def _spread(self, n: Node, a: Any, *_: Any, **__: Any) -> LazyLogits:
        logits, lead = self._logits(a), size(n)[:-2]
        _need(size(a)[-2:] == size(n)[-2:])
        return self._in_front(logits, lead, lambda t: self.edit.expand(t, (*lead, *size(t)[-2:])))

    def _in_front(self, logits: LazyLogits, lead: tuple[int, ...], f: Callable[[Node], Node]) -> LazyLogits:
        """The same with `f` done to everything along the axes in front, spread out where it is not the same for all."""
        if lead == logits.lead:
            return logits
        count = len(logits.axes) - 2
        _need(logits.axes[:-2] == tuple(range(count)))

        def spread(t: Node) -> Node:
            if all(s == 1 for s in size(t)[:-2]):
                return self.edit.reshape(t, (*(1 for _ in lead), *size(t)[-2:]))
            return f(self.edit.expand(t, (*logits.lead, *size(t)[-2:])))

        def change(part: LazyLogits) -> LazyLogits:
            return replace(
                part,
                q=f(part.q),
                k=f(part.k),
                axes=(*range(len(lead)), *(c - count + len(lead) for c in logits.axes[-2:])),
                terms=tuple(map(spread, part.terms)),
                sink=spread(part.sink) if isinstance(part.sink, Node) else part.sink,
                gains=tuple(map(spread, part.gains)),
            )

        return replace(change(logits), beside=tuple(map(change, logits.beside)))


_BEGINS = MATMULS | {"einsum", "cdist", "_euclidean_dist", "linalg_vector_norm", "norm", "sum"}
_R = LogitsReader
_STEPS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*MATMULS, "einsum"), _R._product),
    **dict.fromkeys(("cdist", "_euclidean_dist"), _R._cdist),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _R._norm),
    **dict.fromkeys(("mul", "multiply"), _R._times),
    **dict.fromkeys(("div", "true_divide", "divide"), _R._divide),
    **dict.fromkeys(("sub", "subtract"), _R._subtract),
    **dict.fromkeys(("maximum", "clamp_min", "clamp"), _R._floor),
    **dict.fromkeys(("softmax", "_softmax", "_safe_softmax", "special_softmax"), _R._softmax),
    **dict.fromkeys(("sigmoid", "special_expit"), _R._sigmoid),
    **dict.fromkeys(("cat", "concat", "concatenate"), _R._cat),
    **dict.fromkeys(("pad", "constant_pad_nd"), _R._pad),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unbind"), _R._parts),
    **dict.fromkeys(("select", "index_select"), _R._part),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _R._spread),
    **dict.fromkeys(TURNS, _R._turned),
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "clone", "contiguous", "alias",
         "detach", "to", "_to_copy", "type_as", "float", "double", "dropout", "view_as", "reshape_as", "nan_to_num"),
        _R._shaped,
    ),
    "add": _R._add, "rsub": _R._subtracted, "neg": _R._negative, "pow": _R._power, "square": _R._power, "tanh": _R._tanh,
    "masked_fill": _R._fill, "where": _R._where, "max": _R._floor, "exp": _R._exp, "sum": _R._sum, "slice": _R._slice,
    "narrow": _R._narrow, "getitem": _R._item,
}  # fmt: skip
