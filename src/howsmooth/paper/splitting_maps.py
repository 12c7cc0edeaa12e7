"""Where splitting pays: the map of two atoms on a line, and how often it does on layers and their inputs."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, Map
from howsmooth.measures import Measure
from howsmooth.paper.drawing import new_figure, save_both
from howsmooth.paper.meanfield import two_diracs
from howsmooth.report import COLOURS
from howsmooth.verbs import splitting


def splitting_map(
    alphas: Sequence[float] = (-1.0, 1.0), masses: Sequence[float] = (0.5, 0.9, 0.99), extent: float = 12.0, points: int = 121
) -> list[dict[str, Any]]:
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
    rows = []
    for alpha, mass in itertools.product(alphas, masses):
        moved, split = two_diracs(alpha, x, y, torch.full_like(x, math.log(mass / (1 - mass))))
        gain = torch.where(moved == 0, math.inf, split / moved)
        for point in torch.stack([x, y, moved, split, gain], -1).flatten(0, 1).tolist():
            rows.append({"alpha": alpha, "mass": mass} | dict(zip(("x", "y", "moved", "split", "gain"), point, strict=True)))
    return rows


def map_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every `A` and mass: on how many points splitting pays, and where most."""
    table = []
    for (alpha, mass), points in itertools.groupby(rows, lambda row: (row["alpha"], row["mass"])):
        part = list(points)
        best = max(part, key=lambda p: p["gain"])
        counts = {"case": f"A = {alpha:g}, mass {mass:g}", "points": len(part), "pays": sum(p["gain"] > 1 for p in part)}
        table.append(counts | {"largest gain": best["gain"], "x": best["x"], "y": best["y"]})
    return table


def draw_map(rows: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """One panel per sign of A and mass: the gain of splitting over the plane of two points; the line is gain 1."""
    import numpy as np

    alphas, masses = list(dict.fromkeys(r["alpha"] for r in rows)), list(dict.fromkeys(r["mass"] for r in rows))
    figure = new_figure(2.7 * len(masses) + 0.9, 2.5 * len(alphas) + 0.4)
    grid = figure.subplots(len(alphas), len(masses), squeeze=False)
    image: Any = None
    for axes, (alpha, mass) in zip(grid.flat, itertools.product(alphas, masses), strict=True):
        part = [r for r in rows if r["alpha"] == alpha and r["mass"] == mass]
        x = np.array(sorted({r["x"] for r in part}))
        gain = np.array([r["gain"] for r in part]).reshape(len(x), len(x)).T
        log = np.log2(np.maximum(gain, 2.0**-4))
        image = axes.pcolormesh(x, x, log, cmap="cividis", vmin=-4, vmax=3.4, shading="nearest", rasterized=True)
        if gain.min() < 1 < gain.max():
            axes.contour(x, x, gain, levels=[1.0], colors="white", linewidths=0.9)
        axes.set_title(f"A = {alpha:g}, mass {mass:g} at x\nlargest gain {gain.max():.4g}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("x", fontsize=8)
        axes.set_ylabel("y", fontsize=8)
    bar = figure.colorbar(image, ax=grid, ticks=[-4, -3, -2, -1, 0, 1, 2, 3], shrink=0.8)
    bar.ax.set_yticklabels(["≤1/16", "1/8", "1/4", "1/2", "1", "2", "4", "8"], fontsize=7)
    bar.set_label("splitting / moving", fontsize=8)
    return save_both(figure, out / "splitting-map")


def frequency(problems: Iterable[tuple[str, Map, Tensor | Measure]]) -> list[dict[str, Any]]:
    """Does splitting pay? One row for every labelled map and input: of random layers, or of a model's."""
    rows = []
    for label, f, x in problems:
        s = splitting(f, x)
        numbers = {"moved": s.moved.value, "split": s.split.value, "gain": s.gain}
        about = {"label": label, "n": len(x), "width": f.width}
        rows.append(about | numbers | {"pays": s.pays, "certain": s.certain, "token": s.token})
    return rows


def shares(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How often splitting pays among the rows of one label, in order of appearance."""
    table = []
    for label in dict.fromkeys(row["label"] for row in rows):
        part = [row for row in rows if row["label"] == label]
        gains, share = sorted(row["gain"] for row in part), fmean(row["pays"] for row in part)
        counts = {"label": label, "cases": len(part), "share": share}
        table.append(counts | {"largest": gains[-1], "median": gains[len(gains) // 2]})
    return table


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


def draw_frequency(rows: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """How often splitting pays, and by how much at most, label by label."""
    figure = new_figure(max(4.0, 0.34 * len(rows) + 1.5), 4.6)
    top, bottom = figure.subplots(2, 1, sharex=True)
    places = range(len(rows))
    top.bar(places, [100 * r["share"] for r in rows], color=COLOURS[0])
    top.set_ylabel("splitting pays (%)")
    top.set_title(f"{sum(r['cases'] for r in rows)} inputs", fontsize=10)
    bottom.plot(places, [r["largest"] for r in rows], "v", color=COLOURS[1], label="largest gain")
    bottom.plot(places, [r["median"] for r in rows], "o", color=COLOURS[2], label="median gain")
    bottom.axhline(1, color="0.6", lw=0.8)
    bottom.set_ylabel("splitting / moving")
    bottom.set_xticks(list(places), [r["label"] for r in rows], rotation=90, fontsize=7)
    bottom.legend(fontsize=8)
    return save_both(figure, out / "splitting-frequency")
