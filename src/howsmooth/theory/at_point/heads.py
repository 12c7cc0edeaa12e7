"""The heads of a layer at an input: directions of their weights, tokens in those coordinates, norms of non-negative matrices.

Numbers such as 4.2 are those of docs/explanation/point-bounds.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.tiled import Block, Tiled
from howsmooth.maps import Attention, AttentionJacobian, NormJacobian
from howsmooth.spectral import largest_eigenvalue, svd
from howsmooth.theory.at_point.slopes import token_slopes
from howsmooth.theory.upper import ROUNDINGS, TINY, largest_entry, lengths, no_less, no_nan, product_blur

# Six squarings of the gap bring an attention matrix within 1 % of its norm.
STEPS = 6
# Weights below this share of the largest one are raised to it: they stay positive whatever underflows.
_FLOOR = 1e-12
# A bound on `‖N‖²` this close to the Rayleigh quotient of its weights has nothing left to gain.
_TOL = 2e-3
_TOKENS = 4096  # worked on at once in float64

Product = Callable[[Tensor], Tensor]
PerQuery = Float[Tensor, "g n"]
PerKey = Float[Tensor, "g m"]
PerHead = Float[Tensor, "batch heads"]


@dataclass(frozen=True)
class Geometry:
    """The weights of each head cut into orthonormal directions and small square factors (4.2), float64.

    `W_o^h = O_h R_o`, `W_q^hᵀ = Q_h R_q`, `W_k^hᵀ = K_h R_k`, `W_o^h W_v^h = O_h U S Zᵀ`. Sizes are taken out of what is
    multiplied, so that no product leaves the range: `r_o` is divided by `out_size`, `inner` and `S` by `out_size · value_size`.
    """

    out: Float[Tensor, "heads d_out r"]
    r_o: Float[Tensor, "heads r d_v"]
    query: Float[Tensor, "heads d r_q"]
    r_q: Float[Tensor, "heads r_q d_h"]
    key: Float[Tensor, "heads d r_k"]
    r_k: Float[Tensor, "heads r_k d_h"]
    inner: Float[Tensor, "heads r d"]  # R_o W_v
    nu: Float[Tensor, " heads"]  # ‖W_o W_v‖
    blur: Float[Tensor, " heads"]  # the error of W_o W_v, which matters where the product cancels
    values: tuple[Tensor, Tensor] | None  # O U S^½, (heads, d_out, r), and Z S^½, (heads, d, r); nothing for one head
    out_size: float
    value_size: float

    @classmethod
    def of(cls, layer: Attention) -> "Geometry":
        w = layer.by_head()
        sizes = out_size, value_size = largest_entry(w.o), largest_entry(w.v)
        (out, r_o), (query, r_q), (key, r_k) = (torch.linalg.qr(t) for t in (w.o / out_size, w.q.mT, w.k.mT))
        inner, blur = r_o @ (w.v / value_size), product_blur(r_o, w.v / value_size)
        if layer.heads == 1:
            top = largest_entry(inner)
            even = inner[0] / top
            small = even @ even.mT if even.shape[0] <= even.shape[1] else even.mT @ even
            share = inner.new_tensor([largest_eigenvalue(small, 1e-13, 1e-6) ** 0.5]) * top + blur
            nu, blur = (no_less(t, t * out_size * value_size) for t in (share, blur))
            return cls(out, r_o, query, r_q, key, r_k, inner, nu, blur, None, *sizes)
        value, r_v = torch.linalg.qr(w.v.mT / value_size)  # (heads, d, r), (heads, r, d_v)
        u, s, zt = svd(r_o @ r_v.mT)
        root = s.sqrt()[:, None]
        nu, blur = (no_less(t, t * out_size * value_size) for t in (s[:, 0] + blur, blur))
        return cls(out, r_o, query, r_q, key, r_k, inner, nu, blur, (out @ u * root, value @ zt.mT * root), *sizes)

    def blocks(self, t: PerHead, dtype: torch.dtype) -> Float[Tensor, " batch"]:
        """D5, Theorem 4.5: heads of norm `t_h` through the output directions they share."""
        return no_nan(_shared_root([(self.out, t)], dtype) * t.sum(-1).sqrt())

    def coupled(self, p: PerHead, beta: PerHead, key: PerHead, dtype: torch.dtype) -> Float[Tensor, " batch"]:
        """D6, Theorem 4.5: the parts of all heads through the input and output directions they share."""
        assert self.values is not None
        apart = (p * self.blur).sum(-1)
        p = no_nan(p * (self.out_size * self.value_size))
        left = [(self.out, beta + key), (self.values[0], p)]
        right = [(self.query, beta), (self.key, key), (self.values[1], p)]
        return no_nan(_shared_root(left, dtype) * _shared_root(right, dtype) + apart)


def _shared_root(terms: list[tuple[Float[Tensor, "heads d r"], PerHead]], dtype: torch.dtype) -> Float[Tensor, " batch"]:
    """An upper bound on `‖Σ_k Σ_h t_kh E_kh E_khᵀ‖₂^½`, (batch,); the sum is made in `dtype`. No `t` is NaN.

    One matrix serves the batch: with the weights `m_kh` of its average item, item `b` is at most `max_kh t_kh/m_kh` times it.
    """
    columns = [(directions, torch.where(t.isfinite(), t, 0.0).mean(0)) for directions, t in terms]
    # a head that is zero in every item drops out
    shares = [torch.where(t > 0, t / m.clamp_min(TINY), 0.0) for (_, t), (_, m) in zip(terms, columns, strict=True)]
    ratio = torch.cat(shares, -1).amax(-1)
    # sizes are taken out, so that squares stay in the range of `dtype`: those of the terms themselves, head by head
    size = torch.cat([mean.sqrt() * directions.abs().amax((-2, -1)) for directions, mean in columns]).amax().clamp_min(TINY)
    root = torch.cat(
        [(e.to(dtype) * (mean.sqrt() / size).to(dtype)[:, None, None]).transpose(0, 1).flatten(1) for e, mean in columns], 1
    )  # (d, heads·r)
    noise = 4 * torch.finfo(dtype).eps * math.sqrt(root.shape[1])
    return ratio.sqrt() * size * largest_eigenvalue((root @ root.mT).double(), noise) ** 0.5


class VectorErrors(NamedTuple):
    """Rounding errors of one query, key and value of every head, at most (4.9), (batch·heads,) float64.

    slopes: from the slopes of norms on queries and keys, as a share.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor


def vector_errors(operator: AttentionJacobian) -> VectorErrors:
    """`16 ε |c ∘ x|`, `c` the lengths of the columns of the weights: sums `W x` are as exact as their terms are small."""
    w, x, eps = operator.layer.by_head(), operator.tokens, torch.finfo(operator.dtype).eps
    if x is None:
        none = torch.zeros(operator.batch * operator.layer.heads, dtype=torch.float64, device=operator.device)
        return VectorErrors(none, none, none, none)
    far, parts = largest_entry(x), []
    for m in (w.q, w.k, w.v):
        columns = lengths(m.mT)  # (heads, d)
        top = largest_entry(columns)
        squares = (columns / top).square().mT  # (d, heads)
        longest = [((t.double() / far).square() @ squares).amax(1) for t in x.split(_TOKENS, 1)]  # (batch, heads) each
        parts.append(ROUNDINGS * eps * torch.stack(longest).amax(0).sqrt().flatten() * far * top)
    q, k, v = parts
    slopes = torch.zeros_like(q)
    if operator.q_slope is not None:
        q, slopes = _through_norm(operator.q_slope, q, slopes)
    if operator.k_slope is not None:
        k, slopes = _through_norm(operator.k_slope, k, slopes)
    return VectorErrors(q, k, v, slopes)


def _through_norm(slope: NormJacobian, error: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """An error in front of a norm as it is behind it, at the smallest divisor, and the share of slopes that is off with it."""
    if slope.unit.ndim == 3:  # over all heads, whose errors add up
        whole = error.unflatten(0, (slope.batch, -1)).square()
        error = whole.sum(-1, keepdim=True).sqrt().expand_as(whole).flatten()
    error = error / slope.scale.double().min()
    return error * slope.norm.weight.double().abs().max(), slopes + 4 * error


def rounding(operator: AttentionJacobian, errors: VectorErrors) -> Float[Tensor, " g"]:
    """The factor that covers what rounding did to a bound on a head (4.9), float64; infinite for huge logits."""
    kernel, scores = operator.kernel.tiled(), operator.kernel.scores
    q, k = (lengths(t.double()).amax(-1) for t in (kernel.q, kernel.k))
    logit = abs(scores.scale) * q * k
    moved = 2 * abs(scores.scale) * (errors.q * k + q * errors.k + errors.q * errors.k)
    if scores.softcap is not None:
        logit, moved = logit.clamp_max(scores.softcap), moved.clamp_max(4 * scores.softcap)
    if scores.mask.bias is not None:
        bias = scores.mask.bias.double().abs()
        logit = logit + torch.where(bias.isfinite(), bias, 0.0).max()
    return torch.exp(_noise(operator) * (1 + logit) + moved + errors.slopes)


def _noise(operator: AttentionJacobian) -> float:
    """The relative error of a sum over tokens (4.9)."""
    return ROUNDINGS * torch.finfo(operator.dtype).eps * math.sqrt(sum(operator.in_shape))


@dataclass(frozen=True)
class Tokens:
    """Queries, keys and values in the coordinates of `Geometry`, (batch·heads, n, ·), in the kernel's precision.

    v, o: `R_o v_j`, `R_o o_i`, measured from the mean value.  k: `R_q k_j`, from the mean key without a soft-cap.
    a: at least `τ |W_kᵀ q_i|`.  y: `R_o W_v` applied to the unit vector along `W_kᵀ q_i`, and times `a`; for one plain head.
    chi, kappa: what `k` and `a` are to be multiplied by at query `i` and at key `j`, 1 in plain layers. Where queries and keys
    are normalised or turned they are the slopes of 4.13, `k` and `a` are lengths, and there is no `y`.
    tau, nu: (g, 1), `|τ|` and `‖W_o W_v‖`.
    Every head has units of its own: `v`, `o`, `k`, `chi`, `kappa` are divided by their largest entries, and `nu`, `a`, `tau`,
    `y` made to fit, so that a bound on the head comes out in units of `unit`, (g,) float64, the largest of its parts (4.9).
    blur_v, blur_k, blur_a, blur_w: (g, 1), the error of one `v` or `o`, of one `k`, what `a` was raised by, that of `R_o W_v`.
    inverse: `1/z_i`, zero for queries that are not part of the output.  noise: relative error of a sum over tokens.
    """

    v: Tensor
    o: Tensor
    k: Tensor
    a: Tensor
    y: tuple[Tensor, Tensor] | None
    chi: Tensor
    kappa: Tensor
    tau: Tensor
    nu: Tensor
    unit: Tensor
    blur_v: Tensor
    blur_k: Tensor
    blur_a: Tensor
    blur_w: Tensor
    inverse: Tensor
    noise: float

    @classmethod
    def of(cls, operator: AttentionJacobian, geometry: Geometry, errors: VectorErrors) -> "Tokens":
        layer, kernel = operator.layer, operator.kernel.tiled()
        batch, heads, _, _ = kernel.shape
        dtype, capped, noise = operator.dtype, kernel.scores.softcap, _noise(operator)

        def apply(t: Tensor, factor: Tensor) -> Tensor:
            """`factor_h t_i` for every head, float64."""
            return (t.double().unflatten(0, (batch, heads)) @ factor.mT).flatten(0, 1)

        v, o = apply(kernel.v, geometry.r_o), apply(kernel.o, geometry.r_o)
        inverse, slopes = inverse_rows(operator), token_slopes(operator, geometry.r_q, geometry.r_k)
        if slopes is None:
            k, q = apply(kernel.k, geometry.r_q), apply(kernel.q, geometry.r_k)
            chi = kappa = torch.ones_like(inverse, dtype=torch.float64)
            by_k, by_q = (t.norm(dim=(-2, -1)).repeat(batch) for t in (geometry.r_q, geometry.r_k))  # (g,)
        else:
            k, chi, by_k, q, kappa, by_q = slopes
        by_v = geometry.r_o.norm(dim=(-2, -1)).repeat(batch)
        exact = ROUNDINGS * torch.finfo(torch.float64).eps  # of the products above
        blur_v, blur_k, blur_a = (
            ((e + exact * lengths(t.double()).amax(-1)) * by)[:, None]
            for e, t, by in ((errors.v, kernel.v, by_v), (errors.k, kernel.k, by_k), (errors.q, kernel.q, by_q))
        )
        blur_v, blur_k = (e + noise * lengths(t).amax(-1, keepdim=True) for e, t in ((blur_v, v), (blur_k, k)))  # (g, 1)
        centre = v.mean(1, keepdim=True)
        v, o = v - centre, o - centre
        k = k - k.mean(1, keepdim=True) if capped is None else k
        (v, o, blur_v), v_size = _even(v, o, blur_v)
        (k, blur_k), k_size = _even(k, blur_k)
        (q, blur_a), q_size = _even(q * abs(layer.scale), blur_a * abs(layer.scale))
        (chi,), chi_size = _even(chi)
        (kappa,), kappa_size = _even(kappa)
        # the three parts of a head, at most, each (g, 1)
        nu, v_size = geometry.nu.repeat(batch)[:, None], v_size * geometry.out_size
        by_query, by_key = abs(layer.scale) * v_size * k_size * chi_size, q_size * v_size * kappa_size
        unit = torch.stack([nu, by_query, by_key]).amax(0)
        unit = torch.where(unit == 0, 1.0, unit)
        a, y = lengths(q), None
        if slopes is None and heads == 1:
            turned = apply(q / a.clamp_min(TINY)[..., None], geometry.inner @ geometry.key) * math.copysign(1.0, layer.scale)
            image = turned * (geometry.out_size * geometry.value_size / unit)[..., None]
            y = image.to(dtype), (image * (a * (by_key / unit))[..., None]).to(dtype)
        a, blur_a = (a + blur_a) * (by_key / unit), blur_a * (by_key / unit)
        blur_w = geometry.blur.repeat(batch)[:, None] / unit
        sides = {"v": v, "o": o, "k": k, "a": a, "chi": chi, "kappa": kappa, "tau": by_query / unit, "nu": nu / unit}
        blurs = {"blur_v": blur_v, "blur_k": blur_k, "blur_a": blur_a, "blur_w": blur_w}
        numbers = {name: t.to(dtype) for name, t in (sides | blurs).items()}
        return cls(y=y, unit=unit[:, 0], inverse=inverse, noise=noise, **numbers)


def _even(*parts: Float[Tensor, "g *n"]) -> tuple[tuple[Tensor, ...], Float[Tensor, "g 1"]]:
    """Numbers of every head divided by the largest of them, and that; nothing is divided by zero."""
    size = torch.stack([t.abs().flatten(1).amax(-1) for t in parts]).amax(0)
    by = torch.where(size == 0, 1.0, size)
    return tuple(t / by.reshape(-1, *[1] * (t.ndim - 1)) for t in parts), size[:, None]


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
