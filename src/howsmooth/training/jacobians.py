"""Products with the Jacobians of several layers at once.

Every layer has a graph of its own, from a copy of the tokens that enter it. A backward pass, itself recorded, is linear in what
it is applied to, so a backward pass through that gives the forward product. One call of torch serves all layers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.spectral.ritz import Block
from howsmooth.spectral.step import Turned, block_step

_APART = 1e-6  # share of a product that may reach another item, as rounding does


class LayerGraph(NamedTuple):
    """A layer's graph between tokens that enter and what leaves, each in one tensor or several.

    axes: of each of them, along which its rows lie; nothing where there is one row.
    """

    enter: Sequence[Tensor]
    leave: Sequence[Tensor]
    axes: tuple[Sequence[int | None], Sequence[int | None]]

    def sizes(self, rows: int) -> tuple[int, int]:
        """How many numbers of a row enter and leave."""
        enter, leave = (sum([t.numel() for t in side]) // rows for side in (self.enter, self.leave))
        return enter, leave

    def side(self, leave: int) -> Sequence[Tensor]:
        """What leaves, or what enters."""
        return self.leave if leave else self.enter


@final
class LayerJacobians:
    """`Jᵀ u` and `J v` of layers of one size, on blocks (layers · items, times, N).

    rows: `times` copies of every item, one behind the other.  real: which tokens of the rows are not padding;
    the others neither move nor count.
    """

    def __init__(self, layers: Sequence[LayerGraph], rows: int, times: int, real: Bool[Tensor, "rows n"] | None):
        self._layers, self._rows, self._times, self._real = layers, rows, times, real
        self._enter, self._leave = ([t for layer in layers for t in layer.side(s)] for s in (0, 1))
        self._us: list[Tensor] = []
        self._pulled: Sequence[Tensor] = ()

    def record(self, u: Block) -> Block:
        """`Jᵀ u`, with a graph down to weights and to `u`; before any other product."""
        self._us = [t.detach().requires_grad_() for t in self._split(u, 1)]
        self._pulled = self._back(self._us, graph=True)
        return self._block(self._pulled, 0)

    def vjp(self, u: Block, *, graph: bool = False) -> Block:
        """`Jᵀ u`. graph: down to weights."""
        return self._block(self._back(self._split(u, 1), graph=graph), 0)

    def jvp(self, v: Block) -> Block:
        """`J v`, a backward pass through what `record` recorded."""
        pairs = [(p, t) for p, t in zip(self._pulled, self._split(v, 0), strict=True) if p.requires_grad]
        if not pairs:
            return self._block([torch.zeros_like(u) for u in self._us], 1)
        outputs, along = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, self._us, along, retain_graph=True, materialize_grads=True)
        return self._block(found, 1)

    def unit(self, u: Block) -> Block:
        """Directions of length one, zero at padding."""
        u = self._block(self._split(u, 1), 1)
        size = u.norm(dim=-1, keepdim=True)
        return u / torch.where(size > 0, size, 1.0)

    def apart(self) -> bool:
        """Whether what is asked of the last row reaches no other."""
        random = torch.Generator().manual_seed(0)
        us = self._block([torch.randn(t.shape, generator=random).to(t) for t in self._leave], 1).flatten(0, 1)
        us.unflatten(0, (-1, self._rows))[:, :-1] = 0
        found = self.vjp(us[:, None]).flatten(0, 1).unflatten(0, (-1, self._rows)).abs().amax(-1)
        return bool((found[:, :-1] <= _APART * found[:, -1:]).all())

    def _back(self, us: Sequence[Tensor], *, graph: bool) -> Sequence[Tensor]:
        pairs = [(y, u) for y, u in zip(self._leave, us, strict=True) if y.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in self._enter]
        outputs, given = zip(*pairs, strict=True)
        how = {"create_graph": graph, "retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(outputs, self._enter, given, **how)

    def _block(self, tensors: Sequence[Tensor], side: int) -> Block:
        """Tensors of one side of all layers as a block."""
        found, rest = [], iter(tensors)
        for layer in self._layers:
            own = [self._masked(_rows_first(next(rest), axis)).reshape(self._rows, -1) for axis in layer.axes[side]]
            found.append(own[0] if len(own) == 1 else torch.cat(own, 1))
        return torch.cat(found).unflatten(0, (-1, self._times))

    def _split(self, block: Block, side: int) -> list[Tensor]:
        """The other way round."""
        found: list[Tensor] = []
        for layer, own in zip(self._layers, block.flatten(0, 1).chunk(len(self._layers)), strict=True):
            parts = own.split([t.numel() // self._rows for t in layer.side(side)], 1)
            for part, t, axis in zip(parts, layer.side(side), layer.axes[side], strict=True):
                whole = self._masked(part.to(t).reshape(_rows_first(t, axis).shape))
                found.append(whole.movedim(0, axis) if axis else whole)
        return found

    def _masked(self, t: Tensor) -> Tensor:
        real = self._real
        return t if real is None or t.ndim != 3 or t.shape[:2] != real.shape else t * real[..., None].to(t)


def _rows_first(t: Tensor, axis: int | None) -> Tensor:
    return t.movedim(axis, 0) if axis else t


def kinds_of(graphs: Mapping[int, LayerGraph], rows: int) -> list[list[int]]:
    """Layers of one size together."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for k, graph in graphs.items():
        kinds.setdefault(graph.sizes(rows), []).append(k)
    return list(kinds.values())


def drawn(seed: int, shape: tuple[int, ...], like: Tensor) -> Block:
    """Random directions."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def power_steps(
    jacobians: LayerJacobians, u: Block, rounds: int, least: float = 0.0, *, graph: bool = False
) -> tuple[Turned, Block]:
    """Some steps of power iteration from `u`, and the `Jᵀ u` of the last of them. least: the gain of a step behind which
    there is no further one.  graph: keep that of `Jᵀ u` down to the weights.
    """

    def forward(v: Block) -> Block:
        return jacobians.jvp(v)

    pulled = jacobians.record(u)
    turned = block_step(pulled.detach(), forward)
    for _ in range(rounds - 1):
        if not bool(turned.gain > least):
            break
        pulled = jacobians.vjp(turned.directions, graph=graph)
        turned = block_step(pulled.detach(), forward)
    return turned, pulled
