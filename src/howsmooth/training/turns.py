"""Steps of power iteration in the layers that one pass has recorded."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.training.bundle import Bundle, Recorded
from howsmooth.training.looks import look

_COARSE = 2.0**-9  # error of a layer's products on a GPU: four times the rounding of operands with eleven bits


@final
@dataclass(eq=False)
class Seen:
    """What one pass saw of one layer.

    x: the tokens that entered, as they came.  value: by row of the probe, or by head of every row, `max |J w|` over unit `w` in
    the span of the last `v`, a lower end of the constant, less what rounding may have added; where a graph was asked for,
    `|Jᵀ u|` with its graph, at the unit `u` before the last step, held fixed.  directions: the next `u`, (rows · times, N).
    looks: of its attention calls, as `look` gives them, where they were asked for.
    """

    x: Tensor
    value: Tensor
    directions: Tensor
    looks: list[Tensor] = field(default_factory=list)


@final
@dataclass(frozen=True)
class How:
    """How a pass measures.

    graph: keep the graph of `value` down to the weights, on attention with second derivatives.  times: how many directions a
    row has; each gets a copy of the row.  heads: the copies are for one head each, alone.  rounds: steps of power iteration at
    most; first: the same where directions are drawn.  settled: the gain of a step at which no further one is needed.
    looks: also what attention looks like.
    """

    graph: bool = False
    times: int = 1
    heads: bool = False
    rounds: int = 1
    first: int = 1
    settled: float = 0.0
    looks: bool = False


@final
class Turns:
    """What is measured in one pass.

    rows: of the pass, copies included.  real: which tokens are not padding.  directions: by layer, the `u`.  starts: the `v`,
    where they are known instead.
    """

    def __init__(
        self,
        how: How,
        rows: int,
        real: Tensor | None,
        directions: Mapping[int, Tensor],
        starts: Mapping[int, Tensor],
    ):
        self.how, self.rows, self.times, self.real = how, rows, how.times, real
        self.directions, self.starts = directions, starts
        self.found: dict[int, Seen] = {}

    def measure(self, recorded: Sequence[Recorded]) -> None:
        """Layers, those of a kind together; what refuses is left out."""
        kinds: dict[Any, list[Recorded]] = {}
        for layer in recorded:
            kinds.setdefault(layer.kind, []).append(layer)
        for layers in kinds.values():
            try:
                self._turn(layers)
            except BadInputError:  # one of them, or all
                for layer in layers if len(layers) > 1 else ():
                    with suppress(BadInputError):
                        self._turn([layer])

    @torch.enable_grad()
    def _turn(self, layers: list[Recorded]) -> None:
        """Values and next directions of layers of a kind."""
        bundle = Bundle(layers, self.rows, self.times, self.how.heads, self._masked)
        starts = [self.starts[layer.index] for layer in layers if layer.index in self.starts] or None
        pulled = bundle.first([self._direction(layer.index, layer.y) for layer in layers])
        turned = bundle.step(pulled, starts)
        known = all(self._carried(layer.index, layer.y) is not None for layer in layers)
        for _ in range(max(self.how.rounds, 0 if known else self.how.first) - 1):
            if not bool(turned.gain > self.how.settled):
                break
            pulled = bundle.back(turned.directions.chunk(len(layers)), graph=self.how.graph)
            turned = bundle.step(pulled)
        directions = turned.directions.flatten(0, 1).chunk(len(layers))
        if self.how.graph:
            values = [self._sizes(t) for t in pulled]
        else:  # what rounding may have added is taken off
            noise = max((kernel.noise for kernel in bundle.kernels), default=0.0)
            noise += _COARSE if layers[0].x.is_cuda and layers[0].x.dtype == torch.float32 else 0.0
            values = (max(0.0, 1 - noise) * turned.value.cpu()).chunk(len(layers))
        looks = [look(kernel, self.real, len(layers)) for kernel in bundle.kernels] if self.how.looks else []
        for i, layer in enumerate(layers):
            x = layer.x.detach()[:: self.times]
            self.found[layer.index] = Seen(x, values[i], directions[i], [each[i] for each in looks])

    def _direction(self, index: int, y: Tensor) -> Tensor:
        """The `u` of a layer whose output is `y`: carried over, or random; none where it is known what goes in."""
        if index in self.starts:
            return torch.zeros_like(y)
        u = self._carried(index, y)
        if u is None:
            return self._unit(torch.randn(y.shape, generator=torch.Generator().manual_seed(index)).to(y))
        u = u.detach().to(y).reshape(y.shape)
        return self._unit(u) if self.how.graph else u  # its own length, and others than these rows' padding, would count

    def _carried(self, index: int, y: Tensor) -> Tensor | None:
        u = self.directions.get(index)
        return u if u is not None and u.numel() == y.numel() and len(u) == self.rows else None

    def _masked(self, t: Tensor) -> Tensor:
        return t if self.real is None else t * self._mask(t)

    def _mask(self, t: Tensor) -> Tensor:
        assert self.real is not None
        return self.real.repeat_interleave(self.times, 0).reshape(*t.shape[:-1], 1)

    def _sizes(self, t: Tensor) -> Tensor:
        """Norms by row, of any layout where there is one row."""
        return (t.flatten(1) if self.rows > 1 else t.reshape(1, -1)).norm(dim=-1)

    def _unit(self, t: Tensor) -> Tensor:
        """Of length one in every row, zero at padding."""
        t = self._masked(t)
        size = self._sizes(t)
        return t / torch.where(size > 0, size, 1.0).reshape(-1, *[1] * (t.ndim - 1))
