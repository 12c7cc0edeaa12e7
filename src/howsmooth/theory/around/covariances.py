"""The first-order change of a head's Jacobian, with norms of covariances where `around_jets` has sums of lengths.

Numbers such as 6.8 are those of docs/explanation/around.md.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.theory.around.jets import ROUNDED, Centre, Parts
from howsmooth.theory.at_point.perron import perron_bound
from howsmooth.theory.bound import TINY, lengths, no_nan

_STEPS = 8  # power steps on a matrix of norms: any number of them gives a bound
_LONG = 2**30  # products behind the covariances past which float32 makes them
_ROOM = 2**22  # entries of covariances that are made at once


class Linear(NamedTuple):
    """Bounds on `DB_i(X)[H]` of the query part of every head and token, and on the norm of `DE(X)[H]` of the key part."""

    query: Float[Tensor, "heads n"]
    key: Float[Tensor, " heads"]


def linear_parts(centre: Centre, found: Parts, r: Float[Tensor, " n"], columns: Tensor) -> Linear:
    """Proposition 6.8, for layers without a soft-cap.

    columns: tokens by which the Jacobian is taken.
    """
    p, nu = centre.weights, centre.geometry.nu[:, None]
    by_key, by_query = found.slopes
    own = p * by_key.size * r
    z = by_query.size * r[:, None] + by_key.size * r * (1 - p).clamp_min(0.0) + (own.sum(-1, keepdim=True) - own).clamp_min(0.0)
    kernel = centre.operator.kernel.tiled()
    r_o = centre.geometry.r_o * centre.geometry.out_size
    values, outputs = kernel.v @ r_o.mT, kernel.o @ r_o.mT
    off_u, off_k = (t[:, None] for t in centre.lost)
    most = z.amax(-1, keepdim=True).clamp_min(TINY)  # taken out before squares, which leave the range
    u, u_z = (_top(w, values, outputs) + w.sum(-1).sqrt() * off_u for w in (p, p * (z / most).square()))
    u_z = u_z * most[..., 0]
    if centre.cross is not None:
        keys = abs(centre.layer.scale) * (kernel.k @ centre.geometry.r_q.mT)
        k = _top(p, keys, p @ keys) + abs(centre.layer.scale) * off_k
    else:
        k = lengths(p.sqrt() * by_query.size)
    moved = nu * lengths(p.sqrt() * r)
    query = (u_z + moved) * k + u * lengths(p.sqrt() * by_query.change)
    spread = (p * (2 - 2 * p).clamp(0.0, 1.0)).sqrt()  # diag(p) − ppᵀ is at most diag of its square
    received = spread * by_key.size * (u_z + moved)[..., None]
    tilted = spread * by_key.change * u[..., None]
    key = sum(lengths(t.mT)[:, columns].amax(-1) for t in (received, tilted))
    assert isinstance(key, Tensor)
    return Linear(no_nan(query * (1 + ROUNDED)), no_nan(key * (1 + ROUNDED)))


def _top(
    w: Float[Tensor, "heads n m"], y: Float[Tensor, "heads m d"], c: Float[Tensor, "heads n d"]
) -> Float[Tensor, "heads n"]:
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
        fourth = torch.linalg.matrix_power(even, 4)
        rows.append((fourth.flatten(-2).norm(dim=-1) ** 0.25 + d * unit) * trace + blur)
    return torch.cat(rows).double().clamp_min(0.0).sqrt() * most[..., 0].sqrt() * far


def matrix_norm(m: Float[Tensor, "heads n c"]) -> Float[Tensor, " heads"]:
    """Norms of non-negative matrices from above; infinity where an entry is."""
    finite = m.isfinite().all(-1).all(-1)
    m = torch.where(finite[:, None, None], m, 0.0)
    top = m.amax((-2, -1))
    even = m / torch.where(top > 0, top, 1.0)[:, None, None]
    bound, _ = perron_bound(
        lambda w: (even @ w[..., None])[..., 0], lambda z: (even.mT @ z[..., None])[..., 0], even.sum(1), _STEPS
    )
    return torch.where(finite, bound * top * (1 + ROUNDED), torch.inf)
