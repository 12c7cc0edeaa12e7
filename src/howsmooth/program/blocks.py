"""Where token streams begin in a recorded run, and which nodes are a block that they go through.

A stream is what reaches the first attention. Blocks are the elements of a list of modules where attention is in one. Outside of
lists a block is the outermost module with one self-attention, or what is between places where all paths meet.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node

from howsmooth.errors import BadInputError
from howsmooth.program.calls import find_calls, is_whole, lonely_operands, whole_call
from howsmooth.program.operations import (
    ADDS,
    EMBEDDINGS,
    GATES,
    JOINS,
    MATRIX,
    NORMALISES,
    SELECTS,
    SHAPE,
    dependents,
    is_float,
    name,
    order,
    shape,
    walk,
)
from howsmooth.program.replay import Run, Way
from howsmooth.program.sites import AttentionSites, Group
from howsmooth.program.tracing import Flow, Program, Span

_ROUNDS = 3  # of looking for streams that begin with a parameter
_RESIDUAL = ADDS | SHAPE | SELECTS | JOINS | NORMALISES | GATES | {"div", "where"}


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


@dataclass(frozen=True, eq=False)
class Layer(Span):
    """One block: its path, the orders of its nodes, the self-attentions inside; none where it mixes tokens otherwise."""

    groups: tuple[Group, ...] = ()

    @property
    def outputs(self) -> tuple[Node, ...]:
        """What its self-attentions give."""
        return tuple(n for group in self.groups for n in group.outputs)


def elements_of(program: Program) -> list[Span]:
    """Runs of elements of lists of modules, each after those it is inside."""
    lists = {p for p, m in program.module.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    known: dict[str, tuple[int, set[str]]] = {}  # by path, which run it is, and the parts that were called in it
    found: list[Span] = []
    for scope in sorted(program.scopes, key=lambda s: (s.first, -s.last)):
        words = scope.path.split(".") if scope.path else []
        for i in range(1, len(words) + 1):
            path, parent, part = ".".join(words[:i]), ".".join(words[: i - 1]), ".".join(words[i:])
            if parent not in lists:
                continue
            at, parts = known.get(path, (-1, {part}))
            if at >= 0 and scope.last <= found[at].last:  # inside a call that is known
                continue
            if part in parts:
                known[path] = len(found), {part}
                found.append(Span(path, scope.first, scope.last))
            else:
                found[at] = Span(path, found[at].first, scope.last)
                parts.add(part)
    return sorted(found, key=lambda e: (e.first, -e.last))


def is_list_of_blocks(module: nn.Module, path: str) -> bool:
    """Whether the list at a path is one of blocks: a ModuleList, or a Sequential of parts that are alike."""
    parent = module.get_submodule(path)
    return isinstance(parent, nn.ModuleList) or len({type(m) for m in parent.children()}) == 1


def place_in_list(module: nn.Module, path: str) -> tuple[str, int]:
    """The list of modules that a path is an element of, and its place there; nothing and -1 where it is in none."""
    parent, _, place = path.rpartition(".")
    listed = place.isdigit() and isinstance(module.get_submodule(parent), nn.ModuleList)
    return (parent, int(place)) if listed else ("", -1)


class BlockFinder:
    """The blocks that tokens of one flow go through."""

    def __init__(self, program: Program, flow: Flow):
        self.program, self.flow, self.elements = program, flow, elements_of(program)
        self.attention = AttentionSites(program, flow)

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
        begins = *token_begins(self.program), *self.flow.begins
        return AttentionSites(self.program, _with_learned(self.program, begins))

    @functools.cached_property
    def waists(self) -> list[Node]:
        """Where every path of the token stream meets."""
        return self.flow.waists(self.ends)

    @functools.cached_property
    def found(self) -> list[Layer]:
        """The blocks, in order."""
        found: list[Layer] = []
        for group in self.attention.groups:
            if any(group in block.groups for block in found):
                continue
            at = self._of(group)
            inside = tuple(g for g in self.attention.groups if g is group or any(map(at.holds, g.outputs)))
            found.append(Layer(at.path, at.first, at.last, inside))
        found += self._without_self_attention(found)
        if not found and self.wide.calls:
            begun = max(order(b) for b in self.flow.begins) + 1
            found.append(Layer("", begun, order(self.program.nodes[-1]) + 1))
        return sorted(found, key=lambda block: block.first)

    def residual(self, before: Sequence[Node], n: Node) -> bool:
        """Whether a node is a sum, or a norm of a sum, that some others are terms of."""
        terms = walk([n], lambda m: self.flow.feeds(m) if name(m) in _RESIDUAL and m not in before else ())
        return any(m in before for m in terms)

    def around(self, part: Span) -> tuple[Node, Node] | None:
        """The waists around a part of the run; nothing where there are none."""
        inside = [n for n in self.flow.unpack(self.flow.up(*self.ends)) if part.holds(n)]
        if not inside:
            return None
        before = [w for w in self.waists if order(w) < part.first or (w in self.flow.begins and w not in inside)]
        behind = [w for w in self.waists if self.flow.index[w] >= self.flow.index[inside[-1]]]
        return (before[-1], behind[0]) if before and behind else None

    def keeps_shape(self, part: Span) -> bool:
        ends = self.around(part)
        return ends is not None and shape(ends[0]) == shape(ends[1])

    def _has_residual(self, part: Span) -> bool:
        ends = self.around(part)
        return ends is not None and self.residual(ends[:1], ends[1])

    def _one_attention(self, part: Span) -> bool:
        groups = self.attention.groups
        return sum(any(map(part.holds, g.outputs)) for g in groups) == 1

    def _holds_blocks(self, e: Span) -> bool:
        """Whether lists inside an element have blocks of their own."""
        inside = [o for o in self.elements if o.path.startswith(f"{e.path}.") and self._one_attention(o)]
        return any(not self._beside_others(o) for o in inside)

    def _beside_others(self, e: Span) -> bool:
        """Whether attention outside of an element, which neither feeds it nor follows it, is between the waists around it."""
        ends = self.around(e)
        between = self.flow.bits(self.flow.between(ends[:1], ends[1:])) if ends else 0
        outputs = [n for g in self.attention.groups for n in g.outputs]
        own = [n for n in outputs if e.holds(n)]
        near = self.flow.up(*own) | self.flow.down(*own)
        return bool(between & ~near & self.flow.bits(n for n in outputs if n not in own))

    def _of(self, group: Group) -> Span:
        """The path and the orders of a group's block."""
        around = [self._with_neighbours(e) for e in self.elements if e.holds(group.outputs[0])]
        around = [e for e in around if not self._beside_others(e)] or around
        single = [e for e in around if self._one_attention(e)]
        keeps = [e for e in single if self.keeps_shape(e)]
        for e in (*(e for e in keeps if is_list_of_blocks(self.program.module, e.parent)), *keeps, *single):
            return e
        around = [e for e in around if not self._holds_blocks(e)]
        if around:
            return self._half(around[-1], group) or around[-1]
        own = self._module_of(group)
        return Span("", *self._cut_at_waists(group)) if own is None or self._outside else own

    def _module_of(self, group: Group) -> Span | None:
        """The outermost module with one attention, that group's, which keeps the shape of its tokens and adds the residual."""
        modules = [s for s in self.program.scopes if s.holds(*group.outputs) and self._one_attention(s)]
        keeps = [s for s in modules if self.keeps_shape(s)]
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
        outputs = [n for group in self.attention.groups for n in group.outputs]
        if any(e.holds(n) for e in self.elements for n in outputs):  # blocks of lists are known
            return False
        scopes = [s for s in map(self._module_of, self.attention.groups) if s is not None]
        matrices = [n for _, found in self._networks for n in found if scopes and order(n) >= scopes[0].first]
        return len(scopes) > 1 and not all(any(s.holds(n) for s in scopes) for n in matrices)

    def _with_neighbours(self, e: Span) -> Span:
        """An element whose residual is added outside, with those of its number in lists side by side."""
        ends, owner, number = self.around(e), e.parent.rpartition(".")[0], e.path.rpartition(".")[2]
        if ends is None or order(ends[1]) < e.last:
            return e
        beside = [o for o in self.elements if o.parent.rpartition(".")[0] == owner]
        same = [o for o in beside if o.path.rpartition(".")[2] == number and o.first >= e.first]
        last = max(o.last for o in same)
        late = [o for o in beside if o not in same and e.first < o.first < last]
        return e if late or len({o.parent for o in same}) < len(same) else Span(e.path, e.first, last)

    def _half(self, e: Span, group: Group) -> Span | None:
        """A module inside an element of several self-attentions that is a block: they share all of its matrices among them."""
        parts = [s for s in self.program.scopes if s.path.startswith(f"{e.path}.") and self._one_attention(s)]
        stream = self.flow.unpack(self.flow.up(*self.ends))
        if not all(any(s.holds(n) for s in parts) for n in stream if e.holds(n) and name(n) in MATRIX):
            return None
        own = [s for s in parts if s.holds(*group.outputs) and self.keeps_shape(s) and self._has_residual(s)]
        return max((s for s in own if (ends := self.around(s)) is not None and s.holds(ends[1])), key=len, default=None)

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
        normed = [next((w for w in self.waists if name(w) in NORMALISES and self.flow.feeds(w) == [add]), None) for add in adds]
        if len(adds) > 1 and None not in normed:  # every sum is normalised, the last one too
            adds = [w for w in normed if w is not None]
        return first, order(adds[-1] if adds else self.program.nodes[-1]) + 1

    # blocks that mix tokens otherwise

    def _without_self_attention(self, found: list[Layer]) -> list[Layer]:
        """Elements beside those blocks, or of the outermost lists where there are none, that mix tokens in some other way.

        Or that are modules of the same type as one of those blocks.
        """
        module = self.program.module
        lists = {e.parent for e in self.elements for block in found if (e.path, e.first) == (block.path, block.first)}
        types = {type(module.get_submodule(block.path)) for block in found if block.path}
        if not found:
            inner = tuple(f"{e.path}." for e in self.elements)
            lists = {e.parent for e in self.elements if is_list_of_blocks(module, e.parent) and not e.parent.startswith(inner)}
        more: list[Layer] = []
        for e in self.elements:
            if e.parent not in lists or any(e.overlaps(block) for block in (*found, *more)):
                continue
            alike = type(module.get_submodule(e.path)) in types and self.keeps_shape(e)
            if alike or any(e.holds(c.output) for c in self.wide.calls) or self._mixes(e):
                more.append(Layer(e.path, e.first, e.last))
        kinds = {(block.parent, type(module.get_submodule(block.path))) for block in more}
        for e in self.elements if not found else ():  # stages that change the shape of tokens, beside others that do not
            alone = not any(e.overlaps(block) for block in more)
            if alone and (e.parent, type(module.get_submodule(e.path))) in kinds:
                more.append(Layer(e.path, e.first, e.last))
        return more

    def _mixes(self, e: Span) -> bool:
        """Whether an element that keeps the tokens' shape moves one of them with another."""
        ends = self.around(e)
        if ends is None or shape(ends[0]) != shape(ends[1]) or len(shape(ends[0]) or ()) < 3:
            return False
        f = Way.of(self.flow, ends[:1], ends[1:], check=False).at(Run.recorded(self.program))
        x = f.start[0].requires_grad_()
        with torch.enable_grad():
            (y,) = f(x)
            seed = torch.zeros_like(y)
            seed[..., y.shape[-2] // 2, :] = torch.randn(y.shape[-1], generator=torch.Generator().manual_seed(0)).to(y)
            (grad,) = torch.autograd.grad(y, x, seed)
        return int((grad.abs().sum(-1).reshape(-1, y.shape[-2]).sum(0) > 0).sum()) > 1
