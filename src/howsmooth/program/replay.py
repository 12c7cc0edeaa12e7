"""A part of a recorded run as a function of what enters it, in float64, at the weights of the moment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from howsmooth.errors import BadFunctionError
from howsmooth.program.flow import Flow
from howsmooth.program.nodes import name, value
from howsmooth.program.operations import CASTS, JUMPS
from howsmooth.program.tracing import Program

_NARROW = (torch.float16, torch.bfloat16, torch.float32)
# what another layout in memory cannot be a view of, it can be a copy of
_INSTEAD: dict[Any, Any] = {
    op.default: torch.ops.aten.reshape.default for op in (torch.ops.aten.view, torch.ops.aten._unsafe_view)
}

Segment = Callable[..., list[Tensor]]


def segment(
    program: Program,
    flow: Flow,
    enter: Sequence[Node],
    leave: Sequence[Node],
    through: Sequence[Node] = (),
    *,
    check: bool = True,
) -> tuple[Segment, list[Tensor]]:
    """The function between some nodes, and what enters it in the recording.

    What is not on the way stays as it is in the recording, choices made from the input among it. through: nodes that all ways
    lead through.  check: refuse operations that have no derivative.
    """
    ends = [n for n in leave if n not in enter]
    path = flow.between(enter, ends) if ends else []
    if through:
        inside = {*flow.between(enter, through), *flow.between(through, leave)}
        path = [n for n in path if n in inside]
    if check:
        check_smooth(program, path, flow)
    kept = values(program, ({m for n in path for m in n.all_input_nodes} | {*enter, *leave}) - set(path))

    def f(*points: Tensor) -> list[Tensor]:
        env = dict(zip(enter, points, strict=True))

        def known(n: Node) -> Any:
            return env[n] if n in env else kept[n]

        for n in path:
            env[n] = _call(n, known)
        return [known(n) for n in leave]

    return f, [kept[n].detach().clone() for n in enter]


def check_smooth(program: Program, path: Sequence[Node], flow: Flow) -> None:
    """Refuse nodes that round what moves, or whose operation is not one of torch's own with a derivative."""
    for n in path:
        schema = getattr(n.target, "_schema", None)
        quantized = schema is not None and schema.name.startswith("quantized")
        if name(n) in JUMPS or n.kwargs.get("rounding_mode") is not None or quantized:
            raise BadFunctionError(
                f"expected operations with a derivative, got {name(n)} in {_place(program, n)}, which rounds; "
                "measure a part without it"
            )
        if any(not flow.live(m) and _rounded(m, flow) for m in n.all_input_nodes):
            raise BadFunctionError(
                f"expected operations with a derivative, got a cast to integers before {name(n)} in {_place(program, n)}; "
                "measure a part without it"
            )


def _place(program: Program, n: Node) -> str:
    """The module that made a node."""
    inside = [s for s in program.scopes if s.holds(n) and s.path]
    return min(inside, key=len).path if inside else "the module"


def _rounded(n: Node, flow: Flow) -> bool:
    """Whether a frozen value is made of whole numbers that something moving was cast to."""
    todo, visited = [n], set[Node]()
    while todo:
        m = todo.pop()
        if m in visited or m.op != "call_function":
            continue
        visited.add(m)
        val = value(m)
        whole = isinstance(val, Tensor) and not val.is_floating_point() and val.dtype is not torch.bool
        moving = any(flow.live(i) for i in m.all_input_nodes)
        if moving and whole and name(m) in CASTS:
            return True
        if not moving:
            todo += m.all_input_nodes
    return False


@torch.no_grad()
def values(program: Program, wanted: set[Node]) -> dict[Node, Any]:
    """What some nodes give at the recording's input and today's weights, in float64; others are kept no longer than needed."""
    needed, todo = set[Node](), list(wanted)
    while todo:
        n = todo.pop()
        if n not in needed:
            needed.add(n)
            todo += n.all_input_nodes
    order = [n for n in program.nodes if n in needed]
    last = {m: n for n in order for m in n.all_input_nodes}
    given: dict[Node, Tensor] = dict(zip(program.inputs, program.tensors, strict=True))
    weights = program.weights_now()
    env: dict[Node, Any] = {}
    for n in order:
        if n.op == "placeholder":
            env[n] = _wide(weights[program.weights[n]].detach() if n in program.weights else given[n])
        elif n.op == "get_attr":
            env[n] = _wide(getattr(program.code, str(n.target)))
        else:
            env[n] = _call(n, env.__getitem__)
        for m in n.all_input_nodes:
            if last[m] is n and m not in wanted:
                env.pop(m, None)
    return {n: env[n] for n in wanted}


def _wide(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t


def _call(n: Node, known: Callable[[Node], Any]) -> Any:
    """What a node gives, casts to narrower floating-point numbers left out, and what is detached moving like the rest."""
    args: tuple[Any, ...] = map_arg(n.args, known)
    kwargs: Mapping[str, Any] = map_arg(dict(n.kwargs), known)
    if name(n) in ("detach", "alias"):
        return args[0]
    wide_args, wide_kwargs = tree_map(
        lambda t: torch.float64 if isinstance(t, torch.dtype) and t in _NARROW else t, (args, kwargs)
    )
    return _INSTEAD.get(n.target, n.target)(*wide_args, **wide_kwargs)
