"""L2 attention with tied queries and keys: every token is nearest to itself, so its weights cannot all fall on another.

With `z_i = √τ (W_q x_i + b_q)`, turned where there are phases, weights are `softmax_j(−|z_i − z_j|²)`. Three numbers bound the
derivative (8.4): the spread of `z` under a row, at most `c = φ⁻¹(n−1)`, about log n; the columns of `P`, at most `1.797^r` in
`r` dimensions, whatever n and R; and the columns of `P_ij |z_i − z_j|²`, likewise. Numbers such as 8.4 are those of
docs/explanation/kinds.md.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.spectral import spectral_norm
from howsmooth.theory.bound import Bound, at_most, first_reason, least_of, log_add, log_of
from howsmooth.theory.constants import Constants, once_a_layer
from howsmooth.theory.kinds.published import inverse_phi
from howsmooth.theory.kinds.slopes import KINDS_SOURCE, same_points
from howsmooth.theory.over_ball.columns import heads_together
from howsmooth.theory.upper import product_blur, slack

_RELATIVE = 1e-6  # of `V`: what may be left of `V − M W_q` for the values to count as a function of the queries


def tied(layer: Constants, n: int | None, radius: float) -> Bound:
    """T1, T1m: any values, over the ball (8.4). `n=None` for the form free of n."""

    answer = (
        _not_tied(layer)
        or (_masked(layer) if n is None else None)
        or heads_together(layer, lambda h: _ell(layer, n, h, radius))
    )
    points = "ρ = √τ‖W_q‖R, ρ′ = ρ, and √τ|b_q| more with phases"
    statement = f"Lip ≤ ‖V‖[√C + 2ρ(√min(c, ρ′²) + √D)], {points}, c = φ⁻¹(n−1), C ≤ 1.797^r, D ≤ min(4ρ′²C, D_r)"
    id, name = ("T1m", "tied L2, any n") if n is None else ("T1", "tied L2")
    return at_most(id, name, statement, f"{KINDS_SOURCE} 8.4", f"{_ASSUMES}, phases", answer, mean_field=n is None)


def tied_everywhere(layer: Constants, n: int, radius: float) -> Bound:
    """T2: values that are a function of the queries, `V = M W_q`: free of the radius (8.4).

    radius: what is left of `V − M W_q`, a rounding, moves in the ball.
    """
    answer = _not_tied(layer) or _turned(layer) or _through_queries(layer, n, radius, kernel_constant(layer, n))
    statement = "Lip ≤ ‖M‖‖W_q‖[√C + 2c + 2√(cD)], V = M W_q, c = φ⁻¹(n−1), C ≤ 1.797^r, D ≤ D_r, any radius"
    return at_most("T2", "tied L2, any radius", statement, f"{KINDS_SOURCE} 8.4", f"{_ASSUMES}; V = M W_q", answer)


def as_published(layer: Constants, n: int, radius: float) -> Bound:
    """K2 of a layer: as Kim et al. state it, for values that are a function of the queries (bounds.md 3.17)."""
    log_kernel = math.log(math.sqrt(n) * (4 * inverse_phi(n - 1) + 1))
    answer = _not_tied(layer) or _turned(layer) or _through_queries(layer, n, radius, log_kernel)
    statement = "Lip ≤ √n(4φ⁻¹(n−1) + 1)‖M‖‖W_q‖, V = M W_q, φ(x) = x exp(x+1), any radius"
    source = "Kim, Papamakarios & Mnih 2021, Theorem 3.2; proved in howsmooth, docs/explanation/bounds.md Theorem 3.17"
    return at_most("K2", "L2 attention", statement, source, f"{_ASSUMES}; V = M W_q", answer)


_ASSUMES = "W_k = W_q and equal biases, no logit bias, no norms on queries and keys; every mask, heads, groups"


def _ell(layer: Constants, n: int | None, h: int, radius: float) -> float:
    """log of `√C + 2ρ(√min(c, ρ′²) + √D)`, every `z` within `ρ′` of one point."""
    slope, size = _slope_of_points(layer, h, radius), _size_of_points(layer, h, radius)
    within = log_of(least_of(size * size, _crowd(layer, n)))  # of z under a row
    moved = log_add(0.5 * within, 0.5 * _moved_columns(layer, n, size))
    return log_add(0.5 * _columns(layer, n), math.log(2) + log_of(slope) + moved)


def kernel_constant(layer: Constants, n: int) -> float:
    """log of `√C + 2c + 2√(cD)`, the constant of `z ↦ Σ_j P_ij z_j` on the whole space."""
    c = log_of(_crowd(layer, n))
    return log_add(0.5 * _columns(layer, n), math.log(2) + c, math.log(2) + 0.5 * (c + _moved_columns(layer, n, math.inf)))


def _not_tied(layer: Constants) -> str | None:
    attn = layer.attn
    return first_reason(
        (not same_points(layer), "for tied queries and keys, without norms on them"),
        (attn.bias is not None, "not proved for a logit bias"),
        (attn.scale < 0, "a negative scale turns distances around"),
    )


def _masked(layer: Constants) -> str | None:
    masked = layer.attn.causal or layer.attn.window is not None
    return "columns are bounded without n for attention without a mask" if masked else None


def _turned(layer: Constants) -> str | None:
    return None if layer.attn.rotary is None else "with rotary phases values are no function of the turned queries; see T1"


def _slope_of_points(layer: Constants, h: int, radius: float) -> float:
    """ρ: `√τ` times the longest `W_q x`, or as much more as the phases make of it."""
    return math.sqrt(layer.attn.scale) * layer.unit[0].slope(h, radius) * radius


def _size_of_points(layer: Constants, h: int, radius: float) -> float:
    """ρ′: ρ, since `z` lies around its bias; phases turn the bias too, and then it is the longest `z`."""
    turned = layer.attn.rotary is not None
    return math.sqrt(layer.attn.scale) * layer.unit[0].length(h, radius) if turned else _slope_of_points(layer, h, radius)


def _crowd(layer: Constants, n: int | None) -> float:
    """`c = φ⁻¹(N − 1)` for rows that see at most N keys."""
    most = layer.visible(n)
    return math.inf if math.isinf(most) else inverse_phi(most - 1)


def _columns(layer: Constants, n: int | None) -> float:
    """log C: the most that a column of `P` sums to."""
    most = math.log(layer.visible(n))
    return most if _masked(layer) else min(most, received_at_most(_rank(layer)))


def _moved_columns(layer: Constants, n: int | None, size: float) -> float:
    """log D: the most that a column of `P_ij |z_i − z_j|²` sums to; size: ρ′."""
    most = layer.visible(n)
    logs = [log_of(4 * size * size) + _columns(layer, n), log_of(inverse_phi(1)) + log_of(most - 1)]
    return least_of(*logs) if _masked(layer) else least_of(*logs, moved_at_most(_rank(layer)))


def _rank(layer: Constants) -> int:
    """Dimensions that points `z` lie in: all of the head where phases turn each by itself."""
    attn = layer.attn
    return attn.head_width if attn.rotary is not None else min(attn.head_width, attn.width)


@cache
def received_at_most(rank: int) -> float:
    """log of `min_u (u + u²/(u² − 1))^{r/2}`, the most that a column of `P` sums to in `r` dimensions (Lemma 8.4.1).

    >>> [round(math.exp(received_at_most(r)), 3) for r in (1, 2)]
    [1.797, 3.229]
    """
    return _least_power(0.0, rank)


@cache
def moved_at_most(rank: int) -> float:
    """log of `min_{δ,u} (u/(1−δ) + u²/(u²−1))^{r/2}/(eδ)`, the most that a column of `P_ij |z_i − z_j|²` sums to."""
    return min(_least_power(k / 100, rank) - 1 - math.log(k / 100) for k in range(1, 100))


def _least_power(share: float, rank: int) -> float:
    """log of `min_u (u/(1−δ) + u²/(u²−1))^{r/2}`, `share` for `δ`, rounded up; every `u > 1` gives a bound."""
    grid = (1 + k / 50 for k in range(2, 150))
    return rank * (math.log(min(u / (1 - share) + u * u / (u * u - 1) for u in grid)) / 2 + 1e-12)


@torch.no_grad()
def _through_queries(layer: Constants, n: int, radius: float, log_kernel: float) -> float | str:
    """log of `‖M‖‖W_q‖` times the constant of the kernel, heads together, and of what is left of `V − M W_q` in the ball."""
    factor = _factor(layer)
    if factor is None:
        return "needs values that are a function of the queries, V = M W_q; see T1"
    left = log_add(*(log_of(r) + _ell(layer, n, h, radius) for h, r in enumerate(factor.rest)))
    return log_add(factor.log_norm + log_kernel, left)


class _Factor(NamedTuple):
    """`V = M W_q`: log of `‖M‖‖W_q‖`, heads together, and what is left of `V − M W_q`, head by head."""

    log_norm: float
    rest: tuple[float, ...]


@once_a_layer
def _factor(layer: Constants) -> _Factor | None:
    """The values as a function of the queries; nothing where they are none."""
    w, gain = layer.attn.by_head(), layer.unit[0].gain
    values = layer.value_maps  # (heads, d_out, d)
    m = values @ torch.linalg.pinv(w.q)  # (heads, d_out, d_h)
    over = values - m @ w.q
    sizes = values.norm(dim=(-2, -1))  # Frobenius norms, at least the others, and at most √width times as large
    if bool((over.norm(dim=(-2, -1)) > _RELATIVE * math.sqrt(min(values.shape[1:])) * sizes).any()):
        return None
    rest = spectral_norm(over) + product_blur(m, w.q) + values.new_tensor([e for _, e in layer.blur])
    if bool((rest > _RELATIVE * spectral_norm(values)).any()):
        return None
    grow = slack(max(*w.q.shape, *values.shape))
    by_head = [(float(a) * grow, b * gain) for a, b in zip(spectral_norm(m), layer.unit[0].weight, strict=True)]
    apart = log_add(*(log_of(a) + log_of(b) for a, b in by_head))
    even = [math.sqrt(b / a) if a > 0 and b > 0 else 1.0 for a, b in by_head]
    stacked = least_of(*(log_of(_stack(m, w.q, f) * gain * grow) for f in ([1.0] * len(even), even)))
    return _Factor(least_of(apart, stacked), tuple(rest.tolist()))


def _stack(m: Float[Tensor, "heads d_out d_h"], q: Float[Tensor, "heads d_h d"], factors: list[float]) -> float:
    """`‖[f_1 M_1 … f_H M_H]‖ ‖[W_q^1/f_1; …]‖`."""
    f = m.new_tensor(factors)[:, None, None]
    return float(spectral_norm((m * f).transpose(0, 1).flatten(1)) * spectral_norm((q / f).flatten(0, 1)))
