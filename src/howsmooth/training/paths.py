"""Where the maps of a model's layers lie in its recorded run, and their graphs at the weights of the moment."""

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.kernels import AttentionKernel, attend, attention_and_kernel, plain_attention
from howsmooth.kernels.kinds import Softmax
from howsmooth.models import MapName, Model
from howsmooth.models.library import reason
from howsmooth.models.recorded import Recording, Recordings
from howsmooth.program import Ends, ends_of
from howsmooth.program.attention import Call, answering, attention
from howsmooth.program.nodes import shape
from howsmooth.program.replay import Run, Segment, Way, compiled
from howsmooth.program.segments import SegmentMap
from howsmooth.settings import items, whole
from howsmooth.training.jacobians import LayerGraph
from howsmooth.training.probe import Probe

FAST: tuple[MapName, ...] = ("attention", "heads", "normed", "block")
Values = Mapping[Node, Tensor]
Weights = Mapping[str, Tensor]


class Linearized(NamedTuple):
    """The graphs of layers, and the kernels of their attention calls, each of which serves all of them."""

    graphs: dict[int, LayerGraph]
    kernels: list[AttentionKernel]

    @property
    def size(self) -> int:
        """About how many bytes they keep."""
        tensors = [t for graph in self.graphs.values() for t in (*graph.enter, *graph.leave)]
        tensors += [t for kernel in self.kernels for t in (*kernel.inputs, kernel.output)]
        return sum([t.numel() * t.element_size() for t in tensors])


@final
@dataclass(frozen=True, eq=False)
class Paths:
    """A recorded run at a probe, and the ends of the maps that are looked at, by layer. work: the precision of the maps."""

    recording: Recording
    tensors: tuple[Tensor, ...]
    probe: Probe
    ends: Mapping[int, Ends]
    map: MapName = "attention"
    work: torch.dtype = torch.float64

    @functools.cached_property
    def ways(self) -> dict[int, Way]:
        """The nodes between the ends of each map."""
        return {k: Way.of(e.flow, e.enter, e.leave, e.through) for k, e in self.ends.items()}

    @functools.cached_property
    def enter(self) -> tuple[Node, ...]:
        """What enters some map."""
        return tuple(dict.fromkeys(n for ends in self.ends.values() for n in ends.enter))

    @functools.cached_property
    def beside(self) -> set[Node]:
        """What is read on the ways and does not move."""
        return {n for way in self.ways.values() for n in way.beside}

    @functools.cached_property
    def heads(self) -> dict[int, int]:
        """How many heads the only attention call of each map has; 0 where there are several calls, or none on the kernels."""
        found = {}
        for k, way in self.ways.items():
            queries = [n.args[0] for n in way.nodes if n.target is attention]
            size = shape(queries[0]) or () if len(queries) == 1 and isinstance(queries[0], Node) else ()
            found[k] = size[-3] if len(size) > 3 and size[0] == self.probe.rows else 0
        return found

    def calls(self, layer: int) -> bool:
        """Whether attention of a map is softmax on the kernels, where it can be looked at."""
        kinds = [str(n.kwargs.get("kind", "softmax")) for n in self.ways[layer].nodes if n.target is attention]
        return bool(kinds) and set(kinds) == {"softmax"}

    @functools.cached_property
    def ends_nodes(self) -> tuple[Node, ...]:
        """What enters and leaves, map by map."""
        return tuple(n for e in self.ends.values() for n in (*e.enter, *e.leave))

    @functools.cached_property
    def axes(self) -> dict[Node, int | None]:
        """The axis along which rows of the probe lie in what enters and leaves; nothing where there is none."""
        rows = self.probe.rows
        return {n: next((a for a in (0, 1) if _is_axis(n, a, rows)), None) for n in self.ends_nodes}

    @property
    def by_row(self) -> bool:
        """Whether all that enters and leaves has an axis for rows."""
        return None not in self.axes.values()

    def with_copies(self, many: "Paths") -> bool:
        """Find the axes of rows from a run with copies of them; false where there are none."""
        if many.ends.keys() != self.ends.keys() or len(many.ends_nodes) != len(self.ends_nodes):
            return False
        found = dict[Node, int | None]()
        for one, other in zip(self.ends_nodes, many.ends_nodes, strict=True):
            sizes = shape(one) or (), shape(other) or ()
            rest = [a for a in (0, 1) if _is_axis(one, a, self.probe.rows) and _is_axis(other, a, many.probe.rows)]
            found[one] = found[other] = next((a for a in rest if _without(sizes[0], a) == _without(sizes[1], a)), None)
        vars(self)["axes"], vars(many)["axes"] = ({n: found[n] for n in p.ends_nodes} for p in (self, many))
        return self.by_row

    def place(self, layer: int) -> str:
        """The module of a map, as it is called in the model."""
        found, layers = self.recording.layers.found[layer], self.recording.layers
        inner = layers.module_of(found) if self.map in ("attention", "heads") else ""
        return inner or found.path or type(self.recording.program.module).__name__

    @property
    def least(self) -> int:
        """How many numbers the smallest of what enters and leaves has."""
        sides = [side for e in self.ends.values() for side in (e.enter, e.leave)]
        return min(sum(math.prod(shape(n) or ()) for n in side) for side in sides)

    def weights(self) -> dict[str, Tensor]:
        """The weights of the moment, without gradients."""
        return {name: t.detach() for name, t in self.recording.program.weights_now().items()}

    def block(self, layer: int) -> str:
        """The path of a layer's block."""
        return self.recording.layers.found[layer].path

    # values

    def replayed(self, weights: Weights) -> tuple[dict[Node, Tensor], list[Tensor]]:
        """What enters the maps, and what the model returns, in the model's own precision."""
        code, inputs, wanted = self._whole
        with answering(_answer, derives=True):
            values = code(*self._given(inputs, weights, {}, None))
        return dict(zip(wanted, values, strict=True)), values[len(self.enter) :]

    def frozen(self, hidden: Values, weights: Weights) -> dict[Node, Tensor]:
        """What is read on the ways and does not move. hidden: what enters the maps."""
        code, inputs, wanted = self._still
        with answering(_answer, derives=True):
            values = code(*self._given(inputs, weights, hidden, self.work))
        return dict(zip(wanted, values, strict=True))

    def _given(self, nodes: Sequence[Node], weights: Weights, hidden: Values, work: torch.dtype | None) -> list[Any]:
        """Weights, arguments, constants and hidden states, in a precision."""
        program, arguments, found = self.recording.program, self._arguments, []
        fit = Run(program, self.tensors, work).fit
        for n in nodes:
            if n in program.weights:
                t = weights[program.weights[n]]
            elif n in hidden:
                t = hidden[n]
            else:
                t = arguments[n] if n.op == "placeholder" else getattr(program.code, str(n.target))
            found.append(fit(t))
        return found

    def at(self, tensors: tuple[Tensor, ...], probe: Probe) -> "Paths":
        """The same at another batch of the kind."""
        other = copy.copy(self)
        vars(other).update(tensors=tensors, probe=probe)
        return other

    @property
    def _arguments(self) -> dict[Node, Tensor]:
        return dict(zip(self.recording.program.inputs, self.tensors, strict=True))

    @functools.cached_property
    def _whole(self) -> tuple[Segment, list[Node], list[Node]]:
        return self._compiled([*self.enter, *self.recording.program.outputs], (), None)

    @functools.cached_property
    def _still(self) -> tuple[Segment, list[Node], list[Node]]:
        return self._compiled(list(self.beside), self.enter, self.work)

    def _compiled(
        self, wanted: list[Node], known: Sequence[Node], work: torch.dtype | None
    ) -> tuple[Segment, list[Node], list[Node]]:
        """Code for some nodes, what it takes and what it gives. known: what needs not be computed."""
        run = Run(self.recording.program, self.tensors, work, dict.fromkeys(known))  # pyright: ignore[reportArgumentType]
        nodes = [n for n in run.needed(set(wanted)) if n.op == "call_function"]
        inputs = [*dict.fromkeys([m for n in nodes for m in n.all_input_nodes] + wanted)]
        inputs = [n for n in inputs if n not in set(nodes)]
        return compiled(nodes, inputs, wanted, work), inputs, wanted

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
        calls, found = [n for n in self.ways[layer].nodes if n.target is attention], list[Any]()
        for n in calls:
            sizes = [shape(m) or () for m in n.args[:3] if isinstance(m, Node)]
            if len(n.all_input_nodes) > 3 or any(len(size) != 4 or size[0] != self.probe.rows for size in sizes):
                return layer
            found.append((sizes, n.args[3:], dict(n.kwargs)))
        ends = self.ends[layer]
        return repr((found, [shape(n) for n in (*ends.enter, *ends.leave)])) if calls else layer

    @functools.cached_property
    def _steps(self) -> dict[tuple[int, ...], tuple[Segment, list[Node]]]:
        return {}

    def _follow(self, layers: tuple[int, ...], points: Mapping[int, list[Tensor]], frozen: Values) -> dict[int, LayerGraph]:
        """What leaves some maps where `points` enter."""
        ways = [self.ways[k] for k in layers]
        if layers not in self._steps:
            beside = list(dict.fromkeys(n for way in ways for n in way.beside))
            stages = [_stages(way.nodes) for way in ways]
            nodes = [n for stage in zip(*stages, strict=True) for part in stage for n in part]
            together = [calls for calls in zip(*([s[-1] for s in own[:-1]] for own in stages), strict=True) if len(calls) > 1]
            inputs, outputs = [*(n for way in ways for n in way.enter), *beside], [n for way in ways for n in way.leave]
            self._steps[layers] = compiled(nodes, inputs, outputs, self.work, together), beside
        code, beside = self._steps[layers]
        left = iter(code(*[t for k in layers for t in points[k]], *[frozen[n] for n in beside]))
        leave = {k: [next(left) for _ in way.leave] for k, way in zip(layers, ways, strict=True)}
        return {k: LayerGraph(points[k], leave[k], self._axes(k)) for k in layers}

    def _axes(self, layer: int) -> tuple[list[int | None], list[int | None]]:
        ends = self.ends[layer]
        return [self.axes[n] for n in ends.enter], [self.axes[n] for n in ends.leave]

    def graphs(self, hidden: Values, frozen: Values) -> dict[int, LayerGraph]:
        """All maps, attention with second derivatives. hidden: what enters, of which graphs begin."""
        found: dict[int, LayerGraph] = {}
        with answering(_answer, derives=True), sdpa_kernel(SDPBackend.MATH):
            for k in self.ends:
                found |= self._follow((k,), self._begun((k,), hidden), frozen)
        return found

    def linearized(
        self, layers: tuple[int, ...], hidden: Values, frozen: Values, copies: int, *, alone: bool = False
    ) -> Linearized:
        """Maps of layers that are alike, attention on the kernels. copies: of every row.  alone: each is for one head alone."""
        kernels: list[AttentionKernel] = []

        def answer(call: Call) -> Tensor:
            own = copies if len(call.q) == self.probe.rows * len(layers) else 1
            out, kernel = attention_and_kernel(call.q, call.k, call.v, call.scores, "strict", own)
            kernels.append(kernel)
            if not alone:
                return out
            one = torch.eye(copies, device=out.device, dtype=out.dtype)[:, : out.shape[1]]
            return out * one.repeat(len(out) // copies, 1)[:, :, None, None]

        with answering(answer), sdpa_kernel(SDPBackend.MATH):
            return Linearized(self._follow(layers, self._begun(layers, hidden), frozen), kernels)

    def _begun(self, layers: tuple[int, ...], hidden: Values) -> dict[int, list[Tensor]]:
        """What enters, as the begin of graphs apart from the run that it comes from, whose gradients still reach back."""
        found: dict[int, list[Tensor]] = {}
        for k in layers:
            points = [hidden[n].to(self.work) for n in self.ends[k].enter]
            found[k] = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in points]
        return found


def _is_axis(n: Node, axis: int, rows: int) -> bool:
    size = shape(n) or ()
    return len(size) > 2 and size[axis] == rows


def _without(size: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*size[:axis], *size[axis + 1 :])


def _stages(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes in order, a stage ending behind each call of attention."""
    stages: list[list[Node]] = [[]]
    for n in nodes:
        stages[-1].append(n)
        if n.target is attention:
            stages.append([])
    return stages


@final
@dataclass(frozen=True, eq=False)
class RowRun:
    """The recorded run of one row, compared with the model there, for certified solves. real: tokens that are no padding."""

    recording: Recording
    run: Run
    real: Tensor | None

    @classmethod
    def every(cls, model: Model, recordings: Recordings, probe: Probe) -> "list[RowRun]":
        """The runs of all rows of a probe."""
        found = []
        for i in range(probe.rows):
            row = probe.row(i)
            real = None if row.real is None or bool(row.real.all()) else row.real[0].nonzero()[:, 0]
            found.append(cls(*recordings.at(model.module, row.args, row.kwargs), real))
        return found

    def segment(self, layer: int, map: str, work: torch.dtype, head: int | None = None) -> SegmentMap:
        """A layer's map at this row."""
        found = self.recording.layers.found[layer]
        place = self.recording.layers.module_of(found) or found.path
        return SegmentMap(self.run, ends_of(self.recording.layers, layer, map), place, head, self.real, work)


def recorded_paths(
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
    try:
        recording, tensors = recordings.find(model.module, probe.args, probe.kwargs, anew=anew)
        count = len(recording.layers.found)
    except HowSmoothError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError) as error:
        raise BadInputError(
            f"expected inputs that {name} runs on, got {type(error).__name__} from it ({reason(error)[:160]}); check their "
            "shapes and kinds"
        ) from error
    if known and recording in known:
        return known[recording].at(tensors, probe)
    if not count:
        raise BadInputError(f"expected a model with self-attention, got {name} without; follow another one")
    every = isinstance(layers, str) and layers == "all"
    ends: dict[int, Ends] = {}
    refusal: HowSmoothError | None = None
    for k in chosen(layers, count):
        try:
            ends[k] = ends_of(recording.layers, k, map)
        except BadInputError as error:
            if not every:
                raise
            refusal = refusal or error
    if not ends and refusal is not None:
        raise refusal
    return Paths(recording, tensors, probe, ends, map, model.dtype)


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


def _answer(call: Call) -> Tensor:
    """Attention with first and second derivatives, NaN where logits are not finite."""
    scores, mask = call.scores, call.scores.mask
    extra = [mask.bias, scores.kind.sink if isinstance(scores.kind, Softmax) else None]
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
