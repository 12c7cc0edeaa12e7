"""Where the maps of a model's layers lie in its recorded run, and their graphs at the weights of the moment."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.kernels import attend, plain_attention
from howsmooth.models import MapName, Model
from howsmooth.models.library import runs
from howsmooth.models.recorded import Recording, Recordings
from howsmooth.program import Ends
from howsmooth.program.attention import Call, answering, attention
from howsmooth.program.confirm import agrees
from howsmooth.program.nodes import shape
from howsmooth.program.replay import Run, Segment, Way, compiled
from howsmooth.settings import items, whole
from howsmooth.training.jacobians import LayerGraph
from howsmooth.training.probe import Probe

FAST: tuple[MapName, ...] = ("attention", "heads", "normed", "block")
Values = Mapping[Node, Tensor]
Weights = Mapping[str, Tensor]


@final
@dataclass(eq=False)
class Paths:
    """A recorded run at a probe, and the ends of the maps that are looked at, by layer. work: the precision of the maps.

    apart: whether the rows of the probe are known to be apart, or known to be mixed.
    """

    recording: Recording
    tensors: tuple[Tensor, ...]
    probe: Probe
    ends: Mapping[int, Ends]
    work: torch.dtype = torch.float64
    apart: bool | None = None
    _codes: dict[torch.dtype | None, tuple[Segment, list[Node]]] = field(default_factory=dict, init=False)
    _steps: dict[tuple[int, ...], tuple[Segment, list[Node]]] = field(default_factory=dict, init=False)

    @functools.cached_property
    def ways(self) -> dict[int, Way]:
        """The nodes between the ends of each map."""
        return {k: e.way for k, e in self.ends.items()}

    @functools.cached_property
    def calls(self) -> dict[int, list[Node]]:
        """The attention calls of each map that run on the kernels."""
        return {k: [n for n in way.nodes if n.target is attention] for k, way in self.ways.items()}

    @functools.cached_property
    def heads(self) -> dict[int, int]:
        """How many heads the only attention call of each map has; 0 where there are several calls, or none on the kernels."""
        found = {}
        for k, calls in self.calls.items():
            size = shape(calls[0].all_input_nodes[0]) or () if len(calls) == 1 else ()
            found[k] = size[-3] if len(size) > 3 and size[0] == self.probe.rows else 0
        return found

    def is_softmax(self, layer: int) -> bool:
        """Whether attention of a map is softmax on the kernels, where it can be looked at."""
        return {str(n.kwargs.get("kind", "softmax")) for n in self.calls[layer]} == {"softmax"}

    @functools.cached_property
    def _enter(self) -> tuple[Node, ...]:
        """What enters some map."""
        return tuple(dict.fromkeys(n for ends in self.ends.values() for n in ends.enter))

    @functools.cached_property
    def _returned(self) -> tuple[Node, ...]:
        """What the model returns."""
        return self.recording.program.outputs

    @functools.cached_property
    def _beside(self) -> tuple[Node, ...]:
        """What is read on the ways and does not move."""
        return tuple(dict.fromkeys(n for way in self.ways.values() for n in way.beside))

    @functools.cached_property
    def ends_nodes(self) -> tuple[Node, ...]:
        """What enters and leaves, map by map."""
        return tuple(n for e in self.ends.values() for n in (*e.enter, *e.leave))

    @functools.cached_property
    def axes(self) -> dict[Node, int | None]:
        """The axis along which rows of the probe lie in what enters and leaves; nothing where there is none."""
        return {n: next(_axes(n, self.probe.rows), None) for n in self.ends_nodes}

    def with_copies(self, many: "Paths") -> bool:
        """Find the axes of rows from a run with copies of them; false where there are none."""
        if many.ends.keys() != self.ends.keys() or len(many.ends_nodes) != len(self.ends_nodes):
            return False
        for one, other in zip(self.ends_nodes, many.ends_nodes, strict=True):
            among = [a for a in _axes(one, self.probe.rows) if a in _axes(other, many.probe.rows)]
            rest = [a for a in among if _without(one, a) == _without(other, a)]
            self.axes[one] = many.axes[other] = next(iter(rest), None)
        return None not in self.axes.values()

    @property
    def least(self) -> int:
        """How many numbers the smallest of what enters and leaves has."""
        sides = [side for e in self.ends.values() for side in (e.enter, e.leave)]
        return min(sum(math.prod(shape(n) or ()) for n in side) for side in sides)

    # values

    def replayed(self, weights: Weights) -> dict[Node, Tensor] | None:
        """What enters the maps, in the model's own precision; nothing where the model itself gives something else.

        Nothing is said against a model that gives what is not finite.
        """
        program = self.recording.program
        values = self._values((*self._enter, *self._returned), {}, weights, None)
        own = program.own(self.tensors)
        same = agrees(program, own, [values[n].detach() for n in self._returned])
        return values if same or not all(bool(t.isfinite().all()) for t in own) else None

    def frozen(self, hidden: Values, weights: Weights) -> dict[Node, Tensor]:
        """What is read on the ways and does not move. hidden: what enters the maps."""
        return self._values(self._beside, hidden, weights, self.work)

    def _values(self, wanted: Sequence[Node], hidden: Values, weights: Weights, work: torch.dtype | None) -> dict[Node, Tensor]:
        """What some nodes give in a precision, by code that is compiled once for each. hidden: what is known already."""
        program = self.recording.program
        run = Run(program, self.tensors, work, hidden)
        if work not in self._codes:
            nodes = {n: None for n in run.needed(set(wanted)) if n.op == "call_function"}
            taken = dict.fromkeys([*(m for n in nodes for m in n.all_input_nodes), *wanted])
            inputs = [n for n in taken if n not in nodes]
            self._codes[work] = compiled(list(nodes), inputs, wanted, work), inputs
        code, inputs = self._codes[work]
        given, arguments = [], dict(zip(program.inputs, self.tensors, strict=True))
        for n in inputs:
            if n in program.weights:
                t = weights[program.weights[n]]
            elif n in hidden:
                t = hidden[n]
            else:
                t = arguments[n] if n.op == "placeholder" else getattr(program.code, str(n.target))
            given.append(run.fit(t))
        with answering(own_answer, derives=True):
            return dict(zip(wanted, code(*given), strict=True))

    # graphs

    @functools.cached_property
    def alike(self) -> list[list[int]]:
        """Layers whose attention calls can run as one."""
        found: list[tuple[Any, list[int]]] = []
        for k in self.ends:
            kind = self._signature(k)
            group = next((g for other, g in found if other == kind and not any(self._meet(k, j) for j in g)), None)
            if group is None:
                found.append((kind, [k]))
            else:
                group.append(k)
        return [group for _, group in found]

    def _meet(self, one: int, other: int) -> bool:
        """Whether what enters one of two maps is made in the other, as between blocks."""
        return any(n in self.ways[b].nodes for a, b in ((one, other), (other, one)) for n in self.ends[a].enter)

    def _signature(self, layer: int) -> Any:
        found = list[Any]()
        for n in self.calls[layer]:
            sizes = [shape(m) or () for m in n.args[:3] if isinstance(m, Node)]
            if len(n.all_input_nodes) > 3 or any(len(size) != 4 or size[0] != self.probe.rows for size in sizes):
                return layer
            found.append((sizes, n.args[3:], dict(n.kwargs)))
        ends = self.ends[layer]
        return repr((found, [shape(n) for n in (*ends.enter, *ends.leave)])) if found else layer

    def graphs(self, layers: Sequence[int], hidden: Values, frozen: Values) -> dict[int, LayerGraph]:
        """Maps of layers that are alike. hidden: what enters, whose own graphs these reach back to, where it has some."""
        if (key := tuple(layers)) not in self._steps:
            self._steps[key] = self._compiled([self.ways[k] for k in layers])
        code, beside = self._steps[key]
        found: dict[int, LayerGraph] = {}
        for k in layers:  # begun apart from the run that they come from, whose gradients still reach back
            enter = [hidden[n].to(self.work) for n in self.ways[k].enter]
            enter = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in enter]
            axes = [self.axes[n] for n in self.ways[k].enter], [self.axes[n] for n in self.ways[k].leave]
            found[k] = LayerGraph(enter, [], axes)
        with sdpa_kernel(SDPBackend.MATH):
            left = iter(code(*[t for graph in found.values() for t in graph.enter], *[frozen[n] for n in beside]))
        return {k: graph._replace(leave=[next(left) for _ in self.ways[k].leave]) for k, graph in found.items()}

    def _compiled(self, ways: Sequence[Way]) -> tuple[Segment, list[Node]]:
        """The code of maps that are alike, their attention calls as one, and what it reads beside what enters."""
        beside = list(dict.fromkeys(n for way in ways for n in way.beside))
        stages = [_stages(way.nodes) for way in ways]
        nodes = [n for stage in zip(*stages, strict=True) for part in stage for n in part]
        together = [calls for calls in zip(*([s[-1] for s in own[:-1]] for own in stages), strict=True) if len(calls) > 1]
        inputs, outputs = [*(n for way in ways for n in way.enter), *beside], [n for way in ways for n in way.leave]
        return compiled(nodes, inputs, outputs, self.work, together), beside


def _axes(n: Node, rows: int) -> Iterator[int]:
    """The axes along which so many rows may lie."""
    size = shape(n) or ()
    return (a for a in (0, 1) if len(size) > 2 and size[a] == rows)


def _without(n: Node, axis: int) -> tuple[int, ...]:
    """The shape of a node but for one axis."""
    size = shape(n) or ()
    return (*size[:axis], *size[axis + 1 :])


def _stages(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes in order, a stage ending behind each call of attention."""
    stages: list[list[Node]] = [[]]
    for n in nodes:
        stages[-1].append(n)
        if n.target is attention:
            stages.append([])
    return stages


def paths_of(
    model: Model,
    recordings: Recordings,
    probe: Probe,
    layers: str | Sequence[int],
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


def chosen(layers: str | Sequence[int], count: int) -> list[int]:
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
