"""What two clusters of tokens attain over the ball of radius R: the lower bounds of docs/explanation/bounds.md §3.12."""

import math

import torch

from howsmooth.kernels.kinds.kind import not_softmax
from howsmooth.spectral import eigh, svd
from howsmooth.theory.bound import Bound, at_least, log_add, log_of
from howsmooth.theory.constants import Constants
from howsmooth.theory.needs import BILINEAR, unmet
from howsmooth.theory.over_ball.columns import BALL_SOURCE
from howsmooth.theory.upper import lengths


def two_clusters(layer: Constants, n: int | None, radius: float) -> Bound:
    """B15, B16: what two clusters of tokens attain, at the best masses and places found (Proposition 3.12).

    All tokens at `x` but `k` at `y`, with `δ = ⟨A x + c, y − x⟩` as large as it gets; `p` is the unit vector along `y − x`, `q`
    the attention `x` pays to the tokens at `y`. `n=None` for measures, or for causal sequences of any length.
    """
    attn = layer.attn
    needs = ("one head", "no window", "no soft-cap", "no logit bias", "no padding", *BILINEAR)
    reason = not_softmax(attn.kind) or unmet(attn, *needs) or ("one token has no other to attend to" if n == 1 else None)
    attained = _causal_clusters if attn.causal else _clusters
    size = layer.a[0] * radius * radius + layer.query_shift[0] * radius
    if n is None:
        id, name = "B16", "two clusters, mean field"
        statement = "Lip ≥ |Vp| max_t e^{δ/2} √t/(1+t) (1 + δ/(1+t)), δ ≈ ΛR², any number of tokens"
    else:
        id, name = "B15", "two clusters"
        statement = "Lip ≥ |Vp| max_k √((n−k)/k) q(1 + (1−q)δ), q = 1/(1 + (n−k)e^{−δ}/k), δ ≈ ΛR²"
    source, assumes = f"{BALL_SOURCE} Proposition 3.12", "one head, unmasked or causal, no soft-cap; biases allowed"
    answer = reason or max(
        log_of(gain) + attained(gap, n) - 1e-11 * (1 + gap) * (1 + size) for gap, gain in _places(layer, radius)
    )
    return at_least(id, name, statement, source, assumes, answer, mean_field=n is None)


@torch.no_grad()
def _places(layer: Constants, radius: float) -> list[tuple[float, float]]:
    """Pairs of places in the ball, `x` by projected ascent from several starts: `δ = ⟨A x + c, y − x⟩` and `|V p|`.

    In units of the radius, so that squares stay in range.
    """
    core, shift = layer.core.matrix[0] * radius * radius, layer.core.shift[0] * radius
    if not bool(core.isfinite().all() & shift.isfinite().all()):
        return [(0.0, 0.0)]
    values = layer.value_maps[0]
    _, _, right = svd(core)
    vectors = eigh((core + core.mT) / 2)[1]
    starts = torch.cat([right[:2], vectors.mT[:2], vectors.mT[-2:]])
    x = torch.cat([scale * starts for scale in (1.0, -1.0, 0.5, -0.5)])  # (starts, m)
    step = 0.25 / max(layer.a[0] * radius * radius, 1e-300)
    tiny = torch.finfo(torch.float64).tiny
    for _ in range(300):
        g = x @ core.mT + shift
        x = x + step * (g / g.norm(dim=-1, keepdim=True).clamp_min(tiny) @ core - x @ (core + core.mT) - shift)
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(1.0)
    g = x @ core.mT + shift
    length = g.norm(dim=-1, keepdim=True)
    y = torch.where(length > 0, (1 - 1e-15) * g / length.clamp_min(tiny), right[:1])
    p = y - x
    logit_blur, value_blur = layer.blur[0]
    gap = (g * p).sum(-1) - 4 * logit_blur * radius * radius
    unit = p / p.norm(dim=-1, keepdim=True).clamp_min(tiny)
    gain = (lengths(unit @ layer.core.basis[0].mT @ values.mT) * (1 - 1e-12) - value_blur).clamp_min(0.0)
    order = (gap / 2 + gain.log()).argsort(descending=True).tolist()
    apart = {(round(float(gap[i]), 9), round(float(gain[i]), 9)): i for i in reversed(order)}  # starts that met count once
    best = sorted(apart.values(), key=order.index)[:4]
    return [(float(gap[i]), float(gain[i])) for i in best if float(gap[i]) >= 0] or [(0.0, 0.0)]


def _clusters(gap: float, n: int | None) -> float:
    """log of the best `√((n−k)/k) q(1 + (1−q)δ)`; over all masses where n is None."""
    if n is None:
        ratios = [math.exp(k / 50) for k in range(-200, 101)]
        return gap / 2 + max(0.5 * math.log(t) - math.log1p(t) + math.log1p(gap / (1 + t)) for t in ratios)
    logs, k = [], 1
    while k < n:
        log_ratio = math.log(n - k) - math.log(k)
        x = log_ratio - gap  # 1/q = 1 + e^x
        logs.append(-log_add(0.0, x) + log_add(0.0, log_of(gap) - log_add(0.0, -x)) + 0.5 * log_ratio)
        k = max(k + 1, k * 21 // 20)
    return max(logs)


def _causal_clusters(gap: float, n: int | None) -> float:
    """A lower bound on the log of `(Σ_i q_i²(1 + (1−q_i)δ)²)^½`, `q_i = 1/(1 + (i−1)e^{−δ})`, block by block of rows."""
    last = n if n is not None else int(math.exp(min(gap, 400.0)) * 32)
    logs, i = [0.0], 2
    while i <= last:
        stop = min(max(i + 1, i * 26 // 25), last + 1)  # rows i … stop − 1
        q_low = -log_add(0.0, math.log(stop - 2) - gap) if stop > 2 else 0.0
        one_less_high = log_of(gap) - log_add(0.0, gap - math.log(i - 1))
        logs.append(math.log(stop - i) + 2 * (q_low + log_add(0.0, one_less_high)))
        i = stop
    return 0.5 * log_add(*logs)
