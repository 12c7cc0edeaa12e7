"""One input of a model: what it says in words, its recorded run there, and the maps of its layers."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from howsmooth.errors import BadInputError, foreign, reason, warn
from howsmooth.kernels.kinds import Kind
from howsmooth.models.recorded import Recording, Recordings
from howsmooth.models.room import check_room, enough
from howsmooth.models.tokens import Window
from howsmooth.program import Ends, Layers
from howsmooth.program.attention import kind_of
from howsmooth.program.blocks import Layer
from howsmooth.program.ends import MAPS
from howsmooth.program.replay import Run
from howsmooth.program.segments import SegmentMap
from howsmooth.settings import choice, whole
from howsmooth.solve import Options, Solved, solve

FROZEN_CHOICE = "experts are those chosen at this input: routing is frozen"


class FallbackWarning(UserWarning):
    """Attention that the kernels do not express: its constant is right, its products go through the model's own operations."""


@dataclass(frozen=True)
class Which:
    """Which map of a layer: its name, or where it ends, one head, one stream, which call of attention."""

    map: str = "attention"
    head: int | None = None
    to: int | str | None = None
    stream: int | None = None
    call: int | None = None


ATTENTION = Which()


@contextmanager
def runs(name: str) -> Iterator[None]:
    """Inside it, what a model's own code raises is told in one sentence. name: the model's."""
    try:
        yield
    except Exception as error:
        if not foreign(error):
            raise
        raise BadInputError(
            f"expected inputs that {name} runs on, got {type(error).__name__} from it ({reason(error)[:160]}); check their "
            "shapes and kinds"
        ) from error  # where in the module it happened is worth knowing


@final
@dataclass(frozen=True, eq=False, repr=False)
class ModelInput:
    """A model at one input.

    name: the model's.  owner: the module that is called with `args` and `kwargs`.  window: the tokens in words, where there
    are any.  work: the precision of the measurement.  recordings: the model's recorded runs so far.
    """

    name: str
    owner: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    window: Window
    work: torch.dtype
    recordings: Recordings

    def __repr__(self) -> str:
        return f"ModelInput({self.name}, {len(self.window)} tokens)"

    @functools.cached_property
    def _recorded(self) -> tuple[Recording, Run, Any]:
        recording, run = self.recordings.at(self.owner, self.args, self.kwargs)
        return recording, run, recording.program.stamp()

    @property
    def run(self) -> Run:
        """The recorded run at this input."""
        return self._recorded[1]

    @property
    def layers(self) -> Layers:
        """The model's layers, where the run has at least one."""
        layers = self._recorded[0].layers
        if not layers.found:
            raise BadInputError(
                f"expected a model with attention or with a list of blocks, got {type(self.owner).__name__} in which none was "
                "seen; measure the function itself with howsmooth.lipschitz"
            )
        return layers

    @functools.cached_property
    def real(self) -> Tensor | None:
        """Positions that are not padding; nothing where all are real."""
        if self.window.mask is None or all(self.window.mask):
            return None
        return torch.nonzero(torch.tensor(self.window.mask))[:, 0]

    @property
    def words(self) -> tuple[str, ...]:
        """The tokens that are not padding."""
        words = self.window.words
        return words if self.real is None else tuple(words[i] for i in self.real.tolist())

    def layer(self, index: int) -> Layer:
        """A layer by its number."""
        found = self.layers.found
        return found[whole(index, f"a layer from 0 to {len(found) - 1}", f"{self.name} has no other", below=len(found))]

    def check(self, layer: int, which: Which) -> None:
        """Refuse a layer, map or head that is not there."""
        choice(which.map, "a map", MAPS)
        self.layer(layer)
        if self.run.program.stamp() != self._recorded[2]:
            raise BadInputError("expected the model that was captured, got one whose weights have changed since; capture again")
        if which.map == "context" and self.real is not None:
            raise BadInputError("expected an input without padding for map 'context', got a padded one; leave it out")
        if which.head is not None and (which.to is not None or which.map in ("block", "update", "model")):
            raise BadInputError(f"expected a map that is attention alone for a single head, got {which.map!r}; leave head out")
        heads = self.ends(layer, which).heads
        if which.head is not None and not heads:
            raise BadInputError(
                f"expected a layer with one attention call on the kernels for a single head, got {self.place(layer, which)}, "
                "which has several or its own; leave head out"
            )
        if which.head is not None:
            whole(which.head, f"a head from 0 to {heads - 1}", f"layer {layer} has no other", below=heads)

    def ends(self, layer: int, which: Which) -> Ends:
        """Where a map begins and ends in the recorded run."""
        _ = self.layers  # refused where there are none
        return self._recorded[0].ends(layer, which.map, to=which.to, stream=which.stream, call=which.call)

    def segment(self, layer: int, which: Which = ATTENTION) -> SegmentMap:
        """A map of a layer at this input."""
        key = layer, which
        if key not in self._segments:
            ends, place = self.ends(layer, which), self.place(layer, which)
            self._segments[key] = SegmentMap(self.run, ends, place, which.head, self.real, self.work)
        return self._segments[key]

    @functools.cached_property
    def _segments(self) -> dict[tuple[int, Which], SegmentMap]:
        return {}

    def map(self, layer: int, which: Which = ATTENTION) -> SegmentMap:
        """A map of a layer that is there, with a warning where the kernels do not express its attention."""
        self.check(layer, which)
        segment = self.segment(layer, which)
        if not segment.on_kernels:
            if which.head is not None:
                raise BadInputError(
                    f"expected a layer whose attention the kernels express to single out head {which.head}, got "
                    f"{segment.place}, which has its own; leave head out"
                )
            warn(
                f"layer {layer} ({segment.place}) has attention of its own; its products go through the model's operations "
                "and take O(n²) memory, so pass a smaller n where that is too much",
                FallbackWarning,
            )
        return segment

    def kind(self, layer: int) -> Kind | None:
        """The kind of weights of a layer's only attention call; nothing where the kernels do not express it."""
        if not self.layers.found[layer].groups or len(calls := self.ends(layer, ATTENTION).calls) != 1:
            return None
        sink, shift = calls[0].kwargs.get("sink", (*calls[0].args, *[None] * 6)[5]), calls[0].kwargs.get("shift", 0.0)
        logits = self.run.values([sink])[sink] if isinstance(sink, Node) else None
        return kind_of(str(calls[0].kwargs.get("kind", "softmax")), logits, self.ends(layer, ATTENTION).heads, shift)  # pyright: ignore

    def place(self, layer: int, which: Which) -> str:
        """The path of the module that a map belongs to."""
        found = self.layers.found[layer]
        if which.to is not None:
            last = len(self.layers.found) - 1 if isinstance(which.to, str) else which.to
            return f"{found.path} to {which.to if which.to == 'logits' else self.layers.found[last].path}"
        if which.map == "model":
            return type(self.owner).__name__
        return self._recorded[0].place(layer, which.map, which.call or 0)

    def solve(self, layer: int, which: Which, factor: float, options: Options) -> tuple[SegmentMap, Solved]:
        """A map, its tokens multiplied by `factor`, and its constant there."""
        what = self.check_room(layer, which)
        segment = self.map(layer, which)
        with enough(what, self.run.device):
            return segment, solve(segment, factor * segment.start, options)

    def check_room(self, layer: int, which: Which) -> str:
        """Refuse a map that cannot fit on the device; what was asked for, in words."""
        self.check(layer, which)
        segment = self.segment(layer, which)
        what = f"map {which.map!r} of layer {layer} at {len(segment.start)} tokens"
        block = self.owner if which.map == "model" else self.owner.get_submodule(self.layers.found[layer].path)
        wide = block if which.to is not None or which.map in ("block", "update", "model") else None
        check_room(segment.start, wide, self.work, self.run.device, what)
        return what

    def notes(self, layer: int, which: Which, segment: SegmentMap) -> tuple[str, ...]:
        """What a reader should know of how the map was run."""
        said = (FROZEN_CHOICE,) if segment.frozen_choice else ()
        groups = self.layers.found[layer].groups
        if which.to is None and which.map in ("attention", "heads", "normed") and len(groups) > 1:
            names = ", ".join(f"{k}: {self.layers.module_of(self.layers.found[layer], k)}" for k in range(len(groups)))
            said += (f"the block attends {len(groups)} times ({names}); call={which.call or 0} is measured",)
        return said
