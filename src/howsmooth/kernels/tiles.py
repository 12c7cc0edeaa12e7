"""Logits cut into tiles, so that nothing of size n × m is ever kept: where tiles lie, and the logits of one."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.arithmetic import tanh_slope
from howsmooth.kernels.base import AttentionKernel, Keys, Offsets, Queries, Scores, Values
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.naive import logit_slack


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


class OnTiles(AttentionKernel):
    """A kernel that works through its logits tile by tile.

    shape: (batch, heads, n, m).  q, k, v: (g, tokens, width), heads flattened, `g = batch·heads`, keys and values repeated for
    the query heads that share them.  offset: (g, m), added to the logits of every key before the soft-cap.
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
    ):
        super().__init__(q, k, v, scores, q.dtype, trusted)
        if not trusted:
            self.check_range(q, k, offset, q.dtype)
        batch, heads, n, _ = q.shape
        m = k.shape[2]
        self._size, self._given = size or TileSize.on(q.device), offset
        self.shape = (batch, heads, n, m)
        self.q, self.k, self.v = (t.flatten(0, 1) for t in (q, self.expand(k), self.expand(v)))
        self.offset = None if offset is None else self.expand(offset[..., None]).flatten(0, 1)[..., 0]
        shift = self.scores.kind.shift(self.scores.mask, m)
        self._shift = shift.to(self.q).repeat_interleave(heads)[:, None, None] if isinstance(shift, Tensor) else shift
        tiles = cut(n, m, scores.mask, self._size)
        self._parts = [(heads, tile) for tile in tiles for heads in self._head_slices(tile)]

    def select(self, items: Tensor) -> "OnTiles":
        q, k, v = (t[items] for t in self.inputs)
        offset = None if self._given is None else self._given[items]
        return type(self)(q, k, v, self.scores.select(items), self._size, offset=offset)

    def logit_range(self, below=None):
        low, high = torch.inf, -torch.inf
        for heads, tile in self._parts:
            s, _ = self._logits(heads, tile)
            if below is not None:
                s -= below.flatten(0, 1)[heads, tile.rows, None]
            high = max(high, float(s.max()))
            low = min(low, float(s.masked_fill(s == -torch.inf, torch.inf).min()))
        return (low, high) if low <= high else (0.0, 0.0)

    def along(
        self, dq: Queries, dk: Keys, doffset: Offsets | None = None
    ) -> tuple[Float[Tensor, "g probes n e"], Float[Tensor, "g probes m e"]]:
        """Two thin matrices whose product `left rightᵀ` is `τ(dq kᵀ + q dkᵀ)`, and the derivative of the offset beside it."""
        q, k = (t[:, None].expand(-1, len(dq), -1, -1) for t in (self.q, self.k))
        left = torch.cat([flat(dq), q], -1).mul_(self.scores.scale)
        right = torch.cat([k, flat(self.expand(dk))], -1)
        if doffset is None:
            return left, right
        moved = flat(self.expand(doffset[..., None]))  # (g, probes, m, 1)
        return torch.cat([left, torch.ones_like(left[..., :1])], -1), torch.cat([right, moved], -1)

    def slack(self) -> Float[Tensor, "g n 1"]:
        """How far rounding may move a logit of each query."""
        return logit_slack(*self.inputs[:2], self.scores.scale, self.scores.mask.bias).flatten(0, 1)

    def _head_slices(self, tile: Tile) -> Iterator[slice]:
        """Runs of heads whose tiles together stay near the element budget."""
        count = self.shape[0] * self.shape[1]
        step = max(2, self._size.elements // tile.area)
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _logits(self, heads: slice, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Masked logits of a tile, and the soft-cap's slope."""
        q, k = self.q[heads, tile.rows], self.k[heads, tile.cols].mT
        if self.offset is None:
            s = torch.bmm(q, k)
            s *= self.scores.scale
        else:
            s = torch.baddbmm(self.offset[heads, None, tile.cols], q, k, alpha=self.scores.scale)
        slope = None
        if self.scores.softcap is not None:
            s.div_(self.scores.softcap)
            slope = tanh_slope(s)
            s.tanh_().mul_(self.scores.softcap)
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
        if self._shift is not None:
            s += self._shift[heads] if isinstance(self._shift, Tensor) else self._shift
        return s, slope

    def unflat(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1).unflatten(1, self.shape[:2])


def flat(t: Tensor) -> Tensor:
    """(probes, batch, heads, n, d) → (batch·heads, probes, n, d)."""
    return t.flatten(1, 2).transpose(0, 1)


def wide(t: Tensor) -> Tensor:
    """(g, probes, n, d) → (g, n, probes·d)."""
    return t.transpose(1, 2).flatten(2)
