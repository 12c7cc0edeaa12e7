"""Bounds around an input for functions of any size: blocks and models, by certified norms of products alone.

With `F_v` the derivative of what enters node `v` and `G_v` that of the output by what leaves it,

    D_Y f − D_X f = Σ_v G_v(X) (D_v(Y) − D_v(X)) F_v(Y),    f(Y) − f(X) = D_X f (Y − X) + Σ_v G_v(X) e_v,

so residual streams are never taken apart: every norm is that of a derivative at `X`, from products, and certified once. Proofs:
docs/explanation/around-blocks.md §4.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.kinds.kind import check_softmax
from howsmooth.maps import Attention, AutodiffJacobian
from howsmooth.program.pieces import Piece, Pieces
from howsmooth.spectral import DenseSVD, GolubKahan, Weighted, small
from howsmooth.spectral.operator import Operator, Restricted
from howsmooth.theory.around.attention import Around, AroundAttention, Neighbourhood
from howsmooth.theory.around.graph import Derivatives, NearNodes, Reach, spread
from howsmooth.theory.around.pieces import LINEAR, ROW_RULES, SAME_ROWS, Bend, Entered, MatrixRule, rule, unknown
from howsmooth.theory.upper import Upper, lengths

_PAIRS = 12  # nodes that are not linear up to which every two of them have a norm of their own
_WIDTH = 0.1  # of the interval of norms that are multiplied by a change


@final
@dataclass(eq=False)
class Certified(Derivatives):
    """Norms of derivatives of a graph at an input, each certified once and kept. tokens: the positions that may move."""

    graph: Pieces
    x: Float[Tensor, "n d"]
    tokens: tuple[int, ...] | None = None
    delta: float = 1e-6
    seed: int = 0
    norm: float | None = None  # of the derivative of the whole, where it is known
    values: list[Tensor] = field(init=False)
    bends: list[int] = field(init=False)
    used: int = 0
    _kept: dict[tuple[int, int], float] = field(default_factory=dict)
    _slopes: list[dict[int, Tensor]] | None = None
    _layers: dict[int, AroundAttention] = field(default_factory=dict)

    def __post_init__(self):
        with torch.no_grad():
            self.values = self.graph.values(self.x)
        self.bends = [i for i, node in enumerate(self.graph.nodes) if node.kind not in LINEAR]
        for i in self.bends:
            check_known(self.graph.nodes[i])
        crossed = [False] * len(self.graph.nodes)  # by a way around
        for k, node in enumerate(self.graph.nodes):
            for j in node.inputs:
                for i in range(j + 1, k):
                    crossed[i] = True
        self.spread_out = {i for k in self.bends if self.graph.nodes[k].scalar is not None for i in self._matrix_before(k)}
        # every way from the input to the output goes through these
        self.waists = [i for i, node in enumerate(self.graph.nodes) if not crossed[i] and node.kind != "pick"]

    def _matrix_before(self, i: int) -> list[int]:
        """The matrix that makes what enters a node, through changes of shape alone."""
        nodes, i = self.graph.nodes, self.graph.nodes[i].inputs[0]
        while i not in self.bends and nodes[i].name in SAME_ROWS and len(nodes[i].inputs) == 1:
            i = nodes[i].inputs[0]
        return [i] if isinstance(ROW_RULES.get(nodes[i].name), MatrixRule) and nodes[i].constant is not None else []

    @property
    def confidence(self) -> float:
        """Of all norms together."""
        further = sum(layer.risk - self.delta for layer in self._layers.values())
        return max(0.0, 1 - self.used * self.delta - further)

    def into(self, v: int) -> float:
        """`‖F_v(X)‖`, by the tokens that may move."""
        return self._norm(0, v, self._entering(v))

    def out_of(self, u: int) -> float:
        """`‖G_u(X)‖`."""
        return self._norm(u, self.graph.output, None)

    def upto(self, v: int) -> float:
        """From the input to what leaves `v`."""
        return self._norm(0, v, None)

    def reaching(self, u: int, v: int) -> float:
        """From what leaves `u` to what leaves `v`."""
        if not self._leads(u, v):
            return 0.0
        return self._norm(u, v, None) if len(self.bends) <= _PAIRS else self._chained(u, v, None)

    def between(self, u: int, v: int) -> float:
        """From what leaves `u` to what enters `v`; nothing where no way leads there."""
        if not self._leads(u, v):
            return 0.0
        return self._norm(u, v, self._entering(v)) if len(self.bends) <= _PAIRS else self._chained(u, v, self._entering(v))

    def _chained(self, u: int, v: int, ends: tuple[int, ...] | None) -> float:
        """A norm between nodes from norms between waists, multiplied: fewer of them, and larger."""
        first = next((w for w in self.waists if w >= u), None)
        last = next((w for w in reversed(self.waists) if w <= (v if ends is None else min(ends))), None)
        if first is None or last is None or first >= last:
            return self._norm(u, v, ends)
        size = self._norm(u, first, None)
        # waists far enough apart that a norm between two of them is worth its price: one for every attention layer or so
        behind = (i for i in self.bends if self.graph.nodes[i].opaque is not None)
        between = [w for i in behind if (w := next((w for w in self.waists if w > i), last)) < last and w > first]
        for a, b in zip([first, *between], [*between, last], strict=True):
            size *= self._norm(a, b, None)
        return size * self._norm(last, v, ends)

    def attention(self, node: Piece, x: Tensor) -> AroundAttention:
        """Bounds around what enters an attention layer."""
        if id(node) not in self._layers:
            self.used += 1
            tokens = self.tokens if len(self.graph.nodes) == 2 else None
            self._layers[id(node)] = AroundAttention(
                node.opaque, x, tokens=tokens, delta=self.delta, seed=self.seed + self.used
            )
        return self._layers[id(node)]

    def weighted(self, v: int, turn: Tensor) -> tuple[float, float]:
        """`‖√C F_v(X)‖` and `‖G_v(X) √C‖`, `C` diagonal."""
        if not bool(turn.isfinite().all()):
            return math.inf, math.inf
        root = turn.sqrt()
        most = float(root.max())
        if most == 0:
            return 0.0, 0.0
        into = self._solve(0, self._entering(v), _WIDTH, left=root)
        out = self._solve(v, (self.graph.output,), _WIDTH, right=root)
        return min(into, most * self.into(v)), min(out, most * self.out_of(v))

    def whole(self) -> float:
        """`‖D_X f‖`, by the tokens that may move."""
        return self._norm(0, self.graph.output, None, width=0.02) if self.norm is None else self.norm

    def gradients(self) -> list[dict[int, Tensor]]:
        """Of every output, by the input and by what leaves each node that is not linear."""
        if self._slopes is None:
            with torch.enable_grad():
                x = self.x.detach().clone().requires_grad_()
                values = self.graph.values(x)
                keys = [0, *self.bends]
                out = values[self.graph.output].flatten()
                leaves = [values[i] for i in keys]
                found = [torch.autograd.grad(z, leaves, retain_graph=True, materialize_grads=True) for z in out]
            self._slopes = [dict(zip(keys, f, strict=True)) for f in found]
        return self._slopes

    def entered(self, i: int, near: NearNodes, area: Neighbourhood) -> list[Entered]:
        inputs, far = self.graph.nodes[i].inputs, area.far
        entering = [near.reach[j] for j in inputs]
        total = Upper(self.into(i)) * far + _total(near.bends[u].rest * self.between(u, i) for u in near.bends)
        if len(entering) == 1 and entering[0].rows is not None:
            total = total.min(entering[0].rows.length())
        at, totals = [self.values[j] for j in inputs], [total] * len(inputs)
        if len({t.shape for t in at}) > 1:  # a small factor moves less than both together
            totals = [t.min(self._length_moved(near, j, far)) for t, j in zip(totals, inputs, strict=True)]
        found = []
        for e, z, most in zip(entering, at, totals, strict=True):
            entries, rows = Upper(torch.full_like(z, float(most))), Upper(z.new_full(z.shape[:-1], float(most)))
            if e.entries is not None:
                entries = entries.min(e.entries.value.reshape(z.shape))
            if e.rows is not None:
                own = e.rows.value.reshape(z.shape[:-1])
                entries, rows = entries.min(own[..., None].expand(z.shape)), rows.min(own)
            found.append(Entered(z, entries, rows, total, e.slope))
        return found

    def bend(self, i: int, entered: list[Entered]) -> Bend:
        node, first = self.graph.nodes[i], entered[0]
        if not isinstance(node.opaque, Attention):
            return super().bend(i, entered)
        x, none = first.value.reshape(-1, first.value.shape[-1]), Upper(math.inf)
        r, total = first.rows.value.flatten(), float(first.total)
        if not bool(r.isfinite().all()):
            return Bend(none, none, none, none)
        around = self.attention(node, x).within(Neighbourhood(x, r, min(total, float(Upper(r).length()))))
        rest = Upper(around.rest).min(Upper(around.change) * total).min(Upper(around.centre) * total + around.moved_total)
        return Bend(Upper(around.change), rest, rest, first.slope * around.slope, rows=Upper(around.moved))

    def reach(self, i: int, near: NearNodes, area: Neighbourhood) -> Reach:
        node = self.graph.nodes[i]
        entering = [near.reach[j] for j in node.inputs]
        if i in self.bends:
            bend = near.bends[i]
            known = isinstance(node.opaque, Attention) or entering[0].rows is not None
            return Reach(bend.rows if known else None, bend.entries, bend.slope)
        if i in self.spread_out and entering[0].rows is not None:
            # entries behind a matrix move by its columns' lengths times how far a row moves: worth a norm of its own
            total = self._length_moved(near, node.inputs[0], area.far)
            entering = [replace(entering[0], rows=entering[0].rows.min(total))]
        return _through(node, entering, self.graph, len(area.point))

    def moved(self, near: NearNodes, area: Neighbourhood) -> float:
        if len(self.graph.nodes) == 2:
            return around_graph(self, area).moved_total
        total = Upper(self.whole()) * area.far + _total(near.bends[v].rest * self.out_of(v) for v in self.bends)
        rows = near.reach[self.graph.output].rows  # to first order, and what the nodes add beyond it; or token by token
        return float(total if rows is None else total.min(rows.length()))

    def changes(self, near: NearNodes, area: Neighbourhood) -> Float[Tensor, " outputs"]:
        changes = []  # of every output: its own gradient, and what is beyond it
        for by_node in self.gradients():
            g = Upper(by_node[0].reshape(len(area.point), -1).norm(dim=-1)).raised(by_node[0].numel())
            change = (g * area.radii).sum().min(g.length() * area.far)
            for v in self.bends:
                node, bend, weight = self.graph.nodes[v], near.bends[v], by_node[v]
                length = bend.rest * Upper(float(lengths(weight.flatten()))).raised(weight.numel())
                if not isinstance(node.opaque, Attention):
                    length = length.min(rule(node).against(weight, bend))
                change = change + length
            changes.append(float(change))
        return torch.tensor(changes, dtype=torch.float64)

    def _length_moved(self, near: NearNodes, j: int, far: float) -> Upper:
        """How far what leaves a node can move, in length."""
        return Upper(self.upto(j)) * far + _total(near.bends[u].rest * self.reaching(u, j) for u in near.bends if u <= j)

    def _entering(self, v: int) -> tuple[int, ...]:
        return self.graph.nodes[v].inputs

    def _leads(self, u: int, v: int) -> bool:
        reached = {u}
        for i in range(u + 1, v + 1):
            if reached.intersection(self.graph.nodes[i].inputs):
                reached.add(i)
        return v in reached

    def _norm(self, u: int, v: int, ends: tuple[int, ...] | None, width: float = _WIDTH) -> float:
        """From what leaves `u` to what leaves `v`, or to what `ends` give."""
        key = (u, v if ends is None else -v - 1)
        if key not in self._kept:
            targets = (v,) if ends is None else ends
            self._kept[key] = 1.0 if targets == (u,) and not (u == 0 and self.tokens) else self._solve(u, targets, width)
        return self._kept[key]

    def _solve(
        self, u: int, targets: tuple[int, ...], width: float, left: Tensor | None = None, right: Tensor | None = None
    ) -> float:
        """left, right: weights of what comes out and of what goes in."""
        until = max(targets)

        def f(t: Tensor) -> Tensor:
            values = self.graph.values(t if u == 0 else self.x, {u: t}, self.values, until)
            return torch.cat([values[k].flatten() for k in dict.fromkeys(targets)])

        J: Operator = AutodiffJacobian(f, self.values[u], batched=False, checked=False)
        if left is not None or right is not None:
            one = torch.ones(1, dtype=torch.float64)
            rows = one if left is None else left.reshape(1, *J.out_shape)
            J = Weighted(J, rows, one if right is None else right.reshape(1, *J.in_shape))
        if u == 0 and self.tokens is not None:
            J = Restricted(J, self.tokens)
        repeated = math.sqrt(max(targets.count(k) for k in targets))
        if small(J):
            upper, units = DenseSVD().solve(J, 1e-3, None, [self.seed])[0].upper, 2**22
        else:
            self.used += 1
            solved = GolubKahan(delta=self.delta).solve(J, 0.02, width, [self.seed + self.used])[0]
            upper, units = solved.upper, 2**32  # products of a graph are rounded, but not knowing a random start
        return float(Upper(upper * repeated).raised(units))


def check_known(node: Piece) -> None:
    """Refuse what no bound here is known for."""
    if isinstance(node.opaque, Attention):
        check_softmax(node.opaque.kind, "a bound around an input")
    elif not rule(node).bounded:
        raise unknown(node)


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
    total = min(certified.moved(near, neighbourhood), float(Upper(neighbourhood.far) * slope))
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


def _through(node: Piece, entering: list[Reach], graph: Pieces, n: int) -> Reach:
    """A linear node, as far as it treats tokens as rows."""
    first, alone = entering[0], len(node.inputs) == 1
    if any(e.rows is None and float(e.slope) == math.inf for e in entering):
        return Reach(None)
    if alone and node.name in ROW_RULES and ROW_RULES[node.name].knows(node, graph.nodes[node.inputs[0]].shape):
        return Reach(*ROW_RULES[node.name].after(node, first.rows, first.entries, first.slope))
    if node.name in SAME_ROWS and all(_same_rows(node, graph.nodes[j].shape, n) for j in node.inputs):
        rows = [e.rows for e in entering if e.rows is not None]
        entries = [e.entries.map(lambda t: t.reshape(node.shape)) for e in entering if e.entries is not None]
        rows_after, entries_after = (_total(t) if len(t) == len(entering) else None for t in (rows, entries))
        return Reach(rows_after, entries_after, _total(e.slope for e in entering))
    return Reach(None)


def _same_rows(node: Piece, before: tuple[int, ...], n: int) -> bool:
    """Whether a node leaves n tokens in their order, whatever axes of length one stand beside them."""
    rows = math.prod(before[:-1]), math.prod(node.shape[:-1])
    if not (len(before) > 1 and before[-1:] == node.shape[-1:] and rows == (n, n)):
        return False
    if node.name in ("add", "sub"):
        return True
    index = torch.arange(math.prod(before), dtype=torch.float64).reshape(before)
    return torch.equal(node.run(index).flatten(), index.flatten())
