"""Orthonormal vectors of a Krylov space, as many as a run needs, of a batch of maps."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.spectral.operator import Operator

CHUNK = 16  # vectors allocated at a time, fewer where they take more than this
_BYTES = 2**28


@final
class KrylovBasis:
    """The vectors `q_1 … q_k` of every item, in chunks, so that a longer run copies nothing."""

    def __init__(self, operator: Operator):
        step_bytes = operator.batch * operator.in_size * torch.finfo(operator.dtype).bits // 8
        self.room = max(1, min(CHUNK, _BYTES // step_bytes))  # vectors in a chunk
        self.count = 0
        self._chunks: list[Tensor] = []  # (batch, room, N)

    @property
    def chunks(self) -> list[Float[Tensor, "batch part N"]]:
        """What is filled of each chunk."""
        return [chunk[:, : self.count - i * self.room] for i, chunk in enumerate(self._chunks)]

    @property
    def last(self) -> Float[Tensor, "batch N"]:
        return self._chunks[-1][:, (self.count - 1) % self.room]

    def append(self, q: Float[Tensor, "batch N"]) -> None:
        if self.count % self.room == 0:
            self._chunks.append(q.new_empty(len(q), self.room, q.shape[1]))
        self._chunks[-1][:, self.count % self.room] = q
        self.count += 1

    def orthogonal(self, w: Float[Tensor, "batch N"]) -> Float[Tensor, "batch N"]:
        """`w` made orthogonal to the basis; a second pass where the first took most of it away.

        On a GPU always: asking whether it did would cost more than doing it. There, matrix products of one long row are
        forty times as slow as reading it, so vectors that fill a chunk are taken one by one.
        """
        if len(w) == 1 and self.room == 1 and w.device.type != "cpu":
            v = w[0].clone()
            for _ in range(2):
                for chunk in self.chunks:
                    v.addcmul_(chunk[0, 0], torch.dot(chunk[0, 0], v), value=-1)
            return v[None]
        w = w[:, None]
        before = w.norm(dim=-1) if w.device.type == "cpu" else None
        for _ in range(2):
            for chunk in self.chunks:
                w = torch.baddbmm(w, torch.bmm(w, chunk.mT), chunk, alpha=-1)
            if before is not None:
                after = w.norm(dim=-1)
                if bool((after > 0.5 * before).all()):
                    break
                before = after
        return w[:, 0]

    def combined(self, item: int, coefficients: Float[Tensor, " k"]) -> Float[Tensor, " N"]:
        """The unit vector along `Σ c_j q_j` of one item."""
        first = self._chunks[0][item]
        coefficients, v = coefficients.to(first), torch.zeros_like(first[0])
        for chunk, part in zip(self.chunks, coefficients.split(self.room), strict=True):
            v.addmv_(chunk[item].mT, part)
        return v / v.norm()

    def select(self, items: Tensor) -> None:
        self._chunks = [chunk[items] for chunk in self._chunks]
