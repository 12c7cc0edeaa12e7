"""Second derivatives of softmax attention, tile by tile in O(n · d) memory. Derivation: README.md beside this file.

With `P` the weights, `S'` the derivative of the logits along `dq, dk, dv`, `ℓ' = r(P ∘ S')` that of the rows' log-sum-exp and
`o'` that of the output, all known from a first product, and `G = g vᵀ − r(g ∘ o)`:

    hvp   C = P ∘ (S' − ℓ') ∘ G + P ∘ (g dvᵀ − r(g ∘ o'));  τ(C k + (P ∘ G) dk),  τ(Cᵀ q + (P ∘ G)ᵀ dq),  (P ∘ (S' − ℓ'))ᵀ g
    jvp2  U = (S' − ℓ') ∘ (S* − ℓ*) + S'*;  (P ∘ U) v − r(P ∘ U) o + (P ∘ (S' − ℓ')) dv* + (P ∘ (S* − ℓ*)) dv'

A soft-cap with slope `h` at a logit `u` makes `S' = h u'`, bends by `b = −2 tanh/c`, and adds `b u'` times the first order.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.base import Keys, Outputs, Queries, Values
from howsmooth.kernels.tiled import Tiled
from howsmooth.kernels.tiles import flat

Along = tuple[Queries, Keys, Values]
Rows = Float[Tensor, "probes batch heads n"]


def hvp(at: Tiled, along: Along, do: Outputs, dlse: Rows, g: Outputs) -> Along:
    """Derivative along `dq, dk, dv` of the gradients of `⟨g, o⟩`: the Hessian of `⟨g, o⟩` times `along`.

    at: made from a saved output and log-sum-exp.  do, dlse: the derivatives of those. Tiles hold `P z`, `g` is divided by `z`.
    """
    left, right = at.along(along[0], along[1])
    dq, dk, dv = flat(along[0]), *(flat(at.expand(t)) for t in along[1:])  # (g, probes, tokens, width)
    g_, rho = flat(g) * at.inverse[:, None], flat(dlse[..., None])
    delta, ddelta = (g_ * at.o[:, None]).sum(-1, keepdim=True), (g_ * flat(do)).sum(-1, keepdim=True)
    probes = g_.shape[1]
    hq, hk, hv = (torch.zeros_like(t) for t in (dq, dk, dv))
    for b in at.blocks():
        h, i, j = b.heads, b.rows, b.cols
        weights = b.weights[:, None]
        moved = torch.matmul(left[h, :, i], right[h, :, j].mT)  # S'
        pull = torch.bmm(g_[h, :, i].flatten(1, 2), at.v[h, j].mT).unflatten(1, (probes, -1)).sub_(delta[h, :, i])
        second = torch.matmul(g_[h, :, i], dv[h, :, j].mT).sub_(ddelta[h, :, i])
        if at.scores.softcap is not None:
            tanh, slope = (t[:, None] for t in at.capped(b))
            second.addcmul_(pull * moved, tanh, value=-2 / at.scores.softcap)
            moved.mul_(slope)
        second.addcmul_(moved.sub_(rho[h, :, i]), pull).mul_(b.slope[:, None])
        first = pull.mul_(b.slope[:, None])
        moved.mul_(weights)
        hq[h, :, i] += torch.bmm(second.flatten(1, 2), at.k[h, j]).unflatten(1, (probes, -1)) + first @ dk[h, :, j]
        hk[h, :, j] += second.mT @ at.q[h, None, i] + first.mT @ dq[h, :, i]
        hv[h, :, j] += moved.mT @ g_[h, :, i]
    hq, hk = hq.mul_(at.scores.scale), hk.mul_(at.scores.scale)
    return at.unflat(hq), at.sum_groups(at.unflat(hk)), at.sum_groups(at.unflat(hv))


def jvp2(at: Tiled, along: Along, dlse: Rows, twice: Along, dlse2: Rows) -> tuple[Outputs, Rows]:
    """The second derivative along two directions of the output, and of the log-sum-exp of every row."""
    (left, right), (left2, right2) = at.along(along[0], along[1]), at.along(twice[0], twice[1])
    (dq, dk, dv), (dq2, dk2, dv2) = ((flat(t[0]), *(flat(at.expand(x)) for x in t[1:])) for t in (along, twice))
    rho, rho2 = flat(dlse[..., None]), flat(dlse2[..., None])
    mixed, mixed_right = torch.cat([dq, dq2], -1) * at.scores.scale, torch.cat([dk2, dk], -1)
    probes, n = dq.shape[1:3]
    out = dv.new_zeros(len(dq), probes, n, dv.shape[-1])
    row = out.new_zeros(len(dq), probes, n, 1)
    for b in at.blocks():
        h, i, j = b.heads, b.rows, b.cols
        weights = b.weights[:, None]
        moved, moved2 = left[h, :, i] @ right[h, :, j].mT, left2[h, :, i] @ right2[h, :, j].mT
        second = mixed[h, :, i] @ mixed_right[h, :, j].mT
        if at.scores.softcap is not None:
            tanh, slope = (t[:, None] for t in at.capped(b))
            second.addcmul_(moved * moved2, tanh, value=-2 / at.scores.softcap).mul_(slope)
            moved.mul_(slope)
            moved2.mul_(slope)
        moved.sub_(rho[h, :, i])
        moved2.sub_(rho2[h, :, i])
        second.addcmul_(moved, moved2).mul_(weights)
        row[h, :, i] += second.sum(-1, keepdim=True)
        out[h, :, i] += torch.bmm(second.flatten(1, 2), at.v[h, j]).unflatten(1, (probes, -1))
        out[h, :, i] += moved.mul_(weights) @ dv2[h, :, j] + moved2.mul_(weights) @ dv[h, :, j]
    scale = at.inverse[:, None]
    return at.unflat(out.addcmul_(row, at.o[:, None], value=-1).mul_(scale)), at.unflat(row.mul_(scale))[..., 0]
