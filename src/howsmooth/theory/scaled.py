"""Lengths and slopes of queries, keys and values over a ball, behind norms and phases, and the radius that a norm fixes.

A query may be normalised and turned by its position, `q_i = R_i N(W x_i + b)`, a key likewise. Logits and their slopes are then
products of a length on one side and a length or a slope on the other. Factors `f`, equal on the two entries of a plane, may be
moved from one side to the other, `q·k = (q/f)·(f k)`: each choice gives a bound (docs/explanation/bounds.md §3.16).
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, LayerNorm, RMSNorm
from howsmooth.maps.attention import HeadWeights
from howsmooth.spectral import eigh, spectral_norm, top_eigenvalue
from howsmooth.theory.upper import lengths, rounded_up, slack

# Gram matrices past this width are not diagonalised: the bound that needs them is left out.
LARGEST_GRAM = 2048
_STEPS = 12  # of the search for factors; every factor is a bound
_EVEN = 1e-4  # rows smaller than this share of the largest one count as that share


@final
@dataclass(frozen=True)
class Scaled:
    """Queries, or keys, of every head, times a factor `f`: `f ∘ R_i N(W x_i + b)`.

    weight: `‖f W‖`, or `‖C W‖` before a norm (`C` its centring).  shift: `|f b|` or `|C b|`.  alpha, beta, radius: `max |f α|`,
    `|f β|` and the longest vector that leaves the norm times `f`; nothing without one.  gain: of the phases.
    """

    weight: tuple[float, ...]
    shift: tuple[float, ...]
    gain: float
    alpha: tuple[float, ...] | None = None
    beta: tuple[float, ...] = ()
    radius: tuple[float, ...] = ()
    eps: float = 0.0
    width: int = 1

    def nearest(self, h: int, radius: float) -> float:
        """The least `|f (W x + b)|`, or `|C (W x + b)|` before a norm, in the ball; rounded down."""
        return max(0.0, self.shift[h] * (1 - 1e-9) - self.weight[h] * radius)

    def length(self, h: int, radius: float, *, shifted: bool = True) -> float:
        """The largest `|f q|` in the ball of tokens, head `h`. shifted: with the bias."""
        reach = self.weight[h] * radius + (self.shift[h] if shifted else 0.0)
        if self.alpha is None:
            return self.gain * reach
        least = self._least_spread(h, radius)
        near = self.alpha[h] * reach / least + self.beta[h] if least > 0 else math.inf
        return self.gain * min(self.radius[h], near)

    def slope(self, h: int, radius: float) -> float:
        """The largest norm of its derivative in the token."""
        if self.alpha is None:
            return self.gain * self.weight[h]
        least = self._least_spread(h, radius)
        return self.gain * self.alpha[h] * self.weight[h] / least if least > 0 else math.inf

    def _least_spread(self, h: int, radius: float) -> float:
        """What a norm divides by, at least: `√(|C(Wx + b)|²/d + eps)`."""
        return math.sqrt(self.nearest(h, radius) ** 2 / self.width + self.eps) * (1 - 1e-12)


def scaled_pairs(layer: Attention, w: HeadWeights) -> tuple[tuple[Scaled, Scaled], ...]:
    """Queries times `1/f` and keys times `f`; nothing where they are affine in the tokens.

    Factors worth trying: none, the weights of either norm, what balances the two sides.
    """
    if layer.kind.parts > 1 or (layer.q_norm is None and layer.k_norm is None and layer.rotary is None):
        return ()  # a head in parts is bounded part by part
    w_q, w_k = triangle(w.q), triangle(w.k)
    r_q, r_k = (
        plane_factors(layer, w.norm(dim=-1) if n is None else by_heads(n.weight.double().abs(), *w.shape[:2]).to(w.device))
        for w, n in ((w_q, layer.q_norm), (w_k, layer.k_norm))
    )
    factors = [torch.ones_like(r_q), 1 / r_k, r_q, (r_q / r_k).sqrt()]
    if layer.q_norm is None and layer.k_norm is None:
        factors.append(_balanced(layer, w_q, w_k, factors))
    gain = 1.0 if layer.rotary is None else layer.rotary.gain
    whole_q, whole_k = (_whole(t, layer.head_width, n) for t, n in ((w.q, layer.q_norm), (w.k, layer.k_norm)))
    return tuple(
        (scaled(w_q, w.b_q, layer.q_norm, gain, 1 / f, whole_q), scaled(w_k, w.b_k, layer.k_norm, gain, f, whole_k))
        for f in factors
    )


def by_heads(t: Float[Tensor, " width"], heads: int, head: int) -> Float[Tensor, "heads head"]:
    """A norm's vector as every query head sees it: one for all, or over all heads, those of a group alike."""
    parts = t.numel() // head
    return t.unflatten(0, (parts, head)).repeat_interleave(heads // parts, 0)


def _whole(w: Float[Tensor, "heads head d"], head: int, norm: LayerNorm | RMSNorm | None) -> float | None:
    """An upper bound on `‖C W‖` of all heads together, where the norm goes over them; nothing otherwise."""
    if norm is None or norm.width == head:
        return None
    centred = norm.to(w.device, torch.float64).center(w[:: len(w) * head // norm.width].flatten(0, 1).mT).mT
    return min(gram_norm(centred), float(centred.norm()) * slack(max(centred.shape)))


def _planes(layer: Attention, sizes: Float[Tensor, "*heads head"]) -> Tensor:
    """For every entry of a head, which plane of its phases it lies in."""
    width = sizes.shape[-1]
    plane = torch.arange(width) if layer.rotary is None else layer.rotary.planes(width)
    return plane.to(sizes.device).expand(sizes.shape)


def plane_factors(layer: Attention, sizes: Float[Tensor, "*heads head"]) -> Float[Tensor, "*heads head"]:
    """The largest of `sizes` on each plane of a head, entry by entry, none below a share of the largest one."""
    plane = _planes(layer, sizes)
    top = torch.zeros_like(sizes).scatter_reduce_(-1, plane, sizes, "amax").gather(-1, plane)
    largest = top.amax(-1, keepdim=True)
    return torch.where(largest > 0, top.clamp_min(_EVEN * largest), 1.0)


def _balanced(layer: Attention, w_q: Tensor, w_k: Tensor, starts: list[Tensor]) -> Float[Tensor, "heads head"]:
    """Factors that make `‖W_q/f‖ ‖f W_k‖` small, by steps along its slope in `log f`."""
    gram_q, gram_k = w_q @ w_q.mT, w_k @ w_k.mT

    def parts(f: Tensor) -> tuple[Tensor, Tensor]:
        """The product's square, and the way down in `log f`, from the top eigenvectors of both Gram matrices."""
        value_q, vector_q = eigh(gram_q / (f[:, :, None] * f[:, None]))
        value_k, vector_k = eigh(gram_k * (f[:, :, None] * f[:, None]))
        return value_q[:, -1] * value_k[:, -1], vector_q[..., -1].square() - vector_k[..., -1].square()

    plane = _planes(layer, starts[0])
    values = torch.stack([parts(f)[0] for f in starts])
    best, least = torch.stack(starts)[values.argmin(0), torch.arange(values.shape[1])], values.amin(0)
    f, down = best, parts(best)[1]
    for step in range(_STEPS):
        down = torch.zeros_like(f).scatter_add_(-1, plane, down).gather(-1, plane)
        f = f * (down / (1 + step) ** 0.5).exp()
        now, down = parts(f)
        best, least = torch.where((now < least)[:, None], f, best), torch.minimum(now, least)
    return best


def scaled(
    w: Float[Tensor, "heads head r"],
    b: Float[Tensor, "heads head"],
    norm: LayerNorm | RMSNorm | None = None,
    gain: float = 1.0,
    f: Float[Tensor, "heads head"] | None = None,
    whole: float | None = None,
) -> Scaled:
    """The lengths of `f ∘ N(W x + b)`.

    gain: of the phases behind.  whole: `‖C W‖` of all heads, for a norm over them (§3.18).
    """
    heads, head = b.shape
    f = torch.ones_like(b) if f is None else f
    size = max(w.shape[1:])
    if norm is None:
        return Scaled(rounded_up(spectral_norm(w * f[..., None]), size), rounded_up(lengths(b * f), size), gain)
    norm = norm.to(f.device, torch.float64)
    group, size = heads * head // norm.width, max(size, norm.width)  # heads of one group share a part of the norm
    if whole is None:
        weight, shift = rounded_up(spectral_norm(norm.center(w.mT)), size), rounded_up(lengths(norm.center(b)), size)
    else:
        weight, shift = (whole,) * heads, rounded_up(lengths(norm.center(b[::group].flatten())), size) * heads
    alpha = by_heads(norm.weight, heads, head) * f
    beta = torch.zeros_like(alpha) if norm.bias is None else by_heads(norm.bias, heads, head) * f
    radius = []
    for h in range(heads):
        own = slice(h // group * head, (h // group + 1) * head)
        weights, biases = torch.zeros_like(norm.weight), torch.zeros_like(norm.weight)
        weights[own], biases[own] = alpha[h], beta[h]
        radius.append(norm_radius(type(norm)(weights, biases, norm.eps)) * slack(size))
    return Scaled(
        weight,
        shift,
        gain,
        alpha=rounded_up(alpha.abs().amax(-1), size),
        beta=rounded_up(lengths(beta), size),
        radius=tuple(radius),
        eps=norm.eps,
        width=norm.width,
    )


@torch.no_grad()
def norm_radius(norm: LayerNorm | RMSNorm) -> float:
    """The largest token after a LayerNorm or RMSNorm, rounded up: the least of docs/explanation/bounds.md §3.14 over `λ`.

    >>> round(norm_radius(RMSNorm(torch.full((4,), 2.0))), 9)
    4.0
    """
    if not isinstance(norm, LayerNorm | RMSNorm):
        raise BadInputError(f"expected a LayerNorm or RMSNorm, got {type(norm).__name__}; give the radius as a number instead")
    alpha = norm.weight.double().cpu()
    beta = torch.zeros_like(alpha) if norm.bias is None else norm.bias.double().cpu()
    d, centred = alpha.numel(), isinstance(norm, LayerNorm)
    base = _centred_top(alpha.square()) if centred else float(alpha.square().max())
    scale = max(base, float(beta.square().sum()), 1e-300)

    def squared(log_gap: Tensor) -> Tensor:
        lam = base + scale * log_gap.exp()  # (m,)
        w = 1 / (lam[:, None] - alpha.square())
        ab = alpha * beta
        eta = (w * ab).sum(-1, keepdim=True) / w.sum(-1, keepdim=True) if centred else 0.0
        value = lam * d + beta.square().sum() + (w * (ab - eta).square()).sum(-1)
        negative = (w < 0).sum(-1)
        positive_form = (negative == 0) | ((negative == 1) & (w.sum(-1) < 0) & centred)
        return torch.where(positive_form & value.isfinite(), value, torch.inf)

    low, high, least = -34.0, 6.0, math.inf  # convex in λ, hence unimodal in its logarithm: refine a grid around its best point
    for _ in range(8):
        grid = torch.linspace(low, high, 33, dtype=torch.float64)
        values = squared(grid)
        least, best, step = min(least, float(values.min())), float(grid[values.argmin()]), (high - low) / 32
        low, high = best - step, best + step
    return least**0.5 * slack(d)


def _centred_top(squares: Float[Tensor, " d"]) -> float:
    """The largest `Σ α_k² u_k²` over unit `u` with `1·u = 0`: the root of `Σ 1/(λ − α_k²)` between the top two squares."""
    if len(squares) == 1:
        return 0.0
    low, high = (float(x) for x in squares.topk(2).values.flip(0))
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if float((1 / (middle - squares)).sum()) > 0 else (low, middle)
    return high


def triangle(w: Float[Tensor, "heads r d"]) -> Float[Tensor, "heads r k"]:
    """`w` up to an isometry of its input: `Rᵀ` of `wᵀ = Q R`."""
    return torch.linalg.qr(w.mT, mode="r")[1].mT


def gram_norm(flat: Float[Tensor, "p q"]) -> float:
    """An upper bound on the norm of a matrix; infinite where that is too large to compute."""
    if min(flat.shape) > LARGEST_GRAM:
        return math.inf
    return gram_root(flat @ flat.mT if flat.shape[0] <= flat.shape[1] else flat.mT @ flat, max(flat.shape))


def gram_root(gram: Float[Tensor, "p p"], size: int) -> float:
    """An upper bound on the norm of a matrix, from its Gram matrix."""
    return max(float(top_eigenvalue(gram)), 0.0) ** 0.5 * slack(size)
