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
from howsmooth.theory.around.pieces import norm_remainder, softmax_remainder

_UP = 1 + 1e-9  # rounding of sums of positive numbers
_SHAPES = {"view", "_unsafe_view", "reshape", "expand", "clone", "alias", "detach", "_to_copy", "unsqueeze", "squeeze"}
_MOST = 2**27  # entries of all derivatives together: a gigabyte


class Groups(NamedTuple):
    """Unknown vectors, each of a length that is bounded on its own: which group a column belongs to, and how many there are."""

    of: Tensor
    number: int


class Moved(NamedTuple):
    """What the output stays within: `shift ± spread` around `f(X)`, entry by entry, and its Frobenius distance from `f(X)`."""

    shift: Tensor
    spread: Tensor
    total: float


@dataclass(frozen=True, eq=False)
class _Stop:
    """A node that is not linear, with the sizes of what enters it by group, and what it adds.

    sizes: of the quantities its remainder asks for, (…, groups).  lead: the signed parts of columns, for shifts.
    first, columns: its own columns.  groups: its own groups, the first of them.
    """

    node: Piece
    index: int
    at: tuple[Tensor, ...]
    sizes: tuple[Tensor, ...]
    leads: tuple[Tensor, ...]
    columns: slice
    groups: slice
    weights: int | None  # of a matrix product of weights and values, the softmax that gave them: one group for every row


@final
@dataclass(frozen=True, eq=False)
class Expansion:
    """A function around an input, ready to be asked for radii. inputs: how many groups the input has."""

    value: Tensor
    stops: tuple[_Stop, ...]
    inputs: int
    count: int
    lead: Float[Tensor, "columns out"]
    size: Float[Tensor, "out groups"]
    whole: Float[Tensor, " groups"]
    together: float

    def rest(self, radii: Float[Tensor, " inputs"]) -> tuple[Float[Tensor, " groups"], Float[Tensor, " columns"]]:
        """The length of every group, and where columns that are not centred at zero lie."""
        rho = radii.new_zeros(self.count)
        rho[: self.inputs] = radii
        offset = radii.new_zeros(len(self.lead))
        apart: dict[int, Tensor] = {}  # how far the weights of every softmax can move
        for stop in self.stops:
            length, centre = _remainder(stop, rho, offset, apart)
            rho[stop.groups] = torch.nan_to_num(length, nan=math.inf).flatten()
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
        spread = _UP * (self.size @ rho) if bool(rho.isfinite().all()) else torch.full_like(shift, math.inf)
        length = float(radii.norm()) if total is None else min(total, float(radii.norm()))
        first = min(self.together * length, float(self.whole[: self.inputs] @ radii))
        rest = float(self.whole[self.inputs :] @ rho[self.inputs :]) if len(rho) > self.inputs else 0.0
        moved = _UP * (first + rest + float(shift.norm()))
        by_entry = float((shift.abs() + spread).norm())
        shape = self.value.shape
        return Moved(shift.reshape(shape), spread.reshape(shape), min(moved, by_entry) if moved == moved else by_entry)


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
        if node.kind in ("linear", "pick"):
            columns.append(_pushed(node, at, entering))
        else:
            wide = [_widened(c, len(groups)) for c in entering if isinstance(c, Tensor)]
            weights = _weights(graph, node.inputs[0]) if node.kind == "matrix product" else None
            out = values[i]
            own = _own_groups(node, out, weights is not None)
            quantities = _quantities(node, at, wide, out, Groups(groups, count), weights is not None)
            start = len(groups)
            groups = torch.cat([groups, count + own.of])
            stops.append(
                _Stop(
                    node,
                    i,
                    (*at, out),
                    tuple(q[0] for q in quantities),
                    tuple(q[1] for q in quantities),
                    slice(start, len(groups)),
                    slice(count, count + own.number),
                    weights,
                )
            )
            count += own.number
            fresh = torch.eye(out.numel(), dtype=x.dtype).reshape(-1, *out.shape)
            columns.append(torch.cat([_tangent(node, at, out, wide), fresh]))
        made = columns[i]
        room += made.numel() if isinstance(made, Tensor) else sum(t.numel() for t in made or ())
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
    whole = _operator_sizes(lead[:, None], sizes)[0]
    first = lead[:size]
    return Expansion(
        values[graph.output],
        tuple(stops),
        inputs,
        count,
        lead,
        _lengths(lead, sizes).T.contiguous(),
        whole,
        _UP * float(torch.linalg.matrix_norm(first, 2)),
    )


def _last_use(graph: Pieces) -> list[int]:
    last = [graph.output + 1] * len(graph.nodes)
    for i, node in enumerate(graph.nodes[: graph.output + 1]):
        for j in node.inputs:
            last[j] = i
    last[graph.output] = graph.output + 1
    return last


def _pushed(node: Piece, at: tuple[Tensor, ...], entering: list) -> Tensor | tuple[Tensor, ...]:
    """Columns through a linear node."""
    if node.kind == "linear" and len(entering) == 1 and isinstance(entering[0], tuple):
        return node.run(entering[0])  # one of several tensors
    wide = max(len(c) for c in entering)
    tangents = tuple(_widened(c, wide) for c in entering)
    return torch.func.vmap(lambda *t: torch.func.jvp(node.run, at, t)[1])(*tangents)


def _widened(c: Tensor, count: int) -> Tensor:
    """With zeros for columns that came later."""
    return c if len(c) == count else torch.cat([c, c.new_zeros(count - len(c), *c.shape[1:])])


def _weights(graph: Pieces, i: int) -> int | None:
    """The softmax that a node is, entry by entry in its order, if it is one."""
    while graph.nodes[i].kind == "linear" and graph.nodes[i].name in _SHAPES and len(graph.nodes[i].inputs) == 1:
        before = graph.nodes[graph.nodes[i].inputs[0]].shape
        if math.prod(before) != math.prod(graph.nodes[i].shape):
            return None
        i = graph.nodes[i].inputs[0]
    return i if graph.nodes[i].kind == "softmax" else None


def _own_groups(node: Piece, out: Tensor, rows: bool) -> Groups:
    size = out.numel()
    if node.kind == "norm" or rows:
        return Groups(torch.arange(size // out.shape[-1]).repeat_interleave(out.shape[-1]), size // out.shape[-1])
    return Groups(torch.arange(size), size)


def _tangent(node: Piece, at: tuple[Tensor, ...], out: Tensor, c: list[Tensor]) -> Tensor:
    """Columns through the derivative of a node that is not linear."""
    if node.kind == "pointwise" and node.scalar is not None:
        return node.scalar.slope(at[0]) * c[0]
    if node.kind == "norm":
        u = at[0] - at[0].mean(-1, keepdim=True) if node.centred else at[0]
        moved = c[0] - c[0].mean(-1, keepdim=True) if node.centred else c[0]
        scale = (u.square().mean(-1, keepdim=True) + node.eps).sqrt()
        return moved / scale - out * (out * moved).mean(-1, keepdim=True) / scale
    if node.kind == "softmax":
        return out * (c[0] - (out * c[0]).sum(node.axis, keepdim=True))
    if node.kind == "product":
        left, right = (t.reshape(len(t), *[1] * (out.ndim + 1 - t.ndim), *t.shape[1:]) for t in c)
        return left * at[1] + at[0] * right
    if node.kind == "matrix product":
        return c[0] @ at[1] + at[0] @ c[1]
    raise BadFunctionError(
        f"expected linear operations, products, softmax, norms and known activations, got {node.name}; "
        "measure a part of the function without it"
    )


def _quantities(
    node: Piece, at: tuple[Tensor, ...], c: list[Tensor], out: Tensor, groups: Groups, rows: bool
) -> list[tuple[Tensor, Tensor]]:
    """What a remainder asks for, each as sizes by group, (…, groups), and as signed columns."""
    if node.kind == "norm":
        moved = c[0] - c[0].mean(-1, keepdim=True) if node.centred else c[0]
        return [(_operator_sizes(moved, groups), moved)]
    if node.kind == "softmax":
        moved = c[0] - (out * c[0]).sum(node.axis, keepdim=True)
        moved = torch.where(at[0] > -math.inf, moved, 0.0)  # hidden keys stay
        return [(_entries(moved, groups), moved)]
    if node.kind == "matrix product":
        left, right = c
        if rows:
            return [(_entries(left, groups), left), (_operator_sizes(right, groups), right)]
        right = right.transpose(-1, -2)
        return [(_operator_sizes(left, groups), left), (_operator_sizes(right, groups), right)]
    return [(_entries(t, groups), t) for t in c]


def _lengths(c: Float[Tensor, "columns entries"], groups: Groups) -> Float[Tensor, "groups entries"]:
    return c.new_zeros(groups.number, c.shape[1]).index_add_(0, groups.of, c.square()).sqrt_().mul_(_UP)


def _entries(c: Tensor, groups: Groups) -> Float[Tensor, "*shape groups"]:
    """How far a group of length one moves every entry."""
    return _lengths(c.reshape(len(c), -1), groups).T.reshape(*c.shape[1:], groups.number)


def _operator_sizes(c: Float[Tensor, "columns *rows d"], groups: Groups) -> Float[Tensor, "*rows groups"]:
    """How far a group of length one moves every row, in length."""
    flat = c.flatten(1, -2) if c.ndim > 2 else c[:, None]  # (columns, rows, d)
    sizes = flat.square().sum(-1)
    sizes = sizes.new_zeros(groups.number, sizes.shape[1]).index_add_(0, groups.of, sizes)  # Frobenius, squared
    several = torch.bincount(groups.of, minlength=groups.number)
    for g in torch.nonzero(several > 1)[:, 0].tolist():
        block = flat[groups.of == g].transpose(0, 1)  # (rows, columns, d)
        gram = block @ block.mT if block.shape[1] <= block.shape[2] else block.mT @ block
        top = torch.linalg.eigvalsh(gram)[:, -1] + 1e-14 * sizes[g]
        sizes[g] = torch.minimum(sizes[g], top.clamp_min(0))
    return sizes.sqrt_().mul_(_UP).T.reshape(*c.shape[1:-1], groups.number)


def _remainder(stop: _Stop, rho: Tensor, offset: Tensor, apart: dict[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What a node adds beyond first order: the length of its groups, and where entries lie."""
    node = stop.node
    sizes = []
    for size, lead in zip(stop.sizes, stop.leads, strict=True):
        shift = torch.tensordot(offset[: len(lead)], lead, dims=1)
        if shift.shape != size.shape[:-1]:
            shift = shift.norm(dim=-1)
        sizes.append(shift.abs() + _UP * (size @ rho[: size.shape[-1]]))
    if node.kind == "pointwise":
        assert node.scalar is not None
        low, high = node.scalar.remainder(stop.at[0], sizes[0])
        return 0.5 * (high - low), 0.5 * (high + low)
    if node.kind == "norm":
        u = stop.at[0] - stop.at[0].mean(-1, keepdim=True) if node.centred else stop.at[0]
        scale = (u.square().mean(-1) + node.eps).sqrt()
        return norm_remainder(scale, sizes[0], u.shape[-1], node.eps), None
    if node.kind == "softmax":
        low, high, apart[stop.index] = softmax_remainder(stop.at[1], sizes[0], node.axis)
        return 0.5 * (high - low), 0.5 * (high + low)
    if node.kind == "product":
        return sizes[0] * sizes[1], None
    if stop.weights is not None:
        left = torch.minimum(sizes[0], apart[stop.weights].reshape(sizes[0].shape))
        return (left * sizes[1].unsqueeze(-2)).sum(-1), None
    return sizes[0].unsqueeze(-1) * sizes[1].unsqueeze(-2), None
