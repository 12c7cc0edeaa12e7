"""Bounds over the ball of radius R that are proved in docs/explanation/bounds.md, for the layers of real models.

Per head `ℓ_h = √C (1 + G²R²)^½ + K R` (Theorem 3.3) with `G = sup |A x + c|`, `K` its counterpart on the key side and `C` a
bound on the column sums of `P`, in which they differ. Heads are put together through the norms of `V_hᵀ V_k` (Theorem 3.4).
Rotary phases and norms on queries and keys enter through `G` and `K`, and put `1 + GR` for the root (Theorem 3.16).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.kinds.kind import not_softmax
from howsmooth.spectral import eigh, spectral_norm, top_eigenvalue
from howsmooth.theory.bound import Bound, at_most, first_reason, least_of, log_add, log_of
from howsmooth.theory.constants import Constants, once_a_layer
from howsmooth.theory.needs import BILINEAR, unmet
from howsmooth.theory.upper import slack

BALL_SOURCE = "howsmooth, docs/explanation/bounds.md"
_LAYER = "biases, grouped heads, soft-cap, rotary phases, norms on queries and keys allowed"


def tokens(layer: Constants, n: int, radius: float) -> Bound:
    """B7: no column of `P` sums to more than the number of queries that see it (Corollary 3.5)."""
    statement = "Lip ≤ ‖V‖[√N(1 + ‖A‖²R⁴)^½ + ‖A‖R²], N = n, or what a window lets see a token"
    reason = not_softmax(layer.attn.kind, sink=True) or layer.unbounded(radius)
    answer = reason or _by_columns(layer, radius, lambda h: math.log(layer.visible(n)))
    return at_most("B7", "√n, sharper", statement, f"{BALL_SOURCE} Corollary 3.5", f"every mask; {_LAYER}", answer)


def spread(layer: Constants, n: int | None, radius: float) -> Bound:
    """B8: logits of a row are bounded, so no column sums to more than their largest ratio (Corollary 3.6).

    `n=None` for the mean-field form.
    """
    windowed = _windowed(layer, n)
    padded = windowed and layer.attn.attention_mask is not None
    reason = (
        not_softmax(layer.attn.kind, sink=True)
        or unmet(layer.attn, "not causal")
        or ("not proved for a window over padded sequences; see B7" if padded else layer.unbounded(radius))
        or (_hidden_keys(layer) if n is None else None)
    )
    answer = reason or _by_columns(layer, radius, lambda h: log_received(layer, n, layer.log_spread(h, radius)))
    columns = "e^{‖A‖R²}" if n is None else "min(√n, e^{‖A‖R²})"
    statement = f"Lip ≤ ‖V‖[{columns}(1 + ‖A‖²R⁴)^½ + ‖A‖R²]"
    id, name = ("B8m", "bounded logits, mean field") if n is None else ("B8", "bounded logits")
    return at_most(id, name, statement, f"{BALL_SOURCE} Corollary 3.6", f"not causal; {_LAYER}", answer, mean_field=n is None)


def causal(layer: Constants, n: int, radius: float) -> Bound:
    """B9: under a causal mask `P_ij ≤ E/i`, which bounds the sums of columns (Corollary 3.7)."""
    statement = "Lip ≤ ‖V‖[(E(1 + log⁺(n/E)))^½(1 + ‖A‖²R⁴)^½ + ‖A‖R²], E = e^{2‖A‖R²}; a window w puts min(n, w) for n"
    reason = not_softmax(layer.attn.kind, sink=True) or (
        layer.unbounded(radius) if layer.attn.causal else "for causal attention"
    )
    answer = reason or _by_columns(layer, radius, lambda h: log_received(layer, n, layer.log_spread(h, radius)))
    return at_most("B9", "causal", statement, f"{BALL_SOURCE} Corollary 3.7", f"causal; {_LAYER}", answer)


def causal_mean_field(layer: Constants, radius: float) -> Bound:
    """B10: causal and free of n, by a weighted Schur test (Theorem 3.8). At `A = 0` it is Hardy's constant 2, sharp."""

    def first_term(h: int) -> float:
        return causal_free(layer.log_spread(h, radius), log_of(layer.reach(h, radius) * radius))

    statement = "Lip ≤ ‖V‖[min_s (E^{1+s}/(s(1−s)))^½(1 + 2^s‖A‖R²) + ‖A‖R²], E = e^{2‖A‖R²}, any number of tokens"
    source, assumes = f"{BALL_SOURCE} Theorem 3.8", f"causal, no window; {_LAYER}"
    reason = not_softmax(layer.attn.kind, sink=True) or _causal_mean_field(layer) or layer.unbounded(radius)
    answer = reason or _by_heads(layer, radius, first_term)
    return at_most("B10", "causal mean field", statement, source, assumes, answer, mean_field=True)


def exact_columns(layer: Constants, n: int | None, radius: float) -> Bound:
    """B12: the largest column sum over all measures in the ball is `e^{ΛR²}`, exactly (Theorem 3.9).

    `Λ` is `a/4` for `A ⪰ 0`, `2a` for `A = −aI`, in between otherwise. `n=None` for the mean-field form.
    """
    reason = not_softmax(layer.attn.kind, sink=True) or unmet(layer.attn, "not causal")
    reason = reason or ("not proved for a window; see B8" if _windowed(layer, n) else _not_affine(layer))
    reason = reason or (_hidden_keys(layer) if n is None else None)
    cap = math.inf if n is None else math.log(n)
    columns = "e^{ΛR²/2}" if n is None else "min(√n, e^{ΛR²/2})"
    statement = f"Lip ≤ ‖V‖[{columns}(1 + ‖A‖²R⁴)^½ + ‖A‖R²], Λ = max_{{|x|,|y|≤1}} ⟨Ax, y − x⟩"
    source, assumes = f"{BALL_SOURCE} Theorem 3.9", "no mask, no soft-cap; biases and grouped heads allowed"
    id, name = ("B12m", "exact column sums, mean field") if n is None else ("B12", "exact column sums")
    answer = reason or _by_columns(layer, radius, lambda h: min(cap, _exact_column(layer, h, radius)))
    return at_most(id, name, statement, source, assumes, answer, mean_field=n is None)


def causal_positive(layer: Constants, n: int | None, radius: float) -> Bound:
    """B13, B14: causal attention with `A` near a positive semidefinite `S` of small rank (Theorems 3.10 and 3.11).

    `n=None` for the mean-field form.
    """
    reason = not_softmax(layer.attn.kind) or (_causal_mean_field(layer) if n is None else None)
    reason = reason or first_reason(
        (not layer.attn.causal, "for causal attention"),
        (layer.attn.window is not None, "not proved for a window; see B9"),
        (layer.bias_range > 0, "not proved for a logit bias"),
    )

    def first_term(h: int) -> float:
        parts = _positive_parts(layer.core.matrix[h], layer.blur[h][0])
        return least_of(*(_positive_part(layer, h, n, radius, *part) for part in parts))

    if n is None:
        id, name, theorem = "B14", "causal mean field, A ⪰ 0", "3.11"
        claim = "‖P‖² ≤ min_s 2^{r/2}e^{ρ²/4}(1+1/s)e^{s(4ρ² + 2ρ√r + 2sρ²)}/(1−s), any number of tokens"
    else:
        id, name, theorem = "B13", "causal, A ⪰ 0", "3.10"
        claim = "Lip ≤ ‖V‖[√C(1 + ρ⁴)^½ + ρ²], C = 2^{r/2}e^{ρ²/4}(1 + log n + 2ρ² + 2ρ√r)"
    statement = f"A ⪰ 0 of rank r, ρ² = ‖A‖R²: {claim}"
    assumes = "causal, no window, no soft-cap; A = S + T costs e^{2‖T‖R²}; query bias and grouped heads allowed"
    answer = reason or _not_affine(layer) or _by_heads(layer, radius, first_term)
    return at_most(id, name, statement, f"{BALL_SOURCE} Theorem {theorem}", assumes, answer, mean_field=n is None)


@once_a_layer
@torch.no_grad()
def column_exponents(layer: Constants) -> tuple[float, ...]:
    """`Λ_h`, rounded up: `min_μ μ + λ_max(AᵀA/(4μ) − sym A)⁺`, every `μ > 0` an upper bound (Proposition 3.9.2).

    >>> from howsmooth.maps import Attention
    >>> from howsmooth.theory.constants import constants
    >>> [round(column_exponents(constants(Attention.from_matrices(g * torch.eye(2), torch.eye(2))))[0], 6) for g in (4.0, -4.0)]
    [1.0, 8.0]
    """
    core = layer.core.matrix
    a = torch.tensor(layer.a, dtype=torch.float64, device=core.device)
    unit = core / a.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
    gram, sym = unit.mT @ unit, (unit + unit.mT) / 2

    def value(log_mu: Float[Tensor, " heads"]) -> Float[Tensor, " heads"]:
        mu = log_mu.exp()
        top = top_eigenvalue(gram / (4 * mu[:, None, None]) - sym)
        return mu + top.clamp_min(0.0)

    # Convex in μ. With ‖A‖ = 1 the value is at most 2 at μ = 1/2, and above μ + 1/(4μ) − 1, which exceeds 2 below μ = 1/12.
    low, high = torch.full_like(a, math.log(1 / 64)), torch.full_like(a, math.log(2.0))
    ratio = (math.sqrt(5) - 1) / 2
    best = torch.minimum(value(torch.full_like(a, math.log(0.25))), value(torch.full_like(a, math.log(0.5))))
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    f_left, f_right = value(left), value(right)
    for _ in range(37):
        best = torch.minimum(best, torch.minimum(f_left, f_right))
        below = f_left < f_right
        low, high = torch.where(below, low, left), torch.where(below, right, high)
        new = torch.where(below, high - ratio * (high - low), low + ratio * (high - low))
        f_new = value(new)
        left, right = torch.where(below, new, right), torch.where(below, left, new)
        f_left, f_right = torch.where(below, f_new, f_right), torch.where(below, f_left, f_new)
    error = 64 * torch.finfo(torch.float64).eps * (core.shape[-1] + 16)
    return tuple(float(x) * y + error * y + 2 * e for x, y, (e, _) in zip(best, layer.a, layer.blur, strict=True))


def head_constant(layer: Constants, n: int | None, radius: float, h: int) -> float:
    """log of the least `ℓ_h` that B7 to B12 give a head of softmax attention; `n=None` for the form free of n."""
    log_e, log_gr = layer.log_spread(h, radius), log_of(layer.reach(h, radius) * radius)
    if n is None and layer.attn.causal:
        first = causal_free(log_e, log_gr)
    else:
        column = log_received(layer, n, log_e)
        if not (layer.attn.causal or _windowed(layer, n) or _not_affine(layer)):
            column = least_of(column, _exact_column(layer, h, radius))
        first = _first_term(layer, h, radius, column)
    return log_add(first, log_of(layer.key_reach(h, radius) * radius))


def _exact_column(layer: Constants, h: int, radius: float) -> float:
    """log of `e^{ΛR² + 2|c|R + β}` (Theorem 3.9)."""
    return column_exponents(layer)[h] * radius * radius + 2 * layer.query_shift[h] * radius + layer.bias_range


def log_received(layer: Constants, n: int | None, log_e: float) -> float:
    """log of the most that a column of `P` sums to where weights of a row have ratios of at most `E` (3.5, 3.6, 3.7)."""
    attn, most = layer.attn, math.log(layer.visible(n))
    if attn.causal:
        return most if log_e >= most else min(most, log_e + math.log1p(most - log_e))
    if not _windowed(layer, n):
        return min(most, log_e)
    if attn.attention_mask is not None:  # a row may see few real keys
        return most
    # how many more queries see a key than keys a query
    return min(most, log_e + most - math.log(attn.window or 1))


def causal_free(log_e: float, log_gr: float) -> float:
    """log of the first term of Theorem 3.8, free of n: `E` the largest ratio of weights in a row, `GR` as there."""
    return _least(lambda s: 0.5 * ((1 + s) * log_e - math.log(s * (1 - s))) + log_add(0.0, s * math.log(2) + log_gr))


def _windowed(layer: Constants, n: int | None) -> bool:
    """Whether the window hides anything."""
    return layer.attn.window is not None and (n is None or n > layer.attn.window)


def _causal_mean_field(layer: Constants) -> str | None:
    return first_reason(
        (not layer.attn.causal, "for causal attention"),
        (layer.attn.window is not None, "not proved for a window; B9 is free of n there"),
    ) or _hidden_keys(layer)


def _hidden_keys(layer: Constants) -> str | None:
    return "a logit bias hides keys" if math.isinf(layer.bias_range) else None


def _not_affine(layer: Constants) -> str | None:
    """Why logits are not affine in each token; None where they are."""
    return unmet(layer.attn, "no soft-cap", *BILINEAR)


def _by_columns(layer: Constants, radius: float, log_column: Callable[[int], float]) -> float:
    """log of the bound where no column of head `h` sums to more than `exp(log_column(h))` (Theorem 3.3; 3.16 when turned)."""

    return _by_heads(layer, radius, lambda h: _first_term(layer, h, radius, log_column(h)))


def _first_term(layer: Constants, h: int, radius: float, log_column: float) -> float:
    """log of `√C (1 + G²R²)^½`, or as Theorems 3.3 and 3.16 have it with a soft-cap and when turned."""
    log_gr = log_of(layer.reach(h, radius) * radius)
    cross = -math.inf if layer.attn.softcap is None else log_gr
    both = 0.5 * log_add(0.0, cross, 2 * log_gr) if not layer.pairs else log_add(0.0, log_gr)
    return 0.5 * log_column + both


def _by_heads(layer: Constants, radius: float, first_term: Callable[[int], float]) -> float:
    """`heads_together` of `ℓ_h = exp(first_term(h)) + K R`; beside a sink, value biases move too (kinds.md 8.2)."""
    bound = heads_together(layer, lambda h: log_add(first_term(h), log_of(layer.key_reach(h, radius) * radius)))
    if layer.sink is None or not any(layer.value_shift):
        return bound
    return log_add(bound, *(_moved_bias(layer, h, radius, first_term(h)) for h in range(layer.heads)))


def _moved_bias(layer: Constants, h: int, radius: float, first_term: float) -> float:
    """log of `|W_o b_v|(K/4 + G exp(first_term))`: a sink changes how much of the value bias a row takes."""
    moved = log_add(log_of(layer.key_reach(h, radius) / 4), log_of(layer.reach(h, radius)) + first_term)
    return log_of(layer.value_shift[h]) + moved


def heads_together(layer: Constants, log_ell: Callable[[int], float]) -> float:
    """log of the least of the three bounds of Theorem 3.4, `log_ell` the logarithm of `ℓ_h`; in the log domain, so that a head
    of huge `ℓ_h` and small values does not hide another."""
    heads = [h for h in range(layer.heads) if layer.v[h] > 0]
    ell = {h: log_ell(h) for h in heads}
    whole = {h: ell[h] + log_of(layer.v[h]) for h in heads}
    if not heads:
        return -math.inf
    pairs = (log_of(float(layer.cross[h, k])) + whole[h] + whole[k] for h in heads for k in heads)
    return least_of(
        0.5 * log_add(*pairs),
        log_of(layer.stacked[0]) + 0.5 * log_add(*(2 * x for x in ell.values())),
        log_of(layer.stacked[1]) + 0.5 * log_add(*(2 * x for x in whole.values())),
    )


def _least(f: Callable[[float], float]) -> float:
    """The least of `f` on (0, 1), up to a grid: every value is a bound."""
    grid = [0.5] + [10 ** (-k / 16) for k in range(5, 96)] + [1 - 10 ** (-k / 16) for k in range(5, 48)]
    best = min(grid, key=lambda s: least_of(f(s)))
    return least_of(*(f(s) for s in [best * (0.9 + 0.01 * k) for k in range(21)] if 0 < s < 1))


def _positive_parts(core: Float[Tensor, "m m"], blur: float) -> list[tuple[int, float, float]]:
    """Candidates `S ⪰ 0` from the top eigenvectors of the symmetric part: rank, norm, and `‖A − S‖`. blur: the error of A."""
    values, vectors = eigh((core + core.mT) / 2)
    positive = int((values > 1e-12 * values.abs().max()).sum())
    parts = []
    for rank in sorted({min(2**k, positive) for k in range(positive.bit_length() + 1)} if positive else set()):
        u = vectors[:, -rank:]
        rest = core - (u * values[-rank:]) @ u.mT
        error = 64 * torch.finfo(torch.float64).eps * len(core) * float(values[-1])
        parts.append((rank, float(values[-1]) + error, float(spectral_norm(rest)) * slack(len(core)) + error + blur))
    return [*parts, (0, 0.0, float(spectral_norm(core)) * slack(len(core)) + blur)]


def _positive_part(layer: Constants, h: int, n: int | None, radius: float, rank: int, norm: float, rest: float) -> float:
    """log of the first term of `ℓ_h` with `A = S + T`, `rank S`, `‖S‖ = norm`, `‖T‖ = rest`."""
    log_gr = log_of(layer.reach(h, radius) * radius)
    square, shift = norm * radius * radius, 2 * layer.query_shift[h] * radius
    base = 0.5 * rank * math.log(2) + square / 4 + 2 * rest * radius * radius + shift
    wander = 2 * (square * rank) ** 0.5
    if n is not None:
        log_c = min(math.log(n), base + math.log(1 + math.log(n) + 2 * square + wander + shift))
        return 0.5 * log_c + 0.5 * log_add(0.0, 2 * log_gr)
    log_e = layer.log_spread(h, radius)

    def schur(s: float) -> float:
        column = base + math.log1p(1 / s) + s * (2 * square + wander + 2 * s * square + shift)
        return 0.5 * (s * log_e - math.log1p(-s) + column) + log_add(0.0, s * math.log(2) + log_gr)

    return _least(schur)
