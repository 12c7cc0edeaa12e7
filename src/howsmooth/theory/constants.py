"""What a layer contributes to a bound over a ball: norms of its weights, rounded up, and the radius that a norm fixes.

A query may be normalised and turned by its position, `q_i = R_i N(W x_i + b)`, a key likewise. Logits and their slopes are then
products of a length on one side and a length or a slope on the other. Factors `f`, equal on the two entries of a plane, may be
moved from one side to the other, `q·k = (q/f)·(f k)`: each choice gives a bound (docs/explanation/bounds.md §3.16).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, LayerNorm, RMSNorm
from howsmooth.maps.attention import HeadWeights
from howsmooth.theory.bound import (
    TINY,
    largest_entry,
    lengths,
    no_less,
    product_blur,
    product_norm,
    rounded_up,
    slack,
    spectral_norm,
)

# Gram matrices past this width are not diagonalised: the bound that needs them is left out.
_LARGEST_GRAM = 2048
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
        away = max(0.0, self.shift[h] * (1 - 1e-9) - self.weight[h] * radius)
        return math.sqrt(away**2 / self.width + self.eps) * (1 - 1e-12)


class Core(NamedTuple):
    """`A_h` and `c_h` on a space of at most 2·(head width) dimensions outside which they vanish, and a basis of that space."""

    matrix: Float[Tensor, "heads m m"]
    shift: Float[Tensor, "heads m"]
    basis: Float[Tensor, "heads d m"]


@final
@dataclass(frozen=True, eq=False)
class Constants:
    """The norms of a layer, head by head, in float64, each rounded up (docs/explanation/bounds.md §3.1).

    a: `‖A_h‖₂` with `A_h = τ W_kᵀ W_q`, so that logits are `⟨A x_i + c, x_j⟩` up to a constant in j.
    query_shift: `|c_h|`, `c_h = τ W_kᵀ b_q`.  key_shift: `|τ W_qᵀ b_k|`, which matters under a soft-cap only.
    v: `‖V_h‖₂`, `V_h = W_o^h W_v^h`.  w_v, w_o: `‖W_v^h‖₂`, `‖W_o^h‖₂`.
    cross: `‖V_hᵀ V_k‖₂/(‖V_h‖‖V_k‖)`, 0 for heads without values.  stacked: `‖[V_1 … V_H]‖₂`, and the same with every `V_h`
    divided by its norm; infinite when too large to compute.  blur: the errors of the products `A_h` and `V_h`, which matter
    where these cancel.  bias_range: the most a logit bias varies over the keys of a query.
    pairs: where norms or phases act on queries and keys, queries times `1/f` and keys times `f` for several `f` (§3.16); `a`
    and the shifts then speak of the weights alone.
    """

    layer: Attention
    pairs: tuple[tuple[Scaled, Scaled], ...]
    a: tuple[float, ...]
    query_shift: tuple[float, ...]
    key_shift: tuple[float, ...]
    v: tuple[float, ...]
    w_v: tuple[float, ...]
    w_o: tuple[float, ...]
    cross: Float[Tensor, "heads heads"]
    stacked: tuple[float, float]
    blur: tuple[tuple[float, float], ...]
    bias_range: float

    @property
    def heads(self) -> int:
        return len(self.a)

    def reach(self, h: int, radius: float) -> float:
        """G: the largest `|A x + c|`, how fast a logit moves with its key."""
        if not self.pairs:
            return self.a[h] * radius + self.query_shift[h]
        return abs(self.layer.scale) * min(q.length(h, radius) * k.slope(h, radius) for q, k in self.pairs)

    def key_reach(self, h: int, radius: float) -> float:
        """K: how fast logits of a row move with their query, up to what softmax ignores."""
        layer = self.layer
        # A key's bias adds the same to every logit of a row, which softmax ignores, unless it is turned, normalised or capped,
        # or a sink stays where it is.
        shifted = not (layer.rotary is None and layer.k_norm is None and layer.softcap is None and self.sink is None)
        if not self.pairs:
            return self.a[h] * radius + (self.key_shift[h] if shifted else 0.0)
        return abs(layer.scale) * min(q.slope(h, radius) * k.length(h, radius, shifted=shifted) for q, k in self.pairs)

    def log_spread(self, h: int, radius: float) -> float:
        """log E: how far apart the logits of one row can be."""
        gap, cap = radius * self.reach(h, radius), self.layer.softcap
        if self.pairs:
            size = abs(self.layer.scale) * min(q.length(h, radius) * k.length(h, radius) for q, k in self.pairs)
            gap = size if self.layer.rotary is not None else min(size, gap)
        return (2 * gap if cap is None else 2 * cap * math.tanh(gap / cap)) + self.bias_range

    def unbounded(self, radius: float) -> str | None:
        """Why no slope is bounded in the ball, if so."""
        steep = self.pairs and math.inf in [r(h, radius) for r in (self.reach, self.key_reach) for h in range(self.heads)]
        return "a norm on queries or keys with eps = 0 has no bounded slope where they vanish" if steep else None

    @property
    def sink(self) -> Tensor | None:
        """The learned logit of every head that gives no value."""
        return self.layer.kind.traits.sink

    @cached_property
    def unit(self) -> tuple[Scaled, Scaled]:
        """Queries and keys with no factor moved between them."""
        return self.pairs[0] if self.pairs else _unit_pair(self.layer, self.layer.by_head())

    @cached_property
    def value(self) -> Scaled:
        """Values `W_v x + b_v` before the output projection."""
        w = self.layer.by_head().v
        return _scaled(_triangle(w), self._value_bias, None, 1.0, torch.ones_like(self._value_bias), None)

    @cached_property
    def out_norm(self) -> float:
        """`‖W_o‖₂` of all heads together."""
        w_o = self.layer.w_o
        return 1.0 if w_o is None else rounded_up(spectral_norm(w_o.double()), max(w_o.shape))[0]

    @property
    def _value_bias(self) -> Float[Tensor, "heads d_v"]:
        layer, w = self.layer, self.layer.by_head().v
        if layer.b_v is None:
            return w.new_zeros(w.shape[:2])
        return layer.b_v.double().unflatten(0, (layer.kv_heads, -1)).repeat_interleave(self.heads // layer.kv_heads, 0)

    @cached_property
    def value_shift(self) -> tuple[float, ...]:
        """`|W_o^h b_v^h|`, which matters where rows of weights do not sum to one."""
        if self.layer.b_v is None:
            return (0.0,) * self.heads
        return rounded_up(product_norm(self.layer.by_head().o, self._value_bias[..., None]), self.layer.width)

    @cached_property
    def bias_total(self) -> float:
        """The most that a logit bias varies over all queries and keys; infinite where it hides some."""
        if self.layer.bias is None:
            return 0.0
        bias = self.layer.bias.double()
        return float(bias.max() - bias.min())

    @cached_property
    def core(self) -> Core:
        w = self.layer.by_head()
        heads, head, d = w.q.shape
        if 2 * head < d:
            basis = torch.linalg.qr(torch.cat([w.k.mT, w.q.mT], -1))[0]  # (heads, d, 2·head)
        else:
            basis = torch.eye(d, dtype=torch.float64, device=w.q.device).expand(heads, d, d)
        kb = self.layer.scale * (w.k @ basis)
        return Core(kb.mT @ (w.q @ basis), (kb.mT @ w.b_q[..., None])[..., 0], basis)

    @cached_property
    def value_maps(self) -> Float[Tensor, "heads d_out d"]:
        """`V_h`, formed."""
        w = self.layer.by_head()
        return w.o @ w.v


@torch.no_grad()
def constants(layer: Attention) -> Constants:
    """The norms of a layer.

    >>> constants(Attention.from_matrices(3 * torch.eye(2), torch.eye(2))).a[0]  # doctest: +ELLIPSIS
    3.00000000000...
    """
    w, scale, width = layer.by_head(), layer.scale, layer.width
    # ‖τ W_kᵀ W_q‖ = |τ| ‖R_k R_qᵀ‖ with W_kᵀ = Q_k R_k: nothing d × d is formed unless a head is that wide
    a = product_norm(_triangle(w.k).mT, _triangle(w.q), scale)
    unit = largest_entry(w.o) * largest_entry(w.v)
    left, right = w.o / largest_entry(w.o), _triangle(w.v) / largest_entry(w.v)
    outputs, blur = left @ right, product_blur(left, right)  # (heads, d_out, r), (heads,)
    v_norm = spectral_norm(outputs) + blur
    by = torch.where(v_norm > 0, v_norm, 1.0)
    even, share = outputs / by[:, None, None], blur / by
    cross, gram = torch.diag((v_norm > 0).double()), _gram(even)
    if layer.heads > 1:
        i, j = torch.triu_indices(layer.heads, layer.heads, 1)
        cross[i, j] = cross[j, i] = spectral_norm(gram[i, :, j]) + share[i] + share[j]
    top = largest_entry(outputs)
    logit_blur = product_blur(w.k * abs(scale), w.q)
    found = Constants(
        layer,
        _pairs(layer, w),
        a=rounded_up(a, width),
        query_shift=rounded_up(product_norm(w.k.mT, w.b_q[..., None], scale), width),
        key_shift=rounded_up(product_norm(w.q.mT, w.b_k[..., None], scale), width),
        v=rounded_up(no_less(v_norm, v_norm * unit), width),
        w_v=rounded_up(spectral_norm(w.v), width),
        w_o=rounded_up(spectral_norm(w.o), width),
        cross=cross.cpu() * slack(width),
        stacked=(
            max((_stacked(outputs / top, gram, by / top) * top + float(blur.norm())) * unit, TINY),
            _stacked(even, gram, torch.ones_like(by)) + float(share.norm()),
        ),
        blur=tuple(zip(logit_blur.tolist(), (blur * unit).tolist(), strict=True)),
        bias_range=_bias_range(layer),
    )
    numbers = [*found.a, *found.query_shift, *found.key_shift, *found.v, *found.w_v, *found.w_o]
    if not (all(math.isfinite(x) for x in numbers) and bool(found.core.matrix.isfinite().all())):
        raise BadInputError(
            f"expected weights whose products stay in the range of float64, got ‖A‖ = {max(found.a):.3g} and "
            f"‖V‖ = {max(found.v):.3g}; rescale the weights"
        )
    return found


def _triangle(w: Float[Tensor, "heads r d"]) -> Float[Tensor, "heads r k"]:
    """`w` up to an isometry of its input: `Rᵀ` of `wᵀ = Q R`."""
    return torch.linalg.qr(w.mT, mode="r")[1].mT


def _gram(outputs: Float[Tensor, "heads d_out r"]) -> Float[Tensor, "heads r heads r"]:
    """`V_hᵀ V_k` of all pairs of heads, in one product."""
    heads, _, r = outputs.shape
    flat = outputs.transpose(0, 1).flatten(1)
    return (flat.mT @ flat).unflatten(1, (heads, r)).unflatten(0, (heads, r))


def _stacked(outputs: Float[Tensor, "heads d_out r"], gram: Tensor, sizes: Float[Tensor, " heads"]) -> float:
    """The norm of heads side by side. gram: of the same ones divided by their sizes."""
    heads, d_out, r = outputs.shape
    if d_out < heads * r:
        return _norm(outputs.transpose(0, 1).flatten(1))
    if heads * r > _LARGEST_GRAM:
        return math.inf
    return _root((gram * sizes[:, None, None, None] * sizes[:, None]).flatten(2).flatten(0, 1), d_out)


def _norm(flat: Float[Tensor, "p q"]) -> float:
    """The norm of a matrix, from above; infinite where it is too large to compute."""
    if min(flat.shape) > _LARGEST_GRAM:
        return math.inf
    return _root(flat @ flat.mT if flat.shape[0] <= flat.shape[1] else flat.mT @ flat, max(flat.shape))


def _root(gram: Float[Tensor, "p p"], size: int) -> float:
    """The norm of a matrix from its Gram matrix, from above."""
    return max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0) ** 0.5 * slack(size)


def _bias_range(layer: Attention) -> float:
    if layer.bias is None:
        return 0.0
    bias = layer.bias.double()
    spread = bias.amax(-1) - bias.amin(-1)  # −inf hides a key: an infinite range, NaN where it hides all of them
    return float(torch.where(spread.isnan(), torch.inf, spread).max())


def _pairs(layer: Attention, w: HeadWeights) -> tuple[tuple[Scaled, Scaled], ...]:
    """Queries times `1/f` and keys times `f`; nothing where they are affine in the tokens.

    Factors worth trying: none, the weights of either norm, what balances the two sides.
    """
    if layer.kind.parts > 1 or (layer.q_norm is None and layer.k_norm is None and layer.rotary is None):
        return ()  # a head in parts is bounded part by part
    w_q, w_k = _triangle(w.q), _triangle(w.k)
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
        (_scaled(w_q, w.b_q, layer.q_norm, gain, 1 / f, whole_q), _scaled(w_k, w.b_k, layer.k_norm, gain, f, whole_k))
        for f in factors
    )


def _unit_pair(layer: Attention, w: HeadWeights) -> tuple[Scaled, Scaled]:
    """The same without norms and phases, and with no factor."""
    q, k = (_scaled(_triangle(t), b, None, 1.0, torch.ones_like(b), None) for t, b in ((w.q, w.b_q), (w.k, w.b_k)))
    return q, k


def by_heads(t: Float[Tensor, " width"], heads: int, head: int) -> Float[Tensor, "heads head"]:
    """A norm's vector as every query head sees it: one for all, or over all heads, those of a group alike."""
    parts = t.numel() // head
    return t.unflatten(0, (parts, head)).repeat_interleave(heads // parts, 0)


def _whole(w: Float[Tensor, "heads head d"], head: int, norm: LayerNorm | RMSNorm | None) -> float | None:
    """`‖C W‖` of all heads together, from above, where the norm goes over them; nothing otherwise."""
    if norm is None or norm.width == head:
        return None
    centred = norm.to(w.device, torch.float64).center(w[:: len(w) * head // norm.width].flatten(0, 1).mT).mT
    return min(_norm(centred), float(centred.norm()) * slack(max(centred.shape)))


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
        value_q, vector_q = torch.linalg.eigh(gram_q / (f[:, :, None] * f[:, None]))
        value_k, vector_k = torch.linalg.eigh(gram_k * (f[:, :, None] * f[:, None]))
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


def _scaled(
    w: Float[Tensor, "heads head r"],
    b: Float[Tensor, "heads head"],
    norm: LayerNorm | RMSNorm | None,
    gain: float,
    f: Float[Tensor, "heads head"],
    whole: float | None,
) -> Scaled:
    """whole: `‖C W‖` of all heads, for a norm over them."""
    size = max(w.shape[1:])
    if norm is None:
        return Scaled(rounded_up(spectral_norm(w * f[..., None]), size), rounded_up(lengths(b * f), size), gain)
    norm = norm.to(f.device, torch.float64)
    if whole is not None:
        return _scaled_together(b, norm, gain, f, whole)
    centred, shift = norm.center(w.mT).mT, norm.center(b)
    beta = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    return Scaled(
        rounded_up(spectral_norm(centred), size),
        rounded_up(lengths(shift), size),
        gain,
        alpha=rounded_up((norm.weight * f).abs().amax(-1), size),
        beta=rounded_up(lengths(beta * f), size),
        radius=tuple(norm_radius(type(norm)(norm.weight * row, beta * row, norm.eps)) * slack(size) for row in f),
        eps=norm.eps,
        width=norm.width,
    )


def _scaled_together(
    b: Float[Tensor, "heads head"], norm: LayerNorm | RMSNorm, gain: float, f: Float[Tensor, "heads head"], whole: float
) -> Scaled:
    """The same for a norm over all heads (§3.18)."""
    heads, head = f.shape
    group = heads * head // norm.width
    alpha = by_heads(norm.weight, heads, head) * f
    beta = torch.zeros_like(alpha) if norm.bias is None else by_heads(norm.bias, heads, head) * f
    shift = float(norm.center(b[::group].flatten()).norm()) * slack(norm.width)
    radius = []
    for h in range(heads):
        own = slice(h // group * head, (h // group + 1) * head)
        weight, bias = torch.zeros_like(norm.weight), torch.zeros_like(norm.weight)
        weight[own], bias[own] = alpha[h], beta[h]
        radius.append(norm_radius(type(norm)(weight, bias, norm.eps)) * slack(norm.width))
    return Scaled(
        (whole,) * heads,
        (shift,) * heads,
        gain,
        alpha=rounded_up(alpha.abs().amax(-1), head),
        beta=rounded_up(beta.norm(dim=-1), head),
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
