"""How far the values of a small function can move around an input: its first order exactly, the rest bounded node by node.

Every node of a graph gives `f_v(Y) = f_v(X) + J_v Δ + Σ_u G_uv e_u`, where `Δ = Y − X`, `J_v` and `G_uv` are derivatives at `X`
and `e_u` is what node `u` alone adds beyond its own first order. Derivatives do not depend on the radius and are formed once;
a radius then costs a few products of small matrices. Proofs: docs/explanation/around-blocks.md §3.
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
from howsmooth.theory.around.pieces import BENT, LINEAR, MIXTURE, Groups, MatrixProductRule, Rule, SoftmaxRule, rule
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
    """A node that is not linear, with the sizes of what enters it by group, and what it adds.

    sizes: of the quantities its remainder asks for, (…, groups).  leads: the signed parts of columns, for shifts.
    columns: its own columns.  groups: its own groups.
    weights: of a matrix product of weights and values, the softmax that gave them.
    """

    node: Piece
    rule: Rule
    index: int
    at: tuple[Tensor, ...]
    out: Tensor
    sizes: tuple[Upper, ...]
    leads: tuple[Tensor, ...]
    columns: slice
    groups: slice
    weights: int | None

    def remainder(self, rho: Tensor, offset: Tensor, apart: dict[int, Upper]) -> tuple[Upper, Tensor | None]:
        """What the node adds beyond first order: the length of its groups, and where entries lie.

        rho: lengths of groups.  offset: where columns lie.  apart: how far the weights of every softmax can move.
        """
        sizes = []
        for size, lead in zip(self.sizes, self.leads, strict=True):
            shift = torch.tensordot(offset[: len(lead)], lead, dims=1)
            shift = Upper(shift.abs() if shift.shape == size.value.shape[:-1] else shift.norm(dim=-1)).raised(4 * len(lead))
            sizes.append(size @ rho[: size.value.shape[-1]] + shift)
        if isinstance(self.rule, SoftmaxRule):
            apart[self.index] = self.rule.moved(self.node, self.out, sizes)
        if self.weights is not None:
            sizes[0] = sizes[0].min(apart[self.weights].map(lambda t: t.reshape(sizes[0].value.shape)))
        return self.rule.remainder(self.node, self.at, self.out, sizes)


@final
@dataclass(frozen=True, eq=False)
class Expansion:
    """A function around an input, ready to be asked for radii. inputs: how many groups the input has."""

    value: Tensor
    stops: tuple[_Stop, ...]
    inputs: int
    count: int
    lead: Float[Tensor, "columns out"]
    size: Upper  # (out, groups)
    whole: Upper  # (groups,)
    together: Upper

    def rest(self, radii: Float[Tensor, " inputs"]) -> tuple[Float[Tensor, " groups"], Float[Tensor, " columns"]]:
        """The length of every group, and where columns that are not centred at zero lie."""
        rho = radii.new_zeros(self.count)
        rho[: self.inputs] = radii
        offset = radii.new_zeros(len(self.lead))
        apart: dict[int, Upper] = {}
        for stop in self.stops:
            length, centre = stop.remainder(rho, offset, apart)
            rho[stop.groups] = length.value.flatten()
            if centre is not None:
                offset[stop.columns] = torch.nan_to_num(centre, nan=0.0).flatten()
            if not bool(rho.isfinite().all()):
                rho[stop.groups.start :] = math.inf
                return rho, torch.zeros_like(offset)
        return rho, offset

    def at(self, radii: Float[Tensor, " inputs"], total: float | None = None) -> Moved:
        """Everything within the radii. total: of all tokens together, where they share one."""
        rho, offset = self.rest(radii)
        shift = offset @ self.lead
        finite = bool(rho.isfinite().all())
        spread = self.size @ rho if finite else Upper(torch.full_like(shift, math.inf))
        length = Upper(radii).length()
        length = length if total is None else length.min(total)
        first = (self.together * length).min(self.whole[: self.inputs] @ radii)
        rest = self.whole[self.inputs :] @ rho[self.inputs :] if len(rho) > self.inputs else Upper(0.0)
        middle = Upper(float(shift.norm())).raised(4 * len(offset))
        by_entry = (spread + shift.abs()).length().raised(4 * len(offset))
        moved = (first + rest + middle).min(by_entry)
        return Moved(shift.reshape(self.value.shape), spread.value.reshape(self.value.shape), float(moved))


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
    count, stops = inputs, []
    start = torch.eye(x.numel(), dtype=x.dtype).reshape(*x.shape, *x.shape)[free].flatten(0, 1)
    columns: list[Tensor | tuple[Tensor, ...] | None] = [start]
    room = 0
    last = _last_use(graph)
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
            own = _own_groups(out, here.by_rows)
            quantities = here.sizes(node, at, out, wide, Groups(groups, count))
            first, groups = len(groups), torch.cat([groups, count + own.of])
            own_columns, own_groups = slice(first, len(groups)), slice(count, count + own.number)
            sizes, leads = zip(*quantities, strict=True)
            stops.append(_Stop(node, here, i, at, out, sizes, leads, own_columns, own_groups, weights))
            count += own.number
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
    return Expansion(values[graph.output], tuple(stops), inputs, count, lead, each, whole, linear)


def _last_use(graph: Pieces) -> list[int]:
    last = [graph.output + 1] * len(graph.nodes)
    for i, node in enumerate(graph.nodes[: graph.output + 1]):
        for j in node.inputs:
            last[j] = i
    last[graph.output] = graph.output + 1
    return last


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


def _own_groups(out: Tensor, rows: bool) -> Groups:
    """Every entry of what a node adds is a group, or every row."""
    size, width = out.numel(), out.shape[-1] if rows else 1
    return Groups(torch.arange(size // width).repeat_interleave(width), size // width)
