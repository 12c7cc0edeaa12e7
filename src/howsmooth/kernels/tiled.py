"""Attention on q, k, v and its two derivatives, tile by tile, for kinds whose weights come from a logit and its row.

With `P̂` the weights before they are divided, `P̂'` their slope in the logits, `z` the row sums of `P̂` and whatever a sink adds,
`P = P̂/z`, `o = P v` and a row sum `r(·)`:

    jvp   dS = τ(dq kᵀ + q dkᵀ);  T = P̂' ∘ dS;  do = (T v + P̂ dv − r(T) o) / z
    vjp   ĝ = g / z;  dv = P̂ᵀ ĝ;  dS = P̂' ∘ (ĝ vᵀ − r(ĝ ∘ o));  dq = τ dS k;  dk = τ dSᵀ q

For softmax `P̂ = exp(s − max s)` is its own slope. Kinds that divide by nothing have `z = 1` and no row term. A soft-cap
`c·tanh(s/c)` multiplies `P̂'` by its slope `1 − tanh²`. The row scale `1/z` is applied to n × d matrices, never to n × m ones,
and `max s` and `z` are kept apart, so rows sum to one for logits of any size. A number added to the logits of a key moves
with it: its derivative joins dS, and its gradient is a column sum of dS. What no query attends to is skipped, not masked.

Second derivatives of softmax attention are derived in README.md beside this file. With `S'` the derivative of the logits along
`dq, dk, dv`, `ℓ' = r(P ∘ S')` that of the rows' log-sum-exp and `o'` that of the output, all known from a first product, and
`G = g vᵀ − r(g ∘ o)`:

    hvp   C = P ∘ (S' − ℓ') ∘ G + P ∘ (g dvᵀ − r(g ∘ o'));  τ(C k + (P ∘ G) dk),  τ(Cᵀ q + (P ∘ G)ᵀ dq),  (P ∘ (S' − ℓ'))ᵀ g
    jvp2  U = (S' − ℓ') ∘ (S* − ℓ*) + S'*;  (P ∘ U) v − r(P ∘ U) o + (P ∘ (S' − ℓ')) dv* + (P ∘ (S* − ℓ*)) dv'

A soft-cap with slope `h` at a logit `u` makes `S' = h u'`, bends by `b = −2 tanh/c`, and adds `b u'` times the first order.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.kernels.base import Keys, Offsets, OnTiles, Outputs, Queries, Scores, Tile, TileSize, Values, flat, wide
from howsmooth.kernels.kinds import Pointwise
from howsmooth.kernels.kinds.features import FeatureMap, check_sums, supported
from howsmooth.kernels.tensors import tanh_slope

Tangents = tuple[Queries, Keys, Values]
RowNumbers = Float[Tensor, "probes batch heads n"]
_TALL, _DEEP = (slice(None), None), (slice(None), None, None)


@dataclass(frozen=True)
class Block:
    """One tile of `P̂` for some heads. `slope` is its derivative in the logits before a soft-cap; for softmax, without, `P̂`."""

    heads: slice
    rows: slice
    cols: slice
    weights: Float[Tensor, "g rows cols"]
    slope: Float[Tensor, "g rows cols"]


@dataclass(frozen=True)
class Dropout:
    """Which weights are left out, each with probability `p` on its own, from a seed: nothing of it is kept.

    A weight's number is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) at its place, so every tile of every product
    finds the same ones.
    """

    p: float
    seed: int

    def factors(self, place: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
        """0 for a weight that is left out, `1/(1 − p)` for the others; all arithmetic is modulo 2⁶⁴."""
        z = (place + self.seed) * -0x61C8864680B583EB
        z = (z ^ ((z >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
        z = (z ^ ((z >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
        number = ((z ^ ((z >> 31) & (2**33 - 1))) >> 11) & (2**53 - 1)
        return (number >= int(self.p * 2**53)).to(dtype) / (1 - self.p)


class Tiled(OnTiles):
    """Attention on tiles of `P̂`.

    Subclasses say where tiles of `P̂` come from: kept (`Dense`) or made again for each product (`Blocked`).

    o: (g, n, d_v), the output.  largest: (g, n), the number of each row that the kind asks for; softmax's is the largest logit.
    inverse: (g, n, 1), `1/z`, 0 where `z` is.
    """

    def __init__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        scores: Scores,
        size: TileSize | None = None,
        *,
        offset: Offsets | None = None,
        trusted: bool = False,
        saved: tuple[Outputs, Float[Tensor, "batch heads 2 n"]] | None = None,
        dropout: Dropout | None = None,
    ):
        """offset: as for `OnTiles`.  trusted: the inputs are not checked.  dropout: of softmax's weights, with `Blocked` alone.

        saved: `output` and `log_sum_exp` of an earlier forward pass of softmax attention at the same place.
        """
        scores.kind.pointwise()  # refuses others
        super().__init__(q, k, v, scores, size, offset=offset, trusted=trusted)
        self._kind: Pointwise = self.scores.kind.pointwise()
        self._dropout = dropout
        batch, heads, n, _ = self.shape
        if saved is not None:
            self.o, (self.largest, total) = saved[0].flatten(0, 1), saved[1].flatten(0, 1).unbind(1)
            self.inverse = torch.exp(-total)[..., None]
            return
        self.largest = self.q.new_full((batch * heads, n), -torch.inf)
        self.o = self.q.new_zeros(batch * heads, n, v.shape[-1])
        started = self._kind.start(self.largest.unflatten(0, (batch, heads)))
        if started is not None:
            self.largest.copy_(started.flatten(0, 1))
        total = self._forward()
        traits = self._kind.traits
        if traits.features is not None:
            features = traits.features
            check_sums(total, self.shape[3], lambda: self._positive(features), divided=traits.divided)
        if not traits.divided:
            self.inverse = self.o.new_ones(()).expand(batch * heads, n, 1)
            return
        self.o.div_(total.clamp_min(torch.finfo(total.dtype).tiny)[..., None])
        self.inverse = torch.where(total == 0, 0.0, 1 / total)[..., None]

    @abstractmethod
    def _forward(self) -> Float[Tensor, "g n"]:
        """Write the numbers of the rows to `largest` and `P̂ v` to `o`; gives the row sums of `P̂`, a sink's among them."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Every tile of `P̂`, once."""

    def _summed(self) -> Float[Tensor, "g n"]:
        """Row sums, and `P̂ v` in `o`, from all tiles."""
        started = self._kind.start(self.largest.unflatten(0, self.shape[:2]))  # by a sink
        total = torch.zeros_like(self.largest) if started is None else (started.flatten(0, 1) - self.largest).exp()
        for b in self.blocks():
            total[b.heads, b.rows] += b.weights.sum(-1)
            self.o[b.heads, b.rows] += torch.bmm(b.weights, self.v[b.heads, b.cols])
        return total

    def _positive(self, features: FeatureMap) -> Bool[Tensor, "g n"]:
        """Which rows have products of features that are positive before rounding."""
        q, k = (supported(t, features) for t in (self.q, self.k))
        found = torch.zeros_like(self.largest, dtype=torch.bool)
        for b in self.blocks():  # the slope of a feature's product is one where it is seen
            both = torch.bmm(q[b.heads, b.rows], k[b.heads, b.cols].mT) * b.slope
            found[b.heads, b.rows] |= (both > 0).any(-1)
        return found

    def dropped(self, t: Tensor, heads: slice, rows: slice, cols: slice) -> Tensor:
        """Numbers of a tile, (g, rows, cols) or (g, probes, rows, cols), without those that dropout leaves out."""
        if self._dropout is None:
            return t
        n, m = self.shape[2:]
        axes = (torch.arange(s.start, s.stop, device=t.device) for s in (heads, rows, cols))
        g, i, j = (axis[shape] for axis, shape in zip(axes, (_DEEP, _TALL, slice(None)), strict=True))
        factors = self._dropout.factors((g * n + i) * m + j, t.dtype)
        return t * (factors if t.ndim == 3 else factors[:, None])

    @property
    def output(self) -> Outputs:
        return self.o.unflatten(0, self.shape[:2])

    @property
    def log_sum_exp(self) -> Float[Tensor, "batch heads 2 n"]:
        """Of every row of logits and its sink, in two parts: the largest `t`, and `log Σ exp(s − t)`, +inf without a key.

        In one number the second part would have no digits beside an offset that the whole row shares.
        """
        return torch.stack([self.largest, -self.inverse[..., 0].log()], 1).unflatten(0, self.shape[:2])

    @property
    def noise(self) -> float:
        """Weights that jump are decided in float64: where two logits are within a rounding, a product may be any other."""
        if self._kind.flat and self.o.dtype != torch.float64:
            return 1.0
        return super().noise if self._kind.grows else 32 * torch.finfo(self.o.dtype).eps

    @property
    def lifted(self) -> float:
        if self._kind.traits.softmax:
            moved = self.scores.mask.bias is not None or self._kind.traits.sink is not None
            return float(self.largest.abs().max()) if moved else 0.0
        bias = self.scores.mask.bias
        lift = 0.0 if bias is None else float(bias.masked_fill(bias == -torch.inf, 0.0).abs().max())
        return lift + (0.0 if self._shift is None else float(torch.as_tensor(self._shift).abs().max()))

    def tiled(self) -> "Tiled":
        return self

    def jvp(self, dq, dk, dv, doffset=None):
        return self.jvp_and_drift(dq, dk, dv, doffset)[0]

    def jvp_and_drift(
        self, dq: Queries, dk: Keys, dv: Values, doffset: Offsets | None = None
    ) -> tuple[Outputs, Float[Tensor, "probes batch heads n"]]:
        """Derivatives along `dq, dk, dv` of the output, and of the log-sum-exp of every row: the mean of its `dS`."""
        batch, heads, n, _ = self.shape
        probes, flat_weights = dq.shape[0], self._kind.flat
        left, right = self.along(dq, dk, doffset)
        dv_wide = wide(flat(self.expand(dv)))  # (g, m, probes·d_v)
        total = dv_wide.new_zeros(batch * heads, n, dv_wide.shape[-1])  # T v + P̂ dv
        by_probe = total.unflatten(-1, (probes, -1)).transpose(1, 2)  # (g, probes, n, d_v)
        row_sum = total.new_zeros(batch * heads, probes, n, 1)
        for b in self.blocks():
            g, i, j = b.heads, b.rows, b.cols
            total[g, i] += torch.bmm(self.dropped(b.weights, g, i, j), dv_wide[g, j])
            if flat_weights:
                continue
            t = torch.matmul(left[g, :, i], right[g, :, j].mT)
            t *= b.slope[:, None]
            if self._kind.traits.divided:
                row_sum[g, :, i] += t.sum(-1, keepdim=True)
            by_probe[g, :, i] += torch.bmm(self.dropped(t, g, i, j).flatten(1, 2), self.v[g, j]).unflatten(1, (probes, -1))
        drift = self.unflat(row_sum * self.inverse[:, None])[..., 0]
        if self._kind.traits.divided:
            by_probe.addcmul_(row_sum, self.o[:, None], value=-1).mul_(self.inverse[:, None])
        return self.unflat(by_probe), drift

    def vjp(self, g: Outputs) -> tuple[Queries, Keys, Values]:
        return self.vjp_and_offset(g)[:3]

    def vjp_and_offset(self, g):
        batch, heads, n, m = self.shape
        probes, divided = g.shape[0], self._kind.traits.divided
        g_hat = flat(g) * self.inverse[:, None] if divided else flat(g)  # (g, probes, n, d_v)
        drift = (g_hat * self.o[:, None]).sum(-1, keepdim=True) if divided else None
        g_wide = wide(g_hat)
        q = self.q if self.offset is None else torch.cat([self.q, torch.ones_like(self.q[..., :1])], -1)  # column sums last
        dq = g_hat.new_zeros(batch * heads, probes, n, self.q.shape[-1])
        dk = g_hat.new_zeros(batch * heads, probes, m, q.shape[-1])
        dv_wide = g_wide.new_zeros(batch * heads, m, g_wide.shape[-1])
        for b in self.blocks():
            h, i, j = b.heads, b.rows, b.cols
            dv_wide[h, j] += torch.bmm(self.dropped(b.weights, h, i, j).mT, g_wide[h, i])
            if self._kind.flat:
                continue
            ds = torch.bmm(g_hat[h, :, i].flatten(1, 2), self.v[h, j].mT).unflatten(1, (probes, -1))
            ds = self.dropped(ds, h, i, j)
            if drift is not None:
                ds -= drift[h, :, i]
            ds *= b.slope[:, None]
            dq[h, :, i] += torch.bmm(ds.flatten(1, 2), self.k[h, j]).unflatten(1, (probes, -1))
            dk[h, :, j] += torch.matmul(ds.mT, q[h, None, i])
        dv = dv_wide.unflatten(-1, (probes, -1)).transpose(1, 2)
        columns = None if self.offset is None else self.sum_groups(self.unflat(dk[..., -1:]))[..., 0]
        dk = dk if self.offset is None else dk[..., :-1]
        dq *= self.scores.scale
        dk *= self.scores.scale
        return self.unflat(dq), self.sum_groups(self.unflat(dk)), self.sum_groups(self.unflat(dv)), columns

    def attention_received(self) -> Float[Tensor, "batch m"]:
        batch, heads, _, m = self.shape
        received = self.o.new_zeros(batch * heads, m, 1)
        for b in self.blocks():
            received[b.heads, b.cols] += torch.bmm(b.weights.mT, self.inverse[b.heads, b.rows])
        return received[..., 0].unflatten(0, (batch, heads)).mean(1)

    def capped(self, b: Block) -> tuple[Float[Tensor, "g rows cols"], Float[Tensor, "g rows cols"]]:
        """`tanh(s/c)` of a block under a soft-cap `c`, and the cap's slope `1 − tanh²`."""
        assert self.scores.softcap is not None
        s = torch.bmm(self.q[b.heads, b.rows], self.k[b.heads, b.cols].mT)
        s *= self.scores.scale / self.scores.softcap
        slope = tanh_slope(s)
        return s.tanh_(), slope

    def row_slopes(self, g: int, rows: slice) -> Float[Tensor, "rows m"]:
        """Whole rows of one head, of the derivative of `P̂` in the logits."""
        heads, tile = slice(g, g + 1), Tile(rows, slice(0, self.shape[3]), partial=True)
        return self._block(heads, tile, *self._logits(heads, tile)).slope[0]

    def _block(self, heads: slice, tile: Tile, s: Tensor, slope: Tensor | None) -> Block:
        """A tile of `P̂` from its logits and the slope of their soft-cap, written over them."""
        weights, slope = self._kind.tile(s, self.largest[heads, tile.rows, None], slope)
        return Block(heads, tile.rows, tile.cols, weights, slope)


@final
class Dense(Tiled):
    """Attention with its weights kept, tile by tile: made once, read by every product. O(heads · visible logits)."""

    def _forward(self) -> Float[Tensor, "g n"]:
        logits = [self._logits(*part) for part in self._parts]
        tiles = ((heads, tile.rows, s) for (heads, tile), (s, _) in zip(self._parts, logits, strict=True))
        self.largest = self._kind.statistic(tiles, self.largest, self.slack)
        self._kept = [self._block(*part, *tensors) for part, tensors in zip(self._parts, logits, strict=True)]
        return self._summed()

    def blocks(self) -> Iterator[Block]:
        return iter(self._kept)


@final
class Blocked(Tiled):
    """Attention in O(n · d) memory, which keeps two numbers per row instead of its weights: each product makes them again.
    The tiles are the same in every pass, so the logits are the same to the last bit and the saved numbers fit exactly.
    """

    def _forward(self) -> Float[Tensor, "g n"]:
        if not self._kind.traits.softmax:
            tiles = ((heads, tile.rows, self._logits(heads, tile)[0]) for heads, tile in self._parts)
            self.largest = self._kind.statistic(tiles, self.largest, self.slack)
            return self._summed()
        largest, o = self.largest, self.o  # one pass: sums are rescaled when a larger logit comes
        total = torch.zeros_like(largest) if self._kind.traits.sink is None else torch.ones_like(largest)
        for heads, tile in self._parts:
            at = heads, tile.rows
            s, _ = self._logits(heads, tile)
            raised = torch.maximum(largest[at], s.amax(-1))
            base = raised.masked_fill(raised == -torch.inf, 0.0)
            shrink = torch.exp(largest[at] - base)
            weights = s.sub_(base[..., None]).exp_()
            total[at] = total[at] * shrink + weights.sum(-1)
            o[at] *= shrink[..., None]
            o[at] += torch.bmm(self.dropped(weights, *at, tile.cols), self.v[heads, tile.cols])
            largest[at] = raised
        largest.masked_fill_(largest == -torch.inf, 0.0)
        return total

    def blocks(self) -> Iterator[Block]:
        return (self._block(*part, *self._logits(*part)) for part in self._parts)


def hvp(at: Tiled, along: Tangents, do: Outputs, dlse: RowNumbers, g: Outputs) -> Tangents:
    """Derivative along `dq, dk, dv` of the gradients of `⟨g, o⟩` of softmax attention: the Hessian of `⟨g, o⟩` times `along`.

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
        pull = torch.bmm(g_[h, :, i].flatten(1, 2), at.v[h, j].mT).unflatten(1, (probes, -1))
        pull = at.dropped(pull, h, i, j).sub_(delta[h, :, i])
        second = at.dropped(torch.matmul(g_[h, :, i], dv[h, :, j].mT), h, i, j).sub_(ddelta[h, :, i])
        if at.scores.softcap is not None:
            tanh, slope = (t[:, None] for t in at.capped(b))
            second.addcmul_(pull * moved, tanh, value=-2 / at.scores.softcap)
            moved.mul_(slope)
        second.addcmul_(moved.sub_(rho[h, :, i]), pull).mul_(b.slope[:, None])
        first = pull.mul_(b.slope[:, None])
        moved = at.dropped(moved.mul_(weights), h, i, j)
        hq[h, :, i] += torch.bmm(second.flatten(1, 2), at.k[h, j]).unflatten(1, (probes, -1)) + first @ dk[h, :, j]
        hk[h, :, j] += second.mT @ at.q[h, None, i] + first.mT @ dq[h, :, i]
        hv[h, :, j] += moved.mT @ g_[h, :, i]
    hq, hk = hq.mul_(at.scores.scale), hk.mul_(at.scores.scale)
    return at.unflat(hq), at.sum_groups(at.unflat(hk)), at.sum_groups(at.unflat(hv))


def jvp2(at: Tiled, along: Tangents, dlse: RowNumbers, twice: Tangents, dlse2: RowNumbers) -> tuple[Outputs, RowNumbers]:
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
        second, moved, moved2 = (at.dropped(t, h, i, j) for t in (second, moved.mul_(weights), moved2.mul_(weights)))
        out[h, :, i] += torch.bmm(second.flatten(1, 2), at.v[h, j]).unflatten(1, (probes, -1))
        out[h, :, i] += moved @ dv2[h, :, j] + moved2 @ dv[h, :, j]
    scale = at.inverse[:, None]
    return at.unflat(out.addcmul_(row, at.o[:, None], value=-1).mul_(scale)), at.unflat(row.mul_(scale))[..., 0]
