"""A function written down as a graph of operations: values, and as a map of tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from howsmooth.maps.attention import Attention
from howsmooth.maps.base import Composition, Map
from howsmooth.maps.jacobian import AutodiffJacobian
from howsmooth.maps.norms import LayerNorm, RMSNorm
from howsmooth.maps.scalars import Scalar, known_scalar
from howsmooth.program.sides import agree, norm_of

Kind = Literal["input", "linear", "pointwise", "product", "matrix product", "softmax", "norm", "opaque", "pick", "unknown"]


@dataclass(frozen=True, eq=False)
class Piece:
    """One operation. run: of what its references stand for, in order.  name: torch's, for people.  shape: of what it gives."""

    kind: Kind
    name: str
    inputs: tuple[int, ...]
    run: Callable[..., Any]
    shape: tuple[int, ...]
    eps: float = 0.0  # of a norm
    centred: bool = False  # of a norm
    scalar: Scalar | None = None  # of a pointwise function
    axis: int = -1  # of a softmax
    opaque: Any = None  # a layer that is taken whole
    alike: bool = False  # the same on every entry, with numbers for constants
    constant: Any = None  # of a linear node of one input: the matrix on its right, or what it is multiplied by


@final
@dataclass(frozen=True, eq=False)
class Pieces:
    """Operations in order, the first one the input, and which of them is the output.

    rounding: what a function that it was recorded from may differ by, as a part of the largest number on the way.
    """

    nodes: tuple[Piece, ...]
    output: int
    rounding: float = 1e-13

    def values(
        self, x: Tensor, given: Mapping[int, Tensor] | None = None, known: Sequence[Any] | None = None, until: int | None = None
    ) -> list[Any]:
        """What every node gives at `x`, up to `until`.

        given: values that stand for those of some nodes; known: values at `x`, which are used where nothing given is behind.
        """
        given = given or {}
        fresh = set(given)
        values: list[Any] = []
        for i, node in enumerate(self.nodes[: self.output + 1 if until is None else until + 1]):
            if i in given:
                values.append(given[i])
            elif node.kind == "input":
                values.append(x)
            elif known is not None and not fresh.intersection(node.inputs):
                values.append(known[i])
            else:
                values.append(node.run(*(values[j] for j in node.inputs)))
                fresh.add(i)
        return values

    def __call__(self, x: Tensor) -> Tensor:
        return self.values(x)[self.output]

    def reaching(self) -> list[bool]:
        """Which nodes the output depends on."""
        needed = [False] * len(self.nodes)
        needed[self.output] = True
        for i in range(self.output, -1, -1):
            if needed[i]:
                for j in self.nodes[i].inputs:
                    needed[j] = True
        return needed


@final
@dataclass(frozen=True, eq=False)
class PiecesMap(Map):
    """Pieces as a map of tokens, (n, d) of one length, in float64."""

    graph: Pieces

    @property
    def width(self) -> int:
        return self.graph.nodes[0].shape[1]

    @property
    def out_width(self) -> int:
        return self.graph.nodes[self.graph.output].shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def moved(self, device, dtype):
        return self

    def value(self, x):
        return torch.stack([self.graph(t).reshape(-1, self.out_width) for t in x])

    def linearize(self, x):
        jacobian = AutodiffJacobian(self.value, x, batched=True, checked=False)
        return jacobian.output, jacobian


def pruned(graph: Pieces) -> Pieces:
    """Without what the output does not depend on."""
    kept = [i for i, needed in enumerate(graph.reaching()) if needed or i == 0]
    place = {i: k for k, i in enumerate(kept)}
    nodes = tuple(replace(graph.nodes[i], inputs=tuple(place[j] for j in graph.nodes[i].inputs)) for i in kept)
    return replace(graph, nodes=nodes, output=place[graph.output])


def normalised(centred: bool, eps: float) -> Callable[[Tensor], Tensor]:
    def run(t: Tensor) -> Tensor:
        u = t - t.mean(-1, keepdim=True) if centred else t
        return u / (u.square().mean(-1, keepdim=True) + eps).sqrt()

    return run


def norm_pieces(
    name: str,
    before: int,
    first: int,
    shape: tuple[int, ...],
    centred: bool,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
) -> list[Piece]:
    """A norm itself, its weight and its bias. before: the place of what is normalised.  first: that of the first piece."""
    found = [Piece("norm", name, (before,), normalised(centred, eps), shape, eps=float(eps), centred=centred)]
    if weight is not None:
        found.append(Piece("linear", "mul", (first,), lambda t: t * weight, shape, constant=weight))
    if bias is not None:
        found.append(Piece("linear", "add", (first + len(found) - 1,), lambda t: t + bias, shape))
    return found


def pieces_of(f: Map, shape: tuple[int, ...]) -> Pieces | None:
    """A map of this package as a graph for tokens of that shape; nothing where its structure is not known."""
    if isinstance(f, PiecesMap):
        return f.graph
    nodes = _nodes_of(f, [Piece("input", "input", (), lambda: None, tuple(shape))])
    return None if nodes is None else Pieces(tuple(nodes), len(nodes) - 1)


def _nodes_of(f: Map, nodes: list[Piece]) -> list[Piece] | None:
    """The nodes of a map behind others, of whose last one it is a function."""
    last, n = len(nodes) - 1, nodes[-1].shape[0]
    if isinstance(f, Composition):
        inner = _nodes_of(f.inner, nodes)
        return None if inner is None else _nodes_of(f.outer, inner)
    if isinstance(f, Attention):
        layer = f.to(torch.float64)
        return [*nodes, Piece("opaque", "layer", (last,), lambda t: layer.value(t[None])[0], (n, f.out_width), opaque=layer)]
    if isinstance(f, LayerNorm | RMSNorm):
        weight, bias = f.weight.double(), None if f.bias is None else f.bias.double()
        return [*nodes, *norm_pieces("norm", last, len(nodes), (n, f.width), isinstance(f, LayerNorm), f.eps, weight, bias)]
    return None


# norms and scalar functions that a function spells out in several operations, known by their values


def joined(graph: Pieces) -> Pieces:
    """Norms and scalar functions that were spelled out, each in one node again."""
    nodes = list(graph.nodes)
    for i in range(len(nodes)):
        nodes[i] = _as_norm(nodes, i) or nodes[i]
    source: dict[int, int] = {}  # of what a node is a function of, entry by entry
    for i, node in enumerate(nodes):
        if node.alike and node.inputs:
            origins = {source.get(j, j) for j in node.inputs}
            if len(origins) == 1:
                source[i] = origins.pop()
    users: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for j in node.inputs:
            users.setdefault(j, []).append(i)
    for i, origin in source.items():
        leaves = i == graph.output or any(source.get(k) != origin for k in users.get(i, ()))
        if not leaves:
            continue
        inside = _between(nodes, i, origin)
        bent = [nodes[k].name for k in inside if nodes[k].kind != "linear"]
        if len(inside) > 1 and bent and "relu" not in bent:  # what has kinks is not known by its values
            run = _spelled(nodes, inside, origin, i)
            scalar = known_scalar(run)
            if scalar is not None:
                nodes[i] = replace(nodes[i], kind="pointwise", name=scalar.name, inputs=(origin,), run=run, scalar=scalar)
    return replace(graph, nodes=tuple(nodes))


def _between(nodes: list[Piece], end: int, origin: int) -> list[int]:
    """The nodes on the ways from `origin` to `end`, in order."""
    found: set[int] = set()
    open_ = [end]
    while open_:
        i = open_.pop()
        if i != origin and i not in found:
            found.add(i)
            open_ += nodes[i].inputs
    return sorted(found)


def _spelled(nodes: list[Piece], inside: list[int], origin: int, end: int) -> Callable[[Tensor], Tensor]:
    parts = [(k, nodes[k]) for k in inside]

    def run(t: Tensor) -> Tensor:
        values = {origin: t}
        for k, node in parts:
            values[k] = node.run(*(values[j] for j in node.inputs))
        return values[end]

    return run


def _as_norm(nodes: list[Piece], i: int) -> Piece | None:
    """`u · rsqrt(mean u² + eps)` or `u / sqrt(mean u² + eps)` over the last axis, whatever its parts are called."""
    node = nodes[i]
    if node.name not in ("mul", "div") or len(node.inputs) != 2 or len(node.shape) < 1:
        return None
    for u, s in (node.inputs, node.inputs[::-1]):
        if nodes[u].shape != node.shape or nodes[s].shape != (*node.shape[:-1], 1):
            continue
        inside = _between(nodes, s, u)
        if not inside or any(k < u for k in inside) or any(nodes[k].kind in ("input", "opaque") for k in inside):
            continue
        run = _spelled(nodes, [*inside, i], u, i)
        t = torch.randn(3, node.shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        try:
            found = norm_of(run, t)
        except (RuntimeError, IndexError):  # of what these rows are no input of
            continue
        if found is not None and found.bias is None and agree(found.weight, torch.ones_like(found.weight)):
            centred, eps = isinstance(found, LayerNorm), found.eps
            return replace(node, kind="norm", name="norm", inputs=(u,), run=normalised(centred, eps), eps=eps, centred=centred)
    return None
