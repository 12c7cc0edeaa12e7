"""Kim, Papamakarios & Mnih 2021, *The Lipschitz Constant of Self-Attention* (ICML).

Dot-product attention is not Lipschitz on all of R^{n×d}; L2 attention, whose logits are `−|q_i − q_j|²/√k`, is.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.bound import Bound, log_add, log_of, outward_log
from howsmooth.bounds.constants import Constants
from howsmooth.errors import BadInputError

SOURCE = "Kim, Papamakarios & Mnih 2021"


def dot_product(layer: Constants) -> Bound:
    """K1: dot-product attention has no Lipschitz constant on the whole space: any bound has to know a radius."""
    return Bound(
        "K1",
        "no global constant",
        "upper",
        None,
        "sup over all inputs of ‖D_X f‖ = ∞ for dot-product attention with n ≥ 2, A ≠ 0, V ≠ 0",
        SOURCE,
        "dot-product attention on unbounded inputs",
        "a statement about unbounded inputs, not a bound on a ball",
    )


def l2_attention(
    w_q: Float[Tensor, "heads head d"],
    w_v: Float[Tensor, "heads head d"],
    w_o: Float[Tensor, "d_out width"],
    n: int,
) -> Bound:
    """K2: their bound for L2 multi-head attention with tied queries and keys, on the whole space, any radius.

    `F(X) = [f_1 … f_H] W_oᵀ`, `f_h = P_h X A_h W_vᵀ`, `A_h = W_qᵀ W_q/√k`, `P_h = softmax(−|W_q x_i − W_q x_j|²/√k)`:

        Lip ≤ √(n/k) (4φ⁻¹(n−1) + 1) (Σ_h ‖W_q^h‖²‖W_v^h‖²)^½ ‖W_o‖,   φ(x) = x e^{x+1}

    Quoted, not re-proved here. The map is another one than dot-product attention, so it has no row in `ball_bounds`.

    w_q, w_v: (heads, k, d), with k·heads = d as in the paper.  n: tokens, at least 1.

    >>> eye = torch.eye(2)[None]
    >>> round(l2_attention(eye, eye, torch.eye(2), n=1).value, 6)  # one token: √(1/2)
    0.707107
    """
    if n < 1:
        raise BadInputError(f"expected at least one token, got n = {n}")
    if w_q.ndim != 3 or w_v.shape != w_q.shape or w_o.shape[-1] != w_q.shape[0] * w_q.shape[1]:
        raise BadInputError(
            f"expected w_q and w_v of one shape (heads, k, d) and w_o of shape (out, heads·k), "
            f"got {tuple(w_q.shape)}, {tuple(w_v.shape)}, {tuple(w_o.shape)}"
        )
    slack = 1 + 64 * torch.finfo(torch.float64).eps * max(*w_q.shape, *w_o.shape)
    norms = [torch.linalg.matrix_norm(w.double(), ord=2) * slack for w in (w_q, w_v, w_o)]
    heads = float((norms[0] * norms[1]).square().sum()) ** 0.5
    log_value = (
        0.5 * math.log(n / w_q.shape[1])
        + log_add(0.0, log_of(4 * _inverse_phi(n - 1)))
        + log_of(heads)
        + log_of(float(norms[2]))
    )
    return Bound(
        "K2",
        "L2 attention",
        "upper",
        outward_log(log_value, "upper"),
        "Lip ≤ √(n/k)(4φ⁻¹(n−1) + 1)(Σ_h ‖W_q^h‖²‖W_v^h‖²)^½‖W_o‖, φ(x) = x exp(x+1)",
        SOURCE + ", Theorem 3.2 (quoted, not re-proved; tested numerically)",
        "L2 attention with tied queries and keys",
    )


def _inverse_phi(y: float) -> float:
    """The root of `x e^{x+1} = y`, rounded up: Newton's method from the right, where φ is convex and increasing."""
    if y <= 0:
        return 0.0
    x = math.log1p(y)  # φ(log(1+y)) = e(1+y) log(1+y) ≥ y
    for _ in range(100):
        step = (x - y * math.exp(-x - 1)) / (1 + x)
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x * (1 + 1e-12)
