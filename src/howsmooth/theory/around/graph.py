"""Bounds around an input for functions of any size: blocks and models, by certified norms of products alone.

With `F_v` the derivative of what enters node `v` and `G_v` that of the output by what leaves it,

    D_Y f − D_X f = Σ_v G_v(X) (D_v(Y) − D_v(X)) F_v(Y),    f(Y) − f(X) = D_X f (Y − X) + Σ_v G_v(X) e_v,

so residual streams are never taken apart: every norm is that of a derivative at `X`, from products. Proofs:
docs/explanation/around-blocks.md §4.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.maps import Attention
from howsmooth.program.pieces import Piece, Pieces
from howsmooth.theory.around.attention import Around, Neighbourhood
from howsmooth.theory.around.norms import Certified
from howsmooth.theory.around.pieces import ROW_RULES, SAME_ROWS, Bend, Entered, rule
from howsmooth.theory.upper import Upper, lengths


@dataclass(frozen=True)
class _Reach:
    """How far a node can move, and how far its derivative by the input goes.

    rows: length of every token's move, (n,), nothing where tokens are not its rows.  entries: of every entry, where known.
    slope: of the derivative by the input, from the nodes before it one by one.
    """

    rows: Upper | None
    entries: Upper | None = None
    slope: Upper = field(default_factory=lambda: Upper(math.inf))


@dataclass(frozen=True)
class NearNodes:
    """Nodes that are not linear, and how far every node can move."""

    bends: dict[int, Bend]
    reach: list[_Reach]


def around_graph(certified: Certified, neighbourhood: Neighbourhood) -> Around:
    """Bounds on a graph over a neighbourhood of the input that `certified` is of."""
    graph, n = certified.graph, len(neighbourhood.point)
    if len(graph.nodes) == 2 and isinstance(graph.nodes[1].opaque, Attention):
        return certified.attention(graph.nodes[1], neighbourhood.point).within(neighbourhood)
    near = spread(certified, neighbourhood)
    turned: dict[int, Upper] = {}  # ‖(D_v(Y) − D_v(X)) F_v(Y)‖
    change = Upper(0.0)
    for v in certified.bends:
        here = near.bends[v]
        moving = _total(turned[u] * certified.between(u, v) for u in turned)
        if here.turn is None:
            turned[v] = here.change * (moving + certified.into(v))
            if here.factors is not None:
                turned[v] = turned[v].min(_factor_by_factor(certified, v, here.factors, turned))
            change = change + turned[v] * certified.out_of(v)
        else:
            into, out = certified.weighted(v, here.turn.value)
            root = here.change.sqrt()
            entering = root * moving + into
            turned[v] = root * entering
            change = change + entering * out
    centre, last = certified.whole(), near.reach[graph.output]
    slope, reason = min(
        (float(change + centre), "the norm at the input and how far the Jacobian can move from it"),
        (float(last.slope), "the slopes of its parts, one by one"),
    )
    if not slope < math.inf:
        reason = "the neighbourhood is too large: some part of the map can move without a bound in it"
    total = float(_moved(certified, near, neighbourhood.far).min(Upper(neighbourhood.far) * slope))
    rows = torch.full((n,), total, dtype=torch.float64)
    if last.rows is not None and len(last.rows.value) == n:
        rows = torch.minimum(rows, last.rows.value)
    change = float(change.min(Upper(centre) + slope))
    return Around(slope, change, rows, total, reason, centre, certified.confidence)


def _total(terms: Iterable[Upper]) -> Upper:
    return sum(terms, Upper(0.0))


def _factor_by_factor(certified: Certified, v: int, factors: tuple[Upper, Upper], turned: dict[int, Upper]) -> Upper:
    """`‖(D_v(Y) − D_v(X)) F_v(Y)‖` of a product, factor by factor. factors: how far slices of the other one can move."""
    total = Upper(0.0)
    for j, size in zip(certified.graph.nodes[v].inputs, factors, strict=True):
        moving = _total(turned[u] * certified.reaching(u, j) for u in turned if u <= j)
        total = total + size * (moving + certified.upto(j))
    return total


def output_move(certified: Certified, neighbourhood: Neighbourhood) -> float:
    """How far the output of a graph can move: `around_graph(…).moved_total` without what slopes would add to it."""
    if len(certified.graph.nodes) == 2:
        return around_graph(certified, neighbourhood).moved_total
    return float(_moved(certified, spread(certified, neighbourhood), neighbourhood.far))


def _moved(certified: Certified, near: NearNodes, far: float) -> Upper:
    """How far the output can move: to first order, and what the nodes add beyond it; or token by token."""
    total = Upper(certified.whole()) * far + _total(near.bends[v].rest * certified.out_of(v) for v in certified.bends)
    rows = near.reach[certified.graph.output].rows
    return total if rows is None else total.min(rows.length())


@torch.no_grad()
def scalar_changes(certified: Certified, neighbourhood: Neighbourhood) -> Float[Tensor, " outputs"]:
    """How far every output of a graph with few of them, such as margins, can move: its own gradient, and what is beyond it."""
    near, changes = spread(certified, neighbourhood), []
    for by_node in certified.gradients():
        g = Upper(by_node[0].reshape(len(neighbourhood.point), -1).norm(dim=-1)).raised(by_node[0].numel())
        change = (g * neighbourhood.radii).sum().min(g.length() * neighbourhood.far)
        for v in certified.bends:
            node, bend, weight = certified.graph.nodes[v], near.bends[v], by_node[v]
            length = bend.rest * Upper(float(lengths(weight.flatten()))).raised(weight.numel())
            change = change + (length if isinstance(node.opaque, Attention) else length.min(rule(node).against(weight, bend)))
        changes.append(float(change))
    return torch.tensor(changes, dtype=torch.float64)


@torch.no_grad()
def spread(certified: Certified, neighbourhood: Neighbourhood) -> NearNodes:
    """How far every node can move, and what those that are not linear make of it."""
    graph, x, far = certified.graph, neighbourhood.point, neighbourhood.far
    near = NearNodes({}, [_Reach(Upper(neighbourhood.radii), None, Upper(1.0))])
    for i, node in enumerate(graph.nodes[1:], 1):
        entering = [near.reach[j] for j in node.inputs]
        if i not in certified.bends:
            if i in certified.spread_out and entering[0].rows is not None:
                # entries behind a matrix move by its columns' lengths times how far a row moves: worth a norm of its own
                total = _length_moved(certified, near, node.inputs[0], far)
                entering = [replace(entering[0], rows=entering[0].rows.min(total))]
            near.reach.append(_through(node, entering, graph, len(x)))
            continue
        total = Upper(certified.into(i)) * far + _total(near.bends[u].rest * certified.between(u, i) for u in near.bends)
        if len(entering) == 1 and entering[0].rows is not None:
            total = total.min(entering[0].rows.length())
        at, totals = [certified.values[j] for j in node.inputs], [total] * len(node.inputs)
        if len({t.shape for t in at}) > 1:  # a small factor moves less than both together
            totals = [t.min(_length_moved(certified, near, j, far)) for t, j in zip(totals, node.inputs, strict=True)]
        entered = [
            Entered(z, _entry_moves(e, z, t), _row_moves(e, z, t), total, e.slope)
            for e, z, t in zip(entering, at, totals, strict=True)
        ]
        layer = isinstance(node.opaque, Attention)
        bend = near.bends[i] = _attention(certified, node, entered[0]) if layer else rule(node).bend(node, entered)
        known = layer or entering[0].rows is not None
        near.reach.append(_Reach(bend.rows if known else None, bend.entries, bend.slope))
    return near


def _length_moved(certified: Certified, near: NearNodes, j: int, far: float) -> Upper:
    """How far what leaves a node can move, in length."""
    rests = (near.bends[u].rest * certified.reaching(u, j) for u in near.bends if u <= j)
    return Upper(certified.upto(j)) * far + _total(rests)


def _attention(certified: Certified, node: Piece, entered: Entered) -> Bend:
    """An attention layer around what enters it."""
    x = entered.value.reshape(-1, entered.value.shape[-1])
    r, total = entered.rows.value.flatten(), float(entered.total)
    none = Upper(math.inf)
    if not bool(r.isfinite().all()):
        return Bend(none, none, none, none)
    around = certified.attention(node, x).within(Neighbourhood(x, r, min(total, float(Upper(r).length()))))
    rest = Upper(around.rest).min(Upper(around.change) * total).min(Upper(around.centre) * total + around.moved_total)
    return Bend(Upper(around.change), rest, rest, entered.slope * around.slope, rows=Upper(around.moved))


def _entry_moves(e: _Reach, z: Tensor, total: Upper) -> Upper:
    moved = Upper(torch.full_like(z, float(total)))
    if e.entries is not None:
        moved = moved.min(e.entries.map(lambda t: t.reshape(z.shape)))
    return moved if e.rows is None else moved.min(e.rows.map(lambda t: t.reshape(*z.shape[:-1], 1).expand(z.shape)))


def _row_moves(e: _Reach, z: Tensor, total: Upper) -> Upper:
    rows = Upper(torch.full(z.shape[:-1], float(total), dtype=z.dtype))
    return rows if e.rows is None else rows.min(e.rows.map(lambda t: t.reshape(z.shape[:-1])))


def _through(node: Piece, entering: list[_Reach], graph: Pieces, n: int) -> _Reach:
    """A linear node, as far as it treats tokens as rows."""
    first, alone = entering[0], len(node.inputs) == 1
    if any(e.rows is None and float(e.slope) == math.inf for e in entering):
        return _Reach(None)
    if alone and node.name in ROW_RULES and ROW_RULES[node.name].knows(node, graph.nodes[node.inputs[0]].shape):
        return _Reach(*ROW_RULES[node.name].after(node, first.rows, first.entries, first.slope))
    if node.name in SAME_ROWS and all(_same_rows(node, graph.nodes[j].shape, n) for j in node.inputs):
        rows = [e.rows for e in entering if e.rows is not None]
        entries = [e.entries.map(lambda t: t.reshape(node.shape)) for e in entering if e.entries is not None]
        rows_after, entries_after = (_total(t) if len(t) == len(entering) else None for t in (rows, entries))
        return _Reach(rows_after, entries_after, _total(e.slope for e in entering))
    return _Reach(None)


def _same_rows(node: Piece, before: tuple[int, ...], n: int) -> bool:
    """Whether a node leaves n tokens in their order, whatever axes of length one stand beside them."""
    rows = math.prod(before[:-1]), math.prod(node.shape[:-1])
    if not (len(before) > 1 and before[-1:] == node.shape[-1:] and rows == (n, n)):
        return False
    if node.name in ("add", "sub"):
        return True
    index = torch.arange(math.prod(before), dtype=torch.float64).reshape(before)
    return torch.equal(node.run(index).flatten(), index.flatten())
