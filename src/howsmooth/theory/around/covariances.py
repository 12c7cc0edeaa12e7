"""How far a head's Jacobian can move, with norms of covariances where `jets` has sums of lengths.

Numbers such as 6.8 are those of docs/explanation/around.md. Under the weights of a query, `u_j` are values and `ξ_j` keys less
their means, behind `W_o` and `τ W_qᵀ`; `l(w, y)` is the root of the largest eigenvalue of `Σ_j w_j y_j y_jᵀ`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.theory.around.jets import Centre, Parts, moves, visible
from howsmooth.theory.at_point.heads import perron_bound
from howsmooth.theory.upper import TINY, Upper, exp_ratios, exp_rest, others

_POWER = 16  # of a covariance, whose norm is that of its power within a root of its size
_STEPS = 8  # power steps on a matrix of norms: any number of them gives a bound
_LONG = 2**30  # products behind the covariances past which float32 makes them
_ROOM = 2**22  # entries of covariances that are made at once
_SUMS = 64  # units of rounding a token that sums of weights, and products behind the covariances, leave over
_UNIT = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Spread:
    """Covariances at an input, for radii of its tokens.

    r: the radii.  columns: tokens by which the Jacobian is taken.
    """

    centre: Centre
    found: Parts
    r: Float[Tensor, " n"]
    columns: Tensor

    def values(self, t: Upper | None = None) -> Upper:
        """`l(P t², u)` of every head and query, (heads, n); without `t`, `l(P, u)`."""
        kernel, geometry = self.centre.operator.kernel.tiled(), self.centre.geometry
        r_o = geometry.r_o * geometry.out_size
        p, error = self.centre.weights, self.centre.errors.values[:, None]
        if t is None:
            return top(p, kernel.v @ r_o.mT, kernel.o @ r_o.mT) + error
        size = t.amax(-1).value  # taken out before squares, which leave the range
        fine = (size > 0) & size.isfinite()
        share = torch.where(fine[..., None], (t / torch.where(fine, size, 1.0)[..., None]).value, 0.0)
        spread = top(p * share.square(), kernel.v @ r_o.mT, kernel.o @ r_o.mT).raised(4)
        return (spread + error) * size

    @cached_property
    def u(self) -> Upper:
        return self.values()

    @cached_property
    def xi(self) -> Upper:
        """`l(P, ξ)`."""
        centre, kernel = self.centre, self.centre.operator.kernel.tiled()
        p, tau = centre.weights, abs(centre.layer.scale)
        if not centre.affine:
            return self.mean_square(self.found.slopes[1].size)
        keys = kernel.k if centre.cross is None else kernel.k @ centre.geometry.r_q.mT
        return (top(p, keys, p @ keys) + centre.errors.keys[:, None]) * tau * self.turned[0]

    @cached_property
    def turned(self) -> tuple[Upper, Upper]:
        """What lengths of keys and of queries are to be multiplied by where they are turned: the weights come behind phases."""
        if self.centre.cross is not None:
            return Upper(1.0), Upper(1.0)
        query, key = moves(self.centre, self.r)
        return query.slope, key.slope

    def mean_square(self, t: Upper) -> Upper:
        """`(Σ_j P_ij t_ij²)^½`."""
        return (t * Upper(self.centre.weights).sqrt()).length()

    @cached_property
    def variance(self) -> Upper:
        """`(P min(1, 2 − 2P))^½`: `diag(p) − ppᵀ` is at most the diagonal matrix of its square."""
        p = self.centre.weights
        return (Upper(p) * (2 - 2 * p + 4 * p.shape[-1] * _UNIT).clamp(0.0, 1.0)).sqrt()

    def received(self, sizes: Upper, t: Upper) -> Upper:
        """The norm of a key part: row `i` is at most `sizes_i` times the deviation of `⟨g_ij, v_j⟩`, `|g_ij| ≤ t_ij`."""
        each = self.variance * t * sizes[..., None]
        return each.map(lambda m: m.mT[:, self.columns]).length().amax(-1)

    @cached_property
    def logits(self) -> Upper:
        """Entries of `|z|`: moves of the logits less their mean, to first order (6.8)."""
        by_key, by_query = (t.size for t in self.found.slopes)
        p, r = self.centre.weights, self.r
        own = by_key * r
        alone = (1 - p + p.shape[-1] * _UNIT).clamp_min(0.0)
        return by_query * r[:, None] + own * alone + others(own * p)

    def linear(self) -> tuple[Upper, Upper]:
        """The first-order changes of the query blocks, (heads, n), and of the key part, (heads,): 6.8, without a soft-cap."""
        by_key, by_query = self.found.slopes
        moved = self.values(self.logits) + self.centre.nu[..., 0] * self.mean_square(Upper(self.r))
        query = moved * self.xi + self.u * self.mean_square(by_query.change)
        key = self.received(moved, by_key.size) + self.received(self.u, by_key.change)
        units = _SUMS * len(self.r)
        return query.raised(units), key.raised(units)


class Beyond(NamedTuple):
    """Bounds on what the three parts of a head's Jacobian do beyond first order: see `beyond`."""

    weights: Upper  # (heads,), the norm of a matrix
    query: Upper  # (heads, n)
    key: Upper  # (heads,)


def beyond(spread: Spread) -> Beyond:
    """What the parts do beyond first order, to all orders at once (Theorem 6.13), where queries and keys are affine.

    With `x` the moves of the logits less their mean, `P' = P (1 + η)`, `η = e^{x − Λ} − 1 = z + ρ`, `z` of first order: bounds
    on `x`, `η` and `ρ` entry by entry and in `L²(P)` give all terms of the theorem.
    """
    centre, found, r, columns = spread.centre, spread.found, spread.r, spread.columns
    p, errors, tau = centre.weights, centre.errors, abs(centre.layer.scale)
    g = found.slopes[0].size
    gamma, b = (t.change for t in found.slopes)
    mean = lambda t: (t * p).sum(-1, keepdim=True)  # noqa: E731
    rms, nu = spread.mean_square, centre.nu
    a = nu * r + errors.values[:, None, None]
    # the second order of a logit: the product of both moves, and what rounding hides of it
    second = gamma * r + centre.blur
    n_second = rms(second)
    second = second + mean(second)
    x = visible(centre, spread.logits + second)
    most = x.amax(-1)
    n_x = spread.xi * r + rms(g * r) + n_second
    kappa, steep = exp_ratios(most)
    lift = kappa * n_x.square()
    # entry by entry, and in L²(P)
    grown = Upper(torch.expm1(x.value)).raised(4)
    eta = grown.max(Upper(-torch.expm1(-(x + lift[..., None]).value)).raised(4))
    rho = exp_rest(x).max((grown + 1.0) * lift[..., None]) + second
    n_eta = rms(eta).min(steep * n_x)
    n_rho = rms(rho).min((kappa * most + lift) * n_x + n_second)
    largest = visible(centre, centre.values).amax(-1)
    u_eta = spread.values(eta).min(largest * n_eta)
    u_rho = spread.values(rho).min(largest * n_rho)
    growth = (visible(centre, eta).amax(-1) + 1.0).sqrt()  # (max P'/P)^½
    shift = (spread.u * n_eta).min(u_eta)  # |Σ P η u|
    a_after, b_after = (t.amax(-1).min(growth * rms(t)) for t in (visible(centre, a), visible(centre, b)))
    a_eta = rms(eta * a).min(a.amax(-1) * n_eta)
    m = a_after + shift
    query = (u_rho + a_eta + m * n_eta + errors.values[:, None]) * spread.xi
    query = query + u_eta * rms(b) + (a_after + shift) * b_after + spread.u * (errors.keys * tau)[:, None] * spread.turned[0]
    first = u_rho + a_eta + m * n_eta + errors.values[:, None]
    then = u_eta + growth * a_after + shift * n_eta
    key = spread.received(first, g) + spread.received(then, gamma)
    of_queries = (errors.queries * tau)[:, None] * spread.turned[1]
    key = key + spread.received(spread.u, of_queries.map(lambda t: t[:, None].expand(p.shape)))
    columned = (rho * p)[..., columns].value
    summed = (n_rho.square()[..., None] * p).map(lambda t: t[..., columns]).sum(1).amax(-1).sqrt()
    weights = matrix_norm(columned).min(summed)
    return Beyond(*(t.raised(_SUMS * len(r)) for t in (weights, query, key)))


def top(w: Float[Tensor, "heads n m"], y: Float[Tensor, "heads m d"], c: Float[Tensor, "heads n d"]) -> Upper:
    """`λ^½`, `λ` at least the largest eigenvalue of `Σ_j w_ij (y_j − c_i)(y_j − c_i)ᵀ`: the norm of its powers (6.8)."""
    shift = y.mean(1, keepdim=True)
    heads, n, m = w.shape
    d = y.shape[-1]
    dtype = torch.float32 if heads * n * m * d * d > _LONG else torch.float64
    far = (y - shift).abs().max().clamp_min(TINY)
    most = w.amax(-1, keepdim=True).clamp_min(TINY)
    w, y, c = (w / most).to(dtype), ((y - shift) / far).to(dtype), ((c - shift) / far).to(dtype)
    unit = 4 * torch.finfo(dtype).eps
    step = max(1, _ROOM // (d * d * max(n, m)))
    upper = torch.triu_indices(d, d, device=y.device)
    square = torch.zeros(d, d, dtype=torch.long, device=y.device)
    square[upper[0], upper[1]] = square[upper[1], upper[0]] = torch.arange(upper.shape[1], device=y.device)
    place, rows = square.flatten(), []
    for start in range(0, heads, step):
        h = slice(start, start + step)
        pairs = y[h][..., upper[0]] * y[h][..., upper[1]]  # (heads, m, d(d + 1)/2): each product once
        first, total = w[h] @ y[h], w[h].sum(-1)[..., None, None]
        cross = first[..., None] * c[h, :, None]
        cov = (w[h] @ pairs)[..., place].unflatten(-1, (d, d)) - cross - cross.mT + total * c[h, :, :, None] * c[h, :, None]
        size = y[h].square().sum(-1).amax(-1)[:, None] + c[h].square().sum(-1).amax(-1)[:, None]
        blur = unit * (m + 8) * total[..., 0, 0] * size
        trace = cov.diagonal(dim1=-2, dim2=-1).sum(-1).abs()
        even = cov / torch.where(trace > 0, trace, 1.0)[..., None, None]
        power = torch.linalg.matrix_power(even, _POWER)
        rows.append((power.flatten(-2).norm(dim=-1) ** (1 / _POWER) + d * unit) * trace + blur)
    found = Upper(torch.cat(rows).double().clamp_min(0.0)).sqrt() * Upper(most[..., 0]).sqrt() * float(far)
    return found.raised(16)


def matrix_norm(m: Float[Tensor, "heads n c"]) -> Upper:
    """Norms of non-negative matrices; infinity where an entry is."""
    finite = m.isfinite().all(-1).all(-1)
    m = torch.where(finite[:, None, None], m, 0.0)
    largest = m.amax((-2, -1))
    even = m / torch.where(largest > 0, largest, 1.0)[:, None, None]
    bound, _ = perron_bound(
        lambda w: (even @ w[..., None])[..., 0], lambda z: (even.mT @ z[..., None])[..., 0], even.sum(1), _STEPS
    )
    return Upper(torch.where(finite, bound, torch.inf)).raised(8 * sum(m.shape[1:])) * torch.where(finite, largest, 1.0)
