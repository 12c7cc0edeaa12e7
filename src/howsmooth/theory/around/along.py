"""The largest norm around an input, with the top singular directions treated apart, and second derivatives by products.

Along a pair `(u, v)` the first-order change of `⟨u, J v⟩` is a gradient and costs two passes; only what is left of the Jacobian
beside a few such pairs is bounded by norms alone (docs/explanation/around.md, Theorem 6.9). Second derivatives are certified
along the pairs, or in all directions at once (6.12). Numbers such as 6.11 are those of that page.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import AttentionJacobian
from howsmooth.spectral import DenseSVD, GolubKahan, Operator, norm_upper, small, spectral_norm, top_pairs
from howsmooth.spectral.operator import Restricted, stream
from howsmooth.theory.around.covariances import Spread
from howsmooth.theory.around.jets import UNITS, Centre, Jet, moves
from howsmooth.theory.upper import TINY, Upper, lengths

if TYPE_CHECKING:
    from howsmooth.theory.around.attention import Neighbourhood

FEW, MANY = 2, 6  # pairs that are treated apart, of inputs whose Jacobians are decomposed and of larger ones
PROBES = 64  # Gaussian directions that stand for all second derivatives
_STEPS = 6  # for each certificate along a pair: within a factor of two where spectra fall off
_FLAT_STEPS, _FLAT_WIDTH = 20, 0.1  # for the certificate of all second derivatives at once
_NUMBERS, _KEPT = 2**23, 2**24  # numbers of probes that are worked on at once, and that are kept from product to product
_UNIT = torch.finfo(torch.float64).eps


class Pairs(NamedTuple):
    """Orthonormal directions and the Jacobian at the centre between them.

    left: (pairs, n, d_out).  right: (pairs, n, d), zero for tokens that are held.  core: `|Uᵀ J V|`, entry by entry.
    beside: `|u_aᵀ J (I − VVᵀ)|`.  under: `|(I − UUᵀ) J v_b|`.  others: an upper bound on `‖(I − UUᵀ) J (I − VVᵀ)‖`.
    """

    left: Float[Tensor, "pairs n d_out"]
    right: Float[Tensor, "pairs n d"]
    core: Float[Tensor, "pairs pairs"]
    beside: Float[Tensor, " pairs"]
    under: Float[Tensor, " pairs"]
    others: float

    @property
    def norm(self) -> float:
        """An upper bound on `‖J‖` at the centre."""
        none = Upper(torch.zeros_like(self.beside))
        return together(self, Upper(torch.zeros_like(self.core)), none, none, 0.0)


def together(pairs: Pairs, core: Upper, rows: Upper, columns: Upper, others: float) -> float:
    """The norm of the matrix of norms, where the blocks have moved by at most so much."""
    corner = (Upper(pairs.others) + others).value * torch.ones_like(pairs.core[:1, :1])
    top = torch.cat([(core + pairs.core).value, (rows + pairs.beside).value[:, None]], 1)
    whole = torch.cat([top, torch.cat([(columns + pairs.under).value[None], corner], 1)])
    size = float(whole.max().clamp_min(TINY))
    return float(Upper(float(spectral_norm(whole / size))).raised(64 * len(whole)) * size)


@torch.no_grad()
def pairs_at(operator: AttentionJacobian, tokens: tuple[int, ...] | None, count: int, delta: float, seed: int) -> Pairs:
    """The top pairs at the centre, with a certificate of probability `1 − delta` for what they leave."""
    J: Operator = operator if tokens is None else Restricted(operator, tokens)
    count = min(count, J.in_size - 1, J.out_size - 1)
    found = top_pairs(J, count, seeds=[seed], delta=delta)
    assert found.rest is not None
    image, back = J.jvp(found.right).flatten(1), J.vjp(found.left).flatten(1)
    right, left = found.right.flatten(1), found.left.flatten(1)
    core = left @ image.T
    # what rounding makes of orthonormal vectors and of their products
    noise = (1e-13 + J.noise) * float(core.abs().max())
    if small(J) and (rounded := J.rounding()) is not None:  # where heads cancel, that is more
        noise = noise + rounded.error + rounded.fixed
    beside = lengths(back - core @ right) + noise
    under = lengths(image - core.T @ left) + noise
    inputs = found.right[:, 0]
    inputs = J.spread(inputs) if isinstance(J, Restricted) else inputs
    return Pairs(found.left[:, 0], inputs, core.abs() + noise, beside, under, float(found.rest[0]))


class Contracted(NamedTuple):
    """How far rows `u_aᵀ J` or columns `J v_b` can move, and how far beyond first order, (pairs,) each."""

    change: Upper
    rest: Upper

    @classmethod
    def of(cls, jets: list[Jet]) -> "Contracted":
        """Jets of single rows or columns, token by token, with their lengths."""
        return cls(*(Upper(torch.stack([t.length().value for t in ts])) for ts in list(zip(*jets, strict=True))[1:]))


def _row(spread: Spread, u: Tensor) -> Jet:
    """`uᵀ J`, token by token: with `c_i = W_oᵀ u_i`, scalars `⟨c_i, v_j − o_i⟩` stand for lengths."""
    centre, found, r = spread.centre, spread.found, spread.r
    w, kernel = centre.layer.by_head(), centre.operator.kernel.tiled()
    c = torch.einsum("io,hov->hiv", u, w.o)
    omega = Upper((c @ w.v).norm(dim=-1) + UNITS * c.norm(dim=-1) * w.v.flatten(1).norm(dim=-1)[:, None])  # |W_vᵀ c_i|
    # what rounding may have done to a value, before `R_o`
    tokens = centre.operator.tokens
    assert tokens is not None
    error = w.v.flatten(1).norm(dim=-1) * lengths(tokens[0]).max() + kernel.v.norm(dim=-1).amax(-1)
    size = (c @ kernel.v.mT - (c * kernel.o).sum(-1, keepdim=True)).abs()
    size = Upper(size + c.norm(dim=-1, keepdim=True) * (UNITS * error)[:, None, None])
    p = found.weights
    moved = Jet(
        size,
        omega[..., None] * r + (omega * found.towards + (p.change * size).sum())[..., None],
        (omega * (p.change * r).sum() + (p.rest * size).sum())[..., None],
    )
    each = p * moved if found.cap is None else p * moved * found.cap
    by_key, by_query = found.slopes
    total = (each * by_key).sum(1) + (each * by_query).sum(-1)  # (heads, n)
    of_values = Jet(*((t * omega[..., None]).sum(1) for t in p))
    return (total + of_values).sum(0)


def _column(spread: Spread, v: Tensor) -> Jet:
    """`J v`, token by token: scalars `τ (dq_i·(k_j − κ_i) + q_i·dk_j)` stand for lengths."""
    centre, found, r = spread.centre, spread.found, spread.r
    layer, kernel, geometry = centre.layer, centre.operator.kernel.tiled(), centre.geometry
    group = layer.heads // layer.kv_heads
    dq, dk, dv = (t[0, 0] for t in centre.operator.vectors(v[None, None]))
    dk, dv = dk.repeat_interleave(group, 0), dv.repeat_interleave(group, 0)
    p, tau, weights = found.weights, abs(layer.scale), centre.weights
    out = dv @ (geometry.r_o * geometry.out_size).mT
    apart = torch.cdist(weights @ out, out, compute_mode="donot_use_mm_for_euclid_dist")
    apart = Upper(apart + UNITS * out.norm(dim=-1).amax(-1)[:, None, None])
    psi = layer.scale * (dq @ kernel.k.mT + kernel.q @ dk.mT)
    lengths_q, lengths_k, of_q, of_k = (t.norm(dim=-1) for t in (kernel.q, kernel.k, dq, dk))
    fuzz = Upper(UNITS * tau * (of_q[..., None] * lengths_k[:, None] + lengths_q[..., None] * of_k[:, None]))
    if centre.cross is not None:
        by_k, by_q = ((t @ m.mT).norm(dim=-1) * (1 + UNITS) for t, m in ((dq, geometry.r_k), (dk, geometry.r_q)))
        change = Upper(by_k[..., None] * r + r[:, None] * by_q[:, None]) * tau + fuzz
        rest = Upper(torch.zeros_like(weights))
    else:
        length = v.norm(dim=-1)
        query, key = moves(centre, r)
        q_of_v = Jet(Upper(of_q), query.bend * r * length, query.twist * r * r * length * 0.5).map(lambda t: t[..., None])
        k_of_v = Jet(Upper(of_k), key.bend * r * length, key.twist * r * r * length * 0.5).map(lambda t: t[:, None])
        q = Jet(centre.queries, query.step(r), query.curve(r)).map(lambda t: t[..., None])
        k = Jet(centre.keys, key.step(r)[:, None], key.curve(r)[:, None])
        both = q_of_v * k + q * k_of_v
        change, rest = both.change * tau + fuzz, both.rest * tau + fuzz
    raw = Jet(Upper(psi.abs()), change, rest)
    if found.cap is not None:
        raw, psi = raw * found.cap, psi * found.cap.size.value
    centred = Jet(Upper((psi - (weights * psi).sum(-1, keepdim=True)).abs()) + fuzz, raw.change, raw.rest)
    moved = Jet(*((t * apart).sum() for t in p))
    heads = (p * found.value * centred).sum(-1) + moved

    def rows(t: Upper) -> Upper:
        """Lengths of tokens' outputs, heads together."""
        each = t.sum(0)
        if layer.heads > 1:
            each = each.min(Upper(geometry.blocks(t.value.mT, torch.float64)).raised(64 * (layer.width + layer.out_width)))
        return each

    return Jet(*(rows(t) for t in heads))


def deflated(spread: Spread, area: "Neighbourhood", pairs: Pairs, known: "Curves", others: float, beyond: float) -> float:
    """`‖D_Y f‖` over the neighbourhood (Theorem 6.9). others: how far the Jacobian can move.  beyond: beyond first order."""
    far = area.far
    of_rows = Contracted.of([_row(spread, u).map(lambda t: t[spread.columns]) for u in pairs.left])  # Proposition 6.10
    of_columns = Contracted.of([_column(spread, v) for v in pairs.right])
    first = (Upper(known.core) * spread.r).sum()
    if area.total is not None:
        first = first.min(Upper(known.core).length() * far)
    rows, columns = (
        (Upper(norms) * far + part.rest.min(beyond)).min(part.change).min(others)
        for norms, part in ((known.rows, of_rows), (known.columns, of_columns))
    )
    rest = of_rows.rest[:, None].min(of_columns.rest).min(beyond)
    core = rows[:, None].min(columns).min(first.raised(2**22) + rest)
    return together(pairs, core, rows, columns, others)


class Probes(NamedTuple):
    """Input directions, and what they make of queries, keys, values and logits where queries and keys are affine.

    logits: `⟨ξ, v_i⟩ + ⟨g, v_j⟩`, less its mean under the weights.
    """

    v: Float[Tensor, "probes n d"]
    q: Float[Tensor, "probes heads n d_h"]
    k: Float[Tensor, "probes heads n d_h"]
    values: Float[Tensor, "probes heads n d_v"]
    logits: Float[Tensor, "probes heads n n"]


@final
class Second:
    """`gradient`: `∂_X ⟨u, J(X) v⟩`, and `along`: `D²f(X)[h, v]`, linear in `h`, `v` and `u`, each the other's transpose."""

    def __init__(self, centre: Centre):
        self.centre, self.layer = centre, centre.layer
        assert centre.operator.tokens is not None
        self.x = centre.operator.tokens.detach()

    def probes(self, v: Float[Tensor, "probes n d"]) -> Probes:
        operator, kernel = self.centre.operator, self.centre.operator.kernel.tiled()
        group = self.layer.heads // self.layer.kv_heads
        q, k, values = (t[:, 0] for t in operator.vectors(v[:, None]))
        k, values = k.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return Probes(v, q, k, values, self._centred(self.layer.scale * (q @ kernel.k.mT + kernel.q @ k.mT)))

    def _centred(self, t: Tensor) -> Tensor:
        return t - (self.centre.weights * t).sum(-1, keepdim=True)

    def gradient(self, u: Float[Tensor, "n d_out"], at: Probes) -> Float[Tensor, "probes n d"]:
        """`∂_X ⟨u, J(X) v⟩` for every probe `v`, in closed form where queries and keys are affine (6.11)."""
        if not self.centre.affine:
            return torch.stack([self._differentiated(u, v, keep=False) for v in at.v])
        kernel, p, w = self.centre.operator.kernel.tiled(), self.centre.weights, self.layer.by_head()
        tau, c = self.layer.scale, torch.einsum("io,hov->hiv", u, w.o)
        phi = self._centred(c @ kernel.v.mT)
        by_logit = p * self._centred(c @ at.values.mT + phi * at.logits)
        by_phi, by_psi = p * at.logits, p * phi
        g_q = tau * (by_logit @ kernel.k + by_psi @ at.k)
        g_k = tau * (by_logit.mT @ kernel.q + by_psi.mT @ at.q)
        g_v = by_phi.mT @ c
        if self.layer.rotary is not None:
            g_q, g_k = (self.layer.rotary.turn(t, back=True) for t in (g_q, g_k))
        return sum(torch.einsum("phna,had->pnd", g, m) for g, m in ((g_q, w.q), (g_k, w.k), (g_v, w.v)))  # pyright: ignore[reportReturnType]

    def along(self, a: Probes, b: Probes) -> Float[Tensor, "probes n d_out"]:
        """`D²f(X)[h, v]` for every pair of probes, in closed form where queries and keys are affine (6.11)."""
        if not self.centre.affine:
            return torch.stack([self._along(h, v) for h, v in zip(a.v, b.v, strict=True)])
        p, layer = self.centre.weights, self.layer
        both = a.logits * b.logits + layer.scale * (a.q @ b.k.mT + b.q @ a.k.mT)
        out = (p * a.logits) @ b.values + (p * b.logits) @ a.values
        out = layer.concat(out + (p * self._centred(both)) @ self.centre.operator.kernel.tiled().v)
        return out if layer.w_o is None else out @ layer.w_o.mT

    def _along(self, h: Tensor, v: Tensor) -> Tensor:
        """`D²f(X)[h, v]` by automatic differentiation, as the transpose of what is linear in `u`."""
        with torch.inference_mode(False), torch.enable_grad():
            u = h.new_zeros(len(h), self.layer.out_width).requires_grad_()
            back = self._differentiated(u, v, keep=True)
            return torch.autograd.grad(back, u, h, materialize_grads=True)[0] if back.requires_grad else u.detach()

    def _differentiated(self, u: Tensor, v: Tensor, keep: bool) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            x = self.x.clone().requires_grad_()
            (back,) = torch.autograd.grad(self.layer.value(x), x, u[None], create_graph=True, materialize_grads=True)
            if not back.requires_grad:  # a linear layer
                return torch.zeros_like(v)
            return torch.autograd.grad(back, x, v[None], create_graph=keep, materialize_grads=True)[0][0]


@final
class AlongRow(Operator):
    """`h ↦ ∂_X ⟨u, J(X) h⟩`, which is symmetric."""

    def __init__(self, second: Second, u: Float[Tensor, "n d_out"]):
        self.batch, self.in_shape, self.out_shape = 1, second.x.shape[1:], second.x.shape[1:]
        self.dtype, self.device = second.x.dtype, second.x.device
        self._second, self._u = second, u

    def jvp(self, v):
        return self._second.gradient(self._u, self._second.probes(v[:, 0]))[:, None]

    def vjp(self, u):
        return self.jvp(u)


@final
class AlongProbes(Operator):
    """`u ↦ (∂_X ⟨u, J(X) v_s⟩)_s` where some tokens move. Its transpose takes `(h_s)` to `Σ_s D²f[h_s, v_s]`."""

    def __init__(self, second: Second, v: Float[Tensor, "probes n d"], columns: Tensor):
        n, d = second.x.shape[1:]
        self.batch, self.in_shape, self.out_shape = 1, (n, second.layer.out_width), (len(v), len(columns), d)
        self.dtype, self.device = second.x.dtype, second.x.device
        self._second, self._columns = second, columns
        step = max(1, _NUMBERS // (second.layer.heads * n * n + n * d))
        few = len(v) * (second.layer.heads * n * n + 3 * n * d) <= _KEPT
        self._parts: list[Probes | Tensor] = [second.probes(w) if few else w for w in v.split(step)]

    def _probes(self) -> Iterator[Probes]:
        return (self._second.probes(w) if isinstance(w, Tensor) else w for w in self._parts)

    def jvp(self, v):
        found = [torch.cat([self._second.gradient(u, at) for at in self._probes()]) for u in v[:, 0]]
        return torch.stack(found)[:, None, :, self._columns]

    def vjp(self, u):
        found = []
        for h in u[:, 0]:
            moved, total, done = h.new_zeros(len(h), *self._second.x.shape[1:]).index_copy_(1, self._columns, h), [], 0
            for at in self._probes():
                part = self._second.probes(moved[done : done + len(at.v)])
                total, done = [*total, self._second.along(part, at).sum(0)], done + len(at.v)
            found.append(torch.stack(total).sum(0))
        return torch.stack(found)[:, None]


@final
class Transposed(Operator):
    """`Jᵀ` as an operator of its own."""

    def __init__(self, operator: Operator):
        self.batch, self.in_shape, self.out_shape = operator.batch, operator.out_shape, operator.in_shape
        self.dtype, self.device = operator.dtype, operator.device
        self._operator = operator

    def jvp(self, v):
        return self._operator.vjp(v)

    def vjp(self, u):
        return self._operator.jvp(u)


class Curves(NamedTuple):
    """What is known of second derivatives along the pairs.

    core: lengths of `∂_X ⟨u_a, J v_b⟩`, token by token.  rows, columns: norms along `u_a` and `v_b`.
    """

    core: Float[Tensor, "pairs pairs n"]
    rows: Float[Tensor, " pairs"]
    columns: Float[Tensor, " pairs"]


def curves(second: Second, pairs: Pairs, delta: float, seed: int) -> Curves:
    """Norms of second derivatives along the pairs. delta: of all the certificates together."""
    count, n = len(pairs.core), second.x.shape[1]
    right = second.probes(pairs.right)
    core = torch.stack([lengths(second.gradient(u, right)) for u in pairs.left])
    every = torch.arange(n, device=core.device)
    operators: list[Operator] = [AlongRow(second, u) for u in pairs.left]
    operators += [Transposed(AlongProbes(second, v[None], every)) for v in pairs.right]
    seeds, norms = [*range(seed, seed + 2 * count, 2), *range(seed + 1, seed + 2 * count, 2)], []
    for J, k in zip(operators, seeds, strict=True):
        solver = DenseSVD() if J.in_size <= _STEPS else GolubKahan(max_steps=_STEPS, delta=delta / (2 * count))
        norms.append(float(norm_upper(J, solver, 0.2, [k])[0]))
    return Curves(core, core.new_tensor(norms[:count]), core.new_tensor(norms[count:]))


def flattened(second: Second, columns: Tensor, probes: int, delta: float, seed: int) -> float:
    """A bound on `‖D²f(X)[h, ·]‖` for all `|h| ≤ 1`, `h` and the derivative's columns at some tokens (Theorem 6.12).

    As many Gaussian directions as `probes` stand for all of them; where there are no more of these, a basis does.
    """
    (n, d), count = second.x.shape[1:], len(columns)
    if count * d <= probes:
        v, share = torch.eye(count * d, dtype=torch.float64), 1.0
    else:
        v = torch.randn(probes, count * d, generator=stream(seed, "second"), dtype=torch.float64) / math.sqrt(probes)
        share = least_share(probes, delta / 2)
    v = v.to(second.x.device).unflatten(-1, (count, d))
    v = v.new_zeros(len(v), n, d).index_copy_(1, columns, v)
    operator = AlongProbes(second, v, columns)
    upper = norm_upper(operator, GolubKahan(max_steps=_FLAT_STEPS, delta=delta / 2), _FLAT_WIDTH, [seed + 1])
    rounding = Upper(v.flatten(1).norm()) * _rounding(second)
    return float((Upper(float(upper[0])) + rounding) / (math.sqrt(share) * (1 - 4 * _UNIT)))


def least_share(probes: int, delta: float) -> float:
    """A `t < 1` with `(t e^{1 − t})^{m/2} ≤ δ`: the mean of `m` squares that is as rare as that (Theorem 6.12).

    >>> 64 / 2 * (math.log(t := least_share(64, 1e-6)) + 1 - t) <= math.log(1e-6)
    True
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        rare = probes / 2 * (math.log(middle) + 1 - middle) <= math.log(delta) - 1e-9
        low, high = (middle, high) if rare else (low, middle)
    return low


def _rounding(second: Second) -> Upper:
    """What rounding may make of `⟨u, D²f[h, v]⟩` for unit vectors: its sums with absolute values, times their error (6.14)."""
    w, kernel = second.layer.by_head(), second.centre.operator.kernel.tiled()
    n, d = second.x.shape[1:]
    tau = abs(second.layer.scale)
    q, k, v, o = (Upper(lengths(t.flatten(1))).raised(n * d) for t in (w.q, w.k, w.v, w.o))
    keys, queries, values = (Upper(lengths(t).amax(-1)).raised(n * d) for t in (kernel.k, kernel.q, kernel.v))
    logit = 2 * tau * (q * keys + queries * k)
    both = 2 * (logit.square() + 2 * tau * (q * k))
    size = (o * (2.0 * logit * v + both * values)).sum()
    terms = 4 * (4 * n + 2 * d + 2 * kernel.k.shape[-1] + 64)
    return size * (math.sqrt(n) * terms * _UNIT)
