"""The blocks of a model in its recorded run, numbered as the model numbers them.

BlockFinder begin and end where every path of the token stream meets.
"""

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch.fx import Node

from howsmooth.errors import BadInputError
from howsmooth.program.blocks import BlockFinder, Layer, is_list_of_blocks, place_in_list, stream_of
from howsmooth.program.operations import ADDS, GATES, NORMALISES, SHAPE, name, order, shape
from howsmooth.program.sites import AttentionSites
from howsmooth.program.tracing import Flow, Program


class Layers:
    """The layers of a program: `found`, and where each begins and ends.

    apart: what moves with the tokens of other layers, as those of an encoder, where these are of other tokens.
    """

    def __init__(self, program: Program, flow: Flow | None = None, apart: tuple[Flow, ...] = ()):
        self.program, self._apart, self.flow = program, apart, stream_of(program) if flow is None else flow
        self.blocks = BlockFinder(program, self.flow)
        self.attention = self.blocks.attention
        self._known: dict[Layer, tuple[tuple[Node, ...], tuple[Node, ...]]] = {}  # ends of blocks of several streams

    @functools.cached_property
    def beside(self) -> "Layers | None":
        """The layers of tokens that the first attention does not reach and that attend to themselves, as a decoder's do."""
        known = (*self._apart, self.flow)
        begins = [b for b in self.blocks.wide.flow.begins if not any(flow.live(b) for flow in known)]
        sites = AttentionSites(self.program, Flow(self.program, begins))
        own = [g for g in sites.groups if not any(self.flow.live(n) for n in g.outputs)]
        near = [b for b in begins if own and any(sites.near(n) & sites.flow.bit(b) for n in own[0].enter)]
        return Layers(self.program, Flow(self.program, near), known) if near else None

    @functools.cached_property
    def found(self) -> list[Layer]:
        """The blocks, in order."""
        blocks, others = self.blocks.found, [] if self.beside is None else self.beside.found
        late = [a for a in blocks for b in others if a.overlaps(b) and all(map(self.of(b).flow.live, a.outputs))]
        own = [a for a in blocks if a not in late]
        found = sorted([*own, *(b for b in others if not any(a.overlaps(b) for a in own))], key=lambda block: block.first)
        places = [place_in_list(self.program.module, block.path) for block in found]
        listed = len({parent for parent, _ in places}) == 1 and len({*places}) == len(places)
        return [block for _, block in sorted(zip(places, found, strict=True), key=lambda pair: pair[0])] if listed else found

    def of(self, block: Layer) -> "Layers":
        """The layers of the tokens that a block is one of."""
        return self if self.beside is None or block in self.blocks.found else self.beside.of(block)

    def check_number(self, block: Layer) -> None:
        """Refuse a block whose number is not the model's, since a block like it before it in its list does not run."""
        module, run = self.program.module, {e.path for e in self.blocks.elements}
        kinds = {type(module.get_submodule(other.path)) for other in self.found}
        parent, place = place_in_list(module, block.path)
        for key, other in module.get_submodule(parent).named_children() if place >= 0 else ():
            path = f"{parent}.{key}".removeprefix(".")
            if int(key) < place and type(other) in kinds and path not in run:
                raise BadInputError(
                    f"expected blocks that all run, got {path}, which does not run at this input, so that numbers behind it "
                    "are not the model's; take it out, or measure map='model'"
                )

    @property
    def last(self) -> Layer:
        """The last block, with the elements of its list behind it that move no token with another."""
        last = self.blocks.found[-1]
        for e in self.blocks.elements:
            listed = e.parent == last.parent and e.first >= last.last and is_list_of_blocks(self.program.module, e.parent)
            if listed and self.blocks.keeps_shape(e):
                last = replace(last, last=e.last)
        return last

    def entered(self, block: Layer) -> tuple[Node, ...]:
        """Where a block begins, stream by stream."""
        return self._streams(block)[0] if self._joins(block) else (self._enter(block),)

    def left(self, block: Layer) -> tuple[Node, ...]:
        """Where a block ends, stream by stream."""
        return self._streams(block)[1] if self._joins(block) else (self._leave(block),)

    def _streams(self, block: Layer) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """Where a block whose attention joins several streams begins and ends, stream by stream."""
        if block in self._known:
            return self._known[block]
        inside = self._inside(block, returned=False)
        before = [other for other in self.blocks.found if other.last <= block.first]
        entering = self._taken(inside)
        if before and self._joins(before[-1]):  # the order that they have from the first block on
            with suppress(BadInputError):
                entering = in_order(self.flow, entering, self._streams(before[-1])[1])
        given = self._given(inside, returned=False)
        left = [[n for n in given if self.blocks.residual([e], n)] for e in entering]
        count = len(block.groups[0].enter)
        if (len(entering) != count and count > 1) or not any(left) or any(len(part) > 1 for part in left):
            raise BadInputError(
                f"expected a block that takes and gives the {count} streams that attention joins, got "
                f"{len(entering)} tensors that enter {block.path} and {len(given)} that leave; measure map='attention'"
            )
        self._known[block] = tuple(entering), tuple(n for part in left for n in part)
        return self._known[block]

    def _enter(self, block: Layer) -> Node:
        """The only node that a block takes, or the last before it that all paths of the tokens meet at."""
        ends = self._single(block)
        return self._one_stream(block, self._taken(self._inside(block)) if ends is None else ends[:1])

    def _leave(self, block: Layer) -> Node:
        """The only node that a block gives to the stream, or the first behind it that all paths of the tokens meet at."""
        ends = self._single(block)
        if ends is not None:
            return self._one_stream(block, ends[1:])
        inside = self._with_sums(block)
        found = self._continued(inside, self._taken(inside))
        behind = self.blocks.around(block)
        return self._one_stream(block, found or ([behind[1]] if behind and self._is_next(block, behind[1]) else []))

    def _single(self, block: Layer) -> tuple[Node, Node] | None:
        """Where a block begins and ends: where all paths meet in one shape, else at what its module takes and gives."""
        meeting = self._meeting(block)
        if meeting is not None and shape(meeting[0]) == shape(meeting[1]):
            return meeting
        return self._own(block) or meeting

    def _own(self, block: Layer) -> tuple[Node, Node] | None:
        """The only nodes that a block takes and gives, where one is a term of the other; nothing where there are several."""
        inside = self._inside(block)
        taken, among = self._taken(inside), {*inside}
        found = [n for n in self._continued(inside, taken) if among.isdisjoint(n.users)]
        found = found or self._continued(self._with_sums(block), taken)
        return (taken[0], found[0]) if len(taken) == len(found) == 1 else None

    def _continued(self, inside: Sequence[Node], taken: Sequence[Node]) -> list[Node]:
        """The nodes among some that others read and that what these take is a term of."""
        return [n for n in self._given(inside) if self.blocks.residual(taken, n)]

    def _meeting(self, block: Layer) -> tuple[Node, Node] | None:
        """Where all paths of the tokens meet before and behind a block; nothing where there are other layers between."""
        ends = self.blocks.around(block)
        if ends is None or not self._is_next(block, ends[1]):
            return None
        others = [other for other in self.blocks.found if other is not block]
        return None if any(other.holds(n) for n in self.flow.between(ends[:1], ends[1:]) for other in others) else ends

    def _is_next(self, block: Layer, n: Node) -> bool:
        """Whether a node behind a block is before all later ones."""
        return all(order(n) < max(other.first, block.last) for other in self.blocks.found if other.first > block.first)

    def _with_sums(self, block: Layer) -> list[Node]:
        """The nodes of a block, and the sums of two of them, or of one and of what it takes, that are right behind it."""
        found = self._inside(block)
        own, taken = {*found}, {*self._taken(found)}
        of = {n: n for n in (*found, *taken)}  # what a node is but another scale or shape of
        for n in self.flow.unpack(self.flow.down(*found)):
            feeds = self.flow.feeds(n)
            if n in of or not all(m in of for m in feeds) or not self._is_next(block, n):
                continue
            if name(n) in SHAPE | GATES | {"div"} and len(feeds) == 1:
                of[n] = of[feeds[0]]
            elif name(n) in ADDS and len({of[m] for m in feeds}) > 1:
                of[n] = n
        kept = self.flow.up(*(n for n in of if name(n) in ADDS))
        return [*found, *(n for n in of if n not in own | taken and kept & self.flow.bit(n))]

    def _one_stream(self, block: Layer, found: Sequence[Node]) -> Node:
        several = self.beside is not None and any(block.overlaps(b) for b in self.beside.found)
        if len(found) != 1 or several or self._others_leave(block, found[0]):
            what = "paths that go around it" if len(found) != 1 else "streams that do not meet"
            raise BadInputError(
                f"expected a block before and behind which all paths of the tokens meet, got {what} at "
                f"{block.path or 'the module'}; measure map='attention'"
            )
        return found[0]

    def _others_leave(self, block: Layer, n: Node) -> bool:
        """Whether a block gives tokens of another stream too, which are made apart from those that one node of it is."""
        size, behind = shape(n) or (), self.flow.up(n) | self.flow.down(n)
        given = ((m, shape(m) or ()) for m in self._given(self._inside(block)) if name(m) in ADDS | NORMALISES)
        alike = [m for m, other in given if len(other) == len(size) and other[-1:] == size[-1:]]
        return any(not behind & self.flow.bit(m) for m in alike)

    # what blocks take and give

    def _joins(self, block: Layer) -> bool:
        """Whether attention joins several streams of a block: it takes them apart, and gives as many."""
        entered = [group.enter for group in block.groups[:1]]
        if not entered or len(entered[0]) > 1:
            return bool(entered)
        inside, near = self._inside(block, returned=False), self.attention.near(*entered[0])
        taken = self._taken(inside)
        given = [n for n in self._given(inside, returned=False) if self.blocks.residual(taken, n)]
        return len(taken) == len(given) > 1 and all(near & self.flow.bit(n) for n in taken)

    def _inside(self, block: Layer, *, returned: bool = True) -> list[Node]:
        """The live nodes of a block; with `returned`, those that what is returned depends on."""
        need = self.flow.up(*self.blocks.ends) if returned else self.flow.up(*self.flow.nodes)
        return [n for n in self.flow.unpack(need) if block.holds(n) and n.op != "output"]

    def _taken(self, inside: Sequence[Node]) -> list[Node]:
        """The nodes that some depend on right away and that are not among them."""
        before = {m for n in inside for m in self.flow.feeds(n)} - {*inside}
        return sorted(before, key=self.flow.index.__getitem__)

    def _given(self, inside: Sequence[Node], *, returned: bool = True) -> list[Node]:
        """The tensors among some that others read or that are returned; without `returned`, also those that nothing reads."""
        among, need = {*inside}, self.flow.up(*(self.blocks.ends if returned else self.flow.nodes))

        def is_given(n: Node) -> bool:
            users = [u for u in n.users if u.op != "output" and need & self.flow.bit(u)]
            return n in self.blocks.ends or any(u not in among for u in users) or not (users or returned)

        return [n for n in inside if shape(n) and is_given(n)]

    def module_of(self, block: Layer, call: int = 0) -> str:
        """The path of the module that makes one attention of a block; empty where it is none of the block's."""
        if not call < len(block.groups):
            return ""
        scope = self.of(block).attention.scope_of(block.groups[call])
        return "" if scope is None else scope.path


def in_order(flow: Flow, nodes: Sequence[Node], streams: Sequence[Node]) -> list[Node]:
    """Nodes in the order of the streams that each depends on alone; as they are where that is not to be seen."""
    of = [[i for i, s in enumerate(streams) if flow.up(n) & flow.bit(s)] for n in nodes]
    if sorted(of) != [[i] for i in range(len(streams))]:
        return list(nodes)
    return [n for _, n in sorted(zip(of, nodes, strict=True), key=lambda pair: pair[0])]
