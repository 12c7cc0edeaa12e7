"""Where splitting a token does more than moving it, for two atoms on a line; and how often it does, in random layers."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, Map
from howsmooth.measures import Measure
from howsmooth.paper.drawing import Drawn, new_figure
from howsmooth.paper.meanfield import two_diracs
from howsmooth.paper.protocol import Experiment, MeasureRow, Protocol
from howsmooth.report import COLOURS
from howsmooth.study import Job, Question, Steps, grouped, task
from howsmooth.theory import Splitting
from howsmooth.verbs import splitting


@final
@dataclass(frozen=True, eq=False)
class Grid:
    """Two atoms at places of a grid, `A = α`, `V = 1`, the first of this mass: what moving and splitting do there."""

    alpha: float
    mass: float
    axis: Tensor
    moved: Tensor
    split: Tensor

    @property
    def gain(self) -> Tensor:
        return torch.where(self.moved == 0, math.inf, self.split / self.moved)

    def cells(self) -> list[dict[str, float]]:
        """A line for every point, for a table."""
        x, y = torch.meshgrid(self.axis, self.axis, indexing="ij")
        points = torch.stack([x, y, self.moved, self.split, self.gain], -1).flatten(0, 1).tolist()
        about = {"alpha": self.alpha, "mass": self.mass}
        return [about | dict(zip(("x", "y", "moved", "split", "gain"), point, strict=True)) for point in points]

    def row(self) -> "GridRow":
        """On which share of it splitting pays, and where most."""
        i, j = divmod(int(self.gain.argmax()), len(self.axis))
        place = {"x": float(self.axis[i]), "y": float(self.axis[j]), "extent": float(self.axis[-1]), "points": len(self.axis)}
        largest, pays = float(self.gain[i, j]), float((self.gain > 1).double().mean())
        return GridRow(alpha=self.alpha, mass=self.mass, pays=pays, largest_gain=largest, **place)


@final
@dataclass(frozen=True, kw_only=True)
class GridRow(MeasureRow):
    """A grid of places for two atoms: on which share of it splitting pays, and where most."""

    kind = "grid"
    alpha: float
    mass: float
    extent: float
    points: int
    pays: float
    largest_gain: float
    x: float
    y: float


@final
@dataclass(frozen=True, kw_only=True)
class ShareRow(MeasureRow):
    """How often splitting pays among cases of one label."""

    kind = "share"
    label: str
    cases: int
    share: float
    largest: float
    median: float


def splitting_map(
    alphas: Sequence[float] = (-1.0, 1.0), masses: Sequence[float] = (0.5, 0.9, 0.99), extent: float = 12.0, points: int = 121
) -> list[Grid]:
    """Two atoms at `x` and `y` on a grid, for every `A = α`, `V = 1` and every mass of the first: what splitting and moving do.

    In dimension one `A = α` at `x` is `A = ±1` at `√|α| x`, so the sign of α is what matters.
    """
    if not all(0 < m < 1 for m in masses) or not masses:
        raise BadInputError(f"expected masses between 0 and 1, got {list(masses)}; each is the first atom's")
    if not alphas or not all(math.isfinite(a) and a != 0 for a in alphas):
        raise BadInputError(f"expected finite A other than 0, got {list(alphas)}; try -1 and 1")
    if not 0 < extent < math.inf or points < 2:
        raise BadInputError(f"expected a positive extent and two points or more, got {extent} and {points}; correct them")
    axis = extent * (2 * torch.arange(points, dtype=torch.float64) - (points - 1)) / (points - 1)  # symmetric, so 0 is 0
    x, y = torch.meshgrid(axis, axis, indexing="ij")
    odds = [(a, m, torch.full_like(x, math.log(m / (1 - m)))) for a, m in itertools.product(alphas, masses)]
    return [Grid(a, m, axis, *two_diracs(a, x, y, log_odds)) for a, m, log_odds in odds]


def map_table(grids: Sequence[Grid]) -> list[dict[str, Any]]:
    """For every `A` and mass: on how many points splitting pays, and where most."""
    lines = []
    for grid in grids:
        best = grid.row()
        counts = {
            "case": f"A = {grid.alpha:g}, mass {grid.mass:g}",
            "points": grid.gain.numel(),
            "pays": int((grid.gain > 1).sum()),
        }
        lines.append(counts | {"largest gain": best.largest_gain, "x": best.x, "y": best.y})
    return lines


class SplittingCase(NamedTuple):
    """Does splitting pay for one map, of this width, at one input of n tokens?"""

    label: str
    n: int
    width: int
    answer: Splitting

    def cells(self) -> dict[str, Any]:
        """A line of a table."""
        s = self.answer
        numbers = {"moved": s.moved.value, "split": s.split.value, "gain": s.gain}
        about = {"label": self.label, "n": self.n, "width": self.width}
        return about | numbers | {"pays": s.pays, "certain": s.certain, "token": s.token}


def frequency(problems: Iterable[tuple[str, Map, Tensor | Measure]]) -> list[SplittingCase]:
    """An answer for every labelled map and input: of random layers, or of a model's."""
    return [SplittingCase(label, len(x), f.width, splitting(f, x)) for label, f, x in problems]


def shares(cases: Sequence[SplittingCase]) -> list[ShareRow]:
    """How often splitting pays among the cases of one label, in order of appearance."""
    rows = []
    for label, part in grouped(cases, lambda case: case.label).items():
        gains, share = sorted(case.answer.gain for case in part), fmean(case.answer.pays for case in part)
        rows.append(ShareRow(label=label, cases=len(part), share=share, largest=gains[-1], median=gains[len(gains) // 2]))
    return rows


def random_layers(
    count: int,
    lengths: Sequence[int] = (2, 4, 8, 16),
    logits: Sequence[float] = (0.5, 1.0, 2.0, 4.0, 8.0),
    width: int = 4,
    heads: int = 1,
    causal: bool = False,
    seed: int = 0,
) -> Iterator[tuple[str, Attention, Tensor]]:
    """`count` random layers and Gaussian inputs for each length and size of logits, labelled `n=…, logits=…`.

    logits: the standard deviation of `q·k/√d_h` on Gaussian tokens.
    """
    if count < 1 or width < 1 or heads < 1 or width % heads:
        raise BadInputError(
            f"expected count ≥ 1 and heads that divide the width, got {count}, {heads} and {width}; correct them"
        )
    random = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    for n, size, _ in itertools.product(lengths, logits, range(count)):
        w_q, w_k, w_v, w_o = (gaussian(width, width) / width**0.5 for _ in range(4))
        layer = Attention(size * w_q, w_k, w_v, w_o, heads=heads, causal=causal)
        yield f"n={n}, logits={size:g}", layer, gaussian(n, width)


@task
def measure_grid(alpha: float, mass: float, extent: float, points: int) -> list[GridRow]:
    """One grid."""
    return [grid.row() for grid in splitting_map([alpha], [mass], extent, points)]


@task
def measure_share(n: int, logits: float, count: int, seed: int) -> list[ShareRow]:
    """How often splitting pays among random layers and Gaussian inputs."""
    return shares(frequency(random_layers(count, [n], [logits], seed=seed)))


def grid_tasks(protocol: Protocol) -> Steps:
    """A grid for either sign of A and three masses."""
    cases = itertools.product((-1.0, 1.0), (0.5, 0.9, 0.99))
    yield [Job(measure_grid, {"alpha": a, "mass": m, "extent": 12.0, "points": protocol.grid}) for a, m in cases]


def share_tasks(protocol: Protocol) -> Steps:
    """Every length and size of logits."""
    cases, about = itertools.product((2, 4, 8, 16), (0.5, 1.0, 2.0, 4.0, 8.0)), {"count": protocol.cases, "seed": protocol.seed}
    yield [Job(measure_share, {"n": n, "logits": size} | about) for n, size in cases]


def grid_figure(grids: Sequence[Grid]) -> Drawn:
    """One panel per sign of A and mass: the gain of splitting over the plane of two points; the line is gain 1."""
    alphas, masses = list(dict.fromkeys(g.alpha for g in grids)), list(dict.fromkeys(g.mass for g in grids))
    figure, panels = new_figure(2.7 * len(masses) + 0.9, 2.5 * len(alphas) + 0.4, len(alphas), len(masses), squeeze=False)
    image: Any = None
    for axes, grid in zip(panels.flat, grids, strict=True):
        x, gain = grid.axis.numpy(), grid.gain.mT
        image = axes.pcolormesh(
            x, x, gain.clamp_min(2.0**-4).log2().numpy(), cmap="cividis", vmin=-4, vmax=3.4, shading="nearest", rasterized=True
        )
        if gain.min() < 1 < gain.max():
            axes.contour(x, x, gain.numpy(), levels=[1.0], colors="white", linewidths=0.9)
        axes.set_title(f"A = {grid.alpha:g}, mass {grid.mass:g} at x\nlargest gain {float(gain.max()):.4g}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("x", fontsize=8)
        axes.set_ylabel("y", fontsize=8)
    bar = figure.colorbar(image, ax=panels, ticks=[-4, -3, -2, -1, 0, 1, 2, 3], shrink=0.8)
    bar.ax.set_yticklabels(["≤1/16", "1/8", "1/4", "1/2", "1", "2", "4", "8"], fontsize=7)
    bar.set_label("splitting / moving", fontsize=8)
    return figure


def map_figure(rows: Sequence[GridRow]) -> Drawn:
    """The grids of these rows: a closed form, so that they are evaluated again."""
    return grid_figure([g for r in rows for g in splitting_map([r.alpha], [r.mass], r.extent, r.points)])


def share_figure(found: Sequence[ShareRow]) -> Drawn:
    """How often splitting pays, and by how much at most, label by label."""
    figure, (top, bottom) = new_figure(max(4.0, 0.34 * len(found) + 1.5), 4.6, 2, 1, sharex=True)
    places = range(len(found))
    top.bar(places, [100 * r.share for r in found], color=COLOURS[0])
    top.set_ylabel("splitting pays (%)")
    top.set_title(f"{sum(r.cases for r in found)} inputs", fontsize=10)
    bottom.plot(places, [r.largest for r in found], "v", color=COLOURS[1], label="largest gain")
    bottom.plot(places, [r.median for r in found], "o", color=COLOURS[2], label="median gain")
    bottom.axhline(1, color="0.6", lw=0.8)
    bottom.set_ylabel("splitting / moving")
    bottom.set_xticks(list(places), [r.label for r in found], rotation=90, fontsize=7)
    bottom.legend(fontsize=8)
    return figure


MAP = Experiment(
    Question(name="splitting-map", row=GridRow, tasks=grid_tasks, title="Where splitting pays"),
    "Two atoms on a line: splitting one, in units of moving both.",
    map_figure,
)
FREQUENCY = Experiment(
    Question(name="splitting-frequency", row=ShareRow, tasks=share_tasks, title="How often splitting pays"),
    "Random layers and Gaussian inputs.",
    share_figure,
)
