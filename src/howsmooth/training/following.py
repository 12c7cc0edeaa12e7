"""Replays of a model that turn carried directions of all of its layers towards the top ones."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.fx import Node

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.kernels import AttentionKernel, attention_and_kernel
from howsmooth.kernels.tensors import float32_products
from howsmooth.models import MapName, Model
from howsmooth.models.recorded import Recordings, not_the_same
from howsmooth.models.room import free
from howsmooth.program.attention import Call, answering
from howsmooth.program.replay import Run
from howsmooth.program.segments import SegmentMap
from howsmooth.settings import LayerChoice
from howsmooth.solve import Options, solve
from howsmooth.spectral.ritz import Block, orthonormal
from howsmooth.training.paths import LayerGraph, LayerJacobians, Paths, drawn, paths_of
from howsmooth.training.probe import Probe

_WIDTH = 4  # directions that are carried for a layer: when another one becomes the top, it is there
_RECORDINGS = 64  # kept, of rows with masks of their own
_COARSE = 2.0**-9  # error of a layer's products on a GPU: four times the rounding of operands with eleven bits
_GRAPHS, _MOST_GRAPHS = 2**28, 2**31  # bytes of layers that wait to be measured together

Certified = dict[tuple[int, int | None], tuple[float, float]]  # value and upper end, by layer and head


class Observed(NamedTuple):
    """What one replay found of one layer.

    value: by row of the probe, or by head of every row, `max |J w|` over unit `w` in the span of the last `v`, less what
    rounding may have added.  beside: what `looks` gives of the tokens that enter and of the attention calls.  gain: by row, if
    it is wanted.
    """

    value: Tensor
    beside: Tensor
    gain: Tensor | None = None


@final
class Following:
    """A model at a probe, replayed again and again as its weights change.

    places: the modules of the maps, by layer, as they are called in the model.  directions: unit vectors at the outputs,
    (items, times, N), by layer, and whether they are those of its heads, which have one each. There are as many as the layer's
    numbers tell apart, one for the whole batch where the model does not keep its rows apart along the first axis.
    """

    def __init__(self, model: Model, probe: Probe, layers: LayerChoice, map: MapName, *, certifies: bool = True):
        self.model, self._chosen, self._certifies = model, layers, certifies
        self._map: MapName = map
        self.probe, self._recordings, self._bytes = probe, Recordings(_RECORDINGS), 0  # of one layer's graph
        self._rows = [self.probe.row(i) for i in range(self.probe.rows)]
        self.directions: dict[tuple[int, bool], Block] = {}
        self._record()
        self.replay()

    def _record(self, *, anew: bool = False) -> None:
        """Record the model, the first time or anew; the copies that are measured are recorded at the next replay."""
        self.paths = self._paths(self.probe, anew)
        self.layers, self.count = list(self.paths.ends), len(self.paths.recording.layers.found)
        self.is_softmax = {k: self.paths.is_softmax(k) for k in self.layers}
        self.places = {k: self.paths.recording.place(k, self._map) for k in self.layers}
        self._many: Paths | None = None
        self._by_head: Paths | None = None
        with suppress(HowSmoothError):  # told where a certified solve is due
            for row in self._rows if self._certifies else ():
                one = self._recordings.find(self.model.module, row.args, row.kwargs, anew=anew and len(self._rows) > 1)[0]
                for k in self.layers:
                    _ = one.ends(k, self._map).way

    def _paths(self, probe: Probe, anew: bool = False) -> Paths:
        return paths_of(self.model, self._recordings, probe, self._chosen, self._map, anew=anew)

    @torch.no_grad()
    def replay(self) -> None:
        """Replay the model at the weights of the moment, which what follows is at; record it anew where it has changed."""
        for anew in (False, True):
            if anew or not self.paths.recording.program.has_weights:
                self._record(anew=True)
            self._weights = {name: t.detach() for name, t in self.paths.recording.program.weights_now().items()}
            hidden = self.paths.replayed(self._weights)
            if hidden is not None:
                break
        else:
            raise not_the_same()
        self._hidden = hidden
        if self._many is None:
            self._with_copies(anew)

    def _with_copies(self, anew: bool) -> None:
        """Record a run with copies of every row, each for a direction of its own, where rows are apart along the first axis."""
        rows = self.probe.rows
        self._many, self._items, self._times = self.paths, 1, 1
        try:
            many = self._paths(self.probe.repeated(max(1, min(_WIDTH, self.paths.least // rows))), anew)
        except HowSmoothError:
            return
        if not self.paths.with_copies(many):
            return
        found = [LayerJacobians.of_kinds(graphs, many.probe.rows) for graphs, _ in self._graphs(many)]
        if all(kind.apart() for kinds in found for kind in kinds):
            self._many, self._items, self._times = many, rows, many.probe.rows // rows

    @property
    def tells_heads(self) -> bool:
        """Whether rows are apart, and heads."""
        return self._many is not self.paths and all(self.paths.heads.values())

    def turn(self, rounds: int = 1, least: float = 0.0, *, alone: bool = False, probes: int = 0) -> dict[int, Observed]:
        """One replay: what it finds of each layer. What cannot be measured, since something is not finite there, is left out.

        rounds: steps of power iteration at most.  least: the gain of a step behind which there is no further one.
        alone: of every head alone, with one direction each.  probes: for the mean gain; none for no gain.
        """
        if alone and self._by_head is None:
            self._by_head = self._paths(self.probe.repeated(max(self.paths.heads.values())))
            self.paths.with_copies(self._by_head)
        paths = self._by_head if alone else self._many
        assert paths is not None
        rows, times = (paths.probe.rows, 1) if alone else (self._items * self._times, self._times)
        carried = {k: u for (k, heads), u in self.directions.items() if heads == alone}
        found: dict[int, Observed] = {}
        for graphs, kernels in self._graphs(paths, alone):
            enter = [self.paths.ends[k].enter[0] for k in graphs]
            tokens = [self._hidden[n].movedim(self.paths.axes[n] or 0, 0) for n in enter]
            softmax = not alone and all(self.is_softmax[k] for k in graphs)
            beside = dict(zip(graphs, looks(tokens, kernels if softmax else (), self.probe.real), strict=True))
            noise = max([kernel.noise for kernel in kernels], default=0.0)
            for kind in LayerJacobians.of_kinds(graphs, rows, times, paths.probe.real):
                with torch.enable_grad(), float32_products(coarse=True):
                    turned = kind.turn(carried, rounds, 1, least)
                    gains = kind.gains(probes) if probes else {}
                for k, (value, directions) in turned.items():
                    self.directions[k, alone] = directions
                    coarse = _COARSE if directions.is_cuda and directions.dtype == torch.float32 else 0.0
                    # what rounding may have added is taken off
                    found[k] = Observed(max(0.0, 1 - noise - coarse) * value.cpu(), beside[k], gains.get(k))
        return found

    def _graphs(self, paths: Paths, alone: bool = False) -> Iterator[tuple[dict[int, LayerGraph], list[AttentionKernel]]]:
        """The graphs of layers that are alike, and the kernels of their attention calls, each of which serves all of them.

        So many layers at once as there is room for, without those that are not finite.  alone: every copy of a row is for one
        head alone.
        """
        entered: dict[Node, Tensor] = {}
        copies = paths.probe.rows // self.probe.rows
        for k in self.layers:
            for b, a in zip(paths.ends[k].enter, self.paths.ends[k].enter, strict=True):
                hidden = self._hidden[a]
                entered[b] = hidden if copies == 1 else hidden.repeat_interleave(copies, self.paths.axes[a] or 0)
        with torch.no_grad():
            frozen = paths.values(self._weights, entered)
        device = next(iter(entered.values())).device
        room = max(_GRAPHS, min(_MOST_GRAPHS, free(device) // 16)) if device.type == "cuda" else _GRAPHS
        todo = paths.alike[::-1]
        while todo:
            many = max(1, room // self._bytes) if self._bytes else len(todo[-1])
            layers, rest = todo[-1][:many], todo[-1][many:]
            todo[-1:] = [rest] * bool(rest)
            kernels: list[AttentionKernel] = []

            def answer(call: Call, kernels: list[AttentionKernel] = kernels, count: int = len(layers)) -> Tensor:
                own = copies if len(call.q) == paths.probe.rows * count else 1
                out, kernel = attention_and_kernel(call.q, call.k, call.v, call.scores, "strict", own)
                kernels.append(kernel)
                if not alone:
                    return out
                one = torch.eye(copies, device=out.device, dtype=out.dtype)[:, : out.shape[1]]
                return out * one.repeat(len(out) // copies, 1)[:, :, None, None]

            try:
                with torch.enable_grad(), float32_products(coarse=True), answering(answer):
                    graphs = paths.graphs(layers, entered, frozen)
            except BadInputError:  # one of them, or all
                todo += [[k] for k in reversed(layers) if len(layers) > 1]
                continue
            kept = [t for graph in graphs.values() for t in (*graph.enter, *graph.leave)]
            kept += [t for kernel in kernels for t in (*kernel.inputs, kernel.output)]
            self._bytes = max(self._bytes, sum([t.numel() * t.element_size() for t in kept]) // len(layers))
            yield graphs, kernels

    # certified solves

    def certified(self, options: Options, *, heads: bool) -> Certified:
        """Certified constants, the largest over the rows, whose directions are carried from here on. heads: of each alone."""
        found = Certified()
        for k in self.layers:
            maps, tops = self._maps(k), list[Tensor]()
            for h in (None, *range(self.paths.heads[k] if heads else 0)):
                solved = [solve(map if h is None else map.of(head=h), map.start, options) for map in maps]
                found[k, h] = max(s.estimate.value for s in solved), max(s.estimate.upper for s in solved)
                images = [self._padded(s.image, map.real).flatten() for s, map in zip(solved, maps, strict=True)]
                tops += [torch.stack(images)] * (len(images) == self._items)
            if tops:
                self._lead(k, tops)
        return found

    def _maps(self, layer: int) -> list[SegmentMap]:
        """The map of a layer at every row alone, from what enters it in the last replay."""
        found = []
        for i, row in enumerate(self._rows):
            if self._many is self.paths:  # rows are mixed, so that one alone is another run
                recording, run = self._recordings.at(self.model.module, row.args, row.kwargs)
                ends = recording.ends(layer, self._map)
            else:
                recording, tensors = self._recordings.find(self.model.module, row.args, row.kwargs)
                ends, entered = recording.ends(layer, self._map), self.paths.ends[layer].enter
                hidden = [self._hidden[n].narrow(self.paths.axes[n] or 0, i, 1) for n in entered]
                run = Run(recording.program, tensors, None, dict(zip(ends.enter, hidden, strict=True)))
            real = None if row.real is None or bool(row.real.all()) else row.real[0].nonzero()[:, 0]
            found.append(SegmentMap(run, ends, self.places[layer], None, real, self.model.dtype))
        return found

    def _padded(self, image: Tensor, real: Tensor | None) -> Tensor:
        """What a direction of one row goes to, zero at padding."""
        if real is None:
            return image
        n = self.probe.real.shape[1] if self.probe.real is not None else len(image)
        return image.new_zeros(n, image.shape[-1]).index_copy_(0, real.to(image.device), image)

    def _lead(self, layer: int, tops: list[Tensor]) -> None:
        """Put what certified top directions go to, (items, N), before the carried ones; those of heads in their place."""
        top, old = tops[0], self.directions.get((layer, False))
        if old is None or old.shape[::2] != top.shape:
            old = drawn(layer, (len(top), self._times, top.shape[-1]), top)
        self.directions[layer, False] = orthonormal(torch.cat([top[:, None].to(old), old[:, : self._times - 1]], 1))
        if tops[1:]:
            block = torch.stack(tops[1:], 1)  # (items, heads, N)
            more = max(self.paths.heads.values()) - block.shape[1]
            self.directions[layer, True] = torch.nn.functional.pad(block, (0, 0, 0, more)).flatten(0, 1)[:, None]


# what attention looks like: its largest logits, how spread out it is, and who gets most of it


@torch.no_grad()
def _look(kernel: AttentionKernel, real: Tensor | None, layers: int = 1) -> Tensor:
    """What attention looks like in each of the layers that a kernel's rows belong to, (layers, 2 + heads).

    First the mean entropy of the rows, then the largest share of all attention that one token gets, then the largest logits
    by head. With `P̂ = z P`: `H = −Σ P log P = Σ P log z − Σ P̂ log P̂ / z`; a sink has no part in it.
    real: (rows, n), which tokens are not padding.
    """
    if not kernel.scores.kind.traits.softmax:
        raise BadInputError(f"expected softmax attention to look at, got {kernel.scores.kind!r}; its rows have no entropy here")
    tiled = kernel.tiled()
    batch, heads, n, m = tiled.shape
    if batch % layers:  # heads and rows lie along one axis
        batch, heads = batch * heads, 1
    entropy, mass = torch.zeros_like(tiled.largest), torch.zeros_like(tiled.largest)
    top = torch.zeros_like(mass)
    received = tiled.o.new_zeros(batch * heads, m, 1)
    for b in tiled.blocks():
        entropy[b.heads, b.rows] += torch.special.entr(b.weights).sum(-1)
        mass[b.heads, b.rows] += b.weights.sum(-1)
        top[b.heads, b.rows] = torch.maximum(top[b.heads, b.rows], b.weights.amax(-1))
        received[b.heads, b.cols] += torch.bmm(b.weights.mT, tiled.inverse[b.heads, b.rows])
    inverse = tiled.inverse[..., 0]
    tiny = torch.finfo(inverse.dtype).tiny
    entropy = (entropy - mass * inverse.clamp_min(tiny).log()) * inverse
    # the largest number of a row may be its sink: what is left of the largest weight says by how much
    largest = torch.where(top > 0, tiled.largest + top.log(), tiled.largest)
    by_layer = layers, batch // layers, heads
    entropy, logits = (t.unflatten(0, by_layer) for t in (entropy, largest))  # (layers, rows, heads, n)
    share = received[..., 0].unflatten(0, by_layer).mean(2)
    mean = entropy.mean((1, 2, 3))
    if real is not None and (layers * len(real), real.shape[1]) == (batch, n):
        rows = real.to(entropy.device)[None, :, None].expand_as(entropy)
        mean = entropy.where(rows, 0.0).sum((1, 2, 3)) / rows.sum((1, 2, 3))
        logits = logits.masked_fill(~rows, -math.inf)
    share = share / share.sum(-1, keepdim=True).clamp_min(tiny)
    return torch.cat([torch.stack([mean, share.amax(-1).mean(-1)], -1), logits.amax((1, 3))], -1)


def looks(tokens: Sequence[Tensor], kernels: Sequence[AttentionKernel], real: Tensor | None) -> list[Tensor]:
    """By layer, the root mean square norm of the tokens that enter; where there are kernels, what `_look` gives of all of them.

    Of several attention calls that is the mean entropy, the mean share, the largest logit, and then the largest logit by head,
    where all calls have as many. NaN where one of them is.
    """
    found: list[Tensor] = []
    for x in tokens:
        squares = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square().flatten()
        own = squares if real is None or real.numel() != len(squares) else squares[real.flatten().to(squares.device)]
        found.append(own.mean(0, keepdim=True).sqrt())
    if not kernels:
        return found
    calls = [_look(kernel, real, len(tokens)).double() for kernel in kernels]
    logits = [own[:, 2:] for own in calls]
    by_head = [torch.stack(logits).amax(0)] if len({t.shape for t in logits}) == 1 else []
    mean, top = torch.stack([own[:, :2] for own in calls]).mean(0), torch.cat(logits, 1).amax(1, keepdim=True)
    return [torch.cat(both) for both in zip(found, torch.cat([mean, top, *by_head], 1), strict=True)]
