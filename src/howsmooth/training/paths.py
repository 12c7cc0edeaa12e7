"""Where the maps of a model's layers lie in its recorded run, and their graphs and Jacobians at the weights of the moment.

Every layer has a graph of its own, from a copy of the tokens that enter it. A backward pass, itself recorded, is linear in what
it is applied to, so a backward pass through that gives the forward product. One call of torch serves all layers.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.kernels import attend, plain_attention
from howsmooth.models import MapName, Model
from howsmooth.models.model_input import runs
from howsmooth.models.recorded import Recording, Recordings
from howsmooth.program import Ends
from howsmooth.program.attention import Call, answering, attention
from howsmooth.program.confirm import agrees
from howsmooth.program.operations import shape
from howsmooth.program.replay import Run, Way, compiled
from howsmooth.settings import LayerChoice, items, whole
from howsmooth.spectral.operator import unit_rows
from howsmooth.spectral.ritz import Block
from howsmooth.spectral.step import block_step
from howsmooth.training.probe import Probe

FAST: tuple[MapName, ...] = ("attention", "heads", "normed", "block")
_APART = 1e-6  # share of a product that may reach another item, as rounding does
Values = Mapping[Node, Tensor]
Weights = Mapping[str, Tensor]
Code = Callable[..., list[Tensor]]


class LayerGraph(NamedTuple):
    """A layer's graph between tokens that enter and what leaves, each in one tensor or several.

    axes: of each of them, along which its rows lie; nothing where there is one row.
    """

    enter: Sequence[Tensor]
    leave: Sequence[Tensor]
    axes: tuple[Sequence[int | None], Sequence[int | None]]


class LayerTurn(NamedTuple):
    """What steps of power iteration found of a layer: by item, the constant along the last directions, and the next ones."""

    value: Float[Tensor, " items"]
    directions: Block


@final
class LayerJacobians:
    """`Jᵀ u` and `J v` of layers of one size, on blocks (layers · items, times, N).

    rows: `times` copies of every item, one behind the other.  real: which tokens of the rows are not padding;
    the others neither move nor count.
    """

    def __init__(self, layers: Mapping[int, LayerGraph], rows: int, times: int, real: Bool[Tensor, "rows n"] | None):
        self.layers, self._rows, self._times, self._real = list(layers), rows, times, real
        self._sides = [layer.enter for layer in layers.values()], [layer.leave for layer in layers.values()]
        self._axes = [[layer.axes[side] for layer in layers.values()] for side in (0, 1)]
        self._enter, self._leave = ([t for own in side for t in own] for side in self._sides)
        self._us: list[Tensor] = []
        self._transposed: Sequence[Tensor] = ()

    @classmethod
    def of_kinds(
        cls, graphs: Mapping[int, LayerGraph], rows: int, times: int = 1, real: Bool[Tensor, "rows n"] | None = None
    ) -> "list[LayerJacobians]":
        """Layers of one size together."""
        kinds: dict[tuple[int, ...], dict[int, LayerGraph]] = {}
        for k, graph in graphs.items():
            size = tuple(sum([t.numel() for t in side]) for side in (graph.enter, graph.leave))
            kinds.setdefault(size, {})[k] = graph
        return [cls(layers, rows, times, real) for layers in kinds.values()]

    def turn(
        self, carried: Mapping[int, Block], rounds: int, first: int, least: float = 0.0, *, graph: bool = False
    ) -> dict[int, LayerTurn]:
        """Some steps of power iteration by layer, from directions that are carried or, where there are none, random.

        An item where something is not finite keeps its directions.  rounds: how many steps at most.  first: the same where
        directions are random, if it is more.  least: the gain of a step behind which there is no further one.
        graph: values are `|Jᵀ u|` of the last step, for unit `u`, with a graph down to the weights; else `max |J w|` in the
        span of the last `v`.
        """
        like = self._leave[0]
        shape = (self._rows // self._times, self._times, sum([t.numel() for t in self._sides[1][0]]) // self._rows)
        known = {k: u for k in self.layers if (u := carried.get(k)) is not None and u.shape == shape}
        start = torch.cat([known[k].to(like) if k in known else drawn(k, shape, like) for k in self.layers])
        us = self._split(start, 1)  # zero at padding
        us = self._split(unit_rows(self._block(us, 1)), 1) if graph else us
        self._us = [t.detach().requires_grad_() for t in us]
        self._transposed = self._back(self._us, graph=True)
        transposed = self._block(self._transposed, 0)
        turned = block_step(transposed.detach(), self.jvp)
        for _ in range((rounds if len(known) == len(self.layers) else max(rounds, first)) - 1):
            if not bool(turned.gain > least):
                break
            transposed = self.vjp(turned.directions, graph=graph)
            turned = block_step(transposed.detach(), self.jvp)
        values = transposed[:, 0].norm(dim=-1) if graph else turned.value
        kept = torch.where(turned.directions.flatten(1).any(-1)[:, None, None], turned.directions, start)
        parts = zip(values.chunk(len(self.layers)), kept.chunk(len(self.layers)), strict=True)
        return dict(zip(self.layers, (LayerTurn(*own) for own in parts), strict=True))

    def vjp(self, u: Block, *, graph: bool = False) -> Block:
        """`Jᵀ u`. graph: down to weights."""
        return self._block(self._back(self._split(u, 1), graph=graph), 0)

    def jvp(self, v: Block) -> Block:
        """`J v`, a backward pass through the first `Jᵀ u` of a turn, which has a graph down to `u`."""
        pairs = [(p, t) for p, t in zip(self._transposed, self._split(v, 0), strict=True) if p.requires_grad]
        if not pairs:
            return self._block([torch.zeros_like(u) for u in self._us], 1)
        outputs, along = zip(*pairs, strict=True)
        return self._block(torch.autograd.grad(outputs, self._us, along, retain_graph=True, materialize_grads=True), 1)

    def gains(self, probes: int) -> dict[int, Float[Tensor, " items"]]:
        """The mean gain of every item by layer, from so many Gaussian probes or a few more; behind a turn.

        Probes are those of every call, so that what changes is the layer. They are multiplied as blocks, `times` in each.
        """
        shape = (self._rows // self._times * len(self.layers), self._times, self._enter_size)
        like = self._enter[0]
        entries = self._block(self._split(torch.ones(shape[0], 1, shape[2]).expand(shape).to(like), 0), 0)[:, 0].sum(-1)
        squares, count = torch.zeros(shape[0], dtype=torch.float64, device=like.device), math.ceil(probes / self._times)
        for i in range(count):
            image = self.jvp(drawn(i, shape, like))
            squares = squares + torch.linalg.vector_norm(image, dim=-1, dtype=torch.float64).square().mean(1)
        found = (squares / count / entries).sqrt()
        return dict(zip(self.layers, found.chunk(len(self.layers)), strict=True))

    @property
    def _enter_size(self) -> int:
        """How many numbers enter one layer in one copy of an item."""
        return sum([t.numel() for t in self._sides[0][0]]) // self._rows

    def apart(self) -> bool:
        """Whether what is wanted of the last row reaches no other."""
        random = torch.Generator().manual_seed(0)
        us = self._block([torch.randn(t.shape, generator=random).to(t) for t in self._leave], 1).flatten(0, 1)
        us.unflatten(0, (-1, self._rows))[:, :-1] = 0
        found = self.vjp(us[:, None]).flatten(0, 1).unflatten(0, (-1, self._rows)).abs().amax(-1)
        return bool((found[:, :-1] <= _APART * found[:, -1:]).all())

    def _back(self, us: Sequence[Tensor], *, graph: bool) -> Sequence[Tensor]:
        pairs = [(y, u) for y, u in zip(self._leave, us, strict=True) if y.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in self._enter]
        outputs, given = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, self._enter, given, True, graph, materialize_grads=True)

    def _block(self, tensors: Sequence[Tensor], side: int) -> Block:
        """Tensors of one side of all layers as a block."""
        found, rest = [], iter(tensors)
        for axes in self._axes[side]:
            own = [self._masked(next(rest).movedim(axis or 0, 0)).reshape(self._rows, -1) for axis in axes]
            found.append(own[0] if len(own) == 1 else torch.cat(own, 1))
        return torch.cat(found).unflatten(0, (-1, self._times))

    def _split(self, block: Block, side: int) -> list[Tensor]:
        """A block as tensors of one side of all layers."""
        found: list[Tensor] = []
        layers = zip(self._sides[side], self._axes[side], block.flatten(0, 1).chunk(len(self.layers)), strict=True)
        for tensors, axes, own in layers:
            parts = own.split([t.numel() // self._rows for t in tensors], 1)
            for part, t, axis in zip(parts, tensors, axes, strict=True):
                whole = part.to(t).reshape(t.movedim(axis or 0, 0).shape)
                found.append(self._masked(whole).movedim(0, axis or 0))
        return found

    def _masked(self, t: Tensor) -> Tensor:
        """A tensor with rows first, zero at padding."""
        real = self._real
        return t if real is None or t.ndim != 3 or t.shape[:2] != real.shape else t * real[..., None].to(t)


def drawn(seed: int, shape: tuple[int, ...], like: Tensor) -> Block:
    """Random directions."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


@final
class Paths:
    """A recorded run at a probe, and the ends of the maps that are looked at, by layer. work: the precision of the maps.

    apart: whether the rows of the probe are known to be apart, or known to be mixed.
    """

    def __init__(
        self, recording: Recording, tensors: tuple[Tensor, ...], probe: Probe, ends: Mapping[int, Ends], work: torch.dtype
    ):
        self.recording, self.tensors, self.probe, self.ends, self.work = recording, tensors, probe, ends, work
        self.apart: bool | None = None
        self._sides = [n for e in ends.values() for n in (*e.enter, *e.leave)]
        # along which rows of the probe lie in what enters and leaves; nothing where there is none
        self.axes: dict[Node, int | None] = {n: next(_axes(n, probe.rows), None) for n in self._sides}
        self._codes: dict[torch.dtype | None, tuple[Code, list[Node], list[Node]]] = {}
        self._steps: dict[tuple[int, ...], tuple[Code, list[Node]]] = {}

    @functools.cached_property
    def heads(self) -> dict[int, int]:
        """How many heads the only attention call of each map has; 0 where there are several calls, or none on the kernels."""
        sizes = {k: shape(e.calls[0].all_input_nodes[0]) or () for k, e in self.ends.items() if len(e.calls) == 1}
        alone = {k for k, size in sizes.items() if len(size) > 3 and size[0] == self.probe.rows}
        return {k: e.heads if k in alone else 0 for k, e in self.ends.items()}

    def is_softmax(self, layer: int) -> bool:
        """Whether attention of a map is softmax on the kernels, where it can be looked at."""
        return {str(n.kwargs.get("kind", "softmax")) for n in self.ends[layer].calls} == {"softmax"}

    @property
    def least(self) -> int:
        """How many numbers the smallest of what enters and leaves has."""
        sides = [side for e in self.ends.values() for side in (e.enter, e.leave)]
        return min(sum(math.prod(shape(n) or ()) for n in side) for side in sides)

    def with_copies(self, many: "Paths") -> bool:
        """Find the axes of rows from a run with copies of them; false where there are none."""
        if many.ends.keys() != self.ends.keys() or len(many._sides) != len(self._sides):
            return False
        for one, other in zip(self._sides, many._sides, strict=True):
            among = [a for a in _axes(one, self.probe.rows) if a in _axes(other, many.probe.rows)]
            sizes = [list(shape(n) or ()) for n in (one, other)]
            rest = [a for a in among if sizes[0][:a] + sizes[0][a + 1 :] == sizes[1][:a] + sizes[1][a + 1 :]]
            self.axes[one] = many.axes[other] = next(iter(rest), None)
        return None not in self.axes.values()

    # values

    def replayed(self, weights: Weights) -> dict[Node, Tensor] | None:
        """What enters the maps, in the model's own precision; nothing where the model itself gives something else.

        Nothing is said against a model that gives what is not finite.
        """
        program = self.recording.program
        values, own = self.values(weights), program.own(self.tensors)
        same = agrees(program, own, [values[n].detach() for n in program.outputs])
        return values if same or not all(bool(t.isfinite().all()) for t in own) else None

    def values(self, weights: Weights, entered: Values | None = None) -> dict[Node, Tensor]:
        """What enters the maps and what the model returns, in its own precision, by code that is compiled once.

        entered: the former, where it is known: then what is read on the ways and does not move, in the precision of the maps.
        """
        program, work = self.recording.program, None if entered is None else self.work
        run = Run(program, self.tensors, work, entered or {}, weights)
        if work not in self._codes:
            enter = (*(n for e in self.ends.values() for n in e.enter), *program.outputs)
            wanted = list(dict.fromkeys(enter if work is None else (n for e in self.ends.values() for n in e.way.beside)))
            nodes = {n: None for n in run.needed(wanted) if n.op == "call_function"}
            taken = dict.fromkeys([*(m for n in nodes for m in n.all_input_nodes), *wanted])
            inputs = [n for n in taken if n not in nodes]
            self._codes[work] = compiled(list(nodes), inputs, wanted, work), inputs, wanted
        code, inputs, wanted = self._codes[work]
        with answering(own_answer, derives=True):
            return dict(zip(wanted, code(*map(run.given(), inputs)), strict=True))

    # graphs

    @functools.cached_property
    def alike(self) -> list[list[int]]:
        """Layers whose attention calls can run as one."""
        groups: dict[Any, list[list[int]]] = {}
        for k in self.ends:
            like = groups.setdefault(self._signature(k), [])
            group = next((g for g in like if not any(self._meet(k, j) for j in g)), None)
            if group is None:
                like.append([k])
            else:
                group.append(k)
        return sorted(g for like in groups.values() for g in like)

    def _meet(self, one: int, other: int) -> bool:
        """Whether what enters one of two maps comes from inside the other, as between blocks."""
        return any(n in self.ends[b].way.nodes for a, b in ((one, other), (other, one)) for n in self.ends[a].enter)

    def _signature(self, layer: int) -> Any:
        ends, found = self.ends[layer], list[Any]()
        for n in ends.calls:
            sizes = [shape(m) or () for m in n.args[:3] if isinstance(m, Node)]
            if len(n.all_input_nodes) > 3 or any(len(size) != 4 or size[0] != self.probe.rows for size in sizes):
                return layer
            found.append((sizes, n.args[3:], dict(n.kwargs)))
        return repr((found, [shape(n) for n in (*ends.enter, *ends.leave)])) if found else layer

    def graphs(self, layers: Sequence[int], hidden: Values, frozen: Values) -> dict[int, LayerGraph]:
        """Maps of layers that are alike. hidden: what enters, whose own graphs these reach back to, where it has some."""
        if (key := tuple(layers)) not in self._steps:
            self._steps[key] = self._compiled([self.ends[k].way for k in layers])
        code, beside = self._steps[key]
        found: dict[int, LayerGraph] = {}
        for k in layers:  # begun apart from the run that they come from, whose gradients still reach back
            enter = [hidden[n].to(self.work) for n in self.ends[k].enter]
            enter = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in enter]
            axes = [self.axes[n] for n in self.ends[k].enter], [self.axes[n] for n in self.ends[k].leave]
            found[k] = LayerGraph(enter, [], axes)
        with sdpa_kernel(SDPBackend.MATH):
            left = iter(code(*[t for graph in found.values() for t in graph.enter], *[frozen[n] for n in beside]))
        return {k: graph._replace(leave=[next(left) for _ in self.ends[k].leave]) for k, graph in found.items()}

    def _compiled(self, ways: Sequence[Way]) -> tuple[Code, list[Node]]:
        """The code of maps that are alike, their attention calls as one, and what it reads beside what enters."""
        beside, stages = list(dict.fromkeys(n for way in ways for n in way.beside)), list[list[list[Node]]]()
        for way in ways:  # a stage ends behind each call of attention
            stages.append([[]])
            for n in way.nodes:
                stages[-1][-1].append(n)
                stages[-1] += [[]] * (n.target is attention)
        nodes = [n for stage in zip(*stages, strict=True) for part in stage for n in part]
        together = [calls for calls in zip(*([s[-1] for s in own[:-1]] for own in stages), strict=True) if len(calls) > 1]
        inputs, outputs = [*(n for way in ways for n in way.enter), *beside], [n for way in ways for n in way.leave]
        return compiled(nodes, inputs, outputs, self.work, together), beside


def _axes(n: Node, rows: int) -> Iterator[int]:
    """The axes along which so many rows may lie."""
    size = shape(n) or ()
    return (a for a in (0, 1) if len(size) > 2 and size[a] == rows)


def paths_of(
    model: Model,
    recordings: Recordings,
    probe: Probe,
    layers: LayerChoice,
    map: MapName,
    *,
    anew: bool = False,
    known: Mapping[Recording, Paths] | None = None,
) -> Paths:
    """The maps of layers in a model's recorded run.

    layers: `"all"` that have the map, or which.  anew: record again.  known: of recordings that were found before.
    """
    name = type(model.module).__name__
    with runs(name):
        recording, tensors = recordings.find(model.module, probe.args, probe.kwargs, anew=anew)
        count = len(recording.layers.found)
    if known and recording in known:
        paths = known[recording]
        paths.tensors, paths.probe = tensors, probe
        return paths
    if not count:
        raise BadInputError(f"expected a model with self-attention, got {name} without; follow another one")
    every = isinstance(layers, str) and layers == "all"
    ends: dict[int, Ends] = {}
    refusal: HowSmoothError | None = None
    for k in chosen(layers, count):
        try:
            ends[k] = recording.ends(k, map)
        except BadInputError as error:
            if not every:
                raise
            refusal = refusal or error
    if not ends and refusal is not None:
        raise refusal
    return Paths(recording, tensors, probe, ends, model.dtype)


def chosen(layers: LayerChoice, count: int) -> list[int]:
    """Layers by number, in order, of a model that has so many."""
    fix = "count from 0"
    if isinstance(layers, str) and layers == "all":
        return list(range(count))
    given = items(layers, '"all" or a list of layers', fix)
    expected = f"layers from 0 to {count - 1}"
    found = sorted({whole(k, expected, fix, below=count) for k in given})
    if not found:
        raise BadInputError(f"expected {expected}, got an empty list; {fix}")
    return found


def own_answer(call: Call) -> Tensor:
    """Attention with first and second derivatives, NaN where logits are not finite."""
    scores, mask = call.scores, call.scores.mask
    extra = [mask.bias, scores.kind.traits.sink]
    if mask.ends is not None or any(t is not None and t.requires_grad for t in extra):
        return plain_attention(call.q, call.k, call.v, scores)
    plain = scores.softmax and scores.softcap is None and mask.window is None and mask.keys is None and mask.bias is None
    if plain and not torch.is_grad_enabled():
        grouped = call.q.shape[1] != call.k.shape[1]
        how = {"is_causal": mask.causal, "scale": scores.scale, "enable_gqa": grouped}
        return torch.nn.functional.scaled_dot_product_attention(call.q, call.k, call.v, **how)
    try:
        return attend(call.q, call.k, call.v, scores)
    except BadInputError:
        if torch.is_grad_enabled():
            raise
        return torch.full_like(call.q[..., :1], torch.nan).expand(*call.q.shape[:-1], call.v.shape[-1])
