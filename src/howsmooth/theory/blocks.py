"""Norms of the splitting blocks `S_i` of every token, from below and from above."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import NoConvergenceError
from howsmooth.maps import Operator
from howsmooth.maps.queries import own, own_sizes
from howsmooth.spectral.dense import DenseSVD
from howsmooth.spectral.golub_kahan import GolubKahan

_DENSE = 256  # widths up to which every block is decomposed
_NUMBERS = 2**21  # entries of blocks worked on at once
_BASIS = 256  # vectors kept for a block that goes through products
_WIDTH = 0.02  # interval asked for where blocks are too wide to decompose


@final
@dataclass(frozen=True, eq=False)
class OwnNorms:
    """`lower_i ≤ ‖S_i‖ ≤ upper_i`, (batch, n) float64.

    confidence: with which all upper ends hold together; 1 where blocks are decomposed.
    """

    lower: Float[Tensor, "batch n"]
    upper: Float[Tensor, "batch n"]
    confidence: float


@torch.no_grad()
def own_norms(operator: Operator, above: float = 0.0, delta: float = 1e-6) -> OwnNorms:
    """The norms of all blocks of a linearised map.

    Blocks of width up to 256 are decomposed, so both ends are exact to rounding; wider ones go through products, and all
    upper ends hold together with probability `1 − delta`.
    above: tokens whose cheap bound (Proposition 5.6) is not larger are left at `[0, that bound]`.
    """
    sizes = own_sizes(operator)
    batch, n = sizes.bound.shape
    d, d_out = operator.in_shape[-1], operator.out_shape[-1]
    dense = min(d, d_out) <= _DENSE
    lower, upper = torch.zeros_like(sizes.bound), sizes.bound.clone()
    step = max(1, _NUMBERS // (batch * (d * d_out if dense else _BASIS * d)))
    used = False
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        size = sizes.bound[:, rows]
        if bool((size <= above).all()):
            continue
        blocks = own(operator, rows)
        slack = (16 * torch.finfo(operator.dtype).eps * (d + n) ** 0.5 + operator.noise) * sizes.terms[:, rows]
        if dense:
            matrices = blocks.dense().double()
            if not bool(matrices.isfinite().all()):
                raise NoConvergenceError("expected finite splitting blocks, got NaN or infinity; rescale the map")
            low = high = torch.linalg.matrix_norm(matrices, 2).unflatten(0, (batch, -1))
        else:
            found = GolubKahan(delta=delta / (batch * n)).solve(blocks, 0.1 * _WIDTH, _WIDTH, 0)
            low = size.new_tensor([s.value for s in found]).unflatten(0, (batch, -1))
            high = size.new_tensor([s.upper for s in found]).unflatten(0, (batch, -1))
            used = True
        lower[:, rows] = low
        upper[:, rows] = torch.minimum(torch.maximum(high + slack, low), torch.maximum(size, low))
    return OwnNorms(lower, upper, 1 - delta if used else 1.0)


@torch.no_grad()
def own_direction(operator: Operator, token: int) -> tuple[Float[Tensor, " d"], float]:
    """The unit direction that `S_token` stretches most, and by how much, for an operator of one input."""
    blocks = own(operator, slice(token, token + 1))
    solver = DenseSVD() if min(blocks.in_size, blocks.out_size) <= _DENSE else GolubKahan()
    v = solver.solve(blocks, 1e-6, None, 0)[0].direction.reshape(1, 1, *blocks.in_shape).to(blocks.dtype)
    v = v / v.norm()
    return v.flatten(), float(blocks.jvp(v).norm())
