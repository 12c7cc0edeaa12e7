"""Cutting the n × m logits into tiles: what no query sees is skipped, not masked."""

from dataclasses import dataclass

import torch

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
