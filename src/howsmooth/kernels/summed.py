"""Attention whose weights are products of features, in time and memory linear in the number of tokens.

With features `q, k`, `w = [v, 1]` and `W = q kᵀ`, lower triangular where it is causal, `W w` holds both `W v` and `z = r(W)`:

    value  o = W v / z
    jvp    do = (y − z' o) / z,   [y, z'] = (dq kᵀ + q dkᵀ) w + W [dv, 0]
    vjp    G = [g, −r(g ∘ o)] / z;   dq = (G wᵀ) k,   dk = (G wᵀ)ᵀ q,   dv = Wᵀ g / z

Everything is a product `(a bᵀ) c` with thin matrices, taken as `a (bᵀ c)`. Where it is causal, chunk by chunk: what came
before a chunk is in one running sum, what is inside it is masked. Without normalisation `z = 1` and there is no row term.
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import AttentionKernel, Keys, Queries, Scores, Values
from howsmooth.kernels.kinds import Linear

_CHUNK = 128  # tokens whose weights are formed at once: then both halves of the work are alike for heads of usual width


@final
class Summed(AttentionKernel):
    """Attention with weights `q·k` for features `q, k`, divided by their row sums where its kind says so."""

    def __init__(self, q: Queries, k: Keys, v: Values, scores: Scores):
        super().__init__(q, k, v, scores, q.dtype)
        self.check_range(q, k, None, q.dtype)
        kind, mask = self.scores.kind, self.scores.mask
        assert isinstance(kind, Linear)
        self._causal, self._divided, self._group = mask.causal, kind.normalized, q.shape[1] // k.shape[1]
        self._seen = None if mask.keys is None else mask.keys[:, None, :, None].to(k.dtype)
        self.q, self.k, self.v = q, self._hide(self._expand(k)), self._expand(v)
        if kind.normalized:
            self.v = torch.cat([self.v, torch.ones_like(self.v[..., :1])], -1)
        o = product(q, self.k, self.v, self._causal)
        if kind.normalized:
            total = o[..., -1:]
            self._inverse = torch.where(total > 0, 1 / total, 0.0)
            self._o = o[..., :-1] * self._inverse
        else:
            self._o = o

    @property
    def output(self):
        return self._o

    def jvp(self, dq, dk, dv, doffset=None):
        dk, dv = self._hide(self._expand(dk)), self._expand(dv)
        probes = len(dq)
        q, k, v = (t.expand(probes, *t.shape) for t in (self.q, self.k, self.v))
        moved = product(torch.cat([dq, q], -1), torch.cat([k, dk], -1), v, self._causal)
        through = product(self.q, self.k, _wide(dv), self._causal).unflatten(-1, (probes, -1)).movedim(-2, 0)
        if not self._divided:
            return moved + through
        return (moved[..., :-1] + through - moved[..., -1:] * self._o) * self._inverse

    def vjp(self, g):
        probes = len(g)
        if self._divided:
            g = g * self._inverse
            rows = torch.cat([g, -(g * self._o).sum(-1, keepdim=True)], -1)
        else:
            rows = g
        q, k, v = (t.expand(probes, *t.shape) for t in (self.q, self.k, self.v))
        dq, dk = product(rows, v, k, self._causal), transposed(rows, v, q, self._causal)
        dv = transposed(self.q, self.k, _wide(g), self._causal).unflatten(-1, (probes, -1)).movedim(-2, 0)
        return dq, self._sum_groups(self._hide(dk)), self._sum_groups(dv)

    def attention_received(self):
        ones = torch.ones_like(self._o[..., :1])
        return transposed(self.q, self.k, self._inverse if self._divided else ones, self._causal)[..., 0].mean(1)

    def logit_range(self, below=None):
        raise BadInputError(f"expected a kind with logits, got {self.scores.kind!r}; its weights are products of features")

    def select(self, items):
        q, k, v = (t[items] for t in self.inputs)
        return Summed(q, k, v, self.scores.select(items))

    def tiled(self):
        raise BadInputError(f"expected a kind with weights on tiles, got {self.scores.kind!r}; pass kernel='dense'")

    @property
    def noise(self) -> float:
        return 32 * torch.finfo(self._o.dtype).eps

    def _expand(self, t: Tensor) -> Tensor:
        return t if self._group == 1 else t.repeat_interleave(self._group, dim=-3)

    def _sum_groups(self, t: Tensor) -> Tensor:
        return t if self._group == 1 else t.unflatten(-3, (-1, self._group)).sum(-3)

    def _hide(self, k: Tensor) -> Tensor:
        return k if self._seen is None else k * self._seen


def product(
    a: Float[Tensor, "*axes n e"], b: Float[Tensor, "*axes m e"], c: Float[Tensor, "*axes m f"], causal: bool
) -> Float[Tensor, "*axes n f"]:
    """`(a bᵀ) c`, with the entries of `a bᵀ` above its diagonal left out where it is causal."""
    if not causal:
        return a @ (b.mT @ c)
    n = a.shape[-2]
    before = a.new_zeros(*a.shape[:-2], a.shape[-1], c.shape[-1])
    out = []
    for start in range(0, n, _CHUNK):
        at = slice(start, min(start + _CHUNK, n))
        inside = (a[..., at, :] @ b[..., at, :].mT).tril_()
        out.append(inside @ c[..., at, :] + a[..., at, :] @ before)
        before = before + b[..., at, :].mT @ c[..., at, :]
    return torch.cat(out, -2)


def transposed(
    a: Float[Tensor, "*axes n e"], b: Float[Tensor, "*axes m e"], c: Float[Tensor, "*axes n f"], causal: bool
) -> Float[Tensor, "*axes m f"]:
    """`(a bᵀ)ᵀ c`: the same with `a` and `b` changed over, and backwards where it is causal."""
    if not causal:
        return product(b, a, c, causal)
    return product(b.flip(-2), a.flip(-2), c.flip(-2), causal).flip(-2)


def _wide(t: Float[Tensor, "probes *axes m d"]) -> Float[Tensor, "*axes m wide"]:
    """Probes side by side: they share the weights."""
    return t.movedim(0, -2).flatten(-2)
