"""Measures on positions and points, position by position: what the conditional distance `d_p` is made of."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.measures.measure import Measure

Slice = tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]

_SAME = 1e-6  # relative difference of masses at one position that rounding explains


@final
@dataclass(frozen=True)
class Slices:
    """Two measures with the same law θ of positions, cut by position.

    single: masses θ(s) and points of the positions at which both have one atom.  several: θ(s) and the two conditional laws
    at the others.
    """

    single: tuple[Float[Tensor, " s"], Float[Tensor, "s d"], Float[Tensor, "s d"]]
    several: tuple[tuple[float, Slice, Slice], ...]

    def cost(self, p: float) -> tuple[float, float]:
        """What single atoms pay, from below and from above: they have one plan."""
        theta, x, y = self.single
        value = float(theta @ (x - y).norm(dim=-1) ** p)
        return value, value


def slices(mu: Measure, nu: Measure) -> Slices | None:
    """The conditional laws of two measures, or nothing where their first marginals differ."""
    assert mu.positions is not None
    assert nu.positions is not None
    (s, index_mu, count_mu), (t, index_nu, count_nu) = (
        torch.unique_consecutive(m.positions, return_inverse=True, return_counts=True) for m in (mu, nu)
    )
    if len(s) != len(t) or not torch.equal(s, t):
        return None
    theta, other = (
        torch.zeros(len(s), dtype=torch.float64, device=s.device).index_add_(0, i, m.mass)
        for i, m in ((index_mu, mu), (index_nu, nu))
    )
    if not torch.allclose(theta, other, rtol=_SAME, atol=1e-15):
        return None
    one = (count_mu == 1) & (count_nu == 1)
    first = [torch.cat([c.new_zeros(1), c.cumsum(0)[:-1]]) for c in (count_mu, count_nu)]
    single = (theta[one], mu.points.double()[first[0][one]], nu.points.double()[first[1][one]])
    several = []
    for k in torch.nonzero(~one)[:, 0].tolist():
        parts = []
        for m, start, count in ((mu, first[0][k], count_mu[k]), (nu, first[1][k], count_nu[k])):
            rows = slice(int(start), int(start + count))
            parts.append((m.points[rows], m.mass[rows] / m.mass[rows].sum()))
        several.append((float(theta[k]), parts[0], parts[1]))
    return Slices(single, tuple(several))
