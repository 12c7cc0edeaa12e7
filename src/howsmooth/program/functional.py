"""A graph without in-place writes: each becomes a new value of every tensor that shares the memory and is read later."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from howsmooth.errors import BadFunctionError
from howsmooth.program.nodes import name, order, writes


def rewritten(old: Tensor, new: Tensor, layout: tuple[Any, ...]) -> Tensor:
    """`old`, of which `new` overwrites the places that both have in memory; `layout` gives sizes, strides and offsets of both.

    >>> rewritten(torch.zeros(2, 3), torch.ones(2), ((2, 3), (3, 1), 0, (2,), (3,), 1))
    tensor([[0., 1., 0.],
            [0., 1., 0.]])
    """
    size, stride, start, part, step, begin = layout
    if not old.numel() or not new.numel():
        return old
    if (size, stride, start) == (part, step, begin):
        return new
    theirs, ours = _places(part, step, begin, new.device), _places(size, stride, start, new.device)
    where = torch.full((int(max(ours.max(), theirs.max())) + 1,), -1, device=new.device)
    where[theirs] = torch.arange(len(theirs), device=new.device)
    source = where[ours]
    mixed = torch.where(source >= 0, new.reshape(-1).to(old.dtype)[source.clamp_min(0)], old.reshape(-1))
    return mixed.reshape(size)


def _places(size: tuple[int, ...], stride: tuple[int, ...], start: int, device: torch.device) -> Tensor:
    """Where in memory each entry of a tensor is, in order."""
    at = torch.tensor(start, device=device)
    for count, step in zip(size, stride, strict=True):
        at = at[..., None] + torch.arange(count, device=device) * step
    return at.reshape(-1)


def functional(code: GraphModule, inputs: list[Tensor]) -> GraphModule:
    """The same function of its inputs, its graph without in-place writes."""
    if not any(writes(n) is not None for n in code.graph.nodes):
        return code
    layouts = _Layouts(code)
    with torch.no_grad():
        layouts.run(*(t.detach().clone() for t in inputs))
    nodes, graph = list(code.graph.nodes), code.graph
    now: dict[Node, Node] = {}  # what a tensor's node stands for after the writes so far

    def current(n: Node) -> Node:
        return now.get(n, n)

    for n in nodes:
        target = writes(n)
        n.args = map_arg(n.args, current)
        n.kwargs = map_arg(n.kwargs, current)
        if target is None:
            continue
        pure = _pure(n)
        with graph.inserting_after(n):
            new = graph.call_function(pure, n.args, {key: given for key, given in n.kwargs.items() if key != "out"})
        _like(new, n)
        storage, part = layouts.of[target]
        last = new
        for other in nodes:
            if other is target or other is n:
                continue
            known = layouts.of.get(other)
            if order(other) < order(n) and known is not None and known[0] == storage and _read_after(other, n):
                with graph.inserting_after(last):
                    last = graph.call_function(rewritten, (current(other), new, (*known[1], *part)))
                _like(last, other)
                last.meta["order"] = order(n)
                now[other] = last
        now[target] = now[n] = new
    for n in reversed(nodes):
        if writes(n) is not None:
            n.replace_all_uses_with(now[n])
            graph.erase_node(n)
    code.recompile()
    return code


def _read_after(n: Node, write: Node) -> bool:
    """Whether something later than a write reads the node."""
    return any(order(user) > order(write) for user in n.users)


def _like(new: Node, old: Node) -> None:
    """Give a node the facts of the one it stands for."""
    new.meta.update({key: old.meta[key] for key in ("val", "order") if key in old.meta})


def copied(old: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """What `old.copy_(new)` makes of `old`."""
    return new.to(old).expand(old.shape)


def _pure(n: Node) -> Any:
    """The operation that gives what an in-place one writes."""
    if name(n) == "copy_":
        return copied
    operator = name(n).startswith("__i")  # as in __iand__
    base, overload = f"__{name(n)[3:]}" if operator else name(n).removesuffix("_"), n.target._overloadname  # pyright: ignore
    packet = getattr(torch.ops.aten, base, None)
    found = getattr(packet, overload, None) if name(n).endswith("_") else _without_out(packet, n)
    if found is None:
        raise BadFunctionError(
            f"expected operations with a value of their own, got {n.target}, which writes in place; "
            "write x = f(x) instead of f_(x)"
        )
    return found


def _without_out(packet: Any, n: Node) -> Any:
    """The operation that returns what one with an argument `out` writes into it; nothing where there is none."""
    wanted = [(a.name, str(a.type)) for a in n.target._schema.arguments if a.name != "out"]  # pyright: ignore
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in found._schema.arguments] == wanted and isinstance(n.kwargs.get("out"), Node):
            return found
    return None


class _Layouts(Interpreter):
    """Runs a graph and notes where in memory each tensor is."""

    def __init__(self, code: GraphModule):
        super().__init__(code)
        self.of: dict[Node, tuple[int, tuple[Any, ...]]] = {}
        self._kept: list[Tensor] = []  # memory that is given back could be given out again

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self._kept.append(result)
            layout = tuple(result.shape), tuple(result.stride()), result.storage_offset()
            self.of[n] = result.untyped_storage().data_ptr(), layout
        return result
