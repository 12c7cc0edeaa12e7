"""Wasserstein distances between large supports: Sinkhorn's algorithm in O(n) memory, with a feasible plan and feasible duals.

Costs are made tile by tile and never kept. Every level of the temperature gives both ends: the plan rounded to its marginals
(Altschuler, Weed & Rigollet 2017) costs at least the optimum, potentials made feasible by a c-transform are worth at most it.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

_TILE = 2**22  # costs worked on at once
_SWEEPS = 12  # pairs of updates at one temperature
_LEVELS = 12  # temperatures, each half the one before
_RELAX = 1.5  # of the updates
ROUNDING = 1e-13  # of a dual value and of the costs behind it, in units of the largest cost


class _Costs:
    """`|x_i − y_j|^p / scale` by blocks of rows."""

    def __init__(self, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], p: float):
        self.x, self.y, self.p = x, y, p
        self.x2, self.y2 = x.square().sum(-1), y.square().sum(-1)
        self.scale = 1.0
        self.scale = max(float(c.max()) for _, c in self) or 1.0

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, _TILE // len(self.y))
        for start in range(0, len(self.x), step):
            rows = slice(start, min(start + step, len(self.x)))
            squares = torch.addmm(self.y2 + self.x2[rows, None], self.x[rows], self.y.mT, alpha=-2).clamp_min_(0)
            yield rows, (squares if self.p == 2 else squares.pow_(self.p / 2)).div_(self.scale)


def distances(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """`|x_i − y_j|` from differences, not from inner products, which lose small distances."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


@torch.no_grad()
def entropic_ends(
    x: Float[Tensor, "n d"], a: Float[Tensor, " n"], y: Float[Tensor, "m d"], b: Float[Tensor, " m"], p: float, tol: float
) -> tuple[float, float]:
    """A lower and an upper end of `W_p^p`, float64, the work stopped when they are within `tol` of each other."""
    costs = _Costs(x, y, p)
    g = torch.zeros_like(b)
    f = torch.zeros_like(a)
    lower, upper, reg = 0.0, torch.inf, 0.5
    for _ in range(_LEVELS):
        for sweep in range(_SWEEPS):
            # over-relaxed (Thibault et al. 2021), plain at the end of a level so that columns have their mass
            f, g = _sweep(costs, a, b, f, g, reg, _RELAX if sweep < _SWEEPS - 1 else 1.0)
        low, high = _ends(costs, a, b, f, g, reg)
        lower, upper = max(lower, low), min(upper, high)
        if upper <= (1 + tol) * lower or upper == 0:
            break
        reg /= 2
    return lower * costs.scale, upper * costs.scale


def _sweep(costs: _Costs, a: Tensor, b: Tensor, f: Tensor, g: Tensor, reg: float, relax: float) -> tuple[Tensor, Tensor]:
    """One update of both potentials towards `f_i = −reg log Σ_j b_j exp((g_j − c_ij)/reg)`, in one pass over the costs."""
    f = f.clone()
    largest = torch.full_like(g, -torch.inf)
    total = torch.zeros_like(g)
    for rows, c in costs:
        f[rows] += relax * (-reg * torch.logsumexp((g - c) / reg + b.log(), -1) - f[rows])
        s = (f[rows, None] - c) / reg + a[rows, None].log()
        raised = torch.maximum(largest, s.amax(0))
        total = total * (largest - raised).exp() + (s - raised).exp().sum(0)
        largest = raised
    return f, g + relax * (-reg * (largest + total.log()) - g)


def _ends(costs: _Costs, a: Tensor, b: Tensor, f: Tensor, g: Tensor, reg: float) -> tuple[float, float]:
    """The dual value of `(g's c-transform, g)`, and the cost of the plan of `f, g` rounded to its marginals."""
    best = torch.empty_like(a)
    rows_sum = torch.empty_like(a)
    for rows, c in costs:
        best[rows] = (c - g).amin(-1)
        rows_sum[rows] = _plan(c, a[rows], b, f[rows], g, reg).sum(-1)
    shrink_rows = (a / rows_sum.clamp_min(torch.finfo(a.dtype).tiny)).clamp_max(1.0)
    cols_sum = torch.zeros_like(b)
    for rows, c in costs:
        cols_sum += shrink_rows[rows] @ _plan(c, a[rows], b, f[rows], g, reg)
    shrink_cols = (b / cols_sum.clamp_min(torch.finfo(b.dtype).tiny)).clamp_max(1.0)
    spent = 0.0
    left_rows = a.clone()
    for rows, c in costs:
        plan = shrink_rows[rows, None] * _plan(c, a[rows], b, f[rows], g, reg) * shrink_cols
        left_rows[rows] -= plan.sum(-1)
        spent += float((plan * c).sum())
    left_rows = left_rows.clamp_min(0.0)
    left_cols = (b - shrink_cols * cols_sum).clamp_min(0.0)
    missing = float(left_rows.sum())
    if missing > 0:
        share = left_cols / left_cols.sum().clamp_min(torch.finfo(b.dtype).tiny)
        spent += sum(float(left_rows[rows] @ (c @ share)) for rows, c in costs)
    return float(a @ best + b @ g) - ROUNDING, spent


def _plan(c: Tensor, a: Tensor, b: Tensor, f: Tensor, g: Tensor, reg: float) -> Tensor:
    return a[:, None] * b * ((f[:, None] + g - c) / reg).exp()
