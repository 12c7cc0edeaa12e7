"""Where the maps of a model's layers lie in a run of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.models.cut import Cut
from howsmooth.models.room import free
from howsmooth.program.ends import Span
from howsmooth.settings import items, whole

_HELD, _MOST_HELD = 2**28, 2**31  # bytes


@final
@dataclass(frozen=True, eq=False)
class Route:
    """Where a layer's map lies in a run of the model: which call of its block, which call of its module in there."""

    index: int
    name: str
    span: Span
    module: nn.Module
    call: int

    @property
    def block(self) -> nn.Module:
        return self.span.root.module

    @property
    def nth(self) -> int:
        return self.span.root.nth

    @property
    def inside(self) -> bool:
        """Whether the map begins at the attention module and not at the block."""
        return self.span.enter is not None

    @property
    def entrance(self) -> nn.Module:
        """The module whose tokens the map takes."""
        return self.module if self.inside else self.block

    def weights(self) -> list[Tensor]:
        """Those that the map may use."""
        parts = (self.module, self.span.leave) if self.inside else (self.block,)
        return [p for part in parts if part is not None for p in part.parameters()]


@final
@dataclass(eq=False)
class Course:
    """A model and the routes of the layers that are asked for.

    base: how the model is run.  kernels: whether attention calls reach the kernels.  work: the precision of measurements.
    watched: until a whole pass has come through the library's interfaces alone.  apart: whether layers of one graph depend on
    each other only through the tokens that enter them; looked up in the first pass that keeps one.
    """

    module: nn.Module
    routes: list[Route]
    base: Cut
    kernels: bool
    work: torch.dtype
    watched: bool = True
    apart: bool | None = None

    @cached_property
    def room(self) -> int:
        """Bytes of layers that wait to be measured together; a GPU prefers much at once."""
        device = self.base.trace.output.device
        return max(_HELD, min(_MOST_HELD, free(device) // 16)) if device.type == "cuda" else _HELD

    def widened(self) -> dict[str, Tensor]:
        """Weights of the measured parts in the precision of the measurement, where they are in another."""
        work = self.work
        parts = {id(p) for route in self.routes for p in route.weights() if p.is_floating_point() and p.dtype != work}
        if not parts:
            return {}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: p.to(work) for name, p in named if id(p) in parts}


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
