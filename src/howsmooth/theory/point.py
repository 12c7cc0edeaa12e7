"""Upper bounds on `‖D_x f‖₂` of an attention layer at one input, read off its attention weights.

A head's Jacobian has three parts, `P ⊗ W_v`, a block diagonal `B_i W_q` and a part through the keys. Their sizes come from the
norm of `P` and from covariances of values and keys under each row of `P`; heads are put together through the directions that
their weights leave in common. Proofs: docs/point-bounds.md, whose numbers the functions cite.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tiled import Block, Tiled
from howsmooth.kernels.tiles import Tile
from howsmooth.maps import Composed, Operator
from howsmooth.maps.attention import Attention, AttentionJacobian
from howsmooth.maps.base import check_finite, check_tokens
from howsmooth.maps.jacobian import NormJacobian
from howsmooth.theory.bound import Bound, log_of, outward_log
from howsmooth.theory.nair2025 import softmax_bound
from howsmooth.theory.perron import STEPS, perron_bound
from howsmooth.theory.slopes import Pull, token_slopes
from howsmooth.theory.yudin2025 import yudin_bound

_HEAD_STEPS = 4  # power steps on the weights of each of several heads
_START_STEPS = 2  # power steps on a matrix like that of block norms
_BLOCK_STEPS = 2  # and on it
_SHORT, _SHORT_STEPS = 256, 8  # tokens up to which one head may take more of them
_ROUNDINGS = 16
_SMALL = 16  # rows up to which eigenvalues cost no more than powers
_FEATURES = 2**23  # numbers the exact form works on at once
_SOURCE = "howsmooth, docs/point-bounds.md"
_ASSUMES = "any attention layer: heads, groups, biases, masks, soft-cap, rotary phases, norms on queries and keys"


@torch.no_grad()
def point_bounds(attn: Attention, x: Float[Tensor, "n d"], exact: bool = False) -> list[Bound]:
    """Every bound on `‖D_x f‖₂` at the tokens `x`, the smallest of ours last.

    exact: form the covariances of every token, O(n² d_h²) per head; by default their traces stand for them, O(n² d_h).
    Work is done in the precision of `x` and the layer, and its rounding is covered as `trace_bound` says.

    >>> attn = Attention.from_matrices(torch.zeros(2, 2), torch.eye(2))
    >>> [b.id for b in point_bounds(attn, torch.zeros(3, 2))]
    ['D2', 'D4', 'D3', 'D5', 'D6', 'D']
    >>> round(point_bounds(attn, torch.zeros(3, 2))[-1].value, 4)
    1.0
    """
    check_tokens(x)
    check_finite(x, "tokens")
    if x.ndim != 2:
        raise BadInputError(f"expected tokens of shape (n, d), got {tuple(x.shape)}; pass one input at a time")
    operator = attn.linearize(attn.prepare(x)[None])[1]
    assert isinstance(operator, AttentionJacobian)
    form = "exact" if exact else "trace"
    found = _bounds(operator, exact)
    rows = [
        ("D3", "three parts", found.parts, "Σ_h ‖W_oW_v‖‖P‖ + max_i ‖W_oB_iW_q‖ + ‖key part‖"),
        ("D5", "block norms", found.blocks, "(‖Σ_h b_h O_hO_hᵀ‖ Σ_h b_h)^½, b_h = ‖(‖J_ij‖)_ij‖₂ of head h"),
        ("D6", "coupled heads", found.coupled, "the parts of D3, heads through the input and output directions they share"),
        ("D", "best at a point", found.best, "min(D3, D5, D6)"),
    ]
    return [
        yudin_bound(attn, x),
        softmax_bound(),
        *(
            Bound(i, f"{name}, {form} form", "upper", outward_log(log_of(float(value)), "upper"), statement, _SOURCE, _ASSUMES)
            for i, name, value, statement in rows
        ),
    ]


@torch.no_grad()
def trace_bound(operator: Operator) -> Float[Tensor, " batch"]:
    """Upper bounds on the norms of linearised attention, (batch,) float64, at the cost of about two products with `JᵀJ`.

    The smallest of the trace forms D3, D5, D6. Work is done in the precision of the operator on the tiles its kernel makes,
    in O(n · d) memory beyond the kernel's own. The result covers the rounding of that precision, counted as in
    docs/point-bounds.md 4.9: with `η = 16 ε √(d + n)`, weights off by a factor `e^{η max|τ||q_i||k_j|}`, sums by `e^η`.

    operator: what `Attention.linearize` gives.
    """
    if not isinstance(operator, AttentionJacobian):
        raise BadInputError(f"expected a linearised attention layer, got {type(operator).__name__}; use operator_bound")
    return _bounds(operator, exact=False, every=False).best


@torch.no_grad()
def operator_bound(operator: Operator) -> Float[Tensor, " batch"] | None:
    """`trace_bound` for attention, Proposition 4.8 for a norm, the product for a composition; nothing for other operators."""
    if isinstance(operator, AttentionJacobian):
        return trace_bound(operator)
    if isinstance(operator, NormJacobian):
        return norm_bound(operator)
    if isinstance(operator, Composed):
        outer = operator_bound(operator.outer)
        inner = None if outer is None else operator_bound(operator.inner)
        return None if outer is None or inner is None else outer * inner
    return None


def norm_bound(operator: NormJacobian) -> Float[Tensor, " batch"]:
    """`‖D_x norm‖ ≤ max|α| / min_i s_i`, Proposition 4.8."""
    smallest = operator.scale.double().flatten(1).amin(-1)
    slack = 1 + _ROUNDINGS * torch.finfo(operator.dtype).eps * math.sqrt(operator.in_shape[-1])
    return operator.norm.weight.double().abs().max() / smallest * slack


class _Found(NamedTuple):
    """The bounds of every item, (batch,) float64."""

    parts: Tensor
    blocks: Tensor
    coupled: Tensor

    @property
    def best(self) -> Tensor:
        return torch.stack(self).amin(0)


def _bounds(operator: AttentionJacobian, exact: bool, every: bool = True) -> _Found:
    """every: all three of them; else one that cannot be the smallest may be left at a larger one."""
    operator = operator.tiled()
    geometry = _Geometry.of(operator.layer)
    tokens = _Tokens.of(operator, geometry)
    found = _combine(operator, geometry, tokens, _trace_sizes(operator, geometry, tokens), every)
    if not exact:
        return found
    sharper = _combine(operator, geometry, tokens, _exact_sizes(operator, geometry, tokens), every)
    return _Found(*(torch.minimum(a, b) for a, b in zip(found, sharper, strict=True)))


def _combine(operator: AttentionJacobian, geometry: "_Geometry", tokens: "_Tokens", sizes: "_Sizes", every: bool) -> _Found:
    """Heads put together: plainly, through output directions, through input and output directions."""
    batch, heads = operator.batch, operator.layer.heads
    slack = tokens.slack.unflatten(0, (batch, heads))
    p, beta, key, block = (t.double().unflatten(0, (batch, heads)) for t in sizes)
    parts = geometry.nu * p + beta + key
    p, beta, key, parts, block = (t * slack for t in (p, beta, key, parts, torch.minimum(parts, block)))
    plain = parts.sum(-1)
    if heads == 1:
        return _Found(plain, block[:, 0], plain)
    dtype = operator.dtype
    coupled = geometry.coupled(p, beta, key, dtype)
    # ‖Σ b_h O_hO_hᵀ‖ is at least max b_h: often D5 cannot win
    if not every and bool((coupled.square() <= block.amax(-1) * block.sum(-1)).all()):
        return _Found(plain, plain, coupled)
    return _Found(plain, geometry.blocks(block, dtype), coupled)


class _Sizes(NamedTuple):
    """What is known of each head, (batch·heads,): `‖P‖`, `max ‖B_i W_q‖`, the norm of the key part, of the whole Jacobian."""

    p: Tensor
    beta: Tensor
    key: Tensor
    block: Tensor


@dataclass(frozen=True)
class _Geometry:
    """The weights of each head cut into orthonormal directions and small square factors (docs/point-bounds.md 4.2), float64.

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
    def of(cls, layer: Attention) -> "_Geometry":
        heads, kv_heads = layer.heads, layer.kv_heads
        group = heads // kv_heads
        w_v = layer.w_v.double().unflatten(0, (kv_heads, -1)).repeat_interleave(group, 0)
        w_o = None if layer.w_o is None else layer.w_o.double().mT
        width = heads * w_v.shape[1]
        out, r_o = _directions(w_o, width, heads, w_v.device)
        query, r_q = _directions(layer.w_q.double(), layer.width, heads, w_v.device)
        w_k = None if layer.w_k is None else layer.w_k.double()
        key, r_k = (t.repeat_interleave(group, 0) for t in _directions(w_k, layer.width, kv_heads, w_v.device))
        inner = r_o @ w_v
        if heads == 1:
            small = inner[0] @ inner[0].mT if inner.shape[1] <= inner.shape[2] else inner[0].mT @ inner[0]
            nu = inner.new_tensor([_largest_eigenvalue(small, 1e-13, 1e-6) ** 0.5])
            return cls(out, r_o, query, r_q, key, r_k, inner, nu, None)
        value, r_v = torch.linalg.qr(w_v.mT)  # (heads, d, r), (heads, r, d_v)
        u, s, zt = torch.linalg.svd(r_o @ r_v.mT, full_matrices=False)
        root = s.sqrt()[:, None]
        return cls(out, r_o, query, r_q, key, r_k, inner, s[:, 0], (out @ u * root, value @ zt.mT * root))

    def blocks(self, t: Float[Tensor, "batch heads"], dtype: torch.dtype) -> Float[Tensor, " batch"]:
        """D5, Theorem 4.5: heads of norm `t_h` through the output directions they share."""
        return (_shared_norm([(self.out, t)], dtype) * t.sum(-1)).sqrt()

    def coupled(
        self,
        p: Float[Tensor, "batch heads"],
        beta: Float[Tensor, "batch heads"],
        key: Float[Tensor, "batch heads"],
        dtype: torch.dtype,
    ) -> Float[Tensor, " batch"]:
        """D6, Theorem 4.5: the parts of all heads through the input and output directions they share."""
        assert self.values is not None
        left = [(self.out, beta + key), (self.values[0], p)]
        right = [(self.query, beta), (self.key, key), (self.values[1], p)]
        return (_shared_norm(left, dtype) * _shared_norm(right, dtype)).sqrt()


def _directions(w: Tensor | None, width: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`W_hᵀ = E_h R_h` with orthonormal columns in `E_h`, for the blocks of rows of `w` (of the identity if there is none)."""
    if w is not None:
        return torch.linalg.qr(w.unflatten(0, (heads, -1)).mT)
    eye = torch.eye(width, dtype=torch.float64, device=device)
    small = torch.eye(width // heads, dtype=torch.float64, device=device)
    return eye.unflatten(1, (heads, -1)).transpose(0, 1), small.expand(heads, -1, -1)


def _shared_norm(
    terms: list[tuple[Float[Tensor, "heads d r"], Float[Tensor, "batch heads"]]], dtype: torch.dtype
) -> Float[Tensor, " batch"]:
    """`‖Σ_k Σ_h t_kh E_kh E_khᵀ‖₂` from above, (batch,); the sum is made in `dtype`.

    One matrix serves the batch: with the weights `m_kh` of its average item, item `b` is at most `max_kh t_kh/m_kh` times it.
    """
    columns, ratio = [], None
    for directions, t in terms:
        mean = t.mean(0)
        # a head that is zero in every item drops out
        share = torch.where(mean > 0, t / mean.clamp_min(torch.finfo(mean.dtype).tiny), 0.0).amax(-1)
        ratio = share if ratio is None else torch.maximum(ratio, share)
        columns.append((directions, mean))
    assert ratio is not None
    # sizes are taken out, so that squares stay in the range of `dtype`
    size = torch.stack([mean.amax() * directions.abs().amax() ** 2 for directions, mean in columns]).amax()
    size = size.clamp_min(torch.finfo(size.dtype).tiny).sqrt()
    root = torch.cat(
        [(e.to(dtype) * (mean.sqrt() / size).to(dtype)[:, None, None]).transpose(0, 1).flatten(1) for e, mean in columns], 1
    )  # (d, heads·r)
    return (
        ratio * size**2 * _largest_eigenvalue((root @ root.mT).double(), 4 * torch.finfo(dtype).eps * math.sqrt(root.shape[1]))
    )


def _largest_eigenvalue(m: Float[Tensor, "d d"], noise: float, step: float = 0.01) -> float:
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
class _Tokens:
    """Queries, keys and values in the coordinates of `_Geometry`, (batch·heads, n, ·), in the kernel's precision.

    v, o: `R_o v_j`, `R_o o_i`, measured from the mean value.  k: `R_q k_j`, from the mean key without a soft-cap.
    a: `τ |W_kᵀ q_i|`.  y: `R_o W_v` applied to the unit vector along `W_kᵀ q_i`, times `a`.
    chi, kappa: what `k` and `a` are to be multiplied by at query `i` and at key `j`, 1 in plain layers. Where queries and keys
    are normalised or turned (`turned`) they are the slopes of 4.13, `k` and `a` are lengths, and there is no `y`.
    inverse: `1/z_i`, zero for queries that are not part of the output.
    """

    v: Tensor
    o: Tensor
    k: Tensor
    q: Tensor
    a: Tensor
    y: Tensor | None
    chi: Tensor
    kappa: Tensor
    turned: bool
    inverse: Tensor
    slack: Tensor  # (g,) float64
    noise: float

    @classmethod
    def of(cls, operator: AttentionJacobian, geometry: _Geometry) -> "_Tokens":
        layer, kernel = operator.layer, operator.kernel.tiled()
        batch, heads, n, _ = kernel._shape
        dtype = operator.dtype

        def apply(t: Tensor, factor: Tensor) -> Tensor:
            """`factor_h t_i` for every head."""
            return (t.unflatten(0, (batch, heads)) @ factor.mT.to(dtype)).flatten(0, 1)

        v = apply(kernel._v, geometry.r_o)
        centre = v.mean(1, keepdim=True)
        inverse = kernel._inverse[..., 0]
        slopes = token_slopes(operator, geometry.r_q, geometry.r_k)
        if slopes is None:
            k, q, y = apply(kernel._k, geometry.r_q), apply(kernel._q, geometry.r_k) * abs(layer.scale), None
            chi = kappa = torch.ones_like(inverse)
        else:
            k, chi, q, kappa = slopes
            q, y = q * abs(layer.scale), None
        k = k - k.mean(1, keepdim=True) if kernel.scores.softcap is None else k
        a = q.norm(dim=-1)
        if slopes is None and heads == 1:
            y = apply(q, geometry.inner @ geometry.key) * math.copysign(1.0, layer.scale)
        if layer.attention_mask is not None:
            real = layer.attention_mask.to(dtype).repeat_interleave(heads, 0)
            inverse = inverse * real
        noise = _ROUNDINGS * torch.finfo(dtype).eps * math.sqrt(layer.width + n)
        logit = abs(layer.scale) * (kernel._q.norm(dim=-1).amax(-1) * kernel._k.norm(dim=-1).amax(-1)).double()
        if kernel.scores.softcap is not None:
            logit = logit.clamp_max(kernel.scores.softcap)
        o = apply(kernel._o, geometry.r_o) - centre
        return cls(v - centre, o, k, q, a, y, chi, kappa, slopes is not None, inverse, torch.exp(noise * (1 + logit)), noise)


def _products(kernel: Tiled, inverse: Tensor, w: Tensor, capped: bool = False) -> Tensor:
    """`P w` for columns (g, m, c); `capped`: with `P` times the soft-cap's slope."""
    image = w.new_zeros(*inverse.shape, w.shape[-1])
    for b in kernel._blocks():
        image[b.heads, b.rows] += torch.bmm(b.slope if capped else b.weights, w[b.heads, b.cols])
    return image.mul_(inverse[..., None])


def _received(kernel: Tiled, inverse: Tensor, z: Tensor, capped: bool = False) -> Tensor:
    """`Pᵀ z` for one vector per head, (g, n) → (g, m)."""
    z_hat, back = z * inverse, z.new_zeros(z.shape[0], kernel._shape[-1])
    for b in kernel._blocks():
        back[b.heads, b.cols] += _down(z_hat[b.heads, b.rows], b.slope if capped else b.weights)
    return back


def _along(tile: Tensor, w: Tensor) -> Tensor:
    """`tile w`, written as the row product that BLAS is quick at."""
    return torch.bmm(w[:, None], tile.mT)[:, 0]


def _down(z: Tensor, tile: Tensor) -> Tensor:
    """`tileᵀ z`."""
    return torch.bmm(z[:, None], tile)[:, 0]


def _trace_sizes(operator: AttentionJacobian, geometry: _Geometry, t: _Tokens) -> _Sizes:
    """Theorem 4.3 with traces for norms, and Theorem 4.4."""
    kernel = operator.kernel.tiled()
    capped = kernel.scores.softcap is not None
    v2, k2 = t.v.square().sum(-1, keepdim=True), t.k.square().sum(-1, keepdim=True)
    if capped:
        spread_v = _spread(_products(kernel, t.inverse, v2)[..., 0], t.o, t)
        spread_k = _products(kernel, t.inverse, k2, capped=True)[..., 0]
    else:
        moments = _products(kernel, t.inverse, torch.cat([v2, k2, t.k], -1))
        spread_v = _spread(moments[..., 0], t.o, t)
        spread_k = _spread(moments[..., 1], moments[..., 2:], t)
    beta = abs(operator.layer.scale) * (spread_v * spread_k).sqrt() * t.chi
    key = (_received(kernel, t.inverse, spread_v * t.a.square(), capped).sqrt() * t.kappa).amax(-1)
    return _with_block_norms(operator, geometry, t, beta, key, spread_v)


def _with_block_norms(
    operator: AttentionJacobian, geometry: _Geometry, t: _Tokens, beta: Tensor, key: Tensor, spread: Tensor
) -> _Sizes:
    """Theorem 4.4 added. Block norms are about `P_ij (ν + a_i √spread_i)`, whose top vector is a cheap start."""
    batch = operator.batch
    p, w = _weights_norm(operator.kernel.tiled(), t.inverse, STEPS if operator.layer.heads == 1 else _HEAD_STEPS)
    nu = geometry.nu.to(beta.dtype).repeat(batch)[:, None]  # (g, 1)
    reach = t.a * spread.sqrt() * t.kappa.amax(-1, keepdim=True)
    start = _start(operator.kernel.tiled(), t.inverse, nu + reach, beta, w)
    if t.y is not None:
        return _Sizes(p, beta.amax(-1), key, _one_head(operator, geometry, t, beta, start))
    start = torch.cat([start, start])
    whole, keys_alone = _many_heads(operator, nu, t, beta, start)
    return _Sizes(p, beta.amax(-1), torch.minimum(key.double(), keys_alone), whole)


def _start(kernel: Tiled, inverse: Tensor, rows: Tensor, beta: Tensor, w: Tensor) -> Tensor:
    """Weights near the top right singular vector of `diag(rows) P + diag(β)`."""
    scaled = rows * inverse

    def forward(w: Tensor) -> Tensor:
        image = beta * w
        for b in kernel._blocks():
            image[b.heads, b.rows] += scaled[b.heads, b.rows] * _along(b.weights, w[b.heads, b.cols])
        return image

    def backward(z: Tensor) -> Tensor:
        return _received(kernel, scaled, z) + beta * z

    return perron_bound(forward, backward, w, _START_STEPS)[1]


def _spread(second: Tensor, mean: Tensor, t: _Tokens) -> Tensor:
    """`Σ_j P_ij |v_j|² − |o_i|²` with what rounding may hide of it, zero for queries that see nothing."""
    return torch.where(t.inverse > 0, (second - mean.square().sum(-1)).clamp_min(0) + t.noise * second, 0.0)


def _weights_norm(kernel: Tiled, inverse: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`‖P‖₂` of every head from above, and weights near its top right singular vector."""

    def forward(w: Tensor) -> Tensor:
        image = torch.zeros_like(inverse)
        for b in kernel._blocks():
            image[b.heads, b.rows] += _along(b.weights, w[b.heads, b.cols])
        return image.mul_(inverse)

    def backward(z: Tensor) -> Tensor:
        return _received(kernel, inverse, z)

    return perron_bound(forward, backward, backward(torch.ones_like(inverse)), steps)


def _one_head(operator: AttentionJacobian, geometry: _Geometry, t: _Tokens, beta: Tensor, start: Tensor) -> Tensor:
    """`‖N‖₂` of the matrix of block norms, each the smaller of two bounds (Theorem 4.4)."""
    kernel = operator.kernel.tiled()
    nu = float(geometry.nu[0])
    assert t.y is not None
    y = t.y
    unit = y / t.a.clamp_min(torch.finfo(t.a.dtype).tiny)[..., None]
    base = unit.square().sum(-1, keepdim=True) + nu**2
    shift = (t.o * y).sum(-1, keepdim=True)
    distance = _Distance(t)
    capped = kernel.scores.softcap is not None

    def tile(b: Block) -> Tensor:
        e = distance(b).mul_(t.a[b.heads, b.rows, None])
        cross = torch.bmm(y[b.heads, b.rows], t.v[b.heads, b.cols].mT).sub_(shift[b.heads, b.rows]).mul_(2)
        if capped:
            split = b.weights.square() * base[b.heads, b.rows] + b.weights * b.slope * cross + (b.slope * e).square()
            return torch.minimum(split.clamp_min_(0).sqrt_(), b.weights * nu + b.slope * e)
        split = cross.addcmul_(e, e).add_(base[b.heads, b.rows]).clamp_min_(0).sqrt_()
        return torch.minimum(split, e.add_(nu)).mul_(b.weights)

    def forward(w: Tensor) -> Tensor:
        image = torch.zeros_like(beta)
        for b in kernel._blocks():
            image[b.heads, b.rows] += _along(tile(b), w[b.heads, b.cols])
        return image * t.inverse + beta * w

    def backward(z: Tensor) -> Tensor:
        back, z_hat = beta * z, z * t.inverse
        for b in kernel._blocks():
            back[b.heads, b.cols] += _down(z_hat[b.heads, b.rows], tile(b))
        return back

    steps = _SHORT_STEPS if beta.shape[1] <= _SHORT else _BLOCK_STEPS
    return perron_bound(forward, backward, start, steps)[0]


def _many_heads(operator: AttentionJacobian, nu: Tensor, t: _Tokens, beta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """`‖ν P + E + diag β‖₂` and `‖E‖₂`, `E_ij = P_ij a_i κ_j |v_j − o_i|`: the simpler bound on each block (Theorem 4.4)."""
    kernel = operator.kernel.tiled()
    g = len(beta)
    distance = _Distance(t)

    def forward(w: Tensor) -> Tensor:
        mean, moved, alone = torch.zeros_like(beta), torch.zeros_like(beta), torch.zeros_like(beta)
        whole, keys = t.kappa * w[:g], t.kappa * w[g:]
        for b in kernel._blocks():
            e = distance(b).mul_(b.slope)
            mean[b.heads, b.rows] += _along(b.weights, w[:g][b.heads, b.cols])
            moved[b.heads, b.rows] += _along(e, whole[b.heads, b.cols])
            alone[b.heads, b.rows] += _along(e, keys[b.heads, b.cols])
        a = t.a * t.inverse
        return torch.cat([nu * t.inverse * mean + a * moved + beta * w[:g], a * alone])

    def backward(z: Tensor) -> Tensor:
        a = t.a * t.inverse
        whole, by_whole, by_keys = beta * z[:g], torch.zeros_like(beta), torch.zeros_like(beta)
        mean, moved, alone = nu * t.inverse * z[:g], a * z[:g], a * z[g:]
        for b in kernel._blocks():
            e = distance(b).mul_(b.slope)
            whole[b.heads, b.cols] += _down(mean[b.heads, b.rows], b.weights)
            by_whole[b.heads, b.cols] += _down(moved[b.heads, b.rows], e)
            by_keys[b.heads, b.cols] += _down(alone[b.heads, b.rows], e)
        return torch.cat([whole + t.kappa * by_whole, t.kappa * by_keys])

    bound, _ = perron_bound(forward, backward, start, _BLOCK_STEPS)
    return bound[:g], bound[g:]


class _Distance:
    """Tiles of `|v_j − o_i|`, from above where rounding hides them."""

    def __init__(self, t: _Tokens):
        v2, o2 = t.v.square().sum(-1), t.o.square().sum(-1)
        self._v, self._minus_2o, self._v2 = t.v, -2 * t.o, v2[:, None]
        self._o2 = (o2 * (1 + t.noise) + t.noise * v2.amax(-1, keepdim=True))[..., None]

    def __call__(self, b: Block) -> Tensor:
        squares = torch.bmm(self._minus_2o[b.heads, b.rows], self._v[b.heads, b.cols].mT)
        return squares.add_(self._v2[b.heads, :, b.cols]).add_(self._o2[b.heads, b.rows]).clamp_min_(0).sqrt_()


def _exact_sizes(operator: AttentionJacobian, geometry: _Geometry, t: _Tokens) -> _Sizes:
    """Theorem 4.3 with the covariances of every token formed, one head and some rows at a time, and Theorem 4.4."""
    beta = torch.zeros_like(t.inverse)
    key = beta.new_zeros(len(beta))
    for g in range(len(beta)):
        beta[g], key[g] = _exact_head(operator, geometry, t, g)
    spread = _spread(_products(operator.kernel.tiled(), t.inverse, t.v.square().sum(-1, keepdim=True))[..., 0], t.o, t)
    return _with_block_norms(operator, geometry, t, beta, key, spread)


def _exact_head(operator: AttentionJacobian, geometry: _Geometry, t: _Tokens, g: int) -> tuple[Tensor, Tensor]:
    """`‖B_i W_q‖` of every token of one head, (n,), and the norm of the key part."""
    kernel, tau = operator.kernel.tiled(), abs(operator.layer.scale)
    n, m = kernel._shape[2:]
    v, k, q, o = t.v[g], t.k[g], t.q[g], t.o[g]
    pull_q = pull_k = None
    if t.turned:  # queries and keys as they are; each token's own derivative is applied to what they make
        h = g % operator.layer.heads
        pull_q = Pull(operator, g, keys=False, triangle=geometry.r_q[h].to(v.dtype))
        pull_k = Pull(operator, g, keys=True, triangle=geometry.r_k[h].to(v.dtype))
        k, q = kernel._k[g], kernel._q[g] * tau
        k = k - k.mean(0) if kernel.scores.softcap is None else k
    vk = torch.cat([v, k], -1)
    r, r_k = v.shape[1], q.shape[1]
    values, cross, keys = _triangle(r, v.device), _rectangle(r, k.shape[1], v.device), _triangle(r_k, v.device)
    pairs = torch.cat([values, cross], 1)
    matrices = m * keys.shape[1] <= _FEATURES  # else the trace stands for the key part's matrices
    step = max(1, min(128, _FEATURES // pairs.shape[1]))
    features = vk[:, pairs[0]] * vk[:, pairs[1]] if m * pairs.shape[1] <= _FEATURES else None
    beta = v.new_zeros(n)
    energy = v.new_zeros(m, keys.shape[1] if matrices else 0)
    total_energy = v.new_zeros(m)
    for start in range(0, n, step):
        rows, cols = slice(start, min(start + step, n)), slice(0, min(start + step, m) if kernel.scores.mask.causal else m)
        weights = _rows(kernel, g, rows, cols) * t.inverse[g, rows, None]
        first, centre, total = weights @ vk[cols], o[rows], weights.sum(-1, keepdim=True)
        second = _second_moments(weights, vk[cols], pairs, None if features is None else features[cols])
        # Σ Q (v − o)(v − o)ᵀ and Σ Q (v − o) kᵀ from moments about the origin
        drift = centre[:, :, None] * (first[:, :r] - 0.5 * total * centre)[:, None]
        cov = _symmetric(second[:, : values.shape[1]], values, r).sub_(drift).sub_(drift.mT)
        mixed = second[:, values.shape[1] :].unflatten(1, (r, -1)) - centre[:, :, None] * first[:, None, r:]
        mixed = mixed if pull_q is None else pull_q(mixed, rows)
        gram = mixed @ mixed.mT if mixed.shape[1] <= mixed.shape[2] else mixed.mT @ mixed
        size_v, size_k = weights @ v[cols].square().sum(-1), weights @ t.k[g][cols].square().sum(-1)
        spread = _top_eigenvalue(cov) + t.noise * size_v
        beta[rows] = tau * (_top_eigenvalue(gram).sqrt() + t.noise * (size_v * size_k).sqrt() * t.chi[g, rows])
        total_energy[cols] += weights.mT @ (spread * t.a[g, rows].square())
        if matrices:
            energy[cols] += weights.mT @ (spread[:, None] * (q[rows][:, keys[0]] * q[rows][:, keys[1]]))
    total_energy = total_energy * t.kappa[g].square()
    if not matrices:
        return beta, total_energy.amax().sqrt()
    whole = _symmetric(energy, keys, r_k)
    if pull_k is not None:
        every = slice(0, m)
        whole = pull_k(pull_k(whole, every).mT, every)
        whole = (whole + whole.mT) / 2
    return beta, torch.minimum(_top_eigenvalue(whole) + t.noise * total_energy, total_energy * (1 + t.noise)).amax().sqrt()


def _triangle(r: int, device: torch.device) -> Tensor:
    """Pairs `i ≤ j < r`, (2, count)."""
    return torch.triu_indices(r, r, device=device)


def _rectangle(r: int, c: int, device: torch.device) -> Tensor:
    """Pairs `i < r`, `r ≤ j < r + c`, (2, r·c)."""
    return torch.stack([torch.arange(r, device=device).repeat_interleave(c), r + torch.arange(c, device=device).repeat(r)])


def _symmetric(entries: Float[Tensor, "n count"], pairs: Tensor, r: int) -> Float[Tensor, "n r r"]:
    full = entries.new_empty(len(entries), r, r)
    full[:, pairs[0], pairs[1]] = entries
    full[:, pairs[1], pairs[0]] = entries
    return full


def _top_eigenvalue(s: Float[Tensor, "n r r"]) -> Float[Tensor, " n"]:
    """The largest eigenvalues of positive semi-definite matrices from above: `λ ≤ (tr S¹⁶)^{1/16}` for large ones (4.6)."""
    if s.shape[-1] <= _SMALL:
        return torch.linalg.eigvalsh(s)[:, -1].clamp_min(0)
    log = s.new_zeros(len(s), dtype=torch.float64)
    for power in (1, 2, 4):
        size = s.flatten(1).norm(dim=-1).clamp_min(torch.finfo(s.dtype).tiny)
        log += size.double().log() / power
        s = s / size[:, None, None]
        s = s @ s.mT
    return (log + s.flatten(1).norm(dim=-1).double().clamp_min(torch.finfo(torch.float64).tiny).log() / 8).exp().to(s.dtype)


def _rows(kernel: Tiled, g: int, rows: slice, cols: slice) -> Tensor:
    """Rows of `P̂` of one head times the soft-cap's slope."""
    s, slope = kernel._logits(slice(g, g + 1), Tile(rows, cols, partial=True))
    weights = s.sub_(kernel._largest[g : g + 1, rows, None]).exp_()
    return (weights if slope is None else weights * slope)[0]


def _second_moments(weights: Tensor, vk: Tensor, pairs: Tensor, features: Tensor | None) -> Tensor:
    """`Σ_j weights_ij vk_jp vk_jq` for the pairs `(p, q)`, some of them at a time where all are too many."""
    if features is not None:
        return weights @ features
    step = max(1, _FEATURES // len(vk))
    return torch.cat([weights @ (vk[:, p] * vk[:, q]) for p, q in (c.unbind() for c in pairs.split(step, 1))], -1)
