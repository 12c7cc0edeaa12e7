"""The norm of a non-negative matrix from above, from its products alone (docs/point-bounds.md 4.1)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

# Six squarings of the gap bring an attention matrix within 1 % of its norm.
STEPS = 6
# Weights below this share of the largest one are raised to it: they stay positive whatever underflows.
_FLOOR = 1e-12

# A bound on `‖N‖²` this close to the Rayleigh quotient of its weights has nothing left to gain.
_TOL = 2e-3

Product = Callable[[Tensor], Tensor]


def perron_bound(
    forward: Product, backward: Product, start: Float[Tensor, "g m"], steps: int = STEPS
) -> tuple[Float[Tensor, " g"], Float[Tensor, "g m"]]:
    """Upper bounds on the norms of `g` non-negative matrices `N`, and the weights they came from.

        ‖N‖₂² ≤ max_j (NᵀN w)_j / w_j     for every w > 0

    Proposition 4.1 in docs/point-bounds.md. Each step takes `w ← NᵀN w`; the smallest bound seen is returned, in float64. The
    products sum non-negative terms, so that rounding makes a relative error of a few units at most: the caller adds it.

    forward: `w ↦ N w`, (g, m) → (g, n).  backward: `z ↦ Nᵀ z`, (g, n) → (g, m).
    start: first weights, non-negative.  steps: products with `NᵀN`, fewer where every bound is within 0.1 %.

    >>> N = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]], dtype=torch.float64)
    >>> times, back = lambda w: (N @ w[..., None])[..., 0], lambda z: (N.mT @ z[..., None])[..., 0]
    >>> bound, _ = perron_bound(times, back, N.sum(1))
    >>> exact = torch.linalg.matrix_norm(N, 2)
    >>> bool(exact <= bound * (1 + 1e-15)), bool(bound < 1.001 * exact)
    (True, True)
    """
    best = start.new_full(start.shape[:1], torch.inf, dtype=torch.float64)
    w = positive(start)
    for _ in range(steps):
        image = backward(forward(w))
        best = torch.minimum(best, (image.double() / w.double()).amax(-1))
        rayleigh = (w * image).sum(-1).double() / w.square().sum(-1).double()
        w = positive(image)
        if bool((best <= rayleigh * (1 + _TOL)).all()):
            break
    return best.sqrt(), w


def positive(w: Float[Tensor, "g m"]) -> Float[Tensor, "g m"]:
    """Weights scaled to a largest entry of 1 and kept away from zero."""
    top = w.amax(-1, keepdim=True)
    return (w / torch.where(top > 0, top, torch.ones_like(top))).clamp_min(_FLOOR)
