"""Which nodes a named map of a layer begins and ends at."""

import functools
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch.fx import Node

from howsmooth.errors import BadInputError
from howsmooth.program.attention import attention
from howsmooth.program.blocks import Layer
from howsmooth.program.calls import AttentionCall
from howsmooth.program.layers import Layers, in_order
from howsmooth.program.operations import JOINS, MATRIX, NORMALISES, PADS, SELECTS, SHAPE, SPLITS, name, shape
from howsmooth.program.replay import Way
from howsmooth.program.sites import AttentionSites, Group
from howsmooth.program.tracing import Flow

MapName = Literal["attention", "heads", "normed", "block", "update", "cross", "context", "model"]
End = int | Literal["final", "logits"]
MAPS: tuple[MapName, ...] = get_args(MapName)


@dataclass(frozen=True, eq=False)
class Ends:
    """Where a map begins and ends; several nodes are one input, or output, of stacked parts.

    flow: what moves with the input.  less: the input is taken off, as a block's residual path is.  through: nodes that all ways
    lead through; what the input reaches otherwise stays as it is.
    """

    enter: tuple[Node, ...]
    leave: tuple[Node, ...]
    flow: Flow
    less: bool = False
    through: tuple[Node, ...] = ()

    @functools.cached_property
    def way(self) -> Way:
        """The nodes between the ends."""
        return Way.of(self.flow, self.enter, self.leave, self.through)

    @functools.cached_property
    def calls(self) -> tuple[Node, ...]:
        """The attention calls between the ends that run on the kernels."""
        return tuple(n for n in self.way.nodes if n.target is attention)

    @functools.cached_property
    def heads(self) -> int:
        """How many heads the attention between the ends has; 0 where the kernels do not run it, or where calls are heads."""
        sizes = {(1, *(shape(n.all_input_nodes[0]) or ()))[-3] for n in self.calls}
        count = sizes.pop() if len(sizes) == 1 else 0
        return count if len(self.calls) == 1 or count > 1 else 0

    def one_stream(self, stream: int | None) -> "Ends":
        """The ends of one stream of several."""
        if stream is None:
            return self
        if len(self.enter) < 2 or len(self.leave) != len(self.enter) or not 0 <= stream < len(self.enter):
            raise BadInputError(
                f"expected stream=None, or one of several streams, got {stream} of {len(self.enter)}; count from 0"
            )
        return replace(self, enter=self.enter[stream : stream + 1], leave=self.leave[stream : stream + 1])


def ends_of(
    layers: Layers,
    layer: int,
    map: str = "attention",
    *,
    to: int | str | None = None,
    stream: int | None = None,
    call: int | None = None,
) -> Ends:
    """Where a map of a layer begins and ends; with `to`, from what enters a layer to what leaves a later one.

    to: a layer, "final" for the last one, "logits" for what the module returns.  stream: one of those that attention joins.
    call: which attention of a block that attends several times; the first by default.
    """
    if map not in MAPS:
        raise BadInputError(f"expected a map among {', '.join(MAPS)}, got {map!r}; name one of them")
    count = len(layers.found)
    if not count:
        raise BadInputError("expected a module with attention or with a list of blocks, got none; measure the function itself")
    if not 0 <= layer < count:
        raise BadInputError(f"expected a layer from 0 to {count - 1}, got {layer}; there is no other")
    at = layers.found[layer]
    layers.check_number(at)
    if isinstance(to, int) and 0 <= to < count:
        layers.check_number(layers.found[to])
    if to is not None:
        return _span(layers, layer, to).one_stream(stream)
    if map == "model":
        return _model(layers).one_stream(stream)
    layers = layers.of(at)
    if map in ("block", "update"):
        enter, leave = layers.entered(at), layers.left(at)
        if map == "update" and [shape(n) for n in enter] != [shape(n) for n in leave]:
            raise BadInputError(
                "expected a block that keeps the shape of its tokens, got one that changes it; measure map='block'"
            )
        return Ends(enter, leave, layers.flow, map == "update").one_stream(stream)
    if map in ("cross", "context"):
        return _cross(layers, at, map, call or 0)
    if not 0 <= (call or 0) < len(at.groups):
        raise BadInputError(
            f"expected a layer with softmax attention of its own tokens, calls from 0 to {len(at.groups) - 1}, got layer "
            f"{layer} and call {call or 0}; measure map='block'"
        )
    group = at.groups[call or 0]
    if len(group.enter) > 1:
        with suppress(BadInputError):  # where no block is to be seen, streams have the order of the run
            group = Group(group.calls, tuple(in_order(layers.flow, group.enter, layers.entered(at))))
    enter, leave = group.enter, _leaves(layers.attention, group, heads=map == "heads")
    beside = map != "heads" and layers.attention.is_joined(group, leave)
    if map == "normed":
        enter = layers.entered(at)
        if all(name(n) in SHAPE for n in layers.flow.between(enter, group.enter)):
            raise BadInputError(
                "expected a block that normalises before it attends, got one that does not; measure map='attention'"
            )
    return Ends(enter, leave, layers.flow, through=group.outputs if beside else ()).one_stream(stream)


def _span(all_layers: Layers, layer: int, to: int | str) -> Ends:
    found = all_layers.found
    layers, first = all_layers.of(found[layer]), found[layer]
    enter, flow, ends = layers.entered(first), layers.flow, layers.blocks.ends
    if to == "logits":
        _refuse_losses(layers)
        behind = tuple(n for n in flow.outputs if n not in ends and flow.up(n) & flow.bits(ends))
        return Ends(enter, behind or ends, flow)
    if to != "final" and not (isinstance(to, int) and 0 <= to < len(found)):
        raise BadInputError(f"expected to below {len(found)}, 'final' or 'logits', got {to!r}; name a later layer")
    last = found[to] if isinstance(to, int) else layers.last
    if last.last <= first.first:
        raise BadInputError(f"expected a layer that runs behind the first, got {to}, which runs before it; name a later one")
    if isinstance(to, int) and all_layers.of(last) is not layers:
        raise BadInputError("expected a later layer of the same tokens, got one of others; name another")
    layers.left(first)  # a block, or one sentence
    return Ends(enter, _reached(flow, enter, layers.left(last)), flow)


def _reached(flow: Flow, enter: tuple[Node, ...], leave: tuple[Node, ...]) -> tuple[Node, ...]:
    """Where a map ends, refused where what enters does not reach it."""
    if not all(flow.up(n) & flow.bits(enter) for n in leave):
        raise BadInputError("expected a later layer that the tokens of the first reach, got one of other tokens; name another")
    return leave


def _refuse_losses(layers: Layers) -> None:
    if any(shape(n) == () for n in layers.flow.outputs):
        raise BadInputError(
            "expected a module that returns its tokens, got one that returns a single number too; leave labels out"
        )


def _model(all_layers: Layers) -> Ends:
    """From what enters the first block to the last hidden state, behind the final norm.

    It is what the module returns by that name, or the last node of the width of the last block.
    """
    _refuse_losses(all_layers)
    by_place = sorted(all_layers.found, key=lambda block: block.first)
    layers, behind = all_layers.of(by_place[0]), all_layers.of(by_place[-1])
    enter, flow, program = layers.entered(by_place[0]), layers.flow, layers.program
    end, *more = _reached(flow, enter, behind.left(behind.last))
    if program.hidden is not None and flow.up(program.outputs[program.hidden]) & flow.bit(end):
        return Ends(enter, program.outputs[program.hidden : program.hidden + 1], flow)
    return Ends(enter, layers.blocks.ends if more else (_normed_behind(layers, end),), flow)


def _normed_behind(layers: Layers, last: Node) -> Node:
    """The last node behind the last block that has its shape and that no matrix lies before."""
    flow, size, found = layers.flow, (shape(last) or ())[-2:], last
    ends = [n for n in flow.outputs if n is not last and flow.up(n) & flow.bit(last)]
    for n in flow.after([last], ends):
        if any(name(m) in MATRIX for m in flow.between([found], [n])):
            break
        own, part = shape(n) or (), flow.between([found], [n])
        fewer = len(own) == len(shape(last) or ()) and own[-1:] == size[-1:]  # some of the tokens, behind a norm
        cut = all(name(m) in SHAPE | SELECTS | JOINS | PADS | NORMALISES for m in part) and any(
            name(m) in NORMALISES for m in part
        )
        if own[-2:] == size or (fewer and cut):
            found = n
    return found


def _leaves(attention: AttentionSites, group: Group, *, heads: bool) -> tuple[Node, ...]:
    """Where attention ends, stream by stream."""
    if len(group.enter) == 1:
        return (attention.leave(group, heads=heads),)
    flow = attention.flow
    split = _split(flow, group.outputs[0])
    needed = flow.bits(n for n in flow.nodes if name(n) in MATRIX or n in flow.outputs)
    read = [n for n in split if flow.down(n) & needed] or split
    order = _joined(flow, group)
    if len(order) == len(read):  # parts lie side by side as the streams were put
        read = [part for _, part in sorted(zip(order, sorted(read, key=_offset), strict=True), key=lambda pair: pair[0])]
    parts = [Group((AttentionCall((), (), (), n),), group.enter) for n in read]
    return tuple(attention.leave(part, heads=heads) for part in parts)


def _joined(flow: Flow, group: Group) -> list[int]:
    """Which of the streams that enter attention lies where, side by side; nothing where that is not to be seen."""
    for n in flow.between(group.enter, group.calls[0].queries):
        given: Any = n.args[0] if name(n) in JOINS and n.args else ()
        parts = [m for m in given if isinstance(m, Node) and flow.live(m)] if isinstance(given, list | tuple) else []
        of = [[i for i, e in enumerate(group.enter) if flow.up(m) & flow.bit(e)] for m in parts]
        if len(parts) == len(group.enter) and sorted(of) == [[i] for i in range(len(parts))]:
            return [i for (i,) in of]
    return []


def _offset(n: Node) -> int:
    """Where a part of a tensor begins, or the number of the part."""
    args: Any = n.args
    place = args[2] if name(n) in ("slice", "narrow") and len(args) > 2 else args[1] if len(args) > 1 else 0
    start = place if isinstance(place, int) else 0
    source = shape(args[0]) if isinstance(args[0], Node) else None
    return start if start >= 0 or source is None else start + max(source)


def _split(flow: Flow, n: Node) -> list[Node]:
    """Where the output of joint attention is split into streams."""
    while True:
        users = flow.users(n)
        if len(users) == 1 and (name(users[0]) in SHAPE | SPLITS or shape(users[0]) == shape(n)):
            n = users[0]
        elif len(users) > 1 and all(name(u) in SELECTS for u in users):
            return sorted(users, key=flow.index.__getitem__)
        else:
            return [n]


def _cross(layers: Layers, block: Layer, map: str, number: int) -> Ends:
    """Cross-attention in its queries' tokens, or in its context."""
    attention, flow = layers.blocks.wide, layers.blocks.wide.flow
    own = {call.output for group in layers.attention.groups for call in group.calls}
    calls: list[tuple[AttentionCall, ...]] = []
    for call in attention.calls:  # those with the same queries whose outputs are added up are one
        if block.holds(call.output) and call.output not in own:
            asks = [attention.bare(q) for q in call.queries]
            alike = (k for k, c in enumerate(calls) if [attention.bare(q) for q in c[0].queries] == asks)
            k = next((k for k in alike if attention.meets(Group(calls[k], call.queries), call)), len(calls))
            calls[k:] = [(*(calls[k] if k < len(calls) else ()), call), *calls[k + 1 :]]
    if not 0 <= number < len(calls):
        place = block.path or "the module"
        raise BadInputError(
            f"expected a cross-attention from 0 to {len(calls) - 1}, got {number} of {place}; there is no other"
            if calls
            else f"expected a block with cross-attention, got {place}, which has none at this input; pass its context, as in "
            "encoder_hidden_states, or measure map='attention'"
        )
    chosen = calls[number]
    if map == "cross":
        through = tuple(dict.fromkeys(n for call in chosen for n in call.queries))
        enter = [_projected_from(flow, through)]
    else:
        through = tuple(n for call in chosen for n in (*call.keys, *call.values))
        chosen = tuple(replace(call, queries=()) for call in chosen)
        whole = functools.reduce(AttentionCall.__or__, chosen)
        enter = [m for n in attention.common(through) for m in attention.before_projection(n, whole)]
    if len(enter) != 1:
        raise BadInputError("expected keys and values that are made of one context, got several; measure map='block'")
    leave = attention.leave(Group(chosen, (enter[0],)))
    return Ends((enter[0],), (leave,), flow, through=through)


def _projected_from(flow: Flow, nodes: tuple[Node, ...]) -> Node:
    """The last node that some are projected from, with nothing beside it."""
    for start in reversed(flow.waists(nodes)):
        if any(name(n) in MATRIX for n in flow.between([start], nodes)):
            return start
    raise BadInputError("expected queries that are projected from tokens, got queries that are not; measure map='context'")
