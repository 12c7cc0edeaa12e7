"""Sinkhorn attention on q, k, v and its two derivatives, tile by tile: `P = exp(s + f_i + g_j)`, potentials `f, g` in turn.

A step on rows sets `f_i = −log Σ_j exp(s_ij + g_j)`, one on columns `g_j` likewise. With `A` the weights right after a step:

    rows     df = −r(A ∘ dS) − A dg        columns     dg = −c(A ∘ dS) − Aᵀ df
    end      do = (P ∘ dS) v + df ∘ o + P (dg ∘ v + dv)

and the transpose runs the steps backwards. `r(A ∘ dS) = τ(dq ∘ A k + q ∘ A dk)` summed over the width: thin products alone.
In the limit, `df + P dg = −r(P ∘ dS)` and `Pᵀ df + dg = −c(P ∘ dS)`: conjugate gradients on `I − P Pᵀ`, whose null space is
constant.
Potentials of each step are kept, n numbers a step; weights are made again, or kept as logits where they are small.
"""

import math
from collections.abc import Callable, Iterator
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.kernels.base import Keys, OnTiles, Queries, Scores, Tile, TileSize, Values, flat, wide
from howsmooth.kernels.kinds.balanced import ROUNDS, unbalanced

_CONJUGATE = 1000  # steps that a system may take; more than its distinct singular values are needed by rounding alone
_CONVERGED = 64  # units in the last place of what is left of a system's right side, or of a potential that moves no more

Rows = Float[Tensor, "g probes n"]
Columns = Float[Tensor, "g probes m"]
Weights = Float[Tensor, "g rows cols"]


@final
class Balanced(OnTiles):
    """Attention with rows and columns normalised in turn. keep: logits are kept instead of being made for each pass."""

    def __init__(
        self, q: Queries, k: Keys, v: Values, scores: Scores, size: TileSize | None = None, *, offset=None, keep: bool = False
    ):
        super().__init__(q, k, v, scores, size, offset=offset)
        balancing = self.scores.kind.traits.balancing
        assert balancing is not None
        batch, heads, n, m = self.shape
        keys = self.scores.mask.keys
        self._real = None if keys is None else keys.repeat_interleave(heads, 0)  # (g, n): queries as well as keys
        self._kept = [self._masked(*part) for part in self._parts] if keep else None
        self._keep = keep
        f, g = self.q.new_zeros(batch * heads, n), self.q.new_zeros(batch * heads, m)
        self.steps: list[tuple[int, Tensor, Tensor]] = []  # which side was normalised, and the potentials after it
        self._rate = 0.0
        for step in range(balancing.iterations or 0):
            f, g = self._normalised(f, g, step % 2)
            self.steps.append((step % 2, f, g))
        if balancing.iterations is None:
            f, g = self._limit(f, g)
        self.f, self.g = f, g
        self.o = torch.zeros_like(self.q[..., :1]).repeat(1, 1, v.shape[-1])
        for at, tile, p, _ in self._weights(f, g):
            self.o[at, tile.rows] += torch.bmm(p, self.v[at, tile.cols])

    @property
    def output(self):
        return self.o.unflatten(0, self.shape[:2])

    @property
    def noise(self) -> float:
        """A step does not enlarge an error of the potentials, in the largest entry, and adds the rounding of its logits."""
        steps = len(self.steps) if self.steps else 4 / max(1 - self._rate, 1e-12)
        return torch.finfo(self.o.dtype).eps * (32 + (1 + steps) * (self.largest_logit + self.lifted))

    @property
    def lifted(self) -> float:
        bias = self.scores.mask.bias
        return 0.0 if bias is None else float(bias.abs().max())

    def select(self, items):
        q, k, v = (t[items] for t in self.inputs)
        return Balanced(q, k, v, self.scores.select(items), self._size, keep=self._keep)

    def tiled(self):
        raise BadInputError(
            f"expected a kind whose weights come from a logit and its row, got {self.scores.kind!r}; its rows need all others"
        )

    def attention_received(self):
        batch, heads, _, m = self.shape
        received = self.o.new_zeros(batch * heads, m)
        for at, tile, p, _ in self._weights(self.f, self.g):
            received[at, tile.cols] += p.sum(-2)
        return received.unflatten(0, (batch, heads)).mean(1)

    def jvp(self, dq, dk, dv, doffset=None):
        dq_, dk_, dv_ = flat(dq), flat(self.expand(dk)), flat(self.expand(dv))  # (g, probes, tokens, width)
        probes = len(dq)
        df, dg = dq_.new_zeros(dq_.shape[:3]), dk_.new_zeros(dk_.shape[:3])
        if self.steps:
            for side, f, g in self.steps:
                if side == 0:
                    df = -self._sums(0, f, g, dq_, dk_, dg)
                else:
                    dg = -self._sums(1, f, g, dq_, dk_, df)
        else:
            df, dg = self._solved(*(-self._sums(side, self.f, self.g, dq_, dk_, still) for side, still in ((0, dg), (1, df))))
        left, right = self.along(dq, dk)
        moved = wide(dv_ + dg[..., None] * self.v[:, None])
        total = moved.new_zeros(*self.o.shape[:2], moved.shape[-1])
        by_probe = total.unflatten(-1, (probes, -1)).transpose(1, 2)  # (g, probes, n, d_v)
        for at, tile, p, slope in self._weights(self.f, self.g):
            t = torch.matmul(left[at, :, tile.rows], right[at, :, tile.cols].mT).mul_(slope[:, None])
            by_probe[at, :, tile.rows] += torch.bmm(t.flatten(1, 2), self.v[at, tile.cols]).unflatten(1, (probes, -1))
            total[at, tile.rows] += torch.bmm(p, moved[at, tile.cols])
        return self.unflat(by_probe.addcmul_(df[..., None], self.o[:, None]))

    def vjp(self, g):
        g_ = flat(g)  # (g, probes, n, d_v)
        probes, width, m = g_.shape[1], self.q.shape[-1], self.shape[3]
        dq, dk = g_.new_zeros(*g_.shape[:3], width), g_.new_zeros(len(g_), probes, m, width)
        g_wide = wide(g_)
        dv = g_wide.new_zeros(len(g_), m, g_wide.shape[-1])
        for at, tile, p, slope in self._weights(self.f, self.g):
            i, j = tile.rows, tile.cols
            dv[at, j] += torch.bmm(p.mT, g_wide[at, i])
            ds = torch.bmm(g_[at, :, i].flatten(1, 2), self.v[at, j].mT).unflatten(1, (probes, -1)).mul_(slope[:, None])
            dq[at, :, i] += torch.bmm(ds.flatten(1, 2), self.k[at, j]).unflatten(1, (probes, -1))
            dk[at, :, j] += torch.matmul(ds.mT, self.q[at, None, i])
        dv = dv.unflatten(-1, (probes, -1)).transpose(1, 2)
        f_bar, g_bar = (g_ * self.o[:, None]).sum(-1), (dv * self.v[:, None]).sum(-1)
        if self.steps:
            for side, f, potential in reversed(self.steps):
                if side == 0:
                    g_bar = g_bar - self._step_vjp(f, potential, f_bar, torch.zeros_like(g_bar), dq, dk)[1]
                    f_bar = torch.zeros_like(f_bar)
                else:
                    f_bar = f_bar - self._step_vjp(f, potential, torch.zeros_like(f_bar), g_bar, dq, dk)[0]
                    g_bar = torch.zeros_like(g_bar)
        else:
            self._step_vjp(self.f, self.g, *self._solved(f_bar, g_bar), dq, dk)
        dq *= self.scores.scale
        dk *= self.scores.scale
        return self.unflat(dq), self.sum_groups(self.unflat(dk)), self.sum_groups(self.unflat(dv))

    def _masked(self, heads: slice, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Logits of a tile with padding hidden as queries too, and the soft-cap's slope."""
        s, cap = self._logits(heads, tile)
        if self._real is not None:
            s.masked_fill_(~self._real[heads, tile.rows, None], -torch.inf)
        return s, cap

    def _tiles(self) -> Iterator[tuple[slice, Tile, Tensor, Tensor | None]]:
        for i, part in enumerate(self._parts):
            yield *part, *(self._masked(*part) if self._kept is None else self._kept[i])

    def _weights(self, f: Tensor, g: Tensor) -> Iterator[tuple[slice, Tile, Weights, Weights]]:
        """Tiles of `exp(s + f + g)`, and the same times the soft-cap's slope."""
        for at, tile, s, cap in self._tiles():
            a = (s + f[at, tile.rows, None]).add_(g[at, None, tile.cols]).exp_()
            yield at, tile, a, a if cap is None else a * cap

    def _normalised(self, f: Tensor, g: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Potentials after a step on rows (0) or columns (1)."""
        like, other = (f, g) if side == 0 else (g, f)
        largest, total = torch.full_like(like, -torch.inf), torch.zeros_like(like)
        for heads, tile, s, _ in self._tiles():
            if side == 0:
                at, t = (heads, tile.rows), s + other[heads, None, tile.cols]
            else:
                at, t = (heads, tile.cols), (s + other[heads, tile.rows, None]).mT
            raised = torch.maximum(largest[at], t.amax(-1))
            base = raised.masked_fill(raised == -torch.inf, 0.0)
            total[at] = total[at] * (largest[at] - base).exp() + t.sub_(base[..., None]).exp_().sum(-1)
            largest[at] = raised
        sums = torch.where(total > 0, largest + total.log(), 0.0)
        return (-sums, g) if side == 0 else (f, -sums)

    def _limit(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        eps, before = torch.finfo(f.dtype).eps, math.inf
        for _ in range(ROUNDS):
            old = g
            f, g = self._normalised(f, g, 0)
            f, g = self._normalised(f, g, 1)
            change = g - old  # a constant moves from one side to the other and changes nothing
            moved = float((change - change.mean(-1, keepdim=True)).abs().max())
            if moved <= _CONVERGED * eps * (1 + float(g.abs().max())):
                return f, g
            self._rate, before = moved / before, moved
        raise NoConvergenceError(unbalanced())

    def _sums(self, side: int, f: Tensor, g: Tensor, dq: Tensor, dk: Tensor, other: Rows | Columns) -> Rows | Columns:
        """Of rows (0) `r(A ∘ dS) + A dg`, of columns (1) `c(A ∘ dS) + Aᵀ df`, for the weights at these potentials."""
        own, own_moved, theirs, theirs_moved = (self.q, dq, self.k, dk) if side == 0 else (self.k, dk, self.q, dq)
        probes, width = dq.shape[1], dq.shape[-1]
        right = torch.cat([theirs, wide(theirs_moved)], -1)
        sums, more = right.new_zeros(*own.shape[:2], right.shape[-1]), torch.zeros_like(own_moved[..., 0])
        for at, tile, a, slope in self._weights(f, g):
            i, j = (tile.rows, tile.cols) if side == 0 else (tile.cols, tile.rows)
            a, slope = (a, slope) if side == 0 else (a.mT, slope.mT)
            sums[at, i] += torch.bmm(slope, right[at, j])
            more[at, :, i] += torch.bmm(other[at, :, j], a.mT)
        a_theirs, a_moved = sums[:, None, :, :width], sums[..., width:].unflatten(-1, (probes, -1)).transpose(1, 2)
        return self.scores.scale * (own_moved * a_theirs + own[:, None] * a_moved).sum(-1) + more

    def _step_vjp(self, f: Tensor, g: Tensor, y: Rows, z: Columns, dq: Tensor, dk: Tensor) -> tuple[Rows, Columns]:
        """Take `A ∘ (y_i + z_j)`, a gradient of the logits, off `dq` and `dk`; gives `A z` and `Aᵀ y`."""
        down, across = torch.zeros_like(z), torch.zeros_like(y)
        for at, tile, a, slope in self._weights(f, g):
            i, j = tile.rows, tile.cols
            y_, z_ = y[at, :, i, None], z[at, :, j, None]
            q, k = self.q[at, None, i], self.k[at, None, j]
            dq[at, :, i] -= y_ * (slope @ self.k[at, j])[:, None] + torch.matmul(slope[:, None], z_ * k)
            dk[at, :, j] -= z_ * (slope.mT @ self.q[at, i])[:, None] + torch.matmul(slope.mT[:, None], y_ * q)
            down[at, :, j] += torch.bmm(y[at, :, i], a)
            across[at, :, i] += torch.bmm(z[at, :, j], a.mT)
        return across, down

    def _solved(self, rows: Rows, columns: Columns) -> tuple[Rows, Columns]:
        """`x, y` with `x + P y = rows`, `Pᵀ x + y = columns`, of which one equation is told by the others."""

        def down(x: Rows) -> Columns:
            out = torch.zeros_like(columns)
            for at, tile, p, _ in self._weights(self.f, self.g):
                out[at, :, tile.cols] += torch.bmm(x[at, :, tile.rows], p)
            return out

        def across(y: Columns) -> Rows:
            out = torch.zeros_like(rows)
            for at, tile, p, _ in self._weights(self.f, self.g):
                out[at, :, tile.rows] += torch.bmm(y[at, :, tile.cols], p.mT)
            return out

        right = self._centred(rows - across(columns))
        size = torch.maximum(rows.abs().amax(-1), columns.abs().amax(-1)).clamp_min(torch.finfo(rows.dtype).tiny)
        x = _conjugate_gradients(lambda t: self._centred(t - across(down(t))), right, size)
        return x, columns - down(x)

    def _centred(self, t: Rows) -> Rows:
        """Less its mean over real tokens."""
        if self._real is None:
            return t - t.mean(-1, keepdim=True)
        real = self._real[:, None].to(t)
        return real * (t - (t * real).sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1))


def _conjugate_gradients(product: Callable[[Rows], Rows], right: Rows, size: Float[Tensor, "g probes"]) -> Rows:
    """Solutions of many symmetric, positive systems of one matrix, to rounding. size: of the numbers behind `right`."""
    x, r = torch.zeros_like(right), right
    p, rr = r, r.square().sum(-1, keepdim=True)
    enough = (_CONVERGED * torch.finfo(right.dtype).eps * size[..., None]).square()
    for _ in range(_CONJUGATE):
        if not bool((rr > enough).any()):
            return x
        image = product(p)
        curve = (p * image).sum(-1, keepdim=True)
        step = torch.where((rr > enough) & (curve > 0), rr / curve, 0.0)
        x, r = x + step * p, r - step * image
        now = r.square().sum(-1, keepdim=True)
        p, rr = r + torch.where(rr > 0, now / rr, 0.0) * p, now
    raise NoConvergenceError(unbalanced())
