"""Upper bounds on norms of non-negative matrices, by products (docs/explanation/point-bounds.md 4.1)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.tiled import Block, Tiled
from howsmooth.maps import AttentionJacobian

# Six squarings of the gap bring an attention matrix within 1 % of its norm.
STEPS = 6
# Weights below this share of the largest one are raised to it: they stay positive whatever underflows.
_FLOOR = 1e-12
# A bound on `‖N‖²` this close to the Rayleigh quotient of its weights has nothing left to gain.
_TOL = 2e-3

Product = Callable[[Tensor], Tensor]
PerQuery = Float[Tensor, "g n"]
PerKey = Float[Tensor, "g m"]


def perron_bound(forward: Product, backward: Product, start: PerKey, steps: int = STEPS) -> tuple[Float[Tensor, " g"], PerKey]:
    """Upper bounds on the norms of `g` non-negative matrices `N`, and the weights they came from.

        ‖N‖₂² ≤ max_j (NᵀN w)_j / w_j     for every w > 0     (Proposition 4.1)

    Each step takes `w ← NᵀN w`; the smallest bound is returned, in float64, infinity where none is a number. The products
    sum non-negative terms, so that rounding makes a relative error of a few units at most: the caller adds it. The caller also
    sees to it that the largest entries of `N` are of size one or so, since squares must stay in range.

    forward: `w ↦ N w`, (g, m) → (g, n).  backward: `z ↦ Nᵀ z`, (g, n) → (g, m).
    start: first weights, non-negative.  steps: products with `NᵀN`, fewer where every bound is within 0.1 %.

    >>> N = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]], dtype=torch.float64)
    >>> times, back = lambda w: (N @ w[..., None])[..., 0], lambda z: (N.mT @ z[..., None])[..., 0]
    >>> bound, _ = perron_bound(times, back, N.sum(1))
    >>> exact = torch.linalg.matrix_norm(N, 2)
    >>> bool(exact <= bound * (1 + 1e-15)), bool(bound < 1.001 * exact)
    (True, True)
    """
    best, w = start.new_full(start.shape[:1], torch.inf, dtype=torch.float64), _positive(start)
    for _ in range(steps):
        image = backward(forward(w))
        best = torch.fmin(best, (image.double() / w.double()).amax(-1))  # NaN, from what overflowed, says nothing
        rayleigh = (w * image).sum(-1).double() / w.square().sum(-1).double()
        w = _positive(image)
        if bool((best <= rayleigh * (1 + _TOL)).all()):
            break
    return best.sqrt(), w


def _positive(w: PerKey) -> PerKey:
    """Weights scaled to a largest entry of 1 and kept away from zero."""
    top = w.amax(-1, keepdim=True)
    return (w / torch.where(top > 0, top, torch.ones_like(top))).clamp_min(_FLOOR)


def tiled_bound(
    kernel: Tiled, tile: Callable[[Block], Tensor], rows: PerQuery, diagonal: PerQuery, start: PerKey, steps: int
) -> tuple[Float[Tensor, " g"], PerKey]:
    """`perron_bound` of `diag(rows) T + diag(diagonal)`, `T` made tile by tile from those of `P̂`."""

    def forward(w: Tensor) -> Tensor:
        image = torch.zeros_like(rows)
        for b in kernel.blocks():
            image[b.heads, b.rows] += along(tile(b), w[b.heads, b.cols])
        return image.mul_(rows) + diagonal * w

    def backward(z: Tensor) -> Tensor:
        back, z_hat = diagonal * z, z * rows
        for b in kernel.blocks():
            back[b.heads, b.cols] += down(z_hat[b.heads, b.rows], tile(b))
        return back

    return perron_bound(forward, backward, start, steps)


def weights_norm(kernel: Tiled, inverse: PerQuery, steps: int) -> tuple[Float[Tensor, " g"], PerKey]:
    """Upper bounds on `‖P‖₂` by head, (g,), and weights near its top right singular vector, (g, m), from `inverse_rows`."""
    start = received(kernel, inverse, torch.ones_like(inverse))
    return tiled_bound(kernel, lambda b: b.weights, inverse, torch.zeros_like(inverse), start, steps)


def inverse_rows(operator: AttentionJacobian) -> PerQuery:
    """`1/z_i`, which turns `P̂` into `P`; zero for queries that see nothing or that are padding."""
    inverse, mask = operator.kernel.tiled().inverse[..., 0], operator.layer.attention_mask
    return inverse if mask is None else inverse * mask.to(inverse.dtype).repeat_interleave(operator.layer.heads, 0)


def received(kernel: Tiled, inverse: PerQuery, z: PerQuery, *, capped: bool = False) -> PerKey:
    """`Pᵀ z` for one vector per head, (g, m); `capped`: with `P` times the soft-cap's slope."""
    z_hat, back = z * inverse, z.new_zeros(z.shape[0], kernel.shape[-1])
    for b in kernel.blocks():
        back[b.heads, b.cols] += down(z_hat[b.heads, b.rows], b.slope if capped else b.weights)
    return back


def along(tile: Float[Tensor, "g rows cols"], w: Float[Tensor, "g cols"]) -> Float[Tensor, "g rows"]:
    """`tile w`, written as the row product that BLAS is quick at."""
    return torch.bmm(w[:, None], tile.mT)[:, 0]


def down(z: Float[Tensor, "g rows"], tile: Float[Tensor, "g rows cols"]) -> Float[Tensor, "g cols"]:
    """`tileᵀ z`."""
    return torch.bmm(z[:, None], tile)[:, 0]
