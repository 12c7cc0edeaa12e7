"""One forward pass of a model that asks its layers for products with their Jacobians.

Where a layer's map begins, its tokens `x` go on as a leaf of a graph of their own. Where it ends, a backward pass through that
graph gives `Jᵀ u`, recorded: it is linear in `u`, so a backward pass through it, from any `v`, gives `J v`. The model itself
runs on as if nothing had happened, and stops behind the last layer that is asked for. So one pass and two short backward
passes for each layer are a step of power iteration in all layers.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.models import Model
from howsmooth.program.ends import MapName, Span
from howsmooth.settings import choice
from howsmooth.training.one_pass import OnePass
from howsmooth.training.probe import Inputs, Probe, captured, rows_of
from howsmooth.training.route import Course, Route, chosen
from howsmooth.training.turns import How, Seen, Turns

FAST: tuple[MapName, ...] = ("attention", "heads", "normed", "block")


@final
class Passes:
    """A model at a probe, ready to be run again and again as its weights change.

    model: as `howsmooth.load` gives it.  probe: a batch, by the names of the model's `forward`, or its only tensor.
    layers: `"all"` or which.  map: `attention`, `heads`, `normed` or `block`.
    """

    def __init__(self, model: Model, probe: Inputs, layers: str | Sequence[int], map: MapName):
        self.model, self.map = model, choice(map, "a map", FAST)
        rows = rows_of(probe)
        samples = [captured(model, row).sample for row in rows]
        first = samples[0]
        self.count = len(first.trace.layers)
        self.layers = chosen(layers, self.count)
        if any(len(s.trace.layers) != self.count for s in samples):
            raise BadInputError("expected rows of a probe that go the same way through the model, got others; pass one row")
        cuts = [first.map(k, self.map) for k in self.layers]  # refuses what is not there, compares with the model's own code
        bad = next((cut for cut in cuts if not cut.kernels), None)
        base = first.cut(self.layers[0], "model") if bad is None else replace(bad, name="model")
        assert base is not None
        trace = base.trace
        routes = [
            Route(k, cut.span.place, Span.of(self.map, trace, layer), layer.module, layer.call)
            for k, cut in zip(self.layers, cuts, strict=True)
            for layer in (trace.layers[k],)
        ]
        self.course = Course(model.module, routes, base, bad is None, first.work)
        self.heads = {k: trace.layers[k].heads for k in self.layers}
        self.least = min(route.span.tokens.numel() for route in routes)  # numbers in the smallest direction
        self.probe = Probe.of(rows, samples)
        self.device = trace.output.device

    def fed(self, batch: Inputs) -> "Passes":
        """The same model and layers at another batch, without looking at the model again."""
        other = copy.copy(self)
        kind = next((p.dtype for p in self.model.module.parameters() if p.is_floating_point()), torch.float32)
        other.probe = self.probe.fed(batch, self.device, kind)
        return other

    def run(
        self, directions: Mapping[int, Tensor], how: How | None = None, *, starts: Mapping[int, Tensor] | None = None
    ) -> Iterator[dict[int, Seen]]:
        """One pass for each run of the probe.

        What cannot be measured, since something is not finite there, and all behind it, is left out.

        directions: by layer, the `u`, (rows · times, n, d); drawn where there is none.  how: how it is measured.
        starts: by layer, the `v`, where they are known instead.
        """
        how = How() if how is None else how
        probe = self.probe
        count, start = probe.rows_a_run * how.times, 0
        for given, real, positions in zip(probe.runs, probe.real, probe.positions, strict=True):
            us, vs = ({k: t[start : start + count] for k, t in (by or {}).items()} for by in (directions, starts))
            mask = None if real is None else real.to(self.device)
            while True:
                with positions.remembered():
                    found = OnePass(self.course, Turns(how, count, mask, us, vs)).seen(given)
                if positions.held():
                    break
            yield found
            start += count
