"""Where attention begins and ends in a recorded run.

Its input is the last that all of a call's queries, keys and values depend on, before the projections. Its output is the last
behind attention that depends on nothing but attention and gates, up to the residual's addition, projection and adapters
included, inside the module that attends.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from howsmooth.errors import BadInputError
from howsmooth.program.calls import AttentionCall, find_calls
from howsmooth.program.operations import (
    ADDS,
    GATES,
    JOINS,
    MATRIX,
    NORMALISES,
    PADS,
    PRODUCT,
    SELECTS,
    SHAPE,
    name,
    shape,
    walk,
)
from howsmooth.program.tracing import Flow, Program, Span

_SAME = SHAPE | SELECTS | JOINS
_AFFINE = MATRIX | _SAME | ADDS | GATES | {"div"}
_SCALES = SHAPE | {"mul", "div"}


@dataclass(frozen=True, eq=False)
class Group:
    """Calls that make one attention: heads or chunks of queries that are taken one by one.

    enter: what queries, keys and values are made of; several nodes where several streams are joined.
    """

    calls: tuple[AttentionCall, ...]
    enter: tuple[Node, ...]

    @property
    def outputs(self) -> tuple[Node, ...]:
        return tuple(call.output for call in self.calls)

    @property
    def sources(self) -> tuple[Node, ...]:
        """The first nodes that are attention's own."""
        return (*self.outputs, *(n for call in self.calls for n in (*call.weights, *call.products)))


class AttentionSites:
    """The calls of attention that some begins reach, and where each begins and ends."""

    def __init__(self, program: Program, flow: Flow):
        self._scopes, self.flow, self.calls = program.scopes, flow, find_calls(flow)

    # where it begins

    def near(self, n: Node) -> int:
        """What a node depends on without going through attention, as bits."""
        return self._near[self.flow.index[n]]

    @functools.cached_property
    def _near(self) -> list[int]:
        outputs, near = self.flow.bits(call.output for call in self.calls), list[int]()
        for i, n in enumerate(self.flow.nodes):
            bits = (1 << i) * self.flow.live(n)
            if bits and not outputs & bits:
                for m in self.flow.feeds(n):
                    bits |= near[self.flow.index[m]]
            near.append(bits)
        return near

    def common(self, nodes: Sequence[Node]) -> list[Node]:
        """The last nodes that all of some depend on without going through attention: of those, the ones no other depends on."""
        rest, found = -1, list[Node]()
        for n in nodes:
            rest &= self.near(n)
        while rest > 0:
            n = self.flow.nodes[rest.bit_length() - 1]
            rest &= ~self.flow.up(n)
            while shape(n) is None:  # several tensors, as what is split gives
                n = self.flow.feeds(n)[0]
            found.append(n)
        return found[::-1]

    def enter(self, call: AttentionCall) -> tuple[Node, ...]:
        """What a call's queries, keys and values are projected from; nothing where they are of several inputs."""
        last = self._whole(self.common(call.operands))
        if not last or self._crosses(call, last):
            return ()
        found = dict.fromkeys(m for n in last for m in self.before_projection(n, call))
        return tuple(dict.fromkeys(self._unshaped(self._without_memory(n, call), call) for n in found))

    def _unshaped(self, n: Node, call: AttentionCall) -> Node:
        """What a node is but another shape of, where attention takes that too: in its biases, or beside a dropout."""
        while name(n) in SHAPE and (before := self.flow.only(n)) is not None:
            if not any(self.flow.down(u) & self.flow.bit(call.output) for u in self.flow.users(before) if u is not n):
                break
            n = before
        return n

    def _without_memory(self, n: Node, call: AttentionCall) -> Node:
        """The tokens in a tensor that attention puts together of them and of others that stay as they are, padding too."""
        whole = self.flow.bare(n, SHAPE)
        tokens, ways = self.flow.only(whole), {*self.flow.between([whole], call.operands)}
        if name(whole) not in JOINS | PADS or tokens is None or not all(u in ways for u in whole.users):
            return n
        residual = self.flow.users(tokens) != [whole]
        return tokens if residual or self._inside(call, whole) else n

    def _whole(self, nodes: list[Node]) -> list[Node]:
        """One node where several are but parts of it, put into other shapes."""
        if len(nodes) < 2:
            return nodes
        return next(([n] for n in self._uncut(nodes[0]) if shape(n) and all(n in self._uncut(m) for m in nodes[1:])), nodes)

    def _uncut(self, n: Node) -> list[Node]:
        """The nodes that one is a part of, in another shape."""
        return [*self.flow.back(n, SHAPE | SELECTS)][1:]

    def _crosses(self, call: AttentionCall, last: list[Node]) -> bool:
        """Whether attention lies between what is common and an operand, which is then of other tokens."""
        own = self.flow.down(*last)
        attended = [c.output for c in self.calls if own & self.flow.bit(c.output) and c.output not in last]
        return bool(self.flow.bits(self.flow.between(last, call.operands)) & self.flow.down(*attended))

    def before_projection(self, n: Node, call: AttentionCall) -> list[Node]:
        """What the projections that a call's operands have in common take: one node, or one a stream."""
        operands = [m for m in call.operands if self.flow.live(m)]
        projected = any(name(m) in MATRIX for m in self.flow.between([n], operands)) and not self._is_cut(n)
        whole = all(self.bare(m) is self.bare(n) for m in operands)
        if projected or (whole and not self._inside(call, n)):
            return [n]
        found = self._projected(call, n)
        if found is None:
            return [n]
        first = [n for n in found if not any(m is not n and self.flow.up(n) & self.flow.bit(m) for m in found)]
        return sorted(first, key=self.flow.index.__getitem__)

    def _is_cut(self, n: Node) -> bool:
        """Whether nothing takes a node whole: it is cut into queries, keys and values, so that it is their projection."""
        users = self.flow.users(n)
        if len(users) == 1 and (name(users[0]) in SHAPE or shape(users[0]) is None):
            return self._is_cut(users[0])
        return len(users) > 1 and all(name(u) in SELECTS for u in users)

    def _projected(self, call: AttentionCall, n: Node) -> set[Node] | None:
        """What the matrices right before a node take; nothing where something else comes first.

        The module that attends may have an activation or a norm behind its projections.
        """
        feeds = self.flow.feeds(n)
        if name(n) in MATRIX and len(feeds) == 1:
            before = self.bare(feeds[0])
            again = name(before) in MATRIX and self._inside(call, before) and self._is_alone(before)
            return self._projected(call, before) if again else set(feeds)
        alone = len(feeds) == 1 and shape(feeds[0]) == shape(n) and self._inside(call, n)
        if not feeds or not (name(n) in _SAME | ADDS | GATES or alone):
            return None
        parts = [self._projected(call, m) for m in feeds]
        return None if None in parts else {m for part in parts if part is not None for m in part}

    def _is_alone(self, n: Node) -> bool:
        """Whether one live node takes a node, in whatever shape."""
        users = self.flow.users(n)
        return len(users) == 1 and (name(users[0]) not in SHAPE or self._is_alone(users[0]))

    def _inside(self, call: AttentionCall, n: Node) -> bool:
        """Whether the module that makes a call also made a node."""
        scope = self.flow.program.scope_of(call.output)
        return scope is not None and bool(scope.path) and scope.holds(n)

    # where it ends

    def leave(self, group: Group, *, heads: bool = False) -> Node:
        """Where attention's own output is; with `heads`, what enters the output projection."""
        flow, outs, own = self.flow, group.outputs, self.flow.down(*group.sources)
        ends = [n for n in flow.outputs if own & flow.bit(n)] or [
            n for n in flow.unpack(flow.down(*outs)) if not any(flow.live(u) for u in n.users)
        ]
        scope, stream, projected = self.scope_of(group), flow.up(*group.enter), False
        end = outs[0] if len(outs) == 1 else None
        adds = self._adds(group, own)
        for n in flow.after(outs, ends):
            part = [m for m in flow.between(outs, [n]) if end is None or not flow.up(end) & flow.bit(m)]
            if any(self._is_residual(m, own, stream) for m in part):
                break
            inside = scope is not None and scope.holds(n)
            matrix = any(name(m) in MATRIX and m not in outs for m in part)
            gates = all(name(m) in GATES | SHAPE for m in part) and any(len(flow.feeds(m)) > 1 for m in part)
            gates |= inside and all(name(m) in GATES | SHAPE | {"div"} for m in part[-1:])
            joined = any(not own & flow.bit(f) for m in part if not self._is_gate(m, scope) for f in flow.feeds(m))
            beside = joined and heads and any(name(m) in JOINS for m in part)
            if joined and (projected or beside or not self._projected_behind(n, group, scope, own, ends)):
                break
            if projected and not (inside and (gates or not adds or self._wraps(n, outs))):
                break
            if not shape(n):
                continue
            if matrix and not projected and (heads or not (inside or self._is_projection(n, part, group, scope))):
                break
            if not (inside or matrix or gates or end is None):  # as far as a projection may lie behind
                if not all(name(m) in _AFFINE for m in part):
                    break
                continue
            if matrix and not projected and scope is not None and not scope.path and set(group.enter).isdisjoint(flow.begins):
                # a whole model: where more matrices follow, they are not attention's
                behind = flow.bits(m for m in flow.unpack(flow.down(n)) if m is not n and scope.holds(m) and name(m) in MATRIX)
                adds |= bool(behind)
            end, projected = n, projected or matrix
        if end is None:
            raise BadInputError("expected attention whose heads are put together, got none such; measure map='block'")
        return end

    def _is_gate(self, n: Node, scope: Span | None) -> bool:
        """Whether a node multiplies or divides by something else, as a product inside the module that attends may."""
        return name(n) in GATES | {"div", "true_divide"} or (name(n) in MATRIX and scope is not None and scope.holds(n))

    def _wraps(self, n: Node, outputs: Sequence[Node]) -> bool:
        """Whether a module made a node together with the projection, and nothing of attention, as a list of both does."""
        around = [s for s in self._scopes if s.holds(n) and not any(s.holds(m) for m in outputs)]
        own = self.flow.unpack(self.flow.down(*outputs) & self.flow.up(n))
        return any(s.holds(m) for s in around for m in own if m is not n and name(m) in MATRIX)

    def is_joined(self, group: Group, leave: Sequence[Node]) -> bool:
        """Whether one matrix projects attention together with another branch, which a block's own code puts beside it."""
        own = self.flow.down(*group.sources)
        if not self._adds(group, own):
            return False
        joins = [n for n in self.flow.between(group.outputs, leave) if name(n) in JOINS]
        return any(not own & self.flow.bit(m) for n in joins for m in self.flow.feeds(n))

    def _adds(self, group: Group, own: int) -> bool:
        """Whether the module that attends adds the residual itself."""
        scope, stream = self.scope_of(group), self.flow.up(*group.enter)
        return scope is not None and any(self._is_residual(n, own, stream) for n in self.flow.unpack(own) if scope.holds(n))

    def scope_of(self, group: Group) -> Span | None:
        """The smallest call of a module that made a group's attention and its projections."""
        ways = self.flow.between(group.enter, [n for call in group.calls for n in call.operands])
        inside = [*group.sources, *([n for n in ways if name(n) in MATRIX and n not in group.outputs] or ways)]
        return self.flow.program.scope_of(*inside)

    def _is_residual(self, n: Node, own: int, stream: int) -> bool:
        """Whether a node adds what attention's input is made of to what attention gives."""
        if name(n) not in ADDS | JOINS | {"where"}:
            return False
        return any(self._of_stream(m, stream) for m in self.flow.feeds(n) if not own & self.flow.bit(m))

    def _of_stream(self, n: Node, stream: int) -> bool:
        """Whether a node is what attention's input is made of, or a sum that this is a term of."""
        n = self.bare(n)
        return bool(stream & self.flow.bit(n)) or (
            name(n) in ADDS and any(self._of_stream(m, stream) for m in self.flow.feeds(n))
        )

    def bare(self, n: Node) -> Node:
        """A node without what only shapes or scales it."""
        return self.flow.bare(n, _SCALES)

    def _projected_behind(self, n: Node, group: Group, scope: Span | None, own: int, ends: Sequence[Node]) -> bool:
        """Whether the module that attends has its projection behind a node, which nothing of attention goes around."""
        if scope is None or not scope.holds(n):
            return False
        stream = self.flow.up(*group.enter)
        for m in self.flow.after([n], ends):
            part = self.flow.between([n], [m])
            around = any(name(p) in ADDS and n in map(self.bare, self.flow.feeds(p)) for p in part)
            if around or any(self._is_residual(p, own, stream) or name(p) not in _AFFINE | NORMALISES for p in part):
                return False
            if any(name(p) in MATRIX for p in part):
                return scope.holds(m) or self._is_projection(m, part, group, scope)
        return False

    def _is_projection(self, n: Node, part: Sequence[Node], group: Group, scope: Span | None) -> bool:
        """Whether a matrix outside the module that attends is its projection: affine, and then the residual is added.

        Or it is the last of the module around that one, or of all.
        """
        if not all(name(m) in _AFFINE for m in part):
            return False
        flow, own, stream = self.flow, self.flow.down(*group.sources), self.flow.up(*group.enter)
        around = [s for s in self._scopes if s.path and s.holds(n, *group.outputs) and scope and len(s) > len(scope)]
        parent = min(around, key=len, default=None)
        if parent and any(self._is_residual(m, own, stream) for m in flow.unpack(flow.down(*group.outputs)) if parent.holds(m)):
            parent = None
        for m in walk([n], lambda m: [u for u in m.users if name(u) in _SCALES | NORMALISES]):
            if any(u.op == "output" for u in m.users) and shape(m) == shape(group.enter[0]):
                return True
            if any(self._is_residual(u, own, stream) or (parent and not parent.holds(u)) for u in flow.users(m)):
                return True
        return False

    # which calls are one attention

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The self-attentions, in order: calls with one input whose outputs meet before anything else happens to them."""
        found: list[Group] = []
        for call in self.calls:
            enter = self.enter(call)
            if not enter:
                k = next((k for k, g in enumerate(found) if self._chained(g, call)), None)
                if k is not None:
                    found[k] = Group((*found[k].calls, call), found[k].enter)
                continue
            both = [g.enter if g.enter == enter else tuple(self._whole([*g.enter, *enter])) for g in found]
            fits = ((k, e) for k, e in enumerate(both) if e == enter or len(e) == 1)
            k, whole = next(((k, e) for k, e in fits if self.meets(found[k], call)), (len(found), enter))
            found[k:] = [Group((*(found[k].calls if k < len(found) else ()), call), whole), *found[k + 1 :]]
        return found

    def _chained(self, group: Group, call: AttentionCall) -> bool:
        """Whether a call takes what a group gives as it is, in another shape or scale, and all else from the group's input."""
        rest = [n for n in call.operands if self.bare(n) not in group.outputs]
        inputs = self.flow.bits(group.enter)
        return len(rest) < len(call.operands) and all(self.flow.up(n) & inputs == inputs for n in rest)

    def meets(self, group: Group, call: AttentionCall) -> bool:
        """Whether a call's output meets those of a group inside one module, before a residual is added."""
        flow = self.flow
        outs = [group.outputs[0], call.output]
        first = next(iter(flow.unpack(flow.down(outs[0]) & flow.down(outs[1]))), None)
        if first is None or name(first) not in JOINS | ADDS | PRODUCT:
            return False
        own, stream = flow.down(*group.sources, call.output), flow.up(*group.enter)
        part = flow.between(outs, [first])
        if any(self._is_residual(n, own, stream) for n in part):
            return False
        if all(name(n) in _AFFINE - MATRIX for n in part if n is not first or name(n) not in PRODUCT):
            return True
        scope = flow.program.scope_of(*outs, first)
        if scope is None or any(
            s.first >= scope.first and s.last < scope.last and self._attends(s, call) for s in self._scopes
        ):
            return False
        return not any(self._is_residual(n, own, stream) for n in flow.unpack(flow.down(first)) if scope.holds(n))

    def _attends(self, scope: Span, call: AttentionCall) -> bool:
        """Whether a module makes a call, the projections of its queries, keys and values, and that of its output."""
        if not scope.holds(call.output):
            return False
        before, behind = self.flow.up(call.output), self.flow.down(call.output) & ~self.flow.bit(call.output)
        inside = self.flow.bits(n for n in self.flow.nodes if scope.holds(n) and name(n) in MATRIX)
        return (inside & before).bit_count() >= 3 and bool(inside & behind)
