"""Kim, Papamakarios & Mnih 2021, *The Lipschitz Constant of Self-Attention* (ICML).

Dot-product attention is not Lipschitz on all of R^{n×d}; L2 attention, whose logits are `−|q_i − q_j|²/√k`, is.
"""

import math

from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps.base import check_finite
from howsmooth.settings import whole
from howsmooth.theory.bound import Bound, at_most, log_add, log_of, slack, spectral_norm


def l2_bounds(
    w_q: Float[Tensor, "heads k d"], w_v: Float[Tensor, "heads k d"], w_o: Float[Tensor, "d_out width"], n: int
) -> list[Bound]:
    """Bounds on the Lipschitz constant of L2 multi-head attention with tied queries and keys, on the whole space.

    `F(X) = [f_1 … f_H] W_oᵀ`, `f_h = P_h X A_h W_vᵀ`, `A_h = W_qᵀ W_q/√k`, `P_h = softmax(−|W_q x_i − W_q x_j|²/√k)`.
    Theorem 3.17 in docs/explanation/bounds.md. The map is another one than dot-product attention, so it has a table of its own.

    >>> import torch
    >>> eye = torch.eye(2)[None]
    >>> [(b.id, round(b.value, 4)) for b in l2_bounds(eye, eye, torch.eye(2), n=1)]  # one token: the map is A, √(1/2)
    [('K2', 0.7071), ('K3', 0.7071)]
    >>> [(b.id, round(b.value, 1)) for b in l2_bounds(eye, eye, torch.eye(2), n=1024)]
    [('K2', 424.5), ('K3', 79.2)]
    """
    whole(n, "a whole number of tokens n, at least 1", "count the tokens", least=1)
    if w_q.ndim != 3 or w_v.shape != w_q.shape or w_o.ndim != 2 or w_o.shape[-1] != w_q.shape[0] * w_q.shape[1]:
        raise BadInputError(
            f"expected w_q and w_v of one shape (heads, k, d) and w_o of shape (out, heads·k), "
            f"got {tuple(w_q.shape)}, {tuple(w_v.shape)}, {tuple(w_o.shape)}; cut the weights head by head"
        )
    for w, name in ((w_q, "w_q"), (w_v, "w_v"), (w_o, "w_o")):
        check_finite(w, name)
    rounding = slack(max(*w_q.shape, *w_o.shape))
    w_q, w_v, w_o = w_q.double(), w_v.double(), w_o.double()
    queries, values, both = (_logs(spectral_norm(m), rounding) for m in (w_q, w_v, w_v @ w_q.mT))
    apart = 0.5 * log_add(*(2 * (2 * q + v) for q, v in zip(queries, values, strict=True)))
    joint = 0.5 * log_add(*(2 * (q + b) for q, b in zip(queries, both, strict=True)))
    c = inverse_phi(n - 1)
    kernel = math.sqrt(n) + 2 * c + 2 * math.sqrt(c * inverse_phi(1) * (n - 1))
    share = _logs(spectral_norm(w_o), rounding)[0] - 0.5 * math.log(w_q.shape[1])
    printed = share + 0.5 * math.log(n) + math.log1p(4 * c) + apart
    sharper = share + math.log(kernel) + joint
    proof, assumes = "howsmooth, docs/explanation/bounds.md Theorem 3.17", "L2 attention with tied queries and keys"
    source = f"Kim, Papamakarios & Mnih 2021, Theorem 3.2; proved in {proof}"
    first = "Lip ≤ √(n/k)(4φ⁻¹(n−1) + 1)(Σ_h ‖W_q^h‖⁴‖W_v^h‖²)^½‖W_o‖, φ(x) = x exp(x+1)"
    second = "Lip ≤ k^{−½}(√n + 2c + 2(c φ⁻¹(1)(n−1))^½)(Σ_h ‖W_v^hW_q^hᵀ‖²‖W_q^h‖²)^½‖W_o‖, c = φ⁻¹(n−1)"
    return [
        at_most("K2", "L2 attention", first, source, assumes, printed),
        at_most("K3", "L2 attention, sharper", second, proof, assumes, sharper),
    ]


def _logs(norms: Tensor, rounding: float) -> list[float]:
    """Logarithms of norms, rounded up."""
    return [log_of(x * rounding) for x in norms.flatten().tolist()]


def inverse_phi(y: float) -> float:
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
