"""Softmax attention on q, k, v and its two derivatives, tile by tile.

With `P̂ = exp(s − max s)`, `z` its row sums, `P = P̂/z`, `o = P v` and a row sum `r(·)`:

    jvp   dS = τ(dq kᵀ + q dkᵀ);  T = P̂ ∘ dS;  do = (T v + P̂ dv − r(T) o) / z
    vjp   ĝ = g / z;  dv = P̂ᵀ ĝ;  dS = P̂ ∘ (ĝ vᵀ − r(ĝ ∘ o));  dq = τ dS k;  dk = τ dSᵀ q

A soft-cap `c·tanh(s/c)` multiplies `P̂` by its slope `1 − tanh²` wherever it meets dS. The row scale `1/z` is applied to
n × d matrices, never to n × m ones, and `max s` and `z` are kept apart, so rows sum to one for logits of any size.
What no query sees is skipped, not masked.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.base import Keys, Outputs, Queries, Scores, SoftmaxAttention, Values
from howsmooth.kernels.masks import Mask


@dataclass(frozen=True)
class Tile:
    """A block of logits. `partial`: the causal or window band cuts through it."""

    rows: slice
    cols: slice
    partial: bool

    @property
    def area(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.cols.stop - self.cols.start)


@dataclass(frozen=True)
class TileSize:
    """Largest tile, the size at which a cut tile is masked rather than divided, and the elements worked on at once."""

    rows: int = 512
    cols: int = 1024
    leaf: int = 128
    elements: int = 2**20

    @classmethod
    def on(cls, device: torch.device) -> "TileSize":
        """Sizes that keep a tile in a CPU's cache, or fill a GPU."""
        return cls() if device.type == "cpu" else cls(rows=4096, cols=8192, leaf=512, elements=2**26)


def cut(n: int, m: int, mask: Mask, size: TileSize) -> tuple[Tile, ...]:
    """Tiles that cover every visible logit once.

    A tile wholly outside the band is dropped, one wholly inside is kept at the largest size, one on the edge is halved
    along its longer side until it reaches `leaf`.

    >>> [(t.rows.start, t.cols.start, t.partial) for t in cut(4, 4, Mask(causal=True), TileSize(4, 4, leaf=2))]
    [(0, 0, True), (2, 0, False), (2, 2, True)]
    """
    tiles: list[Tile] = []

    def divide(rows: slice, cols: slice) -> None:
        inside = mask.band(rows, cols)
        height, width = rows.stop - rows.start, cols.stop - cols.start
        if inside is False:
            return
        if height <= size.rows and width <= size.cols and (inside or max(height, width) <= size.leaf):
            tiles.append(Tile(rows, cols, partial=inside is None))
        elif height >= width or (width <= size.cols and height > size.rows):
            middle = rows.start + _half(height)
            divide(slice(rows.start, middle), cols)
            divide(slice(middle, rows.stop), cols)
        else:
            middle = cols.start + _half(width)
            divide(rows, slice(cols.start, middle))
            divide(rows, slice(middle, cols.stop))

    divide(slice(0, n), slice(0, m))
    return tuple(tiles)


def _half(length: int) -> int:
    """The largest power of two below `length`, so that tiles of long and odd lengths line up."""
    return 1 << ((length - 1).bit_length() - 1)


@dataclass(frozen=True)
class Block:
    """One tile of `P̂` for some heads. `slope` is `P̂` times the soft-cap's slope, `P̂` itself where there is none."""

    heads: slice
    rows: slice
    cols: slice
    weights: Float[Tensor, "g rows cols"]
    slope: Float[Tensor, "g rows cols"]


class Tiled(SoftmaxAttention):
    """Softmax attention on tiles of `P̂`.

    Subclasses say where tiles of `P̂` come from: kept (`Dense`) or made again for each product (`Blocked`).

    shape: (batch, heads, n, m).  q, k, v, o: (g, tokens, width), heads flattened, `g = batch·heads`, keys and values repeated
    for the query heads that share them.  largest: (g, n), row maxima of the logits.  inverse: (g, n, 1), `1/z`, 0 where `z` is.
    """

    def __init__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        scores: Scores,
        size: TileSize | None = None,
        *,
        trusted: bool = False,
        saved: tuple[Outputs, Float[Tensor, "batch heads n"]] | None = None,
    ):
        """trusted: the inputs are not checked.  saved: output and log-sum-exp of an earlier forward pass at the same place."""
        super().__init__(q, k, v, scores, q.dtype, trusted)
        batch, heads, n, _ = q.shape
        self._size = size or TileSize.on(q.device)
        self._group = heads // k.shape[1]
        self.shape = (batch, heads, n, k.shape[2])
        self.q, self.k, self.v = (t.flatten(0, 1) for t in (q, self.expand(k), self.expand(v)))
        tiles = cut(n, k.shape[2], scores.mask, self._size)
        self._parts = [(heads, tile) for tile in tiles for heads in self._head_slices(tile)]
        if saved is not None:
            self.o, self.largest = saved[0].flatten(0, 1), saved[1].flatten(0, 1)
            self.inverse = self.o.new_ones(()).expand(batch * heads, n, 1)
            return
        self.largest = self.q.new_full((batch * heads, n), -torch.inf)
        self.o = self.q.new_zeros(batch * heads, n, v.shape[-1])
        total = self._forward()
        self.o.div_(total.clamp_min(torch.finfo(total.dtype).tiny)[..., None])
        self.inverse = torch.where(total == 0, 0.0, 1 / total)[..., None]

    @abstractmethod
    def _forward(self) -> Float[Tensor, "g n"]:
        """Write the row maxima to `largest`, 0 where nothing is seen, and `P̂ v` to `o`; gives the row sums of `P̂`."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Every tile of `P̂`, once."""

    @property
    def output(self) -> Outputs:
        return self.o.unflatten(0, self.shape[:2])

    @property
    def log_sum_exp(self) -> Float[Tensor, "batch heads n"]:
        """Of every row of logits; +inf where nothing is seen, so that `exp(s − ℓ)` is zero there."""
        return (self.largest - self.inverse[..., 0].log()).unflatten(0, self.shape[:2])

    @property
    def lifted(self) -> float:
        return 0.0 if self.scores.mask.bias is None else float(self.largest.abs().max())

    def tiled(self) -> "Tiled":
        return self

    def select(self, items: Tensor) -> "Tiled":
        q, k, v = (t[items] for t in self.inputs)
        return type(self)(q, k, v, replace(self.scores, mask=self.scores.mask.select(items)), self._size)

    def jvp(self, dq: Queries, dk: Keys, dv: Values) -> Outputs:
        return self.jvp_and_drift(dq, dk, dv)[0]

    def jvp_and_drift(self, dq: Queries, dk: Keys, dv: Values) -> tuple[Outputs, Float[Tensor, "probes batch heads n"]]:
        """Derivatives along `dq, dk, dv` of the output, and of the log-sum-exp of every row: the mean of its `dS`."""
        batch, heads, n, _ = self.shape
        probes = dq.shape[0]
        left, right = self.along(dq, dk)
        dv_wide = wide(flat(self.expand(dv)))  # (g, m, probes·d_v)
        total = dv_wide.new_zeros(batch * heads, n, dv_wide.shape[-1])  # T v + P̂ dv
        by_probe = total.unflatten(-1, (probes, -1)).transpose(1, 2)  # (g, probes, n, d_v)
        row_sum = total.new_zeros(batch * heads, probes, n, 1)
        for b in self.blocks():
            g, i, j = b.heads, b.rows, b.cols
            t = torch.matmul(left[g, :, i], right[g, :, j].mT)
            t *= b.slope[:, None]
            row_sum[g, :, i] += t.sum(-1, keepdim=True)
            by_probe[g, :, i] += torch.bmm(t.flatten(1, 2), self.v[g, j]).unflatten(1, (probes, -1))
            total[g, i] += torch.bmm(b.weights, dv_wide[g, j])
        drift = self.unflat(row_sum * self.inverse[:, None])[..., 0]
        return self.unflat(by_probe.addcmul_(row_sum, self.o[:, None], value=-1).mul_(self.inverse[:, None])), drift

    def along(self, dq: Queries, dk: Keys) -> tuple[Float[Tensor, "g probes n e"], Float[Tensor, "g probes m e"]]:
        """Two thin matrices whose product `left rightᵀ` is `τ(dq kᵀ + q dkᵀ)`."""
        q, k = (t[:, None].expand(-1, len(dq), -1, -1) for t in (self.q, self.k))
        left = torch.cat([flat(dq), q], -1).mul_(self.scores.scale)
        return left, torch.cat([k, flat(self.expand(dk))], -1)

    def vjp(self, g: Outputs) -> tuple[Queries, Keys, Values]:
        batch, heads, n, m = self.shape
        probes = g.shape[0]
        g_hat = flat(g) * self.inverse[:, None]  # (g, probes, n, d_v)
        drift = (g_hat * self.o[:, None]).sum(-1, keepdim=True)
        g_wide = wide(g_hat)
        dq = g_hat.new_zeros(batch * heads, probes, n, self.q.shape[-1])
        dk = g_hat.new_zeros(batch * heads, probes, m, self.q.shape[-1])
        dv_wide = g_wide.new_zeros(batch * heads, m, g_wide.shape[-1])
        for b in self.blocks():
            h, i, j = b.heads, b.rows, b.cols
            ds = torch.bmm(g_hat[h, :, i].flatten(1, 2), self.v[h, j].mT).unflatten(1, (probes, -1))
            ds -= drift[h, :, i]
            ds *= b.slope[:, None]
            dq[h, :, i] += torch.bmm(ds.flatten(1, 2), self.k[h, j]).unflatten(1, (probes, -1))
            dk[h, :, j] += torch.matmul(ds.mT, self.q[h, None, i])
            dv_wide[h, j] += torch.bmm(b.weights.mT, g_wide[h, i])
        dv = dv_wide.unflatten(-1, (probes, -1)).transpose(1, 2)
        dq *= self.scores.scale
        dk *= self.scores.scale
        return self.unflat(dq), self.sum_groups(self.unflat(dk)), self.sum_groups(self.unflat(dv))

    def attention_received(self) -> Float[Tensor, "batch m"]:
        batch, heads, _, m = self.shape
        received = self.o.new_zeros(batch * heads, m, 1)
        for b in self.blocks():
            received[b.heads, b.cols] += torch.bmm(b.weights.mT, self.inverse[b.heads, b.rows])
        return received[..., 0].unflatten(0, (batch, heads)).mean(1)

    def logit_range(self) -> tuple[float, float]:
        low, high = torch.inf, -torch.inf
        for heads, tile in self._parts:
            s, _ = self._logits(heads, tile)
            high = max(high, float(s.max()))
            low = min(low, float(s.masked_fill(s == -torch.inf, torch.inf).min()))
        return (low, high) if low <= high else (0.0, 0.0)

    def capped(self, b: Block) -> Float[Tensor, "g rows cols"]:
        """`tanh(s/c)` of a block under a soft-cap `c`."""
        assert self.scores.softcap is not None
        s = torch.bmm(self.q[b.heads, b.rows], self.k[b.heads, b.cols].mT)
        return s.mul_(self.scores.scale / self.scores.softcap).tanh_()

    def row_slopes(self, g: int, rows: slice) -> Float[Tensor, "rows m"]:
        """Whole rows of `P̂` of one head, times the soft-cap's slope."""
        heads, tile = slice(g, g + 1), Tile(rows, slice(0, self.shape[3]), partial=True)
        return self._block(heads, tile, *self._logits(heads, tile)).slope[0]

    def _block(self, heads: slice, tile: Tile, s: Tensor, slope: Tensor | None) -> Block:
        """A tile of `P̂` from its logits and their slope, written over them."""
        weights = s.sub_(self.largest[heads, tile.rows, None]).exp_()
        return Block(heads, tile.rows, tile.cols, weights, weights if slope is None else slope.mul_(weights))

    def _head_slices(self, tile: Tile) -> Iterator[slice]:
        """Runs of heads whose tiles together stay near the element budget."""
        count = self.shape[0] * self.shape[1]
        step = max(2, self._size.elements // tile.area)
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _logits(self, heads: slice, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Masked logits of a tile, and the soft-cap's slope."""
        s = torch.bmm(self.q[heads, tile.rows], self.k[heads, tile.cols].mT)
        s *= self.scores.scale
        slope = None
        if self.scores.softcap is not None:
            s.div_(self.scores.softcap).tanh_()
            slope = 1 - s.square()
            s *= self.scores.softcap
        mask = self.scores.mask
        if tile.partial:
            s.masked_fill_(~mask.visible(tile.rows, tile.cols, s.device), -torch.inf)
        if mask.keys is not None:
            item = torch.arange(heads.start, heads.stop, device=s.device) // self.shape[1]
            s.masked_fill_(~mask.keys[:, tile.cols][item][:, None], -torch.inf)
        if mask.bias is not None:
            index = torch.arange(heads.start, heads.stop, device=s.device)
            item = index // self.shape[1] if mask.bias.shape[0] > 1 else index * 0
            head = index % self.shape[1] if mask.bias.shape[1] > 1 else index * 0
            rows = tile.rows if mask.bias.shape[2] > 1 else slice(None)
            s += mask.bias[:, :, rows, tile.cols][item, head]
        return s, slope

    def expand(self, t: Tensor) -> Tensor:
        """Key/value heads repeated for the query heads that share them."""
        return t if self._group == 1 else t.repeat_interleave(self._group, dim=-3)

    def sum_groups(self, t: Tensor) -> Tensor:
        return t if self._group == 1 else t.unflatten(2, (-1, self._group)).sum(3)

    def unflat(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1).unflatten(1, self.shape[:2])


@final
class Dense(Tiled):
    """Softmax attention with its weights kept, tile by tile: made once, read by every product. O(heads · visible logits)."""

    def _forward(self) -> Float[Tensor, "g n"]:
        logits = [self._logits(*part) for part in self._parts]
        for (heads, tile), (s, _) in zip(self._parts, logits, strict=True):
            torch.maximum(self.largest[heads, tile.rows], s.amax(-1), out=self.largest[heads, tile.rows])
        self.largest.masked_fill_(self.largest == -torch.inf, 0.0)
        self._kept = [self._block(*part, *tensors) for part, tensors in zip(self._parts, logits, strict=True)]
        total = torch.zeros_like(self.largest)
        for b in self._kept:
            total[b.heads, b.rows] += b.weights.sum(-1)
            self.o[b.heads, b.rows] += torch.bmm(b.weights, self.v[b.heads, b.cols])
        return total

    def blocks(self) -> Iterator[Block]:
        return iter(self._kept)


@final
class Blocked(Tiled):
    """Softmax attention in O(n · d) memory, which keeps two numbers per row instead of its weights: each product makes them
    again. The tiles are the same in every pass, so the logits are the same to the last bit and the saved maxima fit exactly.
    """

    def _forward(self) -> Float[Tensor, "g n"]:
        largest, o, total = self.largest, self.o, torch.zeros_like(self.largest)
        for heads, tile in self._parts:
            at = heads, tile.rows
            s, _ = self._logits(heads, tile)
            raised = torch.maximum(largest[at], s.amax(-1))
            base = raised.masked_fill(raised == -torch.inf, 0.0)
            shrink = torch.exp(largest[at] - base)
            weights = s.sub_(base[..., None]).exp_()
            total[at] = total[at] * shrink + weights.sum(-1)
            o[at] *= shrink[..., None]
            o[at] += torch.bmm(weights, self.v[heads, tile.cols])
            largest[at] = raised
        largest.masked_fill_(largest == -torch.inf, 0.0)
        return total

    def blocks(self) -> Iterator[Block]:
        return (self._block(*part, *self._logits(*part)) for part in self._parts)


def flat(t: Tensor) -> Tensor:
    """(probes, batch, heads, n, d) → (batch·heads, probes, n, d)."""
    return t.flatten(1, 2).transpose(0, 1)


def wide(t: Tensor) -> Tensor:
    """(g, probes, n, d) → (g, n, probes·d)."""
    return t.transpose(1, 2).flatten(2)
