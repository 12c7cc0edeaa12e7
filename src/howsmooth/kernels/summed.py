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
from howsmooth.kernels.kinds.features import FeatureMap, check_sums, supported

_CHUNK = 128  # tokens whose weights are formed at once: then both halves of the work are alike for heads of usual width


@final
class Summed(AttentionKernel):
    """Attention with weights `q·k` for features `q, k`, divided by their row sums where its kind says so."""

    def __init__(self, q: Queries, k: Keys, v: Values, scores: Scores):
        super().__init__(q, k, v, scores, q.dtype)
        self.check_range(q, k, None, q.dtype)
        traits, mask = self.scores.kind.traits, self.scores.mask
        assert traits.features is not None
        self._features: FeatureMap = traits.features
        self._divided = traits.divided
        self._visible = None if mask.keys is None else mask.keys[:, None, :, None].to(k.dtype)
        self.q, self.k, self.v = q, self._hide(self.expand(k)), self.expand(v)
        if self._divided:
            self.v = torch.cat([self.v, torch.ones_like(self.v[..., :1])], -1)
        self._sums = None if mask.causal else self.k.mT @ self.v  # of all keys; none where each query has its own
        o = causal(q, self.k, self.v) if self._sums is None else q @ self._sums
        total = o[..., -1:] if self._divided else self._products(q, self.k)
        check_sums(total, k.shape[2], lambda: self._products(*self._positive()) > 0, divided=self._divided)
        if self._divided:
            self._inverse = torch.where(total > 0, 1 / total, 0.0)
            self._o = o[..., :-1] * self._inverse
        else:
            self._o = o

    def _products(self, q: Tensor, k: Tensor) -> Float[Tensor, "batch heads n 1"]:
        """Row sums of `q kᵀ`."""
        ones = torch.ones_like(k[..., :1])
        return causal(q, k, ones) if self._sums is None else q @ (k.mT @ ones)

    def _positive(self) -> tuple[Tensor, Tensor]:
        """One where features are positive before rounding."""
        return supported(self.q, self._features), self._hide(supported(self.k, self._features))

    @property
    def output(self):
        return self._o

    def jvp(self, dq, dk, dv, doffset=None):
        dk, dv = self._hide(self.expand(dk)), self.expand(dv)
        width = dv.shape[-1]
        if self._sums is None:
            moved = causal(dq, self.k, self.v) + causal(self.q, dk, self.v)
            moved[..., :width] += causal(self.q, self.k, dv)
        else:  # what is summed over keys is small: put together first
            sums = dk.mT @ self.v
            sums[..., :width] += self.k.mT @ dv
            moved = (dq @ self._sums).add_(self.q @ sums)
        if not self._divided:
            return moved
        return moved[..., :-1].addcmul_(moved[..., -1:], self._o, value=-1).mul_(self._inverse)

    def vjp(self, g):
        width = g.shape[-1]
        rows = g
        if self._divided:
            g = g * self._inverse
            rows = torch.cat([g, -(g * self._o).sum(-1, keepdim=True)], -1)
        if self._sums is None:
            dq, dk = causal(rows, self.v, self.k), transposed(rows, self.v, self.q)
            dv = transposed(self.q, self.k, g)
        else:
            sums = self.q.mT @ rows
            dq, dk, dv = rows @ self._sums.mT, self.v @ sums.mT, self.k @ sums[..., :width]
        return dq, self.sum_groups(self._hide(dk)), self.sum_groups(dv)

    def attention_received(self):
        ones = torch.ones_like(self._o[..., :1])
        rows = self._inverse if self._divided else ones
        columns = transposed(self.q, self.k, rows) if self._sums is None else self.k @ (self.q.mT @ rows)
        return columns[..., 0].mean(1)

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

    def _hide(self, k: Tensor) -> Tensor:
        return k if self._visible is None else k * self._visible


def causal(a: Float[Tensor, "*a n e"], b: Float[Tensor, "*b n e"], c: Float[Tensor, "*c n f"]) -> Float[Tensor, "*axes n f"]:
    """`(a bᵀ) c` with the entries of `a bᵀ` above its diagonal left out. Axes in front broadcast."""
    n = a.shape[-2]
    before, out = a.new_zeros(a.shape[-1], c.shape[-1]), []
    for start in range(0, n, _CHUNK):
        at = slice(start, min(start + _CHUNK, n))
        inside = (a[..., at, :] @ b[..., at, :].mT).tril_()
        out.append(inside @ c[..., at, :] + a[..., at, :] @ before)
        before = before + b[..., at, :].mT @ c[..., at, :]
    return torch.cat(out, -2)


def transposed(
    a: Float[Tensor, "*a n e"], b: Float[Tensor, "*b n e"], c: Float[Tensor, "*c n f"]
) -> Float[Tensor, "*axes n f"]:
    """`(a bᵀ)ᵀ c` of the same: with `a` and `b` changed over, backwards."""
    return causal(b.flip(-2), a.flip(-2), c.flip(-2)).flip(-2)
