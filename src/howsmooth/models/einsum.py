"""Equations of `torch.einsum` that attention is written in: queries with keys, and weights with values."""

from typing import Any, NamedTuple

from torch import Tensor


class _Equation(NamedTuple):
    """Letters of both operands and of what comes out."""

    a: str
    b: str
    out: str


def _read(equation: Any, a: Any, b: Any) -> _Equation | None:
    """An equation of two operands with all its letters; nothing where an axis is repeated or left to be guessed."""
    if not isinstance(equation, str) or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    if not arrow or not comma or "," in right:
        return None
    if "..." in equation:  # as many axes as are left over, named by capitals that nobody uses
        counts = {t.ndim - len(side.replace("...", "")) for t, side in ((a, left), (b, right)) if "..." in side}
        if len(counts) != 1 or min(counts) < 0:
            return None
        names = [c for c in "ZYXWVU" if c not in equation][: counts.pop()]
        left, right, out = (side.replace("...", "".join(names)) for side in (left, right, out))
    if any(len(set(side)) != len(side) for side in (left, right, out)):
        return None
    return _Equation(left, right, out) if (len(left), len(right)) == (a.ndim, b.ndim) else None


def turned(equation: str) -> str:
    """The same equation with its operands in the other order.

    >>> turned("bjd,bij->bid")
    'bij,bjd->bid'
    """
    inputs, arrow, out = equation.partition("->")
    left, comma, right = inputs.partition(",")
    return right + comma + left + arrow + out


def scores_of(equation: Any, a: Any, b: Any) -> tuple[Tensor, Tensor] | None:
    """Queries (…, n, d) and keys (…, m, d) of `bhid,bhjd->bhij` in any order of axes; nothing where it is no such product.

    >>> import torch
    >>> q, k = scores_of("bihd,bjhd->bhij", torch.zeros(1, 5, 2, 3), torch.zeros(1, 7, 2, 3))
    >>> q.shape, k.shape
    (torch.Size([1, 2, 5, 3]), torch.Size([1, 2, 7, 3]))
    """
    read = _read(equation, a, b) if type(a) is Tensor and type(b) is Tensor else None
    if read is None or len(read.out) < 3:
        return None
    *lead, i, j = read.out
    if i in read.b:  # keys came first
        a, b, read = b, a, _Equation(read.b, read.a, read.out)
    inner = [c for c in read.a if c not in read.out]
    if len(inner) != 1 or set(read.a) != {*lead, i, *inner} or set(read.b) != {*lead, j, *inner}:
        return None
    return a.permute(*(read.a.index(c) for c in (*lead, i, *inner))), b.permute(*(read.b.index(c) for c in (*lead, j, *inner)))


def values_of(equation: Any, weights: Any, v: Any = None, *more: Any) -> tuple[Tensor, Tensor, list[int]] | None:
    """Weights (…, n, m), values that broadcast to (…, m, d), and the order in which the axes of their product come out.

    >>> import torch
    >>> p, v, order = values_of("bhij,bjhd->bihd", torch.zeros(1, 2, 5, 7), torch.zeros(1, 7, 2, 3))
    >>> v.shape, order
    (torch.Size([1, 2, 7, 3]), [0, 2, 1, 3])
    """
    read = None if more else _read(equation, weights, v)
    if read is None or len(read.a) < 3:
        return None
    *lead, i, j = read.a
    outer = [c for c in read.b if c not in read.a]
    if len(outer) != 1 or j not in read.b or j in read.out or i in read.b or set(read.out) != {*lead, i, *outer}:
        return None
    shared = [c for c in lead if c in read.b]
    if set(read.b) != {*shared, j, *outer}:
        return None
    v = v.permute(*(read.b.index(c) for c in (*shared, j, *outer)))
    for axis, c in enumerate(lead):  # one for all where they do not differ
        v = v if c in read.b else v.unsqueeze(axis)
    return weights, v, [(*lead, i, *outer).index(c) for c in read.out]
