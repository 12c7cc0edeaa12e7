"""Products with the Jacobians of several layers at once.

Every layer has a graph of its own, from a copy of the tokens that enter it. A backward pass, itself recorded, is linear in what
it is applied to, so a backward pass through that gives the forward product. One call of torch serves all layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.spectral.operator import unit_rows
from howsmooth.spectral.ritz import Block
from howsmooth.spectral.step import block_step

_APART = 1e-6  # share of a product that may reach another item, as rounding does


class LayerGraph(NamedTuple):
    """A layer's graph between tokens that enter and what leaves, each in one tensor or several.

    axes: of each of them, along which its rows lie; nothing where there is one row.
    """

    enter: Sequence[Tensor]
    leave: Sequence[Tensor]
    axes: tuple[Sequence[int | None], Sequence[int | None]]


class LayerTurn(NamedTuple):
    """What steps of power iteration found of a layer: by item, the constant along the last directions, and the next ones."""

    value: Float[Tensor, " items"]
    directions: Block


@final
class LayerJacobians:
    """`Jᵀ u` and `J v` of layers of one size, on blocks (layers · items, times, N).

    rows: `times` copies of every item, one behind the other.  real: which tokens of the rows are not padding;
    the others neither move nor count.
    """

    def __init__(self, layers: Mapping[int, LayerGraph], rows: int, times: int, real: Bool[Tensor, "rows n"] | None):
        self.layers, self._rows, self._times, self._real = list(layers), rows, times, real
        self._sides = [layer.enter for layer in layers.values()], [layer.leave for layer in layers.values()]
        self._axes = [[layer.axes[side] for layer in layers.values()] for side in (0, 1)]
        self._enter, self._leave = ([t for own in side for t in own] for side in self._sides)
        self._us: list[Tensor] = []
        self._transposed: Sequence[Tensor] = ()

    @classmethod
    def of_kinds(
        cls, graphs: Mapping[int, LayerGraph], rows: int, times: int, real: Bool[Tensor, "rows n"] | None
    ) -> "Iterator[LayerJacobians]":
        """Layers of one size together."""
        kinds: dict[tuple[int, ...], dict[int, LayerGraph]] = {}
        for k, graph in graphs.items():
            size = tuple(sum([t.numel() for t in side]) for side in (graph.enter, graph.leave))
            kinds.setdefault(size, {})[k] = graph
        return (cls(layers, rows, times, real) for layers in kinds.values())

    def turn(
        self, carried: Mapping[int, Block], rounds: int, first: int, least: float = 0.0, *, graph: bool = False
    ) -> dict[int, LayerTurn]:
        """Some steps of power iteration by layer, from directions that are carried or, where there are none, random.

        An item where something is not finite keeps its directions.  rounds: how many steps at most.  first: the same where
        directions are random, if it is more.  least: the gain of a step behind which there is no further one.
        graph: values are `|Jᵀ u|` of the last step, for unit `u`, with a graph down to the weights; else `max |J w|` in the
        span of the last `v`.
        """
        like = self._leave[0]
        shape = (self._rows // self._times, self._times, sum([t.numel() for t in self._sides[1][0]]) // self._rows)
        known = {k: u for k in self.layers if (u := carried.get(k)) is not None and u.shape == shape}
        start = torch.cat([known[k].to(like) if k in known else drawn(k, shape, like) for k in self.layers])
        us = self._split(start, 1)  # zero at padding
        us = self._split(unit_rows(self._block(us, 1)), 1) if graph else us
        self._us = [t.detach().requires_grad_() for t in us]
        self._transposed = self._back(self._us, graph=True)
        transposed = self._block(self._transposed, 0)
        turned = block_step(transposed.detach(), self.jvp)
        for _ in range((rounds if len(known) == len(self.layers) else max(rounds, first)) - 1):
            if not bool(turned.gain > least):
                break
            transposed = self.vjp(turned.directions, graph=graph)
            turned = block_step(transposed.detach(), self.jvp)
        values = transposed[:, 0].norm(dim=-1) if graph else turned.value
        kept = torch.where(turned.directions.flatten(1).any(-1)[:, None, None], turned.directions, start)
        parts = zip(values.chunk(len(self.layers)), kept.chunk(len(self.layers)), strict=True)
        return dict(zip(self.layers, (LayerTurn(*own) for own in parts), strict=True))

    def vjp(self, u: Block, *, graph: bool = False) -> Block:
        """`Jᵀ u`. graph: down to weights."""
        return self._block(self._back(self._split(u, 1), graph=graph), 0)

    def jvp(self, v: Block) -> Block:
        """`J v`, a backward pass through the first `Jᵀ u` of a turn, which has a graph down to `u`."""
        pairs = [(p, t) for p, t in zip(self._transposed, self._split(v, 0), strict=True) if p.requires_grad]
        if not pairs:
            return self._block([torch.zeros_like(u) for u in self._us], 1)
        outputs, along = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, self._us, along, retain_graph=True, materialize_grads=True)
        return self._block(found, 1)

    def apart(self) -> bool:
        """Whether what is wanted of the last row reaches no other."""
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
        for axes in self._axes[side]:
            rows = [next(rest).movedim(axis or 0, 0) for axis in axes]
            own = [self._masked(t).reshape(self._rows, -1) for t in rows]
            found.append(own[0] if len(own) == 1 else torch.cat(own, 1))
        return torch.cat(found).unflatten(0, (-1, self._times))

    def _split(self, block: Block, side: int) -> list[Tensor]:
        """A block as tensors of one side of all layers."""
        found: list[Tensor] = []
        layers = zip(self._sides[side], self._axes[side], block.flatten(0, 1).chunk(len(self.layers)), strict=True)
        for tensors, axes, own in layers:
            parts = own.split([t.numel() // self._rows for t in tensors], 1)
            for part, t, axis in zip(parts, tensors, axes, strict=True):
                whole = part.to(t).reshape(t.movedim(axis or 0, 0).shape)
                found.append(self._masked(whole).movedim(0, axis or 0))
        return found

    def _masked(self, t: Tensor) -> Tensor:
        """A tensor with rows first, zero at padding."""
        real = self._real
        return t if real is None or t.ndim != 3 or t.shape[:2] != real.shape else t * real[..., None].to(t)


def drawn(seed: int, shape: tuple[int, ...], like: Tensor) -> Block:
    """Random directions."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)
