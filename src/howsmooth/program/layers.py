"""The blocks of a model in its recorded run, numbered as the model numbers them.

Blocks begin and end where every path of the token stream meets. They are the elements of a list of modules, where attention is
in one, and the outermost modules with one self-attention elsewhere.
"""

import functools
import itertools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from howsmooth.errors import BadInputError
from howsmooth.program.elements import Element, elements_of, not_run_before, place_in_list
from howsmooth.program.flow import Flow
from howsmooth.program.nodes import name, order, shape
from howsmooth.program.operations import ADDS, GATES, JOINS, MATRIX, NORMS, PARTS, SHAPE
from howsmooth.program.replay import segment
from howsmooth.program.sites import AttentionSites, Group
from howsmooth.program.streams import every_stream, stream_of
from howsmooth.program.tracing import Program, Scope

_RESIDUAL = ADDS | SHAPE | PARTS | JOINS | NORMS | GATES | {"div", "where"}


@dataclass(frozen=True, eq=False)
class Layer:
    """One block: its path, the orders of its nodes, the self-attentions inside; none where it mixes tokens otherwise.

    owner: the layers of the tokens that the block is one of, which know it.
    """

    path: str
    first: int
    last: int
    groups: tuple[Group, ...]
    owner: "weakref.ref[Layers]"

    @property
    def of(self) -> "Layers":
        """The layers of the tokens that the block is one of."""
        layers = self.owner()
        assert layers is not None
        return layers

    def holds(self, n: Node) -> bool:
        return self.first <= order(n) < self.last

    def overlaps(self, other: "Layer") -> bool:
        return self.first < other.last and other.first < self.last


class Layers:
    """The layers of a program: `found`, and where each begins and ends.

    apart: what moves with the tokens of other layers, as those of an encoder, where these are of other tokens.
    """

    def __init__(self, program: Program, flow: Flow | None = None, apart: tuple[Flow, ...] = ()):
        self.program, self._apart, self._elements = program, apart, elements_of(program)
        self.flow = stream_of(program) if flow is None else flow
        self.attention = AttentionSites(program, self.flow)
        self.streams: dict[Layer, tuple[tuple[Node, ...], tuple[Node, ...]]] = {}  # where blocks of several begin and end

    @functools.cached_property
    def beside(self) -> "Layers | None":
        """The layers of tokens that the first attention does not reach and that attend to themselves, as a decoder's do."""
        known = (*self._apart, self.flow)
        begins = [b for b in self.wide.flow.begins if not any(flow.live(b) for flow in known)]
        sites = AttentionSites(self.program, Flow(self.program, begins))
        own = [g for g in sites.groups if not any(self.flow.live(n) for n in g.outputs)]
        near = [b for b in begins if own and any(sites.near(n) & sites.flow.bit(b) for n in own[0].enter)]
        return Layers(self.program, Flow(self.program, near), known) if near else None

    @functools.cached_property
    def found(self) -> list[Layer]:
        """The blocks, in order."""
        others = [] if self.beside is None else self.beside.found
        late = [a for a in self.own for b in others if a.overlaps(b) and b.of.reaches(a)]
        own = [a for a in self.own if a not in late]
        found = sorted([*own, *(b for b in others if not any(a.overlaps(b) for a in own))], key=lambda layer: layer.first)
        places = [place_in_list(self.program.module, layer.path) for layer in found]
        listed = len({parent for parent, _ in places}) == 1 and len({*places}) == len(places)
        return [layer for _, layer in sorted(zip(places, found, strict=True), key=lambda pair: pair[0])] if listed else found

    def check_number(self, layer: Layer) -> None:
        """Refuse a block whose number is not the model's, since a block like it before it in its list does not run."""
        kinds = {type(self.program.module.get_submodule(other.path)) for other in self.found}
        missing = not_run_before(self.program.module, layer.path, {e.path for e in self._elements}, kinds)
        if missing:
            raise BadInputError(
                f"expected blocks that all run, got {missing}, which does not run at this input, so that numbers behind it are "
                "not the model's; take it out, or measure map='model'"
            )

    def reaches(self, layer: Layer) -> bool:
        """Whether these tokens reach all self-attentions of a block."""
        return all(self.flow.live(n) for group in layer.groups for n in group.outputs)

    @functools.cached_property
    def ends(self) -> tuple[Node, ...]:
        """What the module returns of the token stream: what depends on the last attention, before heads that it returns too."""
        flow, last = self.flow, list(self.flow.outputs)
        last = [n for n in last if shape(n)] or last  # no loss
        if self.attention.calls:
            behind = flow.down(self.attention.calls[-1].output)
            last = [n for n in last if behind & flow.bit(n)] or last
        early = tuple(n for n in last if any(m is not n and flow.up(m) & flow.bit(n) for m in last))
        return early or tuple(last)

    @functools.cached_property
    def wide(self) -> AttentionSites:
        """The calls that any tokens reach, cross-attention among them."""
        return AttentionSites(self.program, every_stream(self.program, self.flow))

    @functools.cached_property
    def waists(self) -> list[Node]:
        """Where every path of the token stream meets."""
        return self.flow.waists(self.ends)

    @functools.cached_property
    def own(self) -> list[Layer]:
        """The blocks that these tokens go through, in order."""
        found: list[Layer] = []
        for group in self.attention.groups:
            if any(group in layer.groups for layer in found):
                continue
            path, first, last = self._block_of(group)
            inside = tuple(g for g in self.attention.groups if g is group or any(first <= order(n) < last for n in g.outputs))
            found.append(Layer(path, first, last, inside, weakref.ref(self)))
        found += self._without_self_attention(found)
        if not found and self.wide.calls:
            begun = max(order(b) for b in self.flow.begins) + 1
            found.append(Layer("", begun, order(self.program.nodes[-1]) + 1, (), weakref.ref(self)))
        return sorted(found, key=lambda layer: layer.first)

    @property
    def last(self) -> Layer:
        """The last block, with the elements of its list behind it that move no token with another."""
        last = max(self.own, key=lambda layer: layer.first)
        end, parent = last.last, last.path.rpartition(".")[0]
        for e in last.of._elements:
            listed = e.parent == parent and e.first >= end and e.among_blocks(self.program.module)
            if listed and last.of._keeps_shape(e):
                end = e.last
        return replace(last, last=end)

    def enter(self, layer: Layer) -> Node:
        """The only node that a block takes, or the last before it that all paths of the tokens meet at."""
        ends = self._single(layer)
        return self._one_stream(layer, self.taken(self.inside(layer)) if ends is None else ends[:1])

    def leave(self, layer: Layer) -> Node:
        """The only node that a block gives to the stream, or the first behind it that all paths of the tokens meet at."""
        ends = self._single(layer)
        if ends is not None:
            return self._one_stream(layer, ends[1:])
        inside = self._with_sums(layer)
        found = self._continued(inside, self.taken(inside))
        behind = self._around(layer.first, layer.last)
        return self._one_stream(layer, found or ([behind[1]] if behind and self._is_next(layer, behind[1]) else []))

    def _single(self, layer: Layer) -> tuple[Node, Node] | None:
        """Where a block begins and ends: where all paths meet in one shape, else at what its module takes and gives."""
        meeting = self._meeting(layer)
        if meeting is not None and shape(meeting[0]) == shape(meeting[1]):
            return meeting
        return self._own(layer) or meeting

    def _own(self, layer: Layer) -> tuple[Node, Node] | None:
        """The only nodes that a block takes and gives, where one is a term of the other; nothing where there are several."""
        inside = self.inside(layer)
        taken, among = self.taken(inside), {*inside}
        found = [n for n in self._continued(inside, taken) if among.isdisjoint(n.users)]
        found = found or self._continued(self._with_sums(layer), taken)
        return (taken[0], found[0]) if len(taken) == len(found) == 1 else None

    def _continued(self, inside: Sequence[Node], taken: Sequence[Node]) -> list[Node]:
        """The nodes among some that others read and that what these take is a term of."""
        return [n for n in self.given(inside) if self.residual(taken, n)]

    def _meeting(self, layer: Layer) -> tuple[Node, Node] | None:
        """Where all paths of the tokens meet before and behind a block; nothing where there are other layers between."""
        ends = self._around(layer.first, layer.last)
        if ends is None or not self._is_next(layer, ends[1]):
            return None
        others = [other for other in self.own if other is not layer]
        return None if any(other.holds(n) for n in self.flow.between(ends[:1], ends[1:]) for other in others) else ends

    def _is_next(self, layer: Layer, n: Node) -> bool:
        """Whether a node behind a layer is before all later ones."""
        return all(order(n) < max(other.first, layer.last) for other in self.own if other.first > layer.first)

    def _with_sums(self, layer: Layer) -> list[Node]:
        """The nodes of a layer, and the sums of two of them, or of one and of what it takes, that are right behind it."""
        found = self.inside(layer)
        own, taken = {*found}, {*self.taken(found)}
        of = {n: n for n in (*found, *taken)}  # what a node is but another scale or shape of
        for n in self.flow.unpack(self.flow.down(*found)):
            feeds = self.flow.feeds(n)
            if n in of or not all(m in of for m in feeds) or not self._is_next(layer, n):
                continue
            if name(n) in SHAPE | GATES | {"div"} and len(feeds) == 1:
                of[n] = of[feeds[0]]
            elif name(n) in ADDS and len({of[m] for m in feeds}) > 1:
                of[n] = n
        kept = self.flow.up(*(n for n in of if name(n) in ADDS))
        return [*found, *(n for n in of if n not in own | taken and kept & self.flow.bit(n))]

    def _one_stream(self, layer: Layer, found: Sequence[Node]) -> Node:
        several = self.beside is not None and any(layer.overlaps(b) for b in self.beside.found)
        if len(found) != 1 or several or self._others_leave(layer, found[0]):
            what = "paths that go around it" if len(found) != 1 else "streams that do not meet"
            raise BadInputError(
                f"expected a block before and behind which all paths of the tokens meet, got {what} at "
                f"{layer.path or 'the module'}; measure map='attention'"
            )
        return found[0]

    def _others_leave(self, layer: Layer, n: Node) -> bool:
        """Whether a block gives tokens of another stream too, which are made apart from those that one node of it is."""
        size, behind = shape(n) or (), self.flow.up(n) | self.flow.down(n)
        for m in self.given(self.inside(layer)):
            other = shape(m) or ()
            sums = name(m) in ADDS | NORMS and len(other) == len(size) and other[-1:] == size[-1:]
            if sums and not behind & self.flow.bit(m):
                return True
        return False

    # what blocks take and give

    def joins(self, layer: Layer) -> bool:
        """Whether attention joins several streams of a block: it takes them apart, and gives as many."""
        entered = [group.enter for group in layer.groups[:1]]
        if not entered or len(entered[0]) > 1:
            return bool(entered)
        inside, near = self.inside(layer, returned=False), self.attention.near(*entered[0])
        taken = self.taken(inside)
        given = [n for n in self.given(inside, returned=False) if self.residual(taken, n)]
        return len(taken) == len(given) > 1 and all(near & self.flow.bit(n) for n in taken)

    def inside(self, layer: Layer, *, returned: bool = True) -> list[Node]:
        """The live nodes of a layer; with `returned`, those that what is returned depends on."""
        need = self.flow.up(*self.ends) if returned else self.flow.up(*self.flow.nodes)
        return [n for n in self.flow.unpack(need) if layer.holds(n) and n.op != "output"]

    def taken(self, inside: Sequence[Node]) -> list[Node]:
        """The nodes that some depend on right away and that are not among them."""
        before = {m for n in inside for m in self.flow.feeds(n)} - {*inside}
        return sorted(before, key=self.flow.index.__getitem__)

    def given(self, inside: Sequence[Node], *, returned: bool = True) -> list[Node]:
        """The tensors among some that others read or that are returned; without `returned`, also those that nothing reads."""
        among, need = {*inside}, self.flow.up(*(self.ends if returned else self.flow.nodes))

        def is_given(n: Node) -> bool:
            users = [u for u in n.users if u.op != "output" and need & self.flow.bit(u)]
            return n in self.ends or any(u not in among for u in users) or not (users or returned)

        return [n for n in inside if shape(n) and is_given(n)]

    def residual(self, before: Sequence[Node], n: Node) -> bool:
        """Whether a node is a sum, or a norm of a sum, that some others are terms of."""
        todo, visited = [n], set[Node]()
        while todo:
            m = todo.pop()
            if m in before:
                return True
            if m not in visited and name(m) in _RESIDUAL:
                visited.add(m)
                todo += self.flow.feeds(m)
        return False

    def module_of(self, layer: Layer, call: int = 0) -> str:
        """The path of the module that makes one attention of a block; empty where it is none of the block's."""
        if not call < len(layer.groups):
            return ""
        scope = layer.of.attention.scope_of(layer.groups[call])
        return "" if scope is None else scope.path

    # which nodes are a block

    def _around(self, first: int, last: int) -> tuple[Node, Node] | None:
        """The waists around the nodes of some orders; nothing where there are none."""
        inside = [n for n in self.flow.unpack(self.flow.up(*self.ends)) if first <= order(n) < last]
        if not inside:
            return None
        before = [w for w in self.waists if order(w) < first or (w in self.flow.begins and w not in inside)]
        behind = [w for w in self.waists if self.flow.index[w] >= self.flow.index[inside[-1]]]
        return (before[-1], behind[0]) if before and behind else None

    def _keeps_shape(self, part: Element | Scope) -> bool:
        ends = self._around(part.first, part.last)
        return ends is not None and shape(ends[0]) == shape(ends[1])

    def _has_residual(self, part: Element | Scope) -> bool:
        ends = self._around(part.first, part.last)
        return ends is not None and self.residual(ends[:1], ends[1])

    def _one_attention(self, part: Element | Scope) -> bool:
        groups = self.attention.groups
        return sum(any(part.first <= order(n) < part.last for n in g.outputs) for g in groups) == 1

    def _holds_blocks(self, e: Element) -> bool:
        """Whether lists inside an element have blocks of their own."""
        inside = [o for o in self._elements if o.path.startswith(f"{e.path}.") and self._one_attention(o)]
        return any(not self._beside_others(o) for o in inside)

    def _beside_others(self, e: Element) -> bool:
        """Whether attention outside of an element, which neither feeds it nor follows it, is between the waists around it."""
        ends = self._around(e.first, e.last)
        between = self.flow.bits(self.flow.between(ends[:1], ends[1:])) if ends else 0
        outputs = [n for g in self.attention.groups for n in g.outputs]
        own = [n for n in outputs if e.first <= order(n) < e.last]
        near = self.flow.up(*own) | self.flow.down(*own)
        return bool(between & ~near & self.flow.bits(n for n in outputs if n not in own))

    def _block_of(self, group: Group) -> tuple[str, int, int]:
        """The path and the orders of a group's block."""
        at = order(group.outputs[0])
        around = [self._with_neighbours(e) for e in self._elements if e.first <= at < e.last]
        around = [e for e in around if not self._beside_others(e)] or around
        single = [e for e in around if self._one_attention(e)]
        keeps = [e for e in single if self._keeps_shape(e)]
        for e in (*(e for e in keeps if e.among_blocks(self.program.module)), *keeps, *single):
            return e.path, e.first, e.last
        scopes = [s for s in self.program.scopes if s.holds(*group.outputs)]
        around = [e for e in around if not self._holds_blocks(e)]
        if around:
            half = self._half(around[-1], scopes)
            return (around[-1].path, around[-1].first, around[-1].last) if half is None else (half.path, half.first, half.last)
        own = self._module_of(group)
        if own is None or self._outside:
            return "", *self._cut_at_waists(group)
        return own.path, own.first, own.last

    def _module_of(self, group: Group) -> Scope | None:
        """The outermost module with one attention, that group's, which keeps the shape of its tokens and adds the residual."""
        modules = [s for s in self.program.scopes if s.holds(*group.outputs) and self._one_attention(s)]
        keeps = [s for s in modules if self._keeps_shape(s)]
        return max([s for s in keeps if self._has_residual(s)] or keeps or modules, key=len, default=None)

    @functools.cached_property
    def _networks(self) -> list[tuple[Node, list[Node]]]:
        """The sums, where all paths meet, of the tokens and of matrices that are no attention's, with those matrices."""
        own = set[Node]()
        for group in self.attention.groups:
            with suppress(BadInputError):
                own.update(self.flow.between(group.enter, [self.attention.leave(group)]))
        found: list[tuple[Node, list[Node]]] = []
        for before, behind in itertools.pairwise(self.waists):
            if name(behind) in ADDS and self.residual([before], behind):
                matrices = [n for n in self.flow.between([before], [behind]) if name(n) in MATRIX and n not in own]
                found += [(behind, matrices)] if matrices else []
        return found

    @functools.cached_property
    def _outside(self) -> bool:
        """Whether matrices of blocks are in no module with one attention, where these are several: parts of blocks."""
        outputs = [order(n) for g in self.attention.groups for n in g.outputs]
        if any(e.first <= at < e.last for e in self._elements for at in outputs):  # blocks of lists are known
            return False
        scopes = [s for s in map(self._module_of, self.attention.groups) if s is not None]
        matrices = [n for _, found in self._networks for n in found if scopes and order(n) >= scopes[0].first]
        return len(scopes) > 1 and not all(any(s.holds(n) for s in scopes) for n in matrices)

    def _with_neighbours(self, e: Element) -> Element:
        """An element whose residual is added outside, with those of its number in lists side by side."""
        ends, owner, number = self._around(e.first, e.last), e.parent.rpartition(".")[0], e.path.rpartition(".")[2]
        if ends is None or order(ends[1]) < e.last:
            return e
        beside = [o for o in self._elements if o.parent.rpartition(".")[0] == owner]
        same = [o for o in beside if o.path.rpartition(".")[2] == number and o.first >= e.first]
        last = max(o.last for o in same)
        late = [o for o in beside if o not in same and e.first < o.first < last]
        return e if late or len({o.parent for o in same}) < len(same) else Element(e.path, e.parent, e.first, last, e.parts)

    def _half(self, e: Element, scopes: list[Scope]) -> Scope | None:
        """A module inside an element of several self-attentions that is a block: they share all of its matrices among them."""
        parts = [s for s in self.program.scopes if s.path.startswith(f"{e.path}.") and self._one_attention(s)]
        stream = self.flow.unpack(self.flow.up(*self.ends))
        matrices = [n for n in stream if e.first <= order(n) < e.last and name(n) in MATRIX]
        if not all(any(s.holds(n) for s in parts) for n in matrices):
            return None
        return max((s for s in scopes if s in parts and self._keeps_shape(s) and self._adds(s)), key=len, default=None)

    def _adds(self, scope: Scope) -> bool:
        """Whether a module adds the residual itself."""
        ends = self._around(scope.first, scope.last)
        return ends is not None and scope.holds(ends[1]) and self.residual(ends[:1], ends[1])

    def _cut_at_waists(self, group: Group) -> tuple[int, int]:
        """The orders of a group's block where no module is one: from the last waist before it to the last before the next.

        Attentions that follow on each other without a network between are of one block, where there are networks at all.
        """
        index, ends = self.flow.index, [order(n) for n, _ in self._networks]

        def start(g: Group) -> int:
            at = max(index[n] for n in g.enter)
            return max((order(w) + 1 for w in self.waists if index[w] <= at), default=0)

        starts = sorted({start(g) for g in self.attention.groups})
        begun = [b for a, b in itertools.pairwise(starts) if not ends or any(a <= e < b for e in ends)]
        begun = [*starts[:1], *begun]
        first = max(s for s in begun if s <= start(group))
        later = [s for s in begun if s > first]
        if later:
            return first, min(later)
        adds = [w for w in self.waists if order(w) >= first and name(w) in ADDS and len(self.flow.feeds(w)) > 1]
        normed = [next((w for w in self.waists if name(w) in NORMS and self.flow.feeds(w) == [add]), None) for add in adds]
        if len(adds) > 1 and None not in normed:  # every sum is normalised, the last one too
            adds = [w for w in normed if w is not None]
        return first, order(adds[-1] if adds else self.program.nodes[-1]) + 1

    # blocks that mix tokens otherwise

    def _without_self_attention(self, found: list[Layer]) -> list[Layer]:
        """Elements beside those blocks, or of the outermost lists where there are none, that mix tokens in some other way.

        Or that are modules of the same type as one of those blocks.
        """
        module = self.program.module
        lists = {e.parent for e in self._elements for layer in found if (e.path, e.first) == (layer.path, layer.first)}
        types = {type(module.get_submodule(layer.path)) for layer in found if layer.path}
        if not found:
            inner = tuple(f"{e.path}." for e in self._elements)
            lists = {e.parent for e in self._elements if e.among_blocks(module) and not e.parent.startswith(inner)}
        more: list[Layer] = []
        for e in self._elements:
            apart = all(e.last <= layer.first or layer.last <= e.first for layer in (*found, *more))
            attends = any(e.first <= order(c.output) < e.last for c in self.wide.calls)
            alike = type(module.get_submodule(e.path)) in types and self._keeps_shape(e)
            if e.parent in lists and apart and (attends or alike or self._mixes(e)):
                more.append(Layer(e.path, e.first, e.last, (), weakref.ref(self)))
        kinds = {(layer.path.rpartition(".")[0], type(module.get_submodule(layer.path))) for layer in more}
        for e in self._elements if not found else ():  # stages that change the shape of tokens, beside others that do not
            apart = all(e.last <= layer.first or layer.last <= e.first for layer in more)
            if apart and (e.parent, type(module.get_submodule(e.path))) in kinds:
                more.append(Layer(e.path, e.first, e.last, (), weakref.ref(self)))
        return more

    def _mixes(self, e: Element) -> bool:
        """Whether an element that keeps the tokens' shape moves one of them with another."""
        ends = self._around(e.first, e.last)
        if ends is None or shape(ends[0]) != shape(ends[1]) or len(shape(ends[0]) or ()) < 3:
            return False
        f, (x,) = segment(self.program, self.flow, ends[:1], ends[1:], check=False)
        x.requires_grad_()
        with torch.enable_grad():
            (y,) = f(x)
            seed = torch.zeros_like(y)
            seed[..., y.shape[-2] // 2, :] = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(0)).to(y)
            (grad,) = torch.autograd.grad(y, x, seed)
        return int((grad.abs().sum(-1).reshape(-1, y.shape[-2]).sum(0) > 0).sum()) > 1
