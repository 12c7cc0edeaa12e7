"""Where the token streams of a recorded run begin: the stream is what reaches the first attention."""

from collections.abc import Iterable

from torch.fx import Node

from howsmooth.program.calls import AttentionCall, find_calls, is_whole, whole_call
from howsmooth.program.flow import Flow
from howsmooth.program.nodes import is_float, name, shape
from howsmooth.program.operations import TABLES
from howsmooth.program.tracing import Program

_ROUNDS = 3  # of looking for streams that begin with a parameter


def token_begins(program: Program) -> list[Node]:
    """Floating-point arguments with a token axis, and what tables of embeddings give."""
    given = [n for n in program.inputs if is_float(n)]
    found = [n for n in given if len(shape(n) or ()) >= 3]
    found += [n for n in program.nodes if n.op == "call_function" and name(n) in TABLES and len(shape(n) or ()) >= 3]
    return found or given


def stream_of(program: Program) -> Flow:
    """What moves with the tokens that reach the first attention: no condition, no table of positions, no time."""
    begins = token_begins(program)
    flow = _near(program, Flow(program, begins))
    known: set[Node] = set()
    for _ in range(_ROUNDS):
        calls = [whole_call(n) for n in flow.nodes if is_whole(n)]
        more = _roots(flow, calls)
        if more <= known:
            break
        known |= more
        flow = _near(program, Flow(program, (*flow.begins, *sorted(known, key=flow.index.__getitem__))))
    return flow


def every_stream(program: Program, flow: Flow) -> Flow:
    """What moves with any tokens, those that only queries or only contexts are made of among them."""
    wide = Flow(program, (*token_begins(program), *flow.begins))
    for _ in range(_ROUNDS):
        more = _roots(wide, find_calls(wide))
        if more <= set(wide.begins):
            break
        wide = Flow(program, (*wide.begins, *sorted(more, key=wide.index.__getitem__)))
    return wide


def _near(program: Program, flow: Flow) -> Flow:
    """The flow from those begins alone that reach the first attention."""
    calls = find_calls(flow)
    near = [b for b in flow.begins if calls and flow.up(*calls[0].operands) & flow.bit(b)]
    return Flow(program, near) if near else flow


def _roots(flow: Flow, calls: Iterable[AttentionCall]) -> set[Node]:
    """Where operands that no begin reaches come from, as learned queries do: what is projected, back to its start."""
    found: set[Node] = set()
    for n in (n for call in calls for n in call.operands if not flow.live(n)):
        while (first := next((m for m in n.all_input_nodes if is_float(m)), None)) is not None:
            n = first
        found.add(n)
    return found
