"""A recorded graph made plain: no write in place, equal operations on equal inputs once, a sum and a product apart.

Each write in place becomes a new value of every tensor that shares the memory and is read later.
"""

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from howsmooth.errors import BadFunctionError
from howsmooth.program.attention import unify
from howsmooth.program.operations import name, order, value, writes

FLEX = math_attention.__name__
_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")
_SUMS = {"addmm": torch.ops.aten.mm.default, "baddbmm": torch.ops.aten.bmm.default}


def plain(code: GraphModule, inputs: list[Tensor]) -> None:
    """Make a recorded graph one without writes in place, with attention of one form where it is one operation."""
    _split_sums(code)
    unify(code)
    _replace_flex(code)
    _without_writes(code, inputs)
    _merge(code)


def _split_sums(code: GraphModule) -> None:
    """Make a sum and a product of each `addmm` and the like, so that a residual in it is a node of its own."""
    graph = code.graph
    for n in list(graph.nodes):
        if n.op != "call_function":
            continue
        n.meta["mode"] = getattr(n.target, "__name__", "") in _MODES
        if name(n) not in _SUMS or len(value(n.args[0]).shape) < 2:
            continue
        beta, alpha = n.kwargs.get("beta", 1), n.kwargs.get("alpha", 1)
        with graph.inserting_before(n):
            product = graph.call_function(_SUMS[name(n)], n.args[1:3])
            if beta == 0:  # what would be added may be anything
                first = total = graph.call_function(torch.ops.aten.mul.Tensor, (product, alpha))
            else:
                first = n.args[0] if beta == 1 else graph.call_function(torch.ops.aten.mul.Tensor, (n.args[0], beta))
                total = graph.call_function(torch.ops.aten.add.Tensor, (first, product), {} if alpha == 1 else {"alpha": alpha})
        for new in (product, first, total):
            new.meta.setdefault("order", order(n))
            new.meta.setdefault("val", value(n))
        n.replace_all_uses_with(total)
        graph.erase_node(n)


def _replace_flex(code: GraphModule) -> None:
    """Give every call of flex_attention torch's dense formula as its target: as one operation it lacks derivatives on a CPU.

    It gives the outputs `softmax(score_mod(scale Q Kᵀ, b, h, i, j)) V`, and, to base 2, the logarithms of the sums and the
    largest logits.
    """
    found = [n for n in code.graph.nodes if n.op == "call_function" and name(n) == "flex_attention"]
    for n in found:
        n.target = math_attention
    for n in code.graph.nodes if found else ():
        if n.op == "call_function" and name(n) in ("view", "_unsafe_view") and isinstance(n.args[1], list | tuple):
            n.target = torch.ops.aten.reshape.default  # its outputs have another layout in memory


def _merge(code: GraphModule) -> None:
    """Make equal operations on equal inputs one node."""
    known: dict[Any, Node] = {}
    for n in list(code.graph.nodes):
        if n.op == "get_attr":
            key: Any = n.target
        elif n.op == "call_function" and not n.meta.get("mode"):
            key = (n.target, repr(n.args), repr(n.kwargs))
        else:
            continue
        if key in known:
            n.replace_all_uses_with(known[key])
            code.graph.erase_node(n)
        else:
            known[key] = n
    code.recompile()


# writes in place


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


def _without_writes(code: GraphModule, inputs: list[Tensor]) -> None:
    """Make every write in place a new value."""
    if not any(writes(n) is not None for n in code.graph.nodes):
        return
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
            shares = order(other) < order(n) and known is not None and known[0] == storage
            if shares and any(order(user) > order(n) for user in other.users):
                with graph.inserting_after(last):
                    last = graph.call_function(rewritten, (current(other), new, (*layouts.of[other][1], *part)))
                _like(last, other)
                last.meta["order"] = order(n)
                now[other] = last
        now[target] = now[n] = new
    for n in reversed(nodes):
        if writes(n) is not None:
            n.replace_all_uses_with(now[n])
            graph.erase_node(n)


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
