"""Wasserstein distances between measures: exact, on a line, Gaussian, conditional, or from both sides for large supports.

Large supports take Sinkhorn's algorithm in O(n) memory; its costs are computed tile by tile and never kept. Every level of the
temperature gives both ends: the plan rounded to its marginals (Altschuler, Weed & Rigollet 2017) costs at least the optimum,
potentials brought to feasibility by a c-transform are worth at most it.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.measures.measure import Gaussian, Measure
from howsmooth.results import OneNumber
from howsmooth.settings import choice, number
from howsmooth.spectral import svd

Method = Literal["auto", "exact", "entropic", "line", "gaussian", "conditional"]

_EXACT = 2**25  # pairs of atoms up to which the network simplex is the default
_STEPS = 50_000_000  # of the network simplex
_SAME = 1e-6  # relative difference of masses at one position that rounding explains
_TINY = 2.0**-1022  # what sums of powers may lose where they leave the range
_TOL = 0.01  # width at which the entropic ends are near enough
_TILE = 2**22  # costs worked on at once
_SWEEPS = 12  # pairs of updates at one temperature
_LEVELS = 12  # temperatures, each half the one before
_RELAX = 1.5  # of the updates
ROUNDING = 1e-13  # of a dual value and of the costs behind it, in units of the largest cost


@final
@dataclass(frozen=True)
class Distance(OneNumber):
    """`lower ≤ W_p ≤ upper`; `value` is `lower`, as of every result.

    Attributes:
        upper: The cost of a plan that was found.
        lower: What its dual potentials prove, less their rounding (1e-13 of the largest cost). Where a formula gives the
            distance, both are that number.
    """

    lower: float
    upper: float
    p: float
    method: Method

    @property
    def value(self) -> float:
        """The distance itself: `lower`."""
        return self.lower

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; an infinite distance is None."""
        lower, upper = (end if math.isfinite(end) else None for end in (self.lower, self.upper))
        return {"value": lower, "lower": lower, "upper": upper, "p": self.p, "method": self.method}


def wasserstein(mu: Measure | Gaussian, nu: Measure | Gaussian, p: float = 2.0, method: Method = "auto") -> Distance:
    """The Wasserstein distance `W_p(μ, ν)`, `p ≥ 1`; between measures with positions, the conditional distance `d_p`.

    Args:
        mu: A measure, or a Gaussian.
        nu: Another of the same dimension and sort.
        p: The power of the distance, at least 1.
        method: `exact` (network simplex, both ends checked against its duals), `entropic` (O(n) memory, an interval),
            `line` (dimension one), `gaussian` (p = 2), `conditional` (`d_p^p = ∫ W_p(μ^s, ν^s)^p dθ(s)`, infinite when the
            laws θ of the positions differ). By default the first that fits: conditional, gaussian, line, exact up to 33
            million pairs of atoms, entropic.

    Returns:
        The distance, with a lower and an upper bound.

    >>> mu, nu = Measure(torch.tensor([[0.0, 0.0], [1.0, 0.0]])), Measure(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    >>> round(wasserstein(mu, nu).value, 6)  # one atom stays, the other moves by 2
    1.414214
    """
    p = number(p, "a finite p of 1 or more", "2 is the usual one", least=1.0)
    method = choice(method, "a method", get_args(Method))
    if isinstance(mu, Gaussian) and isinstance(nu, Gaussian):
        if p != 2 or method not in ("auto", "gaussian"):
            raise BadInputError(f"expected p = 2 between Gaussians, got p = {p} and method {method!r}; sample them for another")
        value = bures(mu, nu)
        return Distance(value, value, p, "gaussian")
    if not isinstance(mu, Measure) or not isinstance(nu, Measure):
        raise BadInputError(
            f"expected two measures or two Gaussians, got {type(mu).__name__} and {type(nu).__name__}; "
            "build them with Measure(points, weights)"
        )
    if mu.width != nu.width:
        raise BadInputError(f"expected measures of one dimension, got {mu.width} and {nu.width}; compare like with like")
    if (mu.positions is None) != (nu.positions is None):
        raise BadInputError("expected positions on both measures or on neither, got one of each; drop them or add them")
    chosen = _choose(mu, nu, method)
    if chosen == "conditional":
        return _conditional(mu, nu, p)
    lower, upper = _ends(mu.points, mu.mass, nu.points, nu.mass, p, chosen)
    return Distance(lower, upper, p, chosen)


def bures(mu: Gaussian, nu: Gaussian) -> float:
    """`W₂² = |m − m'|² + tr(S + S' − 2(S^½ S' S^½)^½)` (Dowson & Landau 1982; Bures).

    The trace is `min_U ‖S^½ − S'^½ U‖_F²` over orthogonal `U` (Procrustes): written so, nothing cancels for measures close by.

    >>> one = torch.eye(1)
    >>> bures(Gaussian(torch.zeros(1), one), Gaussian(torch.full((1,), 3.0), 25 * one))
    5.0
    """
    if mu.mean.shape != nu.mean.shape:
        raise BadInputError(
            f"expected measures of one dimension, got {len(mu.mean)} and {len(nu.mean)}; compare like with like"
        )
    first, second = mu.root(), nu.root()
    u, _, vh = svd(second @ first)  # tr(first second U) is largest at U = u vh
    shape = first - second @ (u @ vh)
    apart = torch.cat([shape.flatten(), mu.mean - nu.mean])
    return _mean(apart, torch.ones_like(apart), 2.0)


def _by_size(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Method:
    return "line" if x.shape[1] == 1 else "exact" if len(x) * len(y) <= _EXACT else "entropic"


def _choose(mu: Measure, nu: Measure, method: Method) -> Method:
    if method not in ("auto", "exact", "entropic", "line", "conditional"):
        raise BadInputError(
            f"expected method auto, exact, entropic, line or conditional for measures, got {method!r}; pick one"
        )
    if method == "conditional" and mu.positions is None:
        raise BadInputError("expected measures with positions for the conditional distance, got none; pass positions=")
    if method == "line" and mu.width != 1:
        raise BadInputError(f"expected points on a line for method 'line', got dimension {mu.width}; use 'exact'")
    if method != "auto":
        if mu.positions is not None and method != "conditional":
            raise BadInputError(
                f"expected method 'conditional' for measures with positions, got {method!r}; or drop the positions"
            )
        return method
    return "conditional" if mu.positions is not None else _by_size(mu.points, nu.points)


def _conditional(mu: Measure, nu: Measure, p: float) -> Distance:
    """`d_p`: the distances of the conditional laws at each position, averaged over the law θ of the positions."""
    assert mu.positions is not None
    assert nu.positions is not None
    (s, index_mu, count_mu), (t, index_nu, count_nu) = (
        torch.unique_consecutive(m.positions, return_inverse=True, return_counts=True) for m in (mu, nu)
    )
    far = Distance(math.inf, math.inf, p, "conditional")
    if not torch.equal(s, t):
        return far
    theta, other = (
        torch.zeros(len(s), dtype=torch.float64, device=s.device).index_add_(0, i, m.mass)
        for i, m in ((index_mu, mu), (index_nu, nu))
    )
    if not torch.allclose(theta, other, rtol=_SAME, atol=1e-15):
        return far
    first_mu, first_nu = (count.cumsum(0) - count for count in (count_mu, count_nu))
    one = (count_mu == 1) & (count_nu == 1)  # where both have one atom, there is one plan
    ends = torch.zeros(2, len(s), dtype=torch.float64)  # of the distance at each position
    ends[:, one.cpu()] = _lengths((mu.points.double()[first_mu[one]] - nu.points.double()[first_nu[one]]).detach().cpu())
    for k in torch.nonzero(~one)[:, 0].tolist():
        rows_mu, rows_nu = (
            slice(int(first[k]), int(first[k] + count[k])) for first, count in ((first_mu, count_mu), (first_nu, count_nu))
        )
        x, a, y, b = mu.points[rows_mu], mu.mass[rows_mu], nu.points[rows_nu], nu.mass[rows_nu]
        ends[:, k] = torch.tensor(_ends(x, a / a.sum(), y, b / b.sum(), p, _by_size(x, y)), dtype=torch.float64)
    lower, upper = (_mean(end, theta.cpu(), p) for end in ends)
    return Distance(lower, upper, p, "conditional")


def _ends(x: Tensor, a: Tensor, y: Tensor, b: Tensor, p: float, method: Method) -> tuple[float, float]:
    """Lower and upper end of `W_p` by one method, on points divided by their size, so that powers stay in range."""
    x, y, a, b = (t.detach().double().cpu() for t in (x, y, a, b))
    size = _power_of_two(max(float(x.abs().max()), float(y.abs().max())))
    x, y = x / size, y / size
    if method == "line":
        lower = upper = _line(x[:, 0], a, y[:, 0], b, p)
    elif method == "entropic":
        centre = x.mean(0)
        x, y = x - centre, y - centre
        low, high = entropic_ends(x, a, y, b, p, p * _TOL)
        longest = float(x.norm(dim=-1).max()) + float(y.norm(dim=-1).max())
        error = (x.shape[1] + 4) * torch.finfo(torch.float64).eps * longest**2
        lower, upper = _widened(low ** (1 / p), (high + _TINY) ** (1 / p), error, p)
    else:
        lower, upper = _exact(x, a, y, b, p)
    return lower * size, upper * size


def _widened(lower: float, upper: float, error: float, p: float) -> tuple[float, float]:
    """Ends of `W_p` where squares of distances are off by `error` at most: Minkowski's inequality in `L^{p/2}`, or in `L^p`."""
    if p >= 2:
        return max(0.0, lower**2 - error) ** 0.5, (upper**2 + error) ** 0.5
    return max(0.0, lower - error**0.5), upper + error**0.5


def _power_of_two(size: float) -> float:
    """The power of two next above, by which numbers are divided without a rounding; 1 for zero."""
    return 2.0 ** max(-1022, min(1023, math.frexp(size)[1])) if size else 1.0


def _lengths(t: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Euclidean lengths of rows, their squares kept in range."""
    size = t.abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    return (t / size).norm(dim=-1) * size[:, 0]


def _mean(values: Float[Tensor, " n"], weights: Float[Tensor, " n"], p: float) -> float:
    """`(Σ w |v|^p)^{1/p}`, the largest value taken out, so that powers stay in range."""
    sizes = values.abs()
    largest = float(sizes[weights > 0].max()) if bool((weights > 0).any()) else 0.0
    if not 0 < largest < math.inf:
        return largest
    return largest * float(weights @ (sizes / largest).clamp_max(1.0) ** p) ** (1 / p)


def _exact(
    x: Float[Tensor, "n d"], a: Float[Tensor, " n"], y: Float[Tensor, "m d"], b: Float[Tensor, " m"], p: float
) -> tuple[float, float]:
    """The network simplex of POT (Bonneel et al. 2011), and its duals made feasible: both ends of `W_p`."""
    import ot

    apart = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")  # inner products lose small distances
    scale = float(apart.max()) or 1.0
    cost = (apart / scale).pow_(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what POT would warn of is in the log, and the duals are checked below
        plan, log = ot.emd(a.numpy(), b.numpy(), cost.numpy(), numItermax=_STEPS, log=True)
    if log["warning"] is not None:
        raise NoConvergenceError(
            f"expected an optimal plan between {len(a)} and {len(b)} atoms, got none ({log['warning']}); use method='entropic'"
        )
    upper = float((torch.as_tensor(plan) * cost).sum())
    potential = torch.as_tensor(log["v"])
    lower = float(a @ (cost - potential).amin(1) + b @ potential)
    if not lower >= upper * (1 - 1e-6) - 1e-12:
        raise NoConvergenceError(
            f"expected equal primal and dual values, got {upper:.9g} and {lower:.9g} of the largest cost; use method='entropic'"
        )
    spent = _mean(apart.flatten(), torch.as_tensor(plan).flatten(), p)  # also where powers of small distances vanish
    return min(spent, max(0.0, min(lower - ROUNDING, upper)) ** (1 / p) * scale), spent


def _line(x: Float[Tensor, " n"], a: Float[Tensor, " n"], y: Float[Tensor, " m"], b: Float[Tensor, " m"], p: float) -> float:
    """`(∫_0^1 |F_μ^{-1} − F_ν^{-1}|^p)^{1/p}`: quantiles meet quantiles, for every p ≥ 1."""
    x, first = x.sort()
    y, second = y.sort()
    below_x, below_y = a[first].cumsum(0), b[second].cumsum(0)
    levels = torch.cat([below_x, below_y]).sort().values
    at_x, at_y = (torch.searchsorted(below, levels).clamp_max(len(below) - 1) for below in (below_x, below_y))
    return _mean(x[at_x] - y[at_y], levels.diff(prepend=levels.new_zeros(1)), p)


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
        low, high = _bracket(costs, a, b, f, g, reg)
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


def _bracket(costs: _Costs, a: Tensor, b: Tensor, f: Tensor, g: Tensor, reg: float) -> tuple[float, float]:
    """The dual value of `(g's c-transform, g)`, and the cost of the plan of `f, g` rounded to its marginals."""
    best = torch.empty_like(a)
    rows_sum = torch.empty_like(a)
    for rows, c in costs:
        best[rows] = (c - g).amin(-1)
        rows_sum[rows] = _plan_of(c, a[rows], b, f[rows], g, reg).sum(-1)
    shrink_rows = (a / rows_sum.clamp_min(torch.finfo(a.dtype).tiny)).clamp_max(1.0)
    cols_sum = torch.zeros_like(b)
    for rows, c in costs:
        cols_sum += shrink_rows[rows] @ _plan_of(c, a[rows], b, f[rows], g, reg)
    shrink_cols = (b / cols_sum.clamp_min(torch.finfo(b.dtype).tiny)).clamp_max(1.0)
    spent = 0.0
    left_rows = a.clone()
    for rows, c in costs:
        plan = shrink_rows[rows, None] * _plan_of(c, a[rows], b, f[rows], g, reg) * shrink_cols
        left_rows[rows] -= plan.sum(-1)
        spent += float((plan * c).sum())
    left_rows = left_rows.clamp_min(0.0)
    left_cols = (b - shrink_cols * cols_sum).clamp_min(0.0)
    missing = float(left_rows.sum())
    if missing > 0:
        share = left_cols / left_cols.sum().clamp_min(torch.finfo(b.dtype).tiny)
        spent += sum(float(left_rows[rows] @ (c @ share)) for rows, c in costs)
    return float(a @ best + b @ g) - ROUNDING, spent


def _plan_of(c: Tensor, a: Tensor, b: Tensor, f: Tensor, g: Tensor, reg: float) -> Tensor:
    return a[:, None] * b * ((f[:, None] + g - c) / reg).exp()
