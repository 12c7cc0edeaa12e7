"""The largest norm around an input, with the top singular directions treated apart from all others.

Along a pair `(u, v)` the first-order change of `⟨u, J v⟩` is a gradient and costs two passes; only what is left of the Jacobian
beside a few such pairs is bounded by norms alone (docs/explanation/around.md, Theorem 6.9).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import AttentionJacobian
from howsmooth.spectral import small, spectral_norm, top_pairs
from howsmooth.spectral.dense import SMALL
from howsmooth.spectral.operator import Operator, Restricted
from howsmooth.theory.around.covariances import Spread
from howsmooth.theory.around.jets import UNITS, Jet, moves
from howsmooth.theory.around.neighbourhood import Neighbourhood
from howsmooth.theory.bound import TINY, lengths
from howsmooth.theory.upper import Upper

if TYPE_CHECKING:
    from howsmooth.theory.around.second import Curves


class Effort(NamedTuple):
    """pairs: top pairs that are treated apart.  exact: of them, those among which first-order changes are exact.

    probes: Gaussian directions that stand for all second derivatives.
    """

    pairs: int
    exact: int
    probes: int

    @classmethod
    def of(cls, size: int) -> "Effort":
        """For inputs of so many entries."""
        return cls(2, 2, 64) if size <= SMALL else cls(6, 6, 64)


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


def contracted(spread: Spread, pairs: Pairs) -> tuple[Contracted, Contracted]:
    """Proposition 6.10: rows, and columns."""
    rows = [_row(spread, u).map(lambda t: t[spread.columns]) for u in pairs.left]
    return Contracted.of(rows), Contracted.of([_column(spread, v) for v in pairs.right])


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


def deflated(spread: Spread, area: Neighbourhood, pairs: Pairs, known: "Curves", others: float, beyond: float) -> float:
    """`‖D_Y f‖` over the neighbourhood (Theorem 6.9). others: how far the Jacobian can move.  beyond: beyond first order."""
    far, exact = area.far, known.core.shape[0]
    of_rows, of_columns = contracted(spread, pairs)
    first = (Upper(known.core) * spread.r).sum()
    if area.total is not None:
        first = first.min(Upper(known.core).length() * far)
    rows, columns = (
        (Upper(norms) * far + part.rest.min(beyond)).min(part.change).min(others)
        for norms, part in ((known.rows, of_rows), (known.columns, of_columns))
    )
    core = rows[:, None].min(columns)
    rest = of_rows.rest[:exact, None].min(of_columns.rest[:exact]).min(beyond)
    sharper = core[:exact, :exact].min(first.raised(2**22) + rest)
    core.value[:exact, :exact] = sharper.value
    return together(pairs, core, rows, columns, others)
