"""Rows with every bound beside what was measured."""

from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor

from howsmooth.maps import Attention
from howsmooth.models import Measurement
from howsmooth.study.jobs import Row
from howsmooth.theory import Bound, point_bounds
from howsmooth.theory.constants import Constants, constants
from howsmooth.theory.over_ball.table import rows_over_ball

# norms of weights, which take longer than the rest; of the layers that a worker holds, which stay as they were read off
_KNOWN: WeakKeyDictionary[Attention, Constants] = WeakKeyDictionary()


def bounds_row(m: Measurement, attn: Attention, x: Tensor) -> Row:
    """One row with every bound at the input, and over the ball that just holds its tokens."""
    if attn not in _KNOWN:
        _KNOWN[attn] = replace(constants(replace(attn.to("cpu"))))  # the layer is another one, or it would keep itself here
    known = replace(_KNOWN[attn])  # what rows derive from it, larger than the layer, goes with them
    bounds = [_cells("point", b) for b in point_bounds(attn, x)]
    bounds += [_cells("ball", b) for b in rows_over_ball(known, m.n, m.radius_max)]
    return m.row("bounds", bounds=bounds)


def _cells(where: str, bound: Bound) -> Row:
    names = ("id", "name", "side", "log_value", "statement", "source", "reason")
    return {"where": where, **{name: getattr(bound, name) for name in names}}
