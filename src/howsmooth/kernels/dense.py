"""Attention with `P̂` kept: made once, read by every product. Memory O(heads · visible logits)."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from howsmooth.kernels.tiled import Block, Tiled


@final
class Dense(Tiled):
    """Softmax attention with its weights kept, tile by tile."""

    def _forward(self) -> tuple[Tensor, Tensor, Tensor]:
        g, n = self.q.shape[:2]
        largest = self.q.new_full((g, n), -torch.inf)
        logits = []
        for tile in self._tiles:
            for heads in self._head_slices(tile):
                s, slope = self._logits(heads, tile)
                torch.maximum(largest[heads, tile.rows], s.amax(-1), out=largest[heads, tile.rows])
                logits.append((heads, tile, s, slope))
        largest.masked_fill_(largest == -torch.inf, 0.0)
        total = self.q.new_zeros(g, n)
        out = self.q.new_zeros(g, n, self.v.shape[-1])
        self._kept: list[Block] = []
        for heads, tile, s, slope in logits:
            weights = s.sub_(largest[heads, tile.rows, None]).exp_()
            total[heads, tile.rows] += weights.sum(-1)
            out[heads, tile.rows] += torch.bmm(weights, self.v[heads, tile.cols])
            slope = weights if slope is None else slope.mul_(weights)
            self._kept.append(Block(heads, tile.rows, tile.cols, weights, slope))
        return largest, total, out.div_(total.clamp_min(torch.finfo(total.dtype).tiny)[..., None])

    def blocks(self) -> Iterator[Block]:
        return iter(self._kept)
