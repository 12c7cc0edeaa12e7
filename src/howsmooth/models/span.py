"""The maps of a model: where each begins and where it ends."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.models.trace import Invocation, Layer, Trace

MapName = Literal["attention", "heads", "normed", "block", "update", "cross", "context", "model"]
MAPS: tuple[MapName, ...] = get_args(MapName)


@dataclass(frozen=True, eq=False)
class Span:
    """Where a map begins and ends.

    root: what is called.  enter: the module, and which call of it, whose tokens are the map's; nothing where they are the
    root's own.  leave: the module at which the run stops once `counted` has been called that often, before it where `before`;
    nothing where the root runs to its end.  tokens: what entered in the trace, (n, d).  place: a name for people.
    everywhere: the tokens are also those of whoever else holds them, as a residual around the module does.
    aside: they are the context of a cross-attention.
    """

    root: Invocation
    tokens: Tensor
    place: str
    enter: tuple[nn.Module, int] | None = None
    everywhere: bool = False
    counted: tuple[nn.Module, int] | None = None
    leave: nn.Module | None = None
    before: bool = False
    aside: bool = False

    @classmethod
    def of(cls, name: MapName, trace: Trace, layer: Layer) -> "Span":
        """The span of one of the `MAPS`."""
        if name in ("cross", "context"):
            return cls._across(layer, aside=name == "context")
        block, call = layer.block, (layer.module, layer.call)
        place, end = layer.name or type(layer.module).__name__, layer.projection or layer.module
        outer = block.name or type(layer.module).__name__
        if name == "heads" and layer.projection is None:
            raise BadInputError(
                f"expected an output projection that is a module of its own, got none behind {layer.name}; "
                'measure map="attention"'
            )
        if name in ("attention", "heads"):
            return cls(block, layer.x, place, call, counted=call, leave=end, before=name == "heads")
        if name == "normed":
            return cls(block, block.tokens, outer, counted=call, leave=end)
        if name == "block":
            return cls(block, block.tokens, outer)
        first, whole = trace.layers[0].block, trace.whole
        enter = None if whole.module is first.module else (first.module, 0)
        return cls(whole, first.tokens, type(whole.module).__name__, enter, everywhere=True)

    @classmethod
    def _across(cls, layer: Layer, aside: bool) -> "Span":
        """Cross-attention, in its queries' tokens or, `aside`, in its context."""
        cross = layer.crossing
        if cross is None or cross.context is None:
            raise BadInputError(
                f"expected a block with cross-attention, got layer {layer.index} ({layer.name}), which looks at nothing else; "
                "take a decoder and pass encoder_hidden_states="
            )
        call, end = (cross.module, cross.call), cross.projection or cross.module
        place = cross.name or type(cross.module).__name__
        return cls(cross.block, cross.context if aside else cross.x, place, call, counted=call, leave=end, aside=aside)
