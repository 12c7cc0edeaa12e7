"""Attention between two maps: one of queries, keys and values before it, one of the outputs after it."""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import AttentionKernel, Keys, Queries, Scores, Values
from howsmooth.kernels.kinds.kind import Entry, Vectors

Build = Callable[[Vectors, Scores], AttentionKernel]


@final
class Mapped(AttentionKernel):
    """`leave ∘ core ∘ enter`, where the kind of attention says what enters and leaves.

    core: attention of a simpler kind at the vectors that entered.
    """

    def __init__(self, q: Queries, k: Keys, v: Values, scores: Scores, build: Build, core: AttentionKernel | None = None):
        """build: makes the core.  core: where it is there already."""
        super().__init__(q, k, v, scores, q.dtype, trusted=core is not None)
        entry = self.scores.kind.enter(q, k, v, self.scores.scale)
        assert entry is not None
        self._entry: Entry = entry
        self._build = build
        self.core = build(entry.vectors, self.scores.kind.inner(self.scores)) if core is None else core
        self._exit = self.scores.kind.leave(self.core.output)
        self.largest_logit = self.core.largest_logit

    @property
    def output(self):
        return self.core.output if self._exit is None else self._exit.output

    def jvp(self, dq, dk, dv, doffset=None):
        do = self.core.jvp(*self._entry.push(dq, dk, dv))
        return do if self._exit is None else self._exit.push(do)

    def vjp(self, g):
        g = g if self._exit is None else self._exit.pull(g)
        return self._entry.pull(Vectors(*self.core.vjp_and_offset(g)))

    def attention_received(self) -> Float[Tensor, "batch m"]:
        """Of weights that are combined from several: the column sums of what comes out, of either sign."""
        if self._exit is None:
            return self.core.attention_received()
        o = self.core.output
        signs = self._exit.signs(o.shape[1])
        g = torch.zeros_like(o)
        g[..., 0] = signs.to(o)[:, None]
        return self.core.vjp(g[None])[2][0, ..., 0].sum(1) * (self.scores.kind.parts / o.shape[1])

    def logit_range(self, below=None):
        return self.core.logit_range(self._entry.below)

    def select(self, items):
        q, k, v = (t[items] for t in self.inputs)
        return Mapped(q, k, v, self.scores.select(items), self._build)

    def tiled(self):
        raise BadInputError(
            f"expected a kind whose logits are of queries and keys as they are, got {self.scores.kind!r}; its core has tiles"
        )

    @property
    def noise(self) -> float:
        before = self.core.noise + self._entry.roundings * torch.finfo(self.output.dtype).eps
        return before if self._exit is None else before * self._exit.growth

    @property
    def lifted(self) -> float:
        return self.core.lifted

    @property
    def coarse(self) -> bool:
        return self.core.coarse

    @property
    def finer(self):
        return self.core.finer

    def refined(self):
        core = self.core.refined()
        return None if core is None else Mapped(*self.inputs, self.scores, self._build, core)

    @property
    def heavy(self) -> bool:
        return self.core.heavy
