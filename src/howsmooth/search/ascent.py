"""Ascent on `σ(X) = ‖D_X f‖₂` over a set: many starts in one batch, curvature learned on the way, no step that loses.

With the top pair `(u, v)` frozen, `∇σ = ∂_X ⟨J(X)ᵀu, v⟩`: a backward pass through a backward pass. Where several singular
values are equal, `σ` is the largest of smooth functions and the steepest of them is followed
(docs/explanation/worst-inputs.md §2).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.maps import AutodiffJacobian, Map
from howsmooth.progress import Progress
from howsmooth.search.sets import TokenSet
from howsmooth.solve import Function
from howsmooth.spectral import TopPairs, eigh, small, top_pairs

_FIRST = 0.1  # first step, in units of the set's size for each token that moves
_LONGER, _SHORTER = 1.6, 0.35  # what a step that gained, and one that did not, make of the longest step allowed
_LEAST, _AGAIN = 1e-6, 0.02  # a longest step below the first, in units of the set's size, starts again from the second
_PATIENCE = 2  # losses in a row after which what was learned of the curvature is forgotten
_REST = 24  # losses in a row after which a start has arrived
_MEMORY = 5
_CLUSTER = 3  # top pairs that a cluster is looked for among
_NEAR = 1e-3  # singular values this close to the top belong to its cluster
_TOL = 1e-3  # of the solver, where Jacobians are not decomposed


class Climb(NamedTuple):
    """What became of every start.

    z: coordinates reached, (starts, n, d).  value: `L` there.  began: `L` at the starts.  trace: the best `L` of all, at the
    starts and after each step.
    """

    z: Float[Tensor, "starts n d"]
    value: Float[Tensor, " starts"]
    began: Float[Tensor, " starts"]
    trace: tuple[float, ...]


def ascend(
    f: Function,
    space: TokenSet,
    starts: Float[Tensor, "starts n d"],
    *,
    steps: int,
    keep: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> Climb:
    """Move every start uphill, the top pair re-solved at every step.

    Projected quasi-Newton (L-BFGS) on `log L` in a radius that grows with every gain and shrinks with every loss; a trial that
    does not gain is taken back, so `L` never falls (docs/explanation/worst-inputs.md §2). After a third and two thirds of the
    steps only the better starts go on, at last `keep` of them.

    f: a map or a batched function.  space: the set.  starts: coordinates, projected first.  steps: measurements of each start.
    progress: told of every step.
    """
    shown = progress or Progress()
    shown.begin(steps)
    z = space.project(starts)
    pairs = pairs_at(f, space.tokens(z), None, seed)
    began, value, reached = pairs.value[0].clone(), pairs.value[0].clone(), z.clone()
    active = torch.arange(len(z), device=z.device)
    radius = torch.full_like(began, _FIRST * space.size * z.shape[1] ** 0.5)
    losses = torch.zeros_like(active)
    slope = _slope(f, space, z, pairs)
    none = z.new_zeros(_MEMORY, *z.shape)
    memory = _Memory(none, none.clone(), z.new_zeros(_MEMORY, len(z)))
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
        shown.advance()
        on = torch.nonzero(losses < _REST)[:, 0]
        third, few = 3 * (k + 1) // max(steps, 1), min(keep, len(began))  # how many thirds of the steps are over
        left = (len(began), max(few, round((len(began) * few) ** 0.5)), few, few)[third]
        on = on[pairs.value[0, on].argsort(descending=True)[:left]]
        if len(on) == 0:
            break
        if len(on) < len(active):
            active, z, radius, losses, slope = active[on], z[on], radius[on], losses[on], slope[on]
            pairs, memory = pairs.select(on), memory.select(on)
    return Climb(reached, value, began, tuple(trace))


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


def pairs_at(f: Function, x: Float[Tensor, "batch n d"], start: Float[Tensor, "batch n d"] | None, seed: int) -> TopPairs:
    """The top pairs at every input of a batch. start: directions that may be near the top ones, from a call before."""
    with torch.no_grad():
        operator = f.linearize(x)[1] if isinstance(f, Map) else AutodiffJacobian(f, x, batched=True)
    count = _CLUSTER if small(operator) else 1
    return top_pairs(operator, count, None if start is None else start[None], seeds=[seed] * operator.batch, tol=_TOL)


def steepest(
    f: Function, embed: Callable[[Tensor], Tensor], z: Float[Tensor, "batch n d"], pairs: TopPairs
) -> Float[Tensor, "batch n d"]:
    """`∂_z ⟨u, J v⟩` of the pair in each cluster whose gradient is longest.

    embed: tokens at the coordinates `z`. In a cluster the gradients of `⟨U a, J V a⟩` are `Σ a_i a_j G_ij`, and
    `max_a |Σ a_i a_j G_ij| = max_{|H|=1} λ_max(⟨H, G_ij⟩)`: each side fixes the other in turn, from every pair of the cluster,
    and the length never falls.
    """
    whole = _gradient(f, embed, z, pairs.left[0], pairs.right[0])
    near = pairs.value >= (1 - _NEAR) * pairs.value[0]
    items = torch.nonzero(near.sum(0) > 1)[:, 0]
    if len(items) == 0:
        return whole
    count, near = len(near), near[:, items]
    parts = z.new_zeros(count, count, len(items), *z.shape[1:])
    for i in range(count):
        for j in range(i, count):
            ways = ((pairs.left[a, items], pairs.right[b, items]) for a, b in ((i, j), (j, i)))
            both = 0.5 * sum(_gradient(f, embed, z[items], *way) for way in ways)
            parts[i, j] = parts[j, i] = both * (near[i] & near[j])[:, None, None]
    flat = parts.flatten(3)  # (count, count, items, n·d)
    longest = flat[0, 0]
    for start in range(count):
        g = flat[start, start]
        for _ in range(4):
            unit = g / g.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
            weights = eigh(torch.einsum("ijbk,bk->bij", flat, unit))[1][..., -1]  # (items, count)
            g = torch.einsum("bi,bj,ijbk->bk", weights, weights, flat)
        longer = g.norm(dim=-1, keepdim=True) > longest.norm(dim=-1, keepdim=True)
        longest = torch.where(longer, g, longest)
    whole[items] = longest.unflatten(-1, z.shape[1:])
    return whole


def _gradient(
    f: Function, embed: Callable[[Tensor], Tensor], z: Tensor, left: Tensor, right: Tensor
) -> Float[Tensor, "batch n d"]:
    """`∂_z ⟨J(x)ᵀ left, right⟩` at `x = embed(z)`, item by item."""
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        z = z.detach().clone().requires_grad_()
        x = embed(z)
        pullback = torch.autograd.grad(f(x), x, left, create_graph=True)[0]
        if not pullback.requires_grad:  # a linear function: its constant is the same everywhere
            return torch.zeros_like(z)
        (g,) = torch.autograd.grad((pullback * right.detach()).sum(), z, materialize_grads=True)
    return g.detach()
