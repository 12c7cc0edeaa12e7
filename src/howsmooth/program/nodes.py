"""Names and facts of nodes: which aten operation a node is, what it reads, what its value looks like."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from howsmooth.program.operations import SHAPE_ALONE

LIKE = {"type_as", "view_as", "reshape_as", "expand_as"}
RANDOM = torch.Tag.nondeterministic_seeded
_DROP = {"dropout", "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "lstm", "gru", "rnn_tanh",
         "rnn_relu"}  # fmt: skip


def order(n: Node) -> int:
    """The place of a node in the recording; nodes that came later have the place of what they replace."""
    return n.meta["order"]


def name(n: Node) -> str:
    """The operation without namespace and overload, as in `add`; the target of others."""
    schema = getattr(n.target, "_schema", None)
    return str(n.target) if n.op != "call_function" else schema.name.partition("::")[2] if schema else n.target.__name__  # pyright: ignore


def value(n: Node) -> Any:
    """What the node gave in the recording, in shape, dtype and device."""
    return n.meta.get("val")


def shape(n: Node) -> tuple[int, ...] | None:
    """The shape of the node's tensor; nothing where it is none."""
    val = value(n)
    return tuple(val.shape) if isinstance(val, Tensor) else None


def is_float(n: Node) -> bool:
    """Whether the node is a floating-point tensor, or holds some."""
    val = value(n)
    parts = val if isinstance(val, list | tuple) else [val]
    return any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in parts)


def reads(n: Node) -> list[Node]:
    """The nodes whose numbers a node reads; what only gives it a shape or a dtype is left out."""
    alike = getattr(n.target, "_overloadname", "") == "other" if name(n) == "to" else name(n) in LIKE
    return [m for m in n.all_input_nodes if not alike or m is n.args[0]]


def carried(nodes: Sequence[Node]) -> list[list[Node]]:
    """Node by node, those through which what moves reaches it: none where it is no floating-point tensor, or a shape alone."""
    return [reads(n) if is_float(n) and name(n) not in SHAPE_ALONE else [] for n in nodes]


def is_random(n: Node) -> bool:
    """Whether two runs of the node differ: random numbers, but for dropout that drops nothing."""
    if n.op != "call_function" or RANDOM not in getattr(n.target, "tags", ()):
        return False
    if name(n) == "scaled_dot_product_attention":
        return bool(_given(n, "dropout_p"))
    drops = _given(n, "p") or _given(n, "dropout")
    return bool(drops and _given(n, "train")) if name(n) in _DROP else True


def _given(n: Node, argument: str) -> Any:
    """An argument of an operation by its name, or its default; nothing where there is none of that name."""
    for i, known in enumerate(n.target._schema.arguments):  # pyright: ignore
        if known.name == argument:
            return n.args[i] if i < len(n.args) else n.kwargs.get(argument, known.default_value)
    return None


def writes(n: Node) -> Node | None:
    """The node whose memory this one writes into."""
    schema = getattr(n.target, "_schema", None)
    if n.op != "call_function" or schema is None or not schema.is_mutable:
        return None
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found = n.args[i] if i < len(n.args) else n.kwargs.get(argument.name)
            return found if isinstance(found, Node) else None
    return None


def is_view(n: Node) -> bool:
    """Whether the node may share the memory of its first argument."""
    schema = getattr(n.target, "_schema", None)
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node):
        return False
    return name(n) == "getitem" or (schema is not None and any(r.alias_info is not None for r in schema.returns))
