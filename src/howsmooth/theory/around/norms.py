"""Norms of the derivatives of a graph at an input, from products, each certified once."""

import math
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.kinds.kind import check_softmax
from howsmooth.maps import Attention, AutodiffJacobian
from howsmooth.program.pieces import Piece, Pieces
from howsmooth.spectral import DenseSVD, GolubKahan, Weighted, small
from howsmooth.spectral.operator import Operator, Restricted
from howsmooth.theory.around.attention import AroundAttention
from howsmooth.theory.around.pieces import LINEAR, ROW_RULES, SAME_ROWS, MatrixRule, rule, unknown
from howsmooth.theory.upper import Upper

_PAIRS = 12  # nodes that are not linear up to which every two of them have a norm of their own
_WIDTH = 0.1  # of the interval of norms that are multiplied by a change


@final
@dataclass(eq=False)
class Certified:
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
        between = [w for w in self._stations() if first < w < last]
        for a, b in zip([first, *between], [*between, last], strict=True):
            size *= self._norm(a, b, None)
        return size * self._norm(last, v, ends)

    def _stations(self) -> list[int]:
        """Waists far enough apart that a norm between two of them is worth its price: one for every attention layer or so."""
        behind = [i for i in self.bends if self.graph.nodes[i].opaque is not None]
        return [w for i in behind if (w := next((w for w in self.waists if w > i), None)) is not None]

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
