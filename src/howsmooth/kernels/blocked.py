"""Attention in O(n · d) memory: each product makes the tiles of `P̂` again from the saved row maxima."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from howsmooth.kernels.tiled import Block, Tiled


@final
class Blocked(Tiled):
    """Softmax attention that keeps two numbers per row instead of its weights.

    The tiles are the same in every pass, so the logits are the same to the last bit and the saved maxima fit exactly.
    """

    def _forward(self) -> tuple[Tensor, Tensor, Tensor]:
        g, n = self.q.shape[:2]
        largest = self.q.new_full((g, n), -torch.inf)
        total = self.q.new_zeros(g, n)
        out = self.q.new_zeros(g, n, self.v.shape[-1])
        for tile in self._tiles:
            for heads in self._head_slices(tile):
                s, _ = self._logits(heads, tile)
                seen = largest[heads, tile.rows]
                raised = torch.maximum(seen, s.amax(-1))
                base = raised.masked_fill(raised == -torch.inf, 0.0)
                shrink = torch.exp(seen - base)
                weights = s.sub_(base[..., None]).exp_()
                total[heads, tile.rows] = total[heads, tile.rows] * shrink + weights.sum(-1)
                out[heads, tile.rows] *= shrink[..., None]
                out[heads, tile.rows] += torch.bmm(weights, self.v[heads, tile.cols])
                largest[heads, tile.rows] = raised
        largest.masked_fill_(largest == -torch.inf, 0.0)
        return largest, total, out.div_(total.clamp_min(torch.finfo(total.dtype).tiny)[..., None])

    def blocks(self) -> Iterator[Block]:
        for tile in self._tiles:
            for heads in self._head_slices(tile):
                s, slope = self._logits(heads, tile)
                weights = s.sub_(self.largest[heads, tile.rows, None]).exp_()
                slope = weights if slope is None else slope.mul_(weights)
                yield Block(heads, tile.rows, tile.cols, weights, slope)
