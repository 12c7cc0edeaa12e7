"""Ascent on `L(X)` over a set: many starts in one batch, curvature learned on the way, no step that loses."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.search.gradient import pairs_at, steepest
from howsmooth.search.sets import TokenSet
from howsmooth.solve import Function
from howsmooth.spectral import TopPairs

_FIRST = 0.1  # first step, in units of the set's size for each token that moves
_LONGER, _SHORTER = 1.6, 0.35  # what a step that gained, and one that did not, make of the longest step allowed
_LEAST, _AGAIN = 1e-6, 0.02  # a longest step below the first, in units of the set's size, starts again from the second
_PATIENCE = 2  # losses in a row after which what was learned of the curvature is forgotten
_REST = 24  # losses in a row after which a start has arrived
_MEMORY = 5


class Climb(NamedTuple):
    """What became of every start.

    z: coordinates reached, (starts, n, d).  value: `L` there.  began: `L` at the starts.  trace: the best `L` of all, at the
    starts and after each step.
    """

    z: Float[Tensor, "starts n d"]
    value: Float[Tensor, " starts"]
    began: Float[Tensor, " starts"]
    trace: tuple[float, ...]


def ascend(f: Function, space: TokenSet, starts: Float[Tensor, "starts n d"], *, steps: int, keep: int, seed: int = 0) -> Climb:
    """Move every start uphill, the top pair re-solved at every step.

    Projected quasi-Newton (L-BFGS) on `log L` in a radius that grows with every gain and shrinks with every loss; a trial that
    does not gain is taken back, so `L` never falls (docs/explanation/worst-inputs.md §2). After a third and two thirds of the
    steps only the better starts go on, at last `keep` of them.

    f: a map or a batched function.  space: the set.  starts: coordinates, projected first.  steps: measurements of each start.
    """
    z = space.project(starts)
    pairs = pairs_at(f, space.tokens(z), None, seed)
    began, value, reached = pairs.value[0].clone(), pairs.value[0].clone(), z.clone()
    active = torch.arange(len(z), device=z.device)
    radius = torch.full_like(began, _FIRST * space.size * z.shape[1] ** 0.5)
    losses = torch.zeros_like(active)
    slope = _slope(f, space, z, pairs)
    memory = _Memory.empty(z)
    trace = [float(value.max())]
    for k in range(steps):
        move = space.tangent(z, memory.newton(slope))
        uphill = _dot(move, slope) > 1e-6 * _length(move) * _length(slope)
        learned = (memory.inverse > 0).any(0) & uphill
        move = torch.where(learned[:, None, None], move, slope)
        length = _length(move).clamp_min(torch.finfo(z.dtype).tiny)
        scale = torch.where(learned, (radius / length).clamp_max(1.0), radius / length)
        trial = space.project(z + scale[:, None, None] * move)
        ahead = pairs_at(f, space.tokens(trial), pairs.right[0], seed)
        gained = ahead.value[0] > pairs.value[0] * (1 + 4 * torch.finfo(z.dtype).eps)
        taken = scale * length
        radius = torch.where(gained, torch.maximum(radius, _LONGER * taken), _SHORTER * taken)
        radius = torch.where(radius < _LEAST * space.size, _AGAIN * space.size, radius)
        losses = torch.where(gained, 0, losses + 1)
        items = torch.nonzero(gained)[:, 0]
        if len(items):
            pairs = pairs.put(items, ahead.select(items))
            new = _slope(f, space, trial[items], ahead.select(items))
            memory.learn(items, trial[items] - z[items], slope[items] - new)
            z, slope = z.clone(), slope.clone()
            z[items], slope[items] = trial[items], new
        memory.inverse[:, losses >= _PATIENCE] = 0.0
        value[active], reached[active] = pairs.value[0], z
        trace.append(float(value.max()))
        on = torch.nonzero(losses < _REST)[:, 0]
        on = on[pairs.value[0, on].argsort(descending=True)[: _left(k, steps, len(began), keep)]]
        if len(on) == 0:
            break
        if len(on) < len(active):
            active, z, radius, losses, slope = active[on], z[on], radius[on], losses[on], slope[on]
            pairs, memory = pairs.select(on), memory.select(on)
    return Climb(reached, value, began, tuple(trace))


def _left(k: int, steps: int, starts: int, keep: int) -> int:
    """How many starts go on after step `k`."""
    keep = min(keep, starts)
    if 3 * (k + 1) < steps:
        return starts
    return keep if 3 * (k + 1) >= 2 * steps else max(keep, round((starts * keep) ** 0.5))


def _slope(f: Function, space: TokenSet, z: Tensor, pairs: TopPairs) -> Float[Tensor, "batch n d"]:
    """The gradient of `log L` in the set; zero where `L` is zero or has no derivative."""
    g = steepest(f, space.tokens, z, pairs) / pairs.value[0, :, None, None]
    return space.tangent(z, torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0))


def _dot(a: Tensor, b: Tensor) -> Float[Tensor, " batch"]:
    return (a * b).sum((-2, -1))


def _length(a: Tensor) -> Float[Tensor, " batch"]:
    return a.flatten(1).norm(dim=-1)


class _Memory(NamedTuple):
    """The last moves `s` and falls of the slope `y` of every start, the newest first, and what they say of the curvature."""

    s: Float[Tensor, "memory batch n d"]
    y: Float[Tensor, "memory batch n d"]
    inverse: Float[Tensor, "memory batch"]  # 1/⟨s, y⟩, zero where there is nothing

    @classmethod
    def empty(cls, z: Float[Tensor, "batch n d"]) -> "_Memory":
        return cls(z.new_zeros(_MEMORY, *z.shape), z.new_zeros(_MEMORY, *z.shape), z.new_zeros(_MEMORY, len(z)))

    def learn(self, items: Tensor, s: Tensor, y: Tensor) -> None:
        """Remember what bends down; the rest is no curvature of a hilltop."""
        down = _dot(s, y) > 1e-8 * _length(s) * _length(y)
        items, s, y = items[down], s[down], y[down]
        for store, new in zip(self, (s, y, 1 / _dot(s, y)), strict=True):
            store[1:, items] = store[:-1, items].clone()
            store[0, items] = new

    def newton(self, slope: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        """The inverse curvature times the slope (two-loop recursion, Nocedal 1980); the slope itself where nothing is known."""
        q, weights = slope.clone(), []
        for s, y, inverse in zip(*self, strict=True):
            weights.append(inverse * _dot(s, q))
            q -= weights[-1][:, None, None] * y
        square = _dot(self.y[0], self.y[0])
        known = (self.inverse[0] > 0) & (square > 0)
        q *= torch.where(known, 1 / (self.inverse[0] * square), 1.0)[:, None, None]
        for k in reversed(range(_MEMORY)):
            back = self.inverse[k] * _dot(self.y[k], q)
            q += torch.where(self.inverse[k] > 0, weights[k] - back, 0.0)[:, None, None] * self.s[k]
        return q

    def select(self, items: Tensor) -> "_Memory":
        return _Memory(*(t[:, items] for t in self))
