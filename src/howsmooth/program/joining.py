"""Norms and scalar functions that a function spells out in several operations, put together again: known by their values."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.maps.norms import LayerNorm
from howsmooth.maps.scalars import known_scalar
from howsmooth.program.pieces import Piece, Pieces, normalised
from howsmooth.program.sides import norm_of
from howsmooth.program.stretch import agree


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
