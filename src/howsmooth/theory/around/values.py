"""How far the values of a small function can move around an input: its first order exactly, the rest bounded node by node.

Derivatives at the input do not depend on the radius and are formed once; a radius then costs a few products of small matrices.
Proofs: docs/explanation/around-blocks.md §3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadFunctionError
from howsmooth.program.pieces import Piece, Pieces
from howsmooth.spectral import spectral_norm
from howsmooth.theory.around.attention import Neighbourhood
from howsmooth.theory.around.graph import Derivatives, NearNodes, spread
from howsmooth.theory.around.pieces import (
    BENT,
    LINEAR,
    MIXTURE,
    Bend,
    Entered,
    Groups,
    MatrixProductRule,
    Rule,
    SoftmaxRule,
    rule,
)
from howsmooth.theory.upper import Upper

_SHAPES = {"view", "_unsafe_view", "reshape", "expand", "clone", "alias", "detach", "_to_copy", "unsqueeze", "squeeze"}
_MOST = 2**27  # entries of all derivatives together: a gigabyte


class Moved(NamedTuple):
    """What the output stays within: `shift ± spread` around `f(X)`, entry by entry, and its Frobenius distance from `f(X)`."""

    shift: Tensor
    spread: Tensor
    total: float


@dataclass(frozen=True, eq=False)
class _Stop:
    """A node that is not linear, with the sizes of what enters it by group.

    rule: what is known of it.  at: what enters it.  sizes: of the quantities its rule asks for, (…, groups).  leads: the signed
    parts of columns, for shifts.  weights: of a matrix product of weights and values, the softmax that gave them.
    """

    rule: Rule
    at: tuple[Tensor, ...]
    sizes: tuple[Upper, ...]
    leads: tuple[Tensor, ...]
    weights: int | None


@final
@dataclass(frozen=True, eq=False)
class Expansion(Derivatives):
    """A function around an input, its derivatives formed.

    free: the tokens that may move; nothing where one radius is that of all of them.  columns: how many the input has.
    """

    graph: Pieces
    value: Tensor
    bends: list[int]
    stops: dict[int, _Stop]
    free: Tensor | None
    columns: int
    lead: Float[Tensor, "columns out"]
    size: Upper  # (out, groups)
    whole: Upper  # (groups,)
    together: Upper

    @property
    def confidence(self) -> float:
        return 1.0  # norms are decomposed

    def entered(self, i: int, near: NearNodes, area: Neighbourhood) -> list[Entered]:
        """As the node's rule measures it: entry by entry, or row by row."""
        (rho, offset), stop, found = self.rest(near, area), self.stops[i], []
        for k, (z, size, lead) in enumerate(zip(stop.at, stop.sizes, stop.leads, strict=True)):
            shift = torch.tensordot(offset, lead, dims=1)
            by_entry = shift.shape == size.value.shape[:-1]
            moved = size @ rho + Upper(shift.abs() if by_entry else shift.norm(dim=-1)).raised(4 * len(lead))
            if stop.weights is not None and k == 0 and (apart := near.bends[stop.weights].entries) is not None:
                moved = moved.min(apart.map(lambda t, shape=moved.value.shape: t.reshape(shape)))
            unknown = Upper(torch.full(z.shape[:-1] if by_entry else z.shape, math.inf, dtype=z.dtype))
            entries, rows = (moved, unknown) if by_entry else (unknown, moved)
            found.append(Entered(z, entries, rows, Upper(math.inf), Upper(math.inf)))
        return found

    def bend(self, i: int, entered: list[Entered]) -> Bend:
        return self.stops[i].rule.bend(self.graph.nodes[i], entered)

    def rest(self, near: NearNodes, area: Neighbourhood) -> tuple[Float[Tensor, " groups"], Float[Tensor, " columns"]]:
        """The length of every group so far, and where columns that are not centred at zero lie."""
        rho, offset = [self._radii(area)], [area.radii.new_zeros(self.columns)]
        for i, bend in near.bends.items():
            size, centre = (bend.each, None) if bend.between is None else _middle(*bend.between)
            count = math.prod(self.graph.nodes[i].shape)
            rho.append(size.value.flatten())
            offset.append(offset[0].new_zeros(count) if centre is None else centre.flatten())
        lengths, centres = torch.cat(rho), torch.cat(offset)
        return lengths, torch.nan_to_num(centres, nan=0.0, posinf=0.0, neginf=0.0)

    @torch.no_grad()
    def at(self, area: Neighbourhood, near: NearNodes | None = None) -> Moved:
        """Everything in a neighbourhood of the input."""
        rho, offset = self.rest(spread(self, area) if near is None else near, area)
        finite = bool(rho.isfinite().all())
        shift = (offset if finite else torch.zeros_like(offset)) @ self.lead
        apart = self.size @ rho if finite else Upper(torch.full_like(shift, math.inf))
        inputs = len(self._radii(area))
        length = Upper(rho[:inputs]).length()
        length = length if area.total is None else length.min(area.total)
        first = (self.together * length).min(self.whole[:inputs] @ rho[:inputs])
        rest = self.whole[inputs:] @ rho[inputs:] if len(rho) > inputs else Upper(0.0)
        middle = Upper(float(shift.norm())).raised(4 * len(offset))
        by_entry = (apart + shift.abs()).length().raised(4 * len(offset))
        moved = (first + rest + middle).min(by_entry)
        return Moved(shift.reshape(self.value.shape), apart.value.reshape(self.value.shape), float(moved))

    def moved(self, near: NearNodes, area: Neighbourhood) -> float:
        return self.at(area, near).total

    def changes(self, near: NearNodes, area: Neighbourhood) -> Float[Tensor, " outputs"]:
        moved = self.at(area, near)
        return moved.spread - moved.shift

    def _radii(self, area: Neighbourhood) -> Float[Tensor, " inputs"]:
        """The lengths of the groups of the input: of each token that may move, or of all together."""
        if self.free is not None:
            return area.radii[self.free]
        return area.radii.new_tensor([area.far if area.total is None else area.total])


def _middle(low: Tensor, high: Tensor) -> tuple[Upper, Tensor]:
    """Half the width of intervals and their middles, with what rounding makes of these."""
    size = torch.maximum(low.abs(), high.abs())
    return Upper((0.5 * (high - low)).clamp_min(0.0)) + size * 1e-15, 0.5 * (high + low)


@torch.no_grad()
def expand(graph: Pieces, x: Float[Tensor, "n d"], together: bool, tokens: Sequence[int] | None = None) -> Expansion:
    """The expansion of a graph at tokens (n, d), float64.

    together: one radius for all tokens (Frobenius), else one for each.  tokens: the positions that may move, all by default.
    """
    free = torch.arange(len(x)) if tokens is None else torch.as_tensor(tokens)
    n, size = len(free), len(free) * x.shape[1]
    values = graph.values(x)
    groups = torch.zeros(size, dtype=torch.long) if together else torch.arange(n).repeat_interleave(x.shape[1])
    inputs = 1 if together else n
    count, stops = inputs, dict[int, _Stop]()
    start = torch.eye(x.numel(), dtype=x.dtype).reshape(*x.shape, *x.shape)[free].flatten(0, 1)
    columns: list[Tensor | tuple[Tensor, ...] | None] = [start]
    room = 0
    last = {j: i for i, node in enumerate(graph.nodes) for j in node.inputs} | {graph.output: len(graph.nodes)}
    for i, node in enumerate(graph.nodes[1 : graph.output + 1], 1):
        entering = [columns[j] for j in node.inputs]
        at = tuple(values[j] for j in node.inputs)
        if node.kind in LINEAR:
            columns.append(_through(node, at, entering))
        else:
            out, wide = values[i], [_widened(c, len(groups)) for c in entering if isinstance(c, Tensor)]
            here, weights = rule(node), None
            if isinstance(here, MatrixProductRule) and (weights := _weights(graph, node.inputs[0])) is not None:
                here = MIXTURE
            width = out.shape[-1] if here.by_rows else 1  # every row of what a node adds is a group, or every entry
            quantities = here.sizes(node, at, out, wide, Groups(groups, count))
            sizes, leads = zip(*quantities, strict=True)
            stops[i] = _Stop(here, at, sizes, leads, weights)
            own = torch.arange(out.numel() // width).repeat_interleave(width)
            groups, count = torch.cat([groups, count + own]), count + out.numel() // width
            fresh = torch.eye(out.numel(), dtype=x.dtype).reshape(-1, *out.shape)
            columns.append(torch.cat([here.tangent(node, at, out, wide), fresh]))
        latest = columns[i]
        room += latest.numel() if isinstance(latest, Tensor) else sum(t.numel() for t in latest or ())
        if room > _MOST:
            raise BadFunctionError(
                f"expected a function small enough to be expanded whole, got one of {size} inputs and {len(graph.nodes)} "
                "operations; measure a layer of it, or a shorter input"
            )
        for j in node.inputs:
            if last[j] == i:
                columns[j] = None
    out = columns[graph.output]
    assert isinstance(out, Tensor)
    lead = _widened(out, len(groups)).flatten(1)  # (columns, out)
    sizes = Groups(groups, count)
    linear = Upper(float(spectral_norm(lead[:size]))).raised(64 * max(lead.shape))
    whole, each = sizes.rows(lead[:, None])[0], sizes.lengths(lead).map(lambda t: t.mT.contiguous())
    return Expansion(
        graph, values[graph.output], list(stops), stops, None if together else free, size, lead, each, whole, linear
    )


def _through(node: Piece, at: tuple[Tensor, ...], entering: list) -> Tensor | tuple[Tensor, ...]:
    """Columns through a linear node."""
    if len(entering) == 1 and isinstance(entering[0], tuple):
        return node.run(entering[0])  # one of several tensors
    wide = max(len(c) for c in entering)
    tangents = tuple(_widened(c, wide) for c in entering)
    return torch.func.vmap(lambda *t: torch.func.jvp(node.run, at, t)[1])(*tangents)


def _widened(c: Tensor, count: int) -> Tensor:
    """With zeros for columns that came later."""
    return c if len(c) == count else torch.cat([c, c.new_zeros(count - len(c), *c.shape[1:])])


def _weights(graph: Pieces, i: int) -> int | None:
    """The softmax that a node is, entry by entry in its order, if it is one."""
    while graph.nodes[i].kind in LINEAR and graph.nodes[i].name in _SHAPES and len(graph.nodes[i].inputs) == 1:
        before = graph.nodes[graph.nodes[i].inputs[0]].shape
        if math.prod(before) != math.prod(graph.nodes[i].shape):
            return None
        i = graph.nodes[i].inputs[0]
    return i if isinstance(BENT.get(graph.nodes[i].kind), SoftmaxRule) else None
