"""The largest norm around an input, with the top singular directions treated apart from all others.

Along a pair `(u, v)` the first-order change of `⟨u, J v⟩` is a gradient and costs two passes; only what is left of the Jacobian
beside a few such pairs is bounded by norms alone (docs/explanation/around.md, Theorem 6.9).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import AttentionJacobian
from howsmooth.spectral import small, spectral_norm, top_pairs
from howsmooth.spectral.dense import SMALL
from howsmooth.spectral.operator import Operator, Restricted
from howsmooth.theory.around.jets import ROUNDED, Centre, Jet, Parts, moves
from howsmooth.theory.bound import lengths, no_nan

_SECOND_STEPS = 6  # for each certificate of a second derivative: within a factor of two where spectra fall off


Product = Callable[[Tensor], Tensor]


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
    beside: `|u_aᵀ J (I − VVᵀ)|`.  under: `|(I − UUᵀ) J v_b|`.  others: `‖(I − UUᵀ) J (I − VVᵀ)‖` from above.
    """

    left: Float[Tensor, "pairs n d_out"]
    right: Float[Tensor, "pairs n d"]
    core: Float[Tensor, "pairs pairs"]
    beside: Float[Tensor, " pairs"]
    under: Float[Tensor, " pairs"]
    others: float

    @property
    def norm(self) -> float:
        """`‖J‖` at the centre, from above."""
        none = torch.zeros_like(self.beside)
        return together(self, torch.zeros_like(self.core), none, none, 0.0)


def together(pairs: Pairs, core: Tensor, rows: Tensor, columns: Tensor, others: float) -> float:
    """The norm of the matrix of norms, where the blocks have moved by at most so much."""
    corner = (pairs.others + others) * torch.ones(1, 1, dtype=core.dtype, device=core.device)
    top = torch.cat([pairs.core + core, (pairs.beside + rows)[:, None]], 1)
    whole = torch.cat([top, torch.cat([(pairs.under + columns)[None], corner], 1)])
    if not bool(whole.isfinite().all()):
        return math.inf
    return float(spectral_norm(whole / whole.max().clamp_min(1e-300)) * whole.max()) * (1 + ROUNDED)


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
    """How far rows `u_aᵀ J` and columns `J v_b` can move, and how far beyond first order."""

    rows: Float[Tensor, " pairs"]
    rows_rest: Float[Tensor, " pairs"]
    columns: Float[Tensor, " pairs"]
    columns_rest: Float[Tensor, " pairs"]


def contracted(centre: Centre, found: Parts, r: Float[Tensor, " n"], pairs: Pairs, columns: Tensor) -> Contracted:
    """Proposition 6.10."""
    rows = [_row(centre, found, r, u, columns) for u in pairs.left]
    cols = [_column(centre, found, r, v) for v in pairs.right]
    stack = lambda ts: torch.stack(ts) * (1 + ROUNDED)  # noqa: E731
    return Contracted(*(stack([t[k] for t in part]) for part in (rows, cols) for k in (0, 1)))


def _row(centre: Centre, found: Parts, r: Tensor, u: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """`uᵀ J`, token by token: with `c_i = W_oᵀ u_i`, scalars `⟨c_i, v_j − o_i⟩` stand for lengths."""
    w, kernel = centre.layer.by_head(), centre.operator.kernel.tiled()
    c = torch.einsum("io,hov->hiv", u, w.o)
    omega = (c @ w.v).norm(dim=-1)  # |W_vᵀ c_i|, (heads, n)
    size = (c @ kernel.v.mT - (c * kernel.o).sum(-1, keepdim=True)).abs() + c.norm(dim=-1, keepdim=True) * _of_values(centre)
    p = found.weights
    moved = Jet(
        size,
        omega[..., None] * r + (omega * found.towards + (p.change * size).sum(-1))[..., None],
        (omega * (p.change * r).sum(-1) + (p.rest * size).sum(-1))[..., None],
    )
    each = p * moved if found.cap is None else p * moved * found.cap
    by_key, by_query = found.slopes
    total = (each * by_key).sum(1) + (each * by_query).sum(-1)  # (heads, n)
    of_values = Jet(*((t * omega[..., None]).sum(1) for t in p))
    total = (total + of_values).sum(0).least()
    return lengths(total.change[columns]), lengths(total.rest[columns])


def _of_values(centre: Centre) -> Tensor:
    """What rounding may have done to a value, before `R_o`."""
    kernel, w = centre.operator.kernel.tiled(), centre.layer.by_head()
    assert centre.operator.tokens is not None
    reach = w.v.flatten(1).norm(dim=-1) * centre.operator.tokens.norm(dim=-1).max() + kernel.v.norm(dim=-1).amax(-1)
    return 1e-13 * reach[:, None, None]


def _column(centre: Centre, found: Parts, r: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`J v`, token by token: scalars `τ (dq_i·(k_j − κ_i) + q_i·dk_j)` stand for lengths."""
    layer, kernel, geometry = centre.layer, centre.operator.kernel.tiled(), centre.geometry
    group = layer.heads // layer.kv_heads
    dq, dk, dv = (t[0, 0] for t in centre.operator.vectors(v[None, None]))
    dk, dv = dk.repeat_interleave(group, 0), dv.repeat_interleave(group, 0)
    p, tau = found.weights, abs(layer.scale)
    out = dv @ (geometry.r_o * geometry.out_size).mT
    apart = torch.cdist(p.size @ out, out, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart + 1e-13 * out.norm(dim=-1).amax(-1)[:, None, None]
    psi = layer.scale * (dq @ kernel.k.mT + kernel.q @ dk.mT)
    fuzz = (
        1e-13
        * tau
        * (
            dq.norm(dim=-1)[..., None] * kernel.k.norm(dim=-1)[:, None]
            + kernel.q.norm(dim=-1)[..., None] * dk.norm(dim=-1)[:, None]
        )
    )
    if centre.cross is not None:
        by_k, by_q = (dq @ geometry.r_k.mT).norm(dim=-1), (dk @ geometry.r_q.mT).norm(dim=-1)
        change = tau * (by_k[..., None] * r + r[:, None] * by_q[:, None]) + fuzz
        rest = torch.zeros_like(change)
    else:
        length = v.norm(dim=-1)
        query, key = moves(centre, r)
        of_q = Jet(dq.norm(dim=-1), query.bend * r * length, 0.5 * query.twist * r.square() * length).map(
            lambda t: t[..., None]
        )
        of_k = Jet(dk.norm(dim=-1), key.bend * r * length, 0.5 * key.twist * r.square() * length).map(lambda t: t[:, None])
        q = Jet(centre.queries, query.step(r), query.curve(r)).map(lambda t: t[..., None])
        k = Jet(centre.keys, key.step(r)[:, None], key.curve(r)[:, None])
        both = of_q * k + q * of_k
        change, rest = tau * both.change + fuzz, tau * both.rest + fuzz
    raw = Jet(psi.abs(), change, rest)
    if found.cap is not None:
        raw = raw * found.cap
        psi = psi * found.cap.size
    centred = Jet((psi - (p.size * psi).sum(-1, keepdim=True)).abs() + fuzz, raw.change, raw.rest)
    total = (p * found.value * centred).sum(-1)
    moved = Jet(*((t * apart).sum(-1) for t in p))
    heads = (total + moved).least()

    def length_of(t: Float[Tensor, "heads n"]) -> Tensor:
        each = t.sum(0)
        if layer.heads > 1:
            each = torch.minimum(each, geometry.blocks(t.T, torch.float64))
        return lengths(no_nan(each))

    return length_of(heads.change), length_of(heads.rest)


def deflated(
    centre: Centre,
    found: Parts,
    neighbourhood: tuple[Float[Tensor, " n"], float, bool],
    pairs: Pairs,
    known: "Curves",
    columns: Tensor,
    others: float,
    beyond: float,
) -> float:
    """`‖D_Y f‖` over the neighbourhood (Theorem 6.9).

    neighbourhood: radii, the largest `‖Y − X‖_F`, and whether that is a limit of its own.
    others: how far the Jacobian can move.  beyond: how far beyond first order.
    """
    r, far, limited = neighbourhood
    parts = contracted(centre, found, r, pairs, columns)
    exact = known.core.shape[0]
    first = (known.core * r).sum(-1)
    if limited:
        first = torch.minimum(first, lengths(known.core) * far)
    rows = torch.minimum(parts.rows, no_nan(known.rows * far) + parts.rows_rest.clamp_max(beyond)).clamp_max(others)
    cols = torch.minimum(parts.columns, no_nan(known.columns * far) + parts.columns_rest.clamp_max(beyond)).clamp_max(others)
    core = torch.minimum(rows[:, None], cols)
    rest = torch.minimum(parts.rows_rest[:exact, None], parts.columns_rest[:exact]).clamp_max(beyond)
    core[:exact, :exact] = torch.minimum(core[:exact, :exact], first * (1 + ROUNDED) + rest)
    return together(pairs, core, rows, cols, others)
