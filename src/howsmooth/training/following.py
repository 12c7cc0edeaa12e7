"""Replays of a model that turn carried directions of all of its layers towards the top ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.fx import Node

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.kernels.products import float32_products
from howsmooth.models import MapName, Model
from howsmooth.models.recorded import Recordings
from howsmooth.models.room import free
from howsmooth.program.confirm import agrees
from howsmooth.solve import Options, solve
from howsmooth.spectral import Estimate
from howsmooth.spectral.ritz import Block
from howsmooth.training.jacobians import LayerJacobians, drawn, kinds_of, power_steps
from howsmooth.training.looks import look
from howsmooth.training.paths import Linearized, Paths, RowRun, Values, recorded_paths
from howsmooth.training.probe import Inputs, Probe

_WIDTH = 4  # directions that are carried for a layer: when another one becomes the top, it is there
_RECORDINGS = 64  # kept, of rows with masks of their own
_COARSE = 2.0**-9  # error of a layer's products on a GPU: four times the rounding of operands with eleven bits
_GRAPHS, _MOST_GRAPHS = 2**28, 2**31  # bytes of layers that wait to be measured together


@final
@dataclass(frozen=True, eq=False)
class Observed:
    """What one replay found of one layer.

    x: the tokens that enter.  value: by row of the probe, or by head of every row, `max |J w|` over unit `w` in the span of the
    last `v`, less what rounding may have added.  directions: the next `u`.  looks: of its attention calls, as `look` gives
    them.
    """

    x: Tensor
    value: Tensor
    directions: Block
    looks: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Copies:
    """A recorded run with copies of every row, each for a direction of its own. alone: each for one head alone."""

    paths: Paths
    copies: int = 1
    items: int = 1
    times: int = 1
    alone: bool = False

    @property
    def rows(self) -> int:
        return self.items * self.times


@final
class Following:
    """A model at a probe, replayed again and again as its weights change.

    times: how many directions are carried for every row; one for the whole batch where the model does not keep its rows apart
    along the first axis.
    """

    def __init__(self, model: Model, batch: Inputs, layers: str | Sequence[int], map: MapName):
        self.model, self._chosen = model, layers
        self._map: MapName = map
        self.probe, self._recordings, self._bytes = Probe.of(model, batch), Recordings(_RECORDINGS), 0  # of one layer's graph
        self.record()

    def record(self, *, anew: bool = False) -> None:
        """Record the model, the first time or anew."""
        self.paths = paths = self._recorded(self.probe, anew)
        self.replay()
        self.layers, self.count, rows = list(paths.ends), len(paths.recording.layers.found), self.probe.rows
        times = max(1, min(_WIDTH, paths.least // rows))
        many = self._repeated(times, anew)
        self._plain = _Copies(paths) if many is None else _Copies(many, times, rows, times)
        self.items, self.times = self._plain.items, self._plain.times
        self.calls = {k: self._plain.paths.calls(k) for k in self.layers}  # whether attention can be looked at
        self.tells_heads = many is not None and all(paths.heads.values())
        self._heads: _Copies | None = None

    @property
    def _by_head(self) -> _Copies:
        if self._heads is None:
            most = max(self.paths.heads.values())
            paths = self._recorded(self.probe.repeated(most))
            self.paths.with_copies(paths)
            self._heads = _Copies(paths, most, self.probe.rows * most, alone=True)
        return self._heads

    def _recorded(self, probe: Probe, anew: bool = False) -> Paths:
        return recorded_paths(self.model, self._recordings, probe, self._chosen, self._map, anew=anew)

    def _repeated(self, times: int, anew: bool) -> Paths | None:
        """The recorded run with copies of every row; nothing where rows are not apart along the first axis."""
        try:
            many = self._recorded(self.probe.repeated(times), anew)
        except HowSmoothError:
            return None
        if not self.paths.with_copies(many):
            return None
        copies = _Copies(many, times, self.probe.rows, times)
        for found in self._parts(copies):
            for layers in kinds_of(found.graphs, copies.rows):
                if not LayerJacobians([found.graphs[k] for k in layers], copies.rows, 1, None).apart():
                    return None
        return many

    @torch.no_grad()
    def replay(self) -> None:
        """Replay the model at the weights of the moment, which the runs that follow are at."""
        self.weights = self.paths.weights()
        self._hidden, self._returned = self.paths.replayed(self.weights)

    def confirmed(self) -> bool:
        """Whether the model itself gives what its replay gave; nothing is said against one that is not finite."""
        own = self.paths.recording.program.own(self.paths.tensors)
        return agrees(self.paths.recording.program, own, self._returned) or not all(bool(t.isfinite().all()) for t in own)

    def run(
        self, directions: Mapping[int, Block], *, rounds: int = 1, first: int = 1, least: float = 0.0, looks: bool = False
    ) -> dict[int, Observed]:
        """One replay: what it finds of each layer. What cannot be measured, since something is not finite there, is left out.

        directions: by layer, the `u`, (items, times, N); drawn where there is none.  rounds: steps of power iteration at most;
        first: the same where directions are drawn.  least: the gain of a step behind which there is no further one.
        """
        return self._run(self._plain, directions, rounds, first, least, looks)

    def run_heads(self, directions: Mapping[int, Block]) -> dict[int, Observed]:
        """The same for every head alone, with one direction; values by row and head."""
        return self._run(self._by_head, directions, 1, 1, 0.0, False)

    def row_runs(self) -> list[RowRun]:
        """The rows alone, for certified solves."""
        return RowRun.every(self.model, self._recordings, self.probe)

    def certified(
        self, rows: Sequence[RowRun], layer: int, head: int | None, options: Options
    ) -> tuple[list[Estimate], Tensor | None]:
        """The constants of a layer at every row, and what their directions go to, (items, N); nothing for rows in one item."""
        estimates, tops = list[Estimate](), list[Tensor]()
        for row in rows:
            map = row.segment(layer, self._map, self.model.dtype, head)
            solved = solve(map, map.start, options)
            estimates.append(solved.estimate)
            image, real = solved.image, row.real
            if real is not None:
                n = self.probe.real.shape[1] if self.probe.real is not None else len(image)
                image = image.new_zeros(n, image.shape[-1]).index_copy_(0, real.to(image.device), image)
            tops.append(image.flatten())
        return estimates, torch.stack(tops) if len(tops) == self.items else None

    # one replay

    def _run(
        self, run: _Copies, directions: Mapping[int, Block], rounds: int, first: int, least: float, looks: bool
    ) -> dict[int, Observed]:
        found: dict[int, Observed] = {}
        real = self.probe.real
        for part in self._parts(run):
            seen: dict[int, list[Tensor]] = {k: [] for k in part.graphs}
            for kernel in part.kernels if looks and all(self.calls[k] for k in seen) else ():
                for k, own in zip(seen, look(kernel, real, len(seen)), strict=True):
                    seen[k].append(own)
            for layers in kinds_of(part.graphs, run.rows):
                with torch.enable_grad(), float32_products(coarse=True):
                    turned = _turned(layers, part, run, directions, rounds, first, least)
                for k, (value, u) in zip(layers, turned, strict=True):
                    enter = self.paths.ends[k].enter[0]
                    found[k] = Observed(self._hidden[enter].movedim(self.paths.axes[enter] or 0, 0), value, u, seen[k])
        return found

    def _parts(self, run: _Copies) -> Iterator[Linearized]:
        """The graphs of layers that are alike, so many at once as there is room for; without those that are not finite."""
        entered: dict[Node, Tensor] = {}
        for k in self.layers:
            for b, a in zip(run.paths.ends[k].enter, self.paths.ends[k].enter, strict=True):
                hidden = self._hidden[a]
                entered[b] = hidden if run.copies == 1 else hidden.repeat_interleave(run.copies, self.paths.axes[a] or 0)
        with torch.no_grad():
            frozen = run.paths.frozen(entered, self.weights)
        for alike in run.paths.alike:
            many = max(1, self._room // self._bytes) if self._bytes else 1
            for start in range(0, len(alike), many):
                yield from self._linearized(run, tuple(alike[start : start + many]), entered, frozen)

    def _linearized(self, run: _Copies, layers: tuple[int, ...], entered: Values, frozen: Values) -> Iterator[Linearized]:
        try:
            with torch.enable_grad(), float32_products(coarse=True):
                found = run.paths.linearized(layers, entered, frozen, run.copies, alone=run.alone)
        except BadInputError:  # one of them, or all
            for k in layers if len(layers) > 1 else ():
                yield from self._linearized(run, (k,), entered, frozen)
            return
        self._bytes = max(self._bytes, found.size // len(layers))
        yield found

    @property
    def _room(self) -> int:
        """Bytes of layers that wait to be measured together; a GPU prefers much at once."""
        device = self.model.device
        return max(_GRAPHS, min(_MOST_GRAPHS, free(device) // 16)) if device.type == "cuda" else _GRAPHS


def _turned(
    layers: list[int],
    part: Linearized,
    run: _Copies,
    directions: Mapping[int, Block],
    rounds: int,
    first: int,
    least: float,
) -> list[tuple[Tensor, Block]]:
    """Values and next directions of layers of one size."""
    graphs = [part.graphs[k] for k in layers]
    jacobians = LayerJacobians(graphs, run.rows, run.times, run.paths.probe.real)
    like = graphs[0].leave[0]
    shape = (run.items, run.times, graphs[0].sizes(run.rows)[1])
    carried = {k: u for k in layers if (u := directions.get(k)) is not None and u.shape == shape}
    u = torch.cat([carried[k].to(like) if k in carried else drawn(k, shape, like) for k in layers])
    turned, _ = power_steps(jacobians, u, rounds if len(carried) == len(layers) else max(rounds, first), least)
    noise = max([kernel.noise for kernel in part.kernels], default=0.0)
    noise += _COARSE if like.is_cuda and like.dtype == torch.float32 else 0.0
    values = max(0.0, 1 - noise) * turned.value.cpu()  # what rounding may have added is taken off
    return list(zip(values.chunk(len(layers)), turned.directions.chunk(len(layers)), strict=True))
