"""Bounds around an input for functions of any size: blocks and models, by certified norms of products alone.

With `F_v` the derivative of what enters node `v` and `G_v` that of the output by what leaves it,

    D_Y f − D_X f = Σ_v G_v(X) (D_v(Y) − D_v(X)) F_v(Y),    f(Y) − f(X) = D_X f (Y − X) + Σ_v G_v(X) e_v,

so residual streams are never taken apart: every norm is that of a derivative at `X`, from products. Proofs:
docs/explanation/around-blocks.md §4.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds.kind import check_softmax
from howsmooth.maps import Attention, Map
from howsmooth.program.pieces import Piece, Pieces, pieces_of
from howsmooth.theory.around.attention import around_attention
from howsmooth.theory.around.neighbourhood import Around, Neighbourhood
from howsmooth.theory.around.norms import SAME_ROWS, Certified
from howsmooth.theory.around.pieces import norm_change, norm_ratios, norm_remainder, norm_slope, shared_shape, slice_lengths

_UP = 1 + 1e-9


@dataclass(frozen=True)
class _Reach:
    """How far a node can move, and how far its derivative by the input goes.

    rows: length of every token's move, (n,), nothing where tokens are not its rows.  entries: of every entry, where known.
    slope: of the derivative by the input, from the nodes before it one by one.
    """

    rows: Tensor | None
    entries: Tensor | None = None
    slope: float = math.inf


@dataclass(frozen=True)
class _Bent:
    """A node that is not linear, around the input.

    change: how far its derivative can move.  rest: what it adds beyond first order, in length.  each: the same by token or by
    entry, broadcast over its output.  total: how far what enters can move, in length.  turn: of a diagonal derivative, the
    change of every entry.  factors: of a product of different shapes, how far its derivative by either factor can move.
    """

    change: float
    rest: float
    each: Tensor
    total: float
    turn: Tensor | None = None
    factors: tuple[float, float] | None = None


def bound_around(
    f: object,
    neighbourhood: Neighbourhood,
    *,
    tokens: tuple[int, ...] | None = None,
    norm: float | None = None,
    delta: float = 1e-6,
    seed: int = 0,
) -> Around:
    """Bounds on a map whose structure is known; others are refused. Arguments as for `AroundAttention`."""
    graph = check_structure(f, neighbourhood.point)
    if isinstance(f, Attention):
        return around_attention(f, neighbourhood, tokens=tokens, norm=norm, delta=delta, seed=seed)
    return around_graph(Certified(graph, neighbourhood.point, tokens, delta, seed, norm), neighbourhood)


def check_structure(f: object, x: Tensor) -> Pieces:
    """The graph of a map at an input of that shape; maps that no bound around an input is known for are refused."""
    graph = pieces_of(f, tuple(x.shape)) if isinstance(f, Map) else None
    if graph is None:
        raise BadInputError(
            f"expected a layer, a norm or a composition of them for a bound around an input, got {type(f).__name__}; "
            "load(module).measure(within=r) knows blocks of models, worst_case(f, over=BallAround(x, r)) searches near x"
        )
    for node in graph.nodes:
        if isinstance(node.opaque, Attention):
            check_softmax(node.opaque.kind, "a bound around an input")
    return graph


def around_graph(certified: Certified, neighbourhood: Neighbourhood) -> Around:
    """Bounds on a graph over a neighbourhood of the input that `certified` is of."""
    graph, n = certified.graph, len(neighbourhood.point)
    if len(graph.nodes) == 2 and graph.nodes[1].kind == "opaque":
        return certified.attention(graph.nodes[1], neighbourhood.point).within(neighbourhood)
    bent, reach = spread(certified, neighbourhood)
    far = neighbourhood.far
    turned: dict[int, float] = {}  # ‖(D_v(Y) − D_v(X)) F_v(Y)‖
    change = 0.0
    for v in certified.bends:
        here = bent[v]
        moving = sum(_times(certified.between(u, v), turned[u]) for u in turned)
        if here.turn is None:
            turned[v] = _times(here.change, certified.into(v) + moving)
            if here.factors is not None:
                turned[v] = min(turned[v], _factor_by_factor(certified, v, here.factors, turned))
            change += _times(certified.out_of(v), turned[v])
        else:
            into, out = certified.weighted(v, here.turn)
            root = math.sqrt(here.change)
            made = into + _times(root, moving)
            turned[v] = _times(root, made)
            change += _times(out, made)
    centre = certified.whole()
    last = reach[graph.output]
    slope, reason = min(
        (centre + change, "the norm at the input and how far the Jacobian can move from it"),
        (last.slope, "the slopes of its parts, one by one"),
    )
    if not slope < math.inf:
        slope, reason = math.inf, "the neighbourhood is too large: some part of the map can move without a bound in it"
    change = min(change, centre + slope) if change == change else math.inf
    total = min(_moved(certified, bent, last, far), slope * far)
    rows = torch.full((n,), total, dtype=torch.float64)
    if last.rows is not None and len(last.rows) == n:
        rows = torch.minimum(rows, last.rows)
    return Around(slope * _UP, change * _UP, rows * _UP, total * _UP, reason, centre, certified.confidence)


def _factor_by_factor(certified: Certified, v: int, factors: tuple[float, float], turned: dict[int, float]) -> float:
    """`‖(D_v(Y) − D_v(X)) F_v(Y)‖` of a product, factor by factor. factors: how far slices of the other one can move."""
    total = 0.0
    for j, size in zip(certified.graph.nodes[v].inputs, factors, strict=True):
        moving = sum(_times(certified.reaching(u, j), turned[u]) for u in turned if u <= j)
        total += _times(size, certified.upto(j) + moving)
    return total


def output_move(certified: Certified, neighbourhood: Neighbourhood) -> float:
    """How far the output of a graph can move: `around_graph(…).moved_total` without what slopes would add to it."""
    if len(certified.graph.nodes) == 2:
        return around_graph(certified, neighbourhood).moved_total
    bent, reach = spread(certified, neighbourhood)
    return _moved(certified, bent, reach[certified.graph.output], neighbourhood.far) * _UP


def _moved(certified: Certified, bent: dict[int, _Bent], last: _Reach, far: float) -> float:
    """To first order, and what the nodes add beyond it; or token by token."""
    total = certified.whole() * far + sum(_times(certified.out_of(v), bent[v].rest) for v in certified.bends)
    total = total if total == total else math.inf
    return total if last.rows is None else min(total, float(last.rows.norm()))


@torch.no_grad()
def scalar_changes(certified: Certified, neighbourhood: Neighbourhood) -> Float[Tensor, " outputs"]:
    """How far every output of a graph with few of them, such as margins, can move: its own gradient, and what is beyond it."""
    graph = certified.graph
    bent, _ = spread(certified, neighbourhood)
    changes = []
    for by_node in certified.gradients():
        g = by_node[0].reshape(len(neighbourhood.point), -1).norm(dim=-1)
        change = min(float(g @ neighbourhood.radii), float(g.norm()) * neighbourhood.far)
        for v in certified.bends:
            weight = by_node[v]
            length = float(weight.norm()) * bent[v].rest
            if graph.nodes[v].kind in ("pointwise", "product"):
                own = float((weight.abs() * bent[v].each).sum())
            elif graph.nodes[v].kind == "norm":
                own = float((weight.norm(dim=-1) * bent[v].each).sum())
            else:
                own = math.inf
            change += min(length, own) if not math.isnan(length) else own
        changes.append(change * _UP if change == change else math.inf)
    return torch.tensor(changes, dtype=torch.float64)


@torch.no_grad()
def spread(certified: Certified, neighbourhood: Neighbourhood) -> tuple[dict[int, _Bent], list[_Reach]]:
    """How far every node can move, and what those that are not linear make of it."""
    graph, x = certified.graph, neighbourhood.point
    reach = [_Reach(neighbourhood.radii, None, 1.0)]
    bent: dict[int, _Bent] = {}
    for i, node in enumerate(graph.nodes[1:], 1):
        if i not in certified.bends:
            entering = [reach[j] for j in node.inputs]
            if i in certified.spread_out and entering[0].rows is not None:
                # entries behind a matrix move by its columns' lengths times how far a row moves: worth a norm of its own
                total = _length_moved(certified, bent, node.inputs[0], neighbourhood.far)
                entering = [replace(entering[0], rows=entering[0].rows.clamp_max(total))]
            reach.append(_through(node, entering, graph, len(x)))
            continue
        rest = sum(_times(certified.between(u, i), bent[u].rest) for u in bent)
        total = certified.into(i) * neighbourhood.far + rest
        total = total if total == total else math.inf
        entering = [reach[j] for j in node.inputs]
        for e in entering:
            if len(entering) == 1 and e.rows is not None:
                total = min(total, float(e.rows.norm()))
        at, totals = [certified.values[j] for j in node.inputs], [total * _UP] * len(node.inputs)
        if len({t.shape for t in at}) > 1:  # a small factor moves less than both together
            totals = [
                min(t, _length_moved(certified, bent, j, neighbourhood.far)) for t, j in zip(totals, node.inputs, strict=True)
            ]
        moved = [_entry_moves(e, z, t) for e, z, t in zip(entering, at, totals, strict=True)]
        rows = [_row_moves(e, z, t) for e, z, t in zip(entering, at, totals, strict=True)]
        bent[i], after = _bend(node, entering, at, moved, rows, total * _UP, certified)
        reach.append(after)
    return bent, reach


def _length_moved(certified: Certified, bent: dict[int, _Bent], j: int, far: float) -> float:
    """How far what leaves a node can move, in length."""
    total = certified.upto(j) * far + sum(_times(certified.reaching(u, j), bent[u].rest) for u in bent if u <= j)
    return total * _UP if total == total else math.inf


def _bend(
    node: Piece,
    entering: list[_Reach],
    at: list[Tensor],
    moved: list[Tensor],
    rows: list[Tensor],
    total: float,
    certified: Certified,
) -> tuple[_Bent, _Reach]:
    """moved, rows, total: how far entries and rows of what enters, and all of it, can move."""
    slope = entering[0].slope
    if node.kind == "norm":
        z, d = at[0], at[0].shape[-1]
        u = z - z.mean(-1, keepdim=True) if node.centred else z
        scale, r = (u.square().mean(-1) + node.eps).sqrt(), rows[0].reshape(z.shape[:-1])
        each = norm_remainder(scale, r, d, node.eps)
        bend = _Bent(
            float(norm_change(scale, r, d, node.eps).max()),
            _length(each, norm_ratios(scale, r, d, node.eps), total),
            each,
            total,
        )
        steep = norm_slope(scale, r, d, node.eps)
        after = (steep * r).clamp_max(2 * math.sqrt(d)).flatten()
        return bend, _Reach(after if entering[0].rows is not None else None, None, slope * float(steep.max()))
    if node.kind == "pointwise":
        assert node.scalar is not None
        low, high = node.scalar.remainder(at[0], moved[0])
        each, turn = torch.maximum(-low, high), node.scalar.slope_change(at[0], moved[0])
        bend = _Bent(float(turn.max()), _length(each, node.scalar.ratios(at[0], moved[0]), total), each, total, turn)
        steep = node.scalar.slope(at[0]).abs() + turn
        entries = steep * moved[0]
        after = None if entering[0].rows is None else (float(steep.max()) * entering[0].rows)
        return bend, _Reach(after, entries, slope * float(steep.max()))
    if node.kind == "product":
        a, b = moved
        shared = shared_shape(at[0].shape, at[1].shape)
        # entries meet whole slices of the other factor where it is repeated (Lemma 4.3)
        alpha, beta = (
            torch.minimum(slice_lengths(m, shared), slice_lengths(r[..., None], (*shared[:-1], 1)))
            for m, r in zip(moved, rows, strict=True)
        )
        each = a * b
        size = min(float(each.norm()), 0.5 * total**2)
        factors = None if at[0].shape == at[1].shape else (float(beta.max()), float(alpha.max()))
        bend = _Bent(min(float(torch.hypot(alpha, beta).max()), total), size, each, total, factors=factors)
        entries = at[0].abs() * b + at[1].abs() * a + each
        most = [float((slice_lengths(z, shared) + m).max()) for z, m in zip(at, (alpha, beta), strict=True)]
        both = most[1] * entering[0].slope + most[0] * entering[1].slope
        after = None if entering[0].rows is None else entries.reshape(-1, entries.shape[-1]).norm(dim=-1)
        return bend, _Reach(after, entries, both)
    assert isinstance(node.opaque, Attention)
    x = at[0].reshape(-1, at[0].shape[-1])
    r = rows[0].flatten()
    if not bool(r.isfinite().all()):
        each = torch.full((len(x),), math.inf, dtype=torch.float64)
        return _Bent(math.inf, math.inf, each, total), _Reach(None)
    around = certified.attention(node, x).within(Neighbourhood(x, r, min(total, float(r.norm()))))
    rest = min(around.rest, around.change * total, around.moved_total + around.centre * total)
    each = torch.full((len(x),), rest, dtype=torch.float64)
    return _Bent(around.change, rest, each, total), _Reach(around.moved, None, slope * around.slope)


def _entry_moves(e: _Reach, z: Tensor, total: float) -> Tensor:
    moved = torch.full_like(z, total) if math.isfinite(total) else torch.full_like(z, math.inf)
    if e.entries is not None:
        moved = torch.minimum(moved, e.entries.reshape(z.shape))
    if e.rows is not None:
        moved = torch.minimum(moved, e.rows.reshape(*z.shape[:-1], 1))
    return moved


def _row_moves(e: _Reach, z: Tensor, total: float) -> Tensor:
    rows = torch.full(z.shape[:-1], total, dtype=z.dtype)
    return rows if e.rows is None else torch.minimum(rows, e.rows.reshape(z.shape[:-1]))


def _length(each: Tensor, ratios: tuple[Tensor, Tensor], total: float) -> float:
    """The length of remainders of moves whose squares add up to `total²` at most, from bounds on each and on their ratios."""
    linear, square = ratios
    bounds = [float(each.norm()), float(linear.max()) * total, float(square.max()) * total**2]
    return min((b for b in bounds if b == b), default=math.inf)


def _through(node: Piece, entering: list[_Reach], graph: Pieces, n: int) -> _Reach:
    """A linear node, as far as it treats tokens as rows."""
    if node.kind == "pick" or any(e.rows is None and e.slope == math.inf for e in entering):
        return _Reach(None)
    c, name, shape = node.constant, node.name, node.shape
    first = entering[0]
    came = graph.nodes[node.inputs[0]].shape
    if name in ("mm", "addmm") and isinstance(c, Tensor):
        size = float(torch.linalg.matrix_norm(c.double(), 2)) * _UP
        columns = c.double().norm(dim=0) * _UP
        if first.rows is None:
            return _Reach(None, None, first.slope * size)
        return _Reach(first.rows * size, first.rows[:, None] * columns, first.slope * size)
    if name in ("mul", "div") and c is not None and len(node.inputs) == 1 and came == shape:
        factor = torch.as_tensor(c, dtype=torch.float64).abs()
        size = float(factor.max())
        entries = None if first.entries is None else (first.entries.reshape(shape) * factor)
        return _Reach(None if first.rows is None else first.rows * size, entries, first.slope * size)
    if name in SAME_ROWS and all(_same_rows(node, graph.nodes[j].shape, n) for j in node.inputs):
        slope = sum(e.slope for e in entering)
        known = all(e.rows is not None for e in entering)
        rows = torch.stack([e.rows for e in entering if e.rows is not None]).sum(0) if known else None
        parts = [e.entries for e in entering if e.entries is not None]
        entries = torch.stack([p.reshape(shape) for p in parts]).sum(0) if len(parts) == len(entering) else None
        return _Reach(rows, entries, slope)
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


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b
