"""Where the token streams of a recorded run begin: the stream is what reaches the first attention."""

from collections.abc import Iterable

from torch.fx import Node

from howsmooth.program.calls import find_calls, is_whole, lonely_operands, whole_call
from howsmooth.program.flow import Flow
from howsmooth.program.operations import ADDS, EMBEDDINGS, dependents, is_float, name, shape, walk
from howsmooth.program.sites import AttentionSites, Group
from howsmooth.program.tracing import Program

_ROUNDS = 3  # of looking for streams that begin with a parameter


def token_begins(program: Program) -> list[Node]:
    """Floating-point arguments with a token axis, and what tables of embeddings give for arguments; not those of places."""
    given = [n for n in program.inputs if is_float(n)]
    moving, tables = dependents(program.nodes, program.inputs), [n for n in program.nodes if name(n) in EMBEDDINGS]
    return [n for n in (*given, *(n for n in tables if n in moving)) if len(shape(n) or ()) >= 3] or given


def stream_of(program: Program) -> Flow:
    """What moves with the tokens that reach the first attention: no condition, no context, no table of positions, no time."""
    wide = _with_learned(program, token_begins(program))
    sites = AttentionSites(program, wide)
    if sites.groups:
        group = sites.groups[0]
        near = [b for b in wide.begins if any(sites.near(n) & wide.bit(b) for n in group.enter)]
        added = wide.up(*_added(wide, group))
        return Flow(program, [b for b in near if added & wide.bit(b)] or near)
    given = set(token_begins(program))
    for call in sites.calls:
        near = [b for b in wide.begins if b in given and any(sites.near(n) & wide.bit(b) for n in call.queries)]
        if near:
            return Flow(program, near)
    flow = Flow(program, token_begins(program))
    calls = find_calls(flow)
    near = [b for b in flow.begins if calls and flow.up(*calls[0].operands) & flow.bit(b)]
    return Flow(program, near) if near else flow


def every_stream(program: Program, flow: Flow) -> Flow:
    """What moves with any tokens, those that only queries or only contexts are made of among them."""
    return _with_learned(program, (*token_begins(program), *flow.begins))


def _with_learned(program: Program, begins: Iterable[Node]) -> Flow:
    """The flow from some begins and from the parameters that queries, keys or values are made of, as learned queries are."""
    flow = Flow(program, begins)
    for _ in range(_ROUNDS):
        more = _roots(flow)
        if more <= set(flow.begins):
            break
        flow = Flow(program, (*flow.begins, *sorted(more, key=flow.index.__getitem__)))
    return flow


def _added(flow: Flow, group: Group) -> list[Node]:
    """What an attention's output is added to."""
    own = flow.down(*group.sources)

    def others(n: Node) -> list[Node]:
        sums = name(n) in ADDS and n not in group.outputs
        return [m for m in flow.feeds(n) if sums and not own & flow.bit(m)]

    behind = walk(group.outputs, lambda n: [] if others(n) else flow.users(n))
    return [m for n in behind for m in others(n)]


def _roots(flow: Flow) -> set[Node]:
    """Where operands of attention that no begin reaches come from: what is projected, back to its start."""
    found: set[Node] = set()
    for n in flow.nodes:
        if n.op != "call_function":
            continue
        operands = whole_call(n).operands if is_whole(n) else lonely_operands(flow, n)
        for m in operands:
            while not flow.live(m) and (first := next((f for f in m.all_input_nodes if is_float(f)), None)) is not None:
                m = first
            if not flow.live(m):
                found.add(m)
    return found
