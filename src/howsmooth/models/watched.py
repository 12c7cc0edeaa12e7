"""A map of a model as a graph of known pieces: its attention layers whole, everything around them by watching it run."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, Map
from howsmooth.maps.graph import Graph, GraphMap
from howsmooth.maps.recording import Placeholder, Recorder, record
from howsmooth.models.closed_old import as_attention
from howsmooth.models.cut import Cut
from howsmooth.models.intercept import Call
from howsmooth.models.sample import Sample
from howsmooth.models.span import MapName
from howsmooth.models.trace import Layer, find_hidden, first_tensor


def watched(sample: Sample, layer: int, map: MapName, head: int | None = None, within: float = 0.0) -> Map:
    """A map in float64, made of known pieces: an attention layer, or a graph.

    Attention layers are read off as `howsmooth.Attention` and taken whole. A graph must give what the model gives, at its
    input and beside it; what is not made of known pieces is refused.  within: how far tokens will move.
    """
    if map in ("cross", "context"):
        raise BadInputError(
            f"expected a map of self-attention for a neighbourhood, got {map!r}; measure it at the input, without within"
        )
    _check_whole(sample)
    cut = sample.map(layer, map, head)
    x = cut.start.double().cpu()
    if map in ("attention", "heads"):
        attn = as_attention(sample.map(layer))
        attn = replace(attn, w_o=None, b_o=None) if map == "heads" else attn
        attn = attn if head is None else attn.head(head)
        return attn.to("cpu", torch.float64)
    inside = [k for k in cut.trace.layers if map == "model" or k.index == layer]
    graph = _record(_precise(cut), inside, _read_off(sample, inside, head), x, head is None, within)
    return GraphMap(graph, (len(x), x.shape[1]))


def to_the_end(sample: Sample, layer: int) -> tuple[Callable[[Tensor], Tensor], Callable[[], Graph], Tensor]:
    """What a model makes of the tokens that enter one of its layers, (n, d) → rows of its output, in float64, in its own code.

    Also a way to the same as a graph with attention layers taken whole, and the tokens.
    """
    _check_whole(sample)
    sample.check(layer, "model", None)
    cut = sample.plain(layer, "model")
    if cut.layer.block.nth:
        raise BadInputError(
            f"expected a layer whose block runs once, got layer {layer}, whose block is shared; certify from layer 0"
        )
    from_here = replace(cut.trace, layers=cut.trace.layers[layer:])
    own = _precise(replace(cut, trace=from_here))

    def graph() -> Graph:
        on_kernels = sample.cut(layer, "model")
        if on_kernels is None:
            raise BadInputError(
                "expected a model whose attention can be cut out, got one with its own; certify a shorter input"
            )
        trace = replace(on_kernels.trace, layers=on_kernels.trace.layers[layer:])
        inside = list(trace.layers)
        return _record(
            _precise(replace(on_kernels, trace=trace)), inside, _read_off(sample, inside, None), own.start.double(), True
        )

    return lambda t: own.run(t).output, graph, own.start.double().cpu()


def _check_whole(sample: Sample) -> None:
    if sample.real is not None:
        raise BadInputError("expected an input without padding for a neighbourhood, got a padded one; leave the padding out")
    if sample.trace.output.device.type != "cpu":
        raise BadInputError("expected a model on the CPU for a neighbourhood, got one on a GPU; move it with model.to('cpu')")


def _precise(cut: Cut) -> Cut:
    return replace(cut, work=torch.float64, precision="strict")


def _read_off(sample: Sample, inside: list[Layer], head: int | None) -> dict[int, Attention]:
    if any(k.cross is not None or k.context is not None for k in inside):
        raise BadInputError(
            "expected a map without cross-attention for a neighbourhood, got one with it; measure it at the input"
        )
    layers = {k.index: as_attention(sample.map(k.index)).to("cpu", torch.float64) for k in inside}
    return layers if head is None else {i: attn.head(head) for i, attn in layers.items()}


def _record(cut: Cut, inside: list[Layer], layers: dict[int, Attention], x: Tensor, exact: bool, within: float = 0.0) -> Graph:
    recorder = Recorder()

    def nothing(call: Call) -> Tensor:  # what comes behind the output projection is put in there
        return call.v.new_zeros(*call.q.shape[:3], call.v.shape[-1])

    def f(t: Tensor) -> Tensor:
        with _Swap(recorder, inside, layers).active():
            return cut.through(t, nothing)

    def truth(t: Tensor) -> Tensor:
        return cut.run(t).output if exact else f(t)

    return record(f, x, recorder, truth, within)


class _Swap:
    """Puts an attention layer's own formula in for its output, call by call."""

    def __init__(self, recorder: Recorder, inside: list[Layer], layers: dict[int, Attention]):
        self._recorder, self._inside, self._layers = recorder, inside, layers
        self._next, self._entered = 0, None

    def active(self) -> ExitStack:
        stack = ExitStack()
        for module in dict.fromkeys(k.module for k in self._inside):
            stack.enter_context(module.register_forward_pre_hook(self._enter, with_kwargs=True))
        for module in dict.fromkeys(k.projection or k.module for k in self._inside):
            stack.enter_context(module.register_forward_hook(self._leave))
        return stack

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._next < len(self._inside) and module is self._inside[self._next].module and self._entered is None:
            self._entered = find_hidden(args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        layer = self._inside[self._next] if self._next < len(self._inside) else None
        if layer is None or self._entered is None or module is not (layer.projection or layer.module):
            return None
        entered, self._entered = self._entered, None
        self._next += 1
        attn, leaving = self._layers[layer.index], first_tensor(output)

        def run(t: Tensor) -> Tensor:
            return attn.value(t.reshape(1, -1, t.shape[-1]))[0].reshape(*leaving.shape)

        known = isinstance(entered, Placeholder)
        value = self._recorder.take_whole(entered, leaving, run, attn) if known else run(entered)
        return tree_map(lambda t: value if t is leaving else t, output)
