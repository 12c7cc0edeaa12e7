"""Published bounds for kinds of attention other than softmax, as stated, with where each is proved.

Kim, Papamakarios & Mnih 2021, *The Lipschitz Constant of Self-Attention* (ICML): dot-product attention is not Lipschitz on all
of R^{n×d}; L2 attention, whose logits are `−|q_i − q_j|²/√k`, is.

Qi et al. 2023, *LipsFormer: Introducing Lipschitz Continuity to Vision Transformers* (ICLR, arXiv 2304.09856): scaled cosine
similarity attention, queries, keys and values divided by `√(|·|² + ε)`; its constant in the Euclidean norm, as remembered.
docs/explanation/kinds.md 8.3 proves a smaller one, so it holds.

Ramapuram et al. 2024, *Theory, Analysis, and Best Practices for Sigmoid Self-Attention* (arXiv 2409.04431): the bound at an
input, `‖W_v‖(σ_∞ + 2σ′_∞ ‖W_qᵀW_k‖ mean|x|²)` with `σ_∞ = n sup σ` and `σ′_∞ = n sup σ′` over the logits there, as remembered
and proved in docs/explanation/kinds.md 8.5; over a ball with `R²` in place of the mean.
"""

import math
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps.base import check_finite
from howsmooth.settings import whole
from howsmooth.spectral import spectral_norm
from howsmooth.theory.bound import Bound, at_most, log_add, log_of
from howsmooth.theory.constants import Constants
from howsmooth.theory.kinds.sums import sigmoid_logs, weight_logs
from howsmooth.theory.needs import BILINEAR, unmet
from howsmooth.theory.upper import slack

_SIGMOID = "Ramapuram et al. 2024, Theorem 3.2; proved in howsmooth, docs/explanation/kinds.md 8.5"
_STATEMENT = "‖V‖(σ_∞ + 2σ′_∞‖A‖ mean|x_i|²), σ_∞ = n sup σ(s + b), σ′_∞ = n sup σ′(s + b)"
_NEEDS = (
    *("one head", "not causal", "no window", "no soft-cap", "no logit bias", "no biases of logits", "no biases of values"),
    *BILINEAR,
)
_ASSUMES = "one head, no mask, no biases on queries, keys and values, no soft-cap"


def l2_bounds(
    w_q: Float[Tensor, "heads k d"], w_v: Float[Tensor, "heads k d"], w_o: Float[Tensor, "d_out width"], n: int
) -> list[Bound]:
    """Bounds on the Lipschitz constant of L2 multi-head attention with tied queries and keys, on the whole space.

    `F(X) = [f_1 … f_H] W_oᵀ`, `f_h = P_h X A_h W_vᵀ`, `A_h = W_qᵀ W_q/√k`, `P_h = softmax(−|W_q x_i − W_q x_j|²/√k)`.
    Theorem 3.17 in docs/explanation/bounds.md. The map is another one than dot-product attention, so it has a table of its own.

    Args:
        w_q: Of queries and keys, (heads, k, d).
        w_v: Of values, (heads, k, d).
        w_o: The output projection, (d_out, heads·k).
        n: How many tokens.

    Returns:
        A bound of every theorem.

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


def cosine(layer: Constants, n: int) -> Bound:
    """Q1: cosine attention at any radius."""
    attn, units = layer.attn, layer.attn.kind.traits.unit_vectors
    assert units is not None
    answer = unmet(attn, *_NEEDS) if units.values else "stated for values of unit length, the layer's are W_v x"
    if answer is None:
        tau, (q, k), v = abs(attn.scale), layer.unit, layer.value
        moved = log_add(
            log_of(2 * n * (n - 1) * tau) + log_of(k.weight[0]),
            log_of(2 * (n - 1) * tau) + log_of(q.weight[0]),
            log_of(2 * n) + log_of(v.weight[0]),
        )
        answer = log_of(layer.out_norm) + log_of(abs(units.factor)) - 0.5 * math.log(units.epsilon) + moved
    statement = "Lip ≤ ‖W_o‖ν ε^{−½}(2n(n−1)τ‖W_k‖ + 2(n−1)τ‖W_q‖ + 2n‖W_v‖), any radius"
    assumes = "one head, no mask, no biases, normalised queries, keys and values"
    return at_most("Q1", "cosine, published", statement, "Qi et al. 2023, Theorem 1", assumes, answer)


def sigmoid_over_ball(layer: Constants, n: int, radius: float) -> Bound:
    """S1: sigmoid attention over a ball, with `R²` in place of the mean of the squares."""
    answer = unmet(layer.attn, *_NEEDS)
    if answer is None:
        log_w, log_slope = weight_logs(layer, 0, n, radius)
        moved = math.log(2) + log_slope + log_of(layer.a[0] * radius * radius)
        answer = log_of(layer.v[0]) + math.log(n) + log_add(log_w, moved)
    statement = f"Lip ≤ {_STATEMENT.replace('mean|x_i|²', 'R²')}"
    return at_most("S1", "sigmoid, published", statement, _SIGMOID, _ASSUMES, answer)


def sigmoid_at_point(layer: Constants, x: Float[Tensor, "n d"]) -> Bound:
    """S1 at an input, with its own logits and the mean of its squares."""
    answer, attn = unmet(layer.attn, *_NEEDS), layer.attn
    if answer is None:
        logistic = attn.kind.traits.logistic
        assert logistic is not None
        x = x if attn.attention_mask is None else x[attn.attention_mask[0]]
        q, k, _ = replace(attn, attention_mask=None).vectors(x[None])
        s = attn.scale * (q @ k.mT) + logistic.shift(len(x))
        # logits carry a rounding of their size
        size = 1e-12 * (1 + abs(attn.scale) * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()))
        high, nearest = float(s.max()) + size, max(0.0, float(s.abs().min()) - size)
        log_w, log_slope = sigmoid_logs(high, nearest)
        moved = math.log(2) + log_slope + log_of(layer.a[0]) + 2 * log_of(float(x.norm())) - math.log(len(x))
        answer = log_of(layer.v[0]) + math.log(len(x)) + log_add(log_w, moved)
    return at_most("S1", "sigmoid, published", _STATEMENT, _SIGMOID, _ASSUMES, answer)
