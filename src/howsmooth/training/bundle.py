"""Products with the Jacobians of several layers that are alike, at once.

A layer was recorded with its graph cut at its attention calls: queries, keys and values are one end of a piece, what attention
gives back the beginning of the next. A backward pass through a piece, itself recorded, is linear in what it is applied to, so a
backward pass through that gives the piece's forward product. Layers are apart from each other, so one call of torch serves the
pieces of all of them, and one kernel their attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from howsmooth.kernels import AttentionKernel, linearize
from howsmooth.kernels.kinds import Softmax
from howsmooth.models.intercept import Answered
from howsmooth.spectral.step import Turned, block_step

Made = list[list[Tensor | None]]  # what a backward pass through a piece makes, by layer: for tokens, then for earlier calls


@dataclass(eq=False)
class Recorded:
    """A layer's map from `x` to `y`, with its attention calls in order; none where attention is part of the graph.

    What a call was answered with is a leaf, at which the graph of what comes after begins; every copy of a row has its own.
    """

    index: int
    x: Tensor
    y: Tensor
    calls: list[Answered] = field(default_factory=list)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Layers of one kind go together."""
        scores = []
        for scored in (c.call.scores for c in self.calls):
            mask, kind = scored.mask, scored.kind
            sink = kind.sink if isinstance(kind, Softmax) else None  # to compare its numbers would be to wait for the device
            tensors = [None if t is None else id(t) for t in (sink, mask.keys, mask.bias, mask.ends)]  # kept alive by the calls
            kind = Softmax() if sink is not None else kind
            scores.append((kind, scored.scale, scored.softcap, mask.causal, mask.window, *tensors))
        return (self.x.shape, self.y.shape, *(t.shape for c in self.calls for t in c.call.qkv), *scores)

    @property
    def held(self) -> int:
        """About how many bytes."""
        tensors = (self.x, self.y, *(t for c in self.calls for t in (*c.call.qkv, c.output)))
        return sum(t.numel() * t.element_size() for t in tensors)


class Bundle:
    """Layers of one kind, each with `times` copies of every row. alone: every copy is for one head alone."""

    def __init__(self, layers: Sequence[Recorded], rows: int, times: int, alone: bool, masked: Callable[[Tensor], Tensor]):
        """Raises `BadInputError` where some logits are not finite or out of range. rows: copies included.
        masked: zero at padding."""
        self.layers, self.rows, self.times, self.alone, self.masked = layers, rows, times, alone, masked
        self.kernels = [self._kernel(i) for i in range(len(layers[0].calls))]
        self._us: list[Tensor] = []
        self._made: list[Made] = []  # by piece, the last one first
        self._given: list[list[Tensor]] = []  # what they were made from

    def first(self, us: Sequence[Tensor]) -> list[Tensor]:
        """`Jᵀ u` of every layer, recorded; before any other product."""
        self._us = [u.detach().requires_grad_() for u in us]
        return self._back(self._us, record=True)

    def back(self, us: Sequence[Tensor], graph: bool = False) -> list[Tensor]:
        """`Jᵀ u` of every layer. graph: down to the weights, where attention is part of the graph."""
        return self._back([u.reshape(layer.y.shape) for u, layer in zip(us, self.layers, strict=True)], graph=graph)

    def forth(self, vs: Sequence[Tensor]) -> list[Tensor]:
        """`J v` of every layer."""
        moved = [[v.to(layer.x).reshape(layer.x.shape)] for v, layer in zip(vs, self.layers, strict=True)]
        for made, given, kernel in zip(self._made[:0:-1], self._given[:0:-1], self.kernels, strict=True):
            tangents = _through(made, given, moved)
            along = kernel.jvp(*(self._probes(tangents[i::3], kernel) for i in range(3)))
            for own, t in zip(moved, self._split(along, tangents[0].dtype), strict=True):
                own.append(self._one_head(t))
        return [self.masked(t) for t in _through(self._made[0], self._given[0], moved)]

    def step(self, pulled: Sequence[Tensor], starts: Sequence[Tensor] | None = None) -> Turned:
        """A step of power iteration in all layers, (layers · rows, times, N). starts: `v` to go on from instead of `pulled`."""
        times = 1 if self.alone else self.times  # heads have a direction each

        def forward(v: Tensor) -> Tensor:
            return self._rows(self.forth(v.flatten(0, 1).chunk(len(self.layers)) if starts is None else starts), times)

        return block_step(self._rows(pulled, times), forward)

    def _rows(self, each: Sequence[Tensor], times: int) -> Tensor:
        """(layers · rows, times, N)."""
        return torch.cat([t.detach().reshape(self.rows // times, times, -1) for t in each])

    def _kernel(self, stage: int) -> AttentionKernel:
        calls = [layer.calls[stage].call for layer in self.layers]
        kind = torch.promote_types(calls[0].qkv[0].dtype, torch.float32)
        q, k, v = (torch.cat([c.qkv[i].detach()[:: self.times] for c in calls]).to(kind) for i in range(3))
        mask, rows = calls[0].scores.mask, len(q) // len(calls)
        keys, bias = (
            t if t is None or len(t) != rows or len(calls) == 1 else t.repeat(len(calls), *[1] * (t.ndim - 1))
            for t in (mask.keys, mask.bias)
        )
        scores = replace(calls[0].scores, mask=replace(mask, keys=keys, bias=bias))
        # strict, since the error of others would be measured in every pass
        with torch.no_grad():  # of a learned sink too
            return linearize(q, k, v, scores, precision="strict")

    def _back(self, us: Sequence[Tensor], record: bool = False, graph: bool = False) -> list[Tensor]:
        stages = len(self.kernels)
        given = list(us)
        ends = [[layer.y] for layer in self.layers]
        totals: Made = [[None] * (stages + 1) for _ in self.layers]
        for stage in range(stages, -1, -1):
            starts = [[layer.x, *(c.output for c in layer.calls[:stage])] for layer in self.layers]
            made = _backward(ends, given, starts, record or graph)
            if record:
                self._made.append(made)
                self._given.append(given)
            for total, own in zip(totals, made, strict=True):
                for i, t in enumerate(own):
                    kept = total[i]
                    total[i] = kept if t is None else t if kept is None else kept + t
            if stage:
                calls = [layer.calls[stage - 1] for layer in self.layers]
                outs = [total[stage] for total in totals]
                filled = [torch.zeros_like(c.output) if t is None else t.detach() for c, t in zip(calls, outs, strict=True)]
                kernel = self.kernels[stage - 1]
                three = kernel.vjp(self._probes([self._one_head(t) for t in filled], kernel))
                parts = [self._split(t, c.dtype) for t, c in zip(three, calls[0].call.qkv, strict=True)]
                given = [t for own in zip(*parts, strict=True) for t in own]  # by layer: for queries, keys, values
                given = [t.requires_grad_() for t in given] if record else given
                ends = [list(c.call.qkv) for c in calls]
        found = [total[0] for total in totals]
        return [self.masked(torch.zeros_like(layer.x) if t is None else t) for t, layer in zip(found, self.layers, strict=True)]

    def _probes(self, each: Sequence[Tensor], kernel: AttentionKernel) -> Tensor:
        """(rows · times, …) of every layer as (times, layers · rows, …): one probe for each copy."""
        return torch.cat(list(each)).to(kernel.output.dtype).unflatten(0, (-1, self.times)).transpose(0, 1)

    def _split(self, t: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """The other way round."""
        return t.transpose(0, 1).flatten(0, 1).to(dtype).chunk(len(self.layers))

    def _one_head(self, t: Tensor) -> Tensor:
        """Of copy `h` only head `h`, where heads are alone."""
        if not self.alone:
            return t
        own = torch.eye(self.times, device=t.device, dtype=t.dtype)
        return t * own.repeat(len(t) // len(own), 1)[:, : t.shape[1], None, None]


def _backward(ends: list[list[Tensor]], given: Sequence[Tensor], starts: list[list[Tensor]], graph: bool) -> Made:
    """Gradients of `⟨given, ends⟩` in the starts of each layer; nothing where there is no way."""
    pairs = [(e, g) for e, g in zip([t for own in ends for t in own], given, strict=True) if e.requires_grad]
    flat = [t for own in starts for t in own]
    found: Sequence[Tensor | None] = [None] * len(flat)
    if pairs:
        outputs, gradients = zip(*pairs, strict=True)
        how = {"create_graph": graph, "retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(outputs, flat, gradients, **how)
    count = len(starts[0])
    return [list(found[i : i + count]) for i in range(0, len(flat), count)]


def _through(made: Made, given: Sequence[Tensor], moved: list[list[Tensor]]) -> list[Tensor]:
    """The forward product of a piece, from what moves at its beginning: a backward pass through what a backward pass made."""
    pairs = [(t, m) for own, along in zip(made, moved, strict=True) for t, m in zip(own, along, strict=True) if t is not None]
    pairs = [(t, m) for t, m in pairs if t.requires_grad]
    if not pairs:
        return [torch.zeros_like(t) for t in given]
    outputs, gradients = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, list(given), gradients, retain_graph=True, materialize_grads=True))
