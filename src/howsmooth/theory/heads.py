"""The heads of a layer at an input: directions of their weights, tokens in those coordinates, slopes of queries and keys.

Numbers such as 4.2 are those of docs/point-bounds.md.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import Attention, AttentionJacobian, NormJacobian
from howsmooth.theory.bound import ROUNDINGS, slack, spectral_norm
from howsmooth.theory.constants import by_heads, plane_factors
from howsmooth.theory.perron import inverse_rows

PerHead = Float[Tensor, "batch heads"]


@dataclass(frozen=True)
class Geometry:
    """The weights of each head cut into orthonormal directions and small square factors (4.2), float64.

    `W_o^h = O_h R_o`, `W_q^hᵀ = Q_h R_q`, `W_k^hᵀ = K_h R_k`, `W_o^h W_v^h = O_h U S Zᵀ`.
    """

    out: Float[Tensor, "heads d_out r"]
    r_o: Float[Tensor, "heads r d_v"]
    query: Float[Tensor, "heads d r_q"]
    r_q: Float[Tensor, "heads r_q d_h"]
    key: Float[Tensor, "heads d r_k"]
    r_k: Float[Tensor, "heads r_k d_h"]
    inner: Float[Tensor, "heads r d"]  # R_o W_v
    nu: Float[Tensor, " heads"]  # ‖W_o W_v‖
    values: tuple[Tensor, Tensor] | None  # O U S^½, (heads, d_out, r), and Z S^½, (heads, d, r); nothing for one head

    @classmethod
    def of(cls, layer: Attention) -> "Geometry":
        w = layer.by_head()
        (out, r_o), (query, r_q), (key, r_k) = (torch.linalg.qr(t) for t in (w.o, w.q.mT, w.k.mT))
        inner = r_o @ w.v
        if layer.heads == 1:
            small = inner[0] @ inner[0].mT if inner.shape[1] <= inner.shape[2] else inner[0].mT @ inner[0]
            nu = inner.new_tensor([largest_eigenvalue(small, 1e-13, 1e-6) ** 0.5])
            return cls(out, r_o, query, r_q, key, r_k, inner, nu, None)
        value, r_v = torch.linalg.qr(w.v.mT)  # (heads, d, r), (heads, r, d_v)
        u, s, zt = torch.linalg.svd(r_o @ r_v.mT, full_matrices=False)
        root = s.sqrt()[:, None]
        return cls(out, r_o, query, r_q, key, r_k, inner, s[:, 0], (out @ u * root, value @ zt.mT * root))

    def blocks(self, t: PerHead, dtype: torch.dtype) -> Float[Tensor, " batch"]:
        """D5, Theorem 4.5: heads of norm `t_h` through the output directions they share."""
        return (_shared_norm([(self.out, t)], dtype) * t.sum(-1)).sqrt()

    def coupled(self, p: PerHead, beta: PerHead, key: PerHead, dtype: torch.dtype) -> Float[Tensor, " batch"]:
        """D6, Theorem 4.5: the parts of all heads through the input and output directions they share."""
        assert self.values is not None
        left = [(self.out, beta + key), (self.values[0], p)]
        right = [(self.query, beta), (self.key, key), (self.values[1], p)]
        return (_shared_norm(left, dtype) * _shared_norm(right, dtype)).sqrt()


def _shared_norm(terms: list[tuple[Float[Tensor, "heads d r"], PerHead]], dtype: torch.dtype) -> Float[Tensor, " batch"]:
    """`‖Σ_k Σ_h t_kh E_kh E_khᵀ‖₂` from above, (batch,); the sum is made in `dtype`.

    One matrix serves the batch: with the weights `m_kh` of its average item, item `b` is at most `max_kh t_kh/m_kh` times it.
    """
    columns = [(directions, t.mean(0)) for directions, t in terms]
    tiny = torch.finfo(torch.float64).tiny
    # a head that is zero in every item drops out
    shares = [torch.where(m > 0, t / m.clamp_min(tiny), 0.0) for (_, t), (_, m) in zip(terms, columns, strict=True)]
    ratio = torch.cat(shares, -1).amax(-1)
    # sizes are taken out, so that squares stay in the range of `dtype`
    size = torch.stack([mean.amax() * directions.abs().amax() ** 2 for directions, mean in columns]).amax()
    size = size.clamp_min(tiny).sqrt()
    root = torch.cat(
        [(e.to(dtype) * (mean.sqrt() / size).to(dtype)[:, None, None]).transpose(0, 1).flatten(1) for e, mean in columns], 1
    )  # (d, heads·r)
    noise = 4 * torch.finfo(dtype).eps * math.sqrt(root.shape[1])
    return ratio * size**2 * largest_eigenvalue((root @ root.mT).double(), noise)


def largest_eigenvalue(m: Float[Tensor, "d d"], noise: float, step: float = 0.01) -> float:
    """The largest eigenvalue of a positive semi-definite `m` from above: `s − m` has a Cholesky factor (Lemma 4.6).

    noise: error of `m`, as a share of its trace.  step: by how much Lanczos's value is raised first.
    """
    trace = float(m.diagonal().sum())
    bound = _ritz_value(m)
    while bound < trace:
        bound *= 1 + step
        if int(torch.linalg.cholesky_ex((-m).diagonal_scatter(bound - m.diagonal())).info) == 0:
            break
        step *= 2
    return min(bound, trace) + noise * trace


def _ritz_value(m: Float[Tensor, "d d"], steps: int = 16) -> float:
    """The largest eigenvalue of a positive semi-definite matrix from below, by Lanczos's method."""
    basis = [m.abs().sum(0)]
    basis[0] = basis[0] / basis[0].norm().clamp_min(torch.finfo(m.dtype).tiny)
    images: list[Tensor] = []
    for _ in range(min(steps, len(m))):
        images.append(m @ basis[-1])
        known = torch.stack(basis)
        rest = images[-1] - known.mT @ (known @ images[-1])
        rest = rest - known.mT @ (known @ rest)
        size = rest.norm()
        if not bool(size > 1e-10 * images[-1].norm()):
            break
        basis.append(rest / size)
    small = torch.stack(basis[: len(images)]) @ torch.stack(images).mT
    return max(0.0, float(torch.linalg.eigvalsh((small + small.mT) / 2)[-1]))


@dataclass(frozen=True)
class Tokens:
    """Queries, keys and values in the coordinates of `Geometry`, (batch·heads, n, ·), in the kernel's precision.

    v, o: `R_o v_j`, `R_o o_i`, measured from the mean value.  k: `R_q k_j`, from the mean key without a soft-cap.
    a: `τ |W_kᵀ q_i|`.  y: `R_o W_v` applied to the unit vector along `W_kᵀ q_i`, times `a`; for one plain head.
    chi, kappa: what `k` and `a` are to be multiplied by at query `i` and at key `j`, 1 in plain layers. Where queries and keys
    are normalised or turned they are the slopes of 4.13, `k` and `a` are lengths, and there is no `y`.
    inverse: `1/z_i`, zero for queries that are not part of the output.  noise: relative error of a sum over tokens.
    slack: (batch·heads,) float64, what rounding may have taken from a bound on a head, as a factor (4.9).
    """

    v: Tensor
    o: Tensor
    k: Tensor
    a: Tensor
    y: Tensor | None
    chi: Tensor
    kappa: Tensor
    inverse: Tensor
    slack: Tensor
    noise: float

    @classmethod
    def of(cls, operator: AttentionJacobian, geometry: Geometry) -> "Tokens":
        layer, kernel = operator.layer, operator.kernel.tiled()
        batch, heads, n, _ = kernel.shape
        dtype, capped = operator.dtype, kernel.scores.softcap

        def apply(t: Tensor, factor: Tensor) -> Tensor:
            """`factor_h t_i` for every head."""
            return (t.unflatten(0, (batch, heads)) @ factor.mT.to(dtype)).flatten(0, 1)

        v, o = apply(kernel.v, geometry.r_o), apply(kernel.o, geometry.r_o)
        centre = v.mean(1, keepdim=True)
        inverse, y = inverse_rows(operator), None
        slopes = token_slopes(operator, geometry.r_q, geometry.r_k)
        if slopes is None:
            k, q = apply(kernel.k, geometry.r_q), apply(kernel.q, geometry.r_k) * abs(layer.scale)
            chi = kappa = torch.ones_like(inverse)
            if heads == 1:
                y = apply(q, geometry.inner @ geometry.key) * math.copysign(1.0, layer.scale)
        else:
            k, chi, q, kappa = slopes
            q = q * abs(layer.scale)
        k = k - k.mean(1, keepdim=True) if capped is None else k
        noise = ROUNDINGS * torch.finfo(dtype).eps * math.sqrt(layer.width + n)
        logit = abs(layer.scale) * (kernel.q.norm(dim=-1).amax(-1) * kernel.k.norm(dim=-1).amax(-1)).double()
        logit = logit if capped is None else logit.clamp_max(capped)
        return cls(v - centre, o - centre, k, q.norm(dim=-1), y, chi, kappa, inverse, torch.exp(noise * (1 + logit)), noise)


class Slopes(NamedTuple):
    """Keys `k_j/f` and `‖∂(f q_i)/∂x_i‖` from above, and queries and key slopes with another `f` likewise, head by head."""

    k: Tensor
    query: Tensor
    q: Tensor
    key: Tensor


def token_slopes(
    operator: AttentionJacobian, r_q: Float[Tensor, "heads r head"], r_k: Float[Tensor, "heads r head"]
) -> Slopes | None:
    """The slopes at the operator's tokens (4.13), from `R` of `W_qᵀ = Q R` and of `W_kᵀ`; nothing where both are affine."""
    layer, kernel = operator.layer, operator.kernel.tiled()
    if layer.q_norm is None and layer.k_norm is None and layer.rotary is None:
        return None
    return Slopes(
        *_moving(layer, operator.q_slope, r_q.mT, kernel.k, operator.batch, layer.w_q),
        *_moving(layer, operator.k_slope, r_k.mT, kernel.q, operator.batch, layer.w_k),
    )


def _moving(
    layer: Attention,
    slope: NormJacobian | None,
    w: Float[Tensor, "heads head r"],
    other: Float[Tensor, "g n head"],
    batch: int,
    whole: Tensor | None,
) -> tuple[Float[Tensor, "g n head"], Float[Tensor, "g n"]]:
    """The other side's vectors divided by `f`, and the slopes of this side times `f`, the better of two `f` for each head."""
    heads, head, _ = w.shape
    n = other.shape[1]
    ones = torch.ones(heads, head, dtype=torch.float64, device=w.device)
    rows = w.norm(dim=-1) if slope is None else by_heads(slope.norm.weight.double().abs(), heads, head)
    choices = []
    for f in (ones, 1 / plane_factors(layer, rows)):
        size = _slopes(layer, slope, w, f, batch, n, whole).flatten(0, 1)  # (g, n)
        vectors = (other.double().unflatten(0, (batch, heads)) / f[:, None]).flatten(0, 1)
        choices.append((vectors, size, vectors.square().sum((-2, -1)) * size.square().amax(-1)))
    (plain, size, worth), (scaled, scaled_size, scaled_worth) = choices
    better = (scaled_worth < worth)[:, None]
    vectors = torch.where(better[..., None], scaled, plain)
    return vectors.to(other.dtype), torch.where(better, scaled_size, size).to(other.dtype)


def query_slopes(operator: AttentionJacobian) -> Float[Tensor, "batch heads n"]:
    """`‖∂q_i/∂x_i‖` from above, head by head and token by token."""
    layer = operator.layer
    w = torch.linalg.qr(layer.by_head().q.mT, mode="r")[1].mT
    ones = torch.ones(w.shape[:2], dtype=torch.float64, device=w.device)
    return _slopes(layer, operator.q_slope, w, ones, operator.batch, operator.in_shape[0], layer.w_q)


def _slopes(
    layer: Attention,
    slope: NormJacobian | None,
    w: Float[Tensor, "heads head r"],
    f: Float[Tensor, "heads head"],
    batch: int,
    n: int,
    whole: Float[Tensor, "rows d"] | None,
) -> Float[Tensor, "batch heads n"]:
    """`‖∂(f q_i)/∂x_i‖` from above (4.13): `w` the weights of queries, or of keys, up to an isometry of their input.

    whole: the weights of all heads, nothing for the identity.
    """
    gain = torch.ones(batch, n, dtype=torch.float64, device=w.device)  # of each token's phases: 1 up to their rounding
    if layer.rotary is not None:
        cos, sin = layer.rotary.cos.double(), layer.rotary.sin.double()
        gain = gain * (cos.square() + sin.square()).amax(-1).sqrt()[..., :n].clamp_min(1.0).to(w.device) * (1 + 1e-15)
    if slope is None:
        size = spectral_norm(w * f[..., None])[None, :, None]
    elif slope.norm.width == w.shape[1]:
        size = _normed(slope, w, f)
    else:
        size = _normed_together(slope, torch.eye(layer.width).to(w) if whole is None else whole.double(), f)
    return size * gain[:, None] * slack(layer.width)


def _normed_together(
    slope: NormJacobian, w: Float[Tensor, "rows d"], f: Float[Tensor, "heads head"]
) -> Float[Tensor, "batch heads n"]:
    """`‖f_h α_h ((I − uuᵀ/m) C W)_h‖/s` of every token and head, for a norm over all heads (4.14)."""
    heads, head = f.shape
    norm, unit, scale = slope.norm, slope.unit.double(), slope.scale.double()[..., 0]  # (batch, n, rows), (batch, n)
    centred = norm.center(w.mT).mT  # C W
    alpha = by_heads(norm.weight.double(), heads, head) * f
    group = heads * head // norm.width
    own = centred.unflatten(0, (-1, head)).repeat_interleave(group, 0) * alpha[..., None]  # (heads, head, d)
    part = unit.unflatten(-1, (-1, head)).repeat_interleave(group, 2)  # (batch, n, heads, head)
    along = (unit @ centred).norm(dim=-1) / norm.width
    size = spectral_norm(own)[None, :, None] + ((alpha * part).norm(dim=-1) * along[..., None]).transpose(1, 2)
    noise = ROUNDINGS * torch.finfo(slope.dtype).eps * math.sqrt(norm.width)
    return size / scale[:, None] * (1 + noise)


def _normed(slope: NormJacobian, w: Float[Tensor, "heads head r"], f: Tensor) -> Float[Tensor, "batch heads n"]:
    """`‖f α (I − uuᵀ/d) C W‖/s` of every token: the projection is a contraction, or a term of rank one."""
    heads, head, _ = w.shape
    norm, unit, scale = slope.norm, slope.unit.double(), slope.scale.double()[..., 0]  # (batch, kv heads, n, …)
    group = heads // unit.shape[1]
    unit, scale = unit.repeat_interleave(group, 1), scale.repeat_interleave(group, 1)
    alpha = norm.weight.double() * f  # (heads, head)
    triangle = torch.linalg.qr(norm.center(w.mT), mode="r")[1]  # (heads, r, head): C W up to an isometry
    contraction = (alpha.abs().amax(-1) * spectral_norm(triangle))[None, :, None]
    along = (unit @ triangle.mT).norm(dim=-1) * (alpha[:, None] * unit).norm(dim=-1) / head
    rank_one = spectral_norm(triangle * alpha[:, None])[None, :, None] + along
    # the token's own numbers carry the rounding of the working precision
    noise = ROUNDINGS * torch.finfo(slope.dtype).eps * math.sqrt(head)
    return torch.minimum(contraction, rank_one) / scale * (1 + noise)
