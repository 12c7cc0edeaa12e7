"""Figures of the mean-field experiments, as PNG and PDF."""

import csv
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from howsmooth.errors import BadInputError
from howsmooth.paper.ladder import COLOURS
from howsmooth.paper.meanfield import BOUNDS, Convergence, Growth
from howsmooth.paper.splitting_maps import MapPoint, Share


class Row(Protocol):
    """Anything with plain columns."""

    def to_dict(self) -> dict[str, Any]: ...


def save_rows(rows: Sequence[Row], path: Path) -> Path:
    """Rows as CSV, whole or not at all."""
    table = [row.to_dict() for row in rows]
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    os.replace(part, path)
    return path


def folder(path: Path) -> Path:
    """The folder, made if it is not there."""
    if path.exists() and not path.is_dir():
        raise BadInputError(f"expected a folder for the results, got the file {path}; choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"expected a folder that can be made, got {path} ({error.strerror}); choose another --out"
        ) from None
    return path


def draw_map(rows: Sequence[MapPoint], out: Path) -> list[Path]:
    """One panel per sign of A and mass: the gain of splitting over the plane of two points; the line is gain 1."""
    pyplot = _pyplot()
    import numpy as np

    alphas, masses = list(dict.fromkeys(r.alpha for r in rows)), list(dict.fromkeys(r.mass for r in rows))
    figure, axes = pyplot.subplots(
        len(alphas),
        len(masses),
        figsize=(2.7 * len(masses) + 0.9, 2.5 * len(alphas) + 0.4),
        squeeze=False,
        layout="constrained",
    )
    image = None
    for (i, alpha), (j, mass) in itertools.product(enumerate(alphas), enumerate(masses)):
        part = [r for r in rows if r.alpha == alpha and r.mass == mass]
        x = np.array(sorted({r.x for r in part}))
        gain = np.array([r.gain for r in part]).reshape(len(x), len(x)).T
        log = np.log2(np.maximum(gain, 2.0**-4))
        image = axes[i][j].pcolormesh(x, x, log, cmap="cividis", vmin=-4, vmax=3.4, shading="nearest", rasterized=True)
        if gain.min() < 1 < gain.max():
            axes[i][j].contour(x, x, gain, levels=[1.0], colors="white", linewidths=0.9)
        axes[i][j].set_title(f"A = {alpha:g}, mass {mass:g} at x\nlargest gain {gain.max():.4g}", fontsize=8)
        axes[i][j].tick_params(labelsize=7)
        axes[i][j].set_xlabel("x", fontsize=8)
        axes[i][j].set_ylabel("y", fontsize=8)
    bar = figure.colorbar(image, ax=axes, ticks=[-4, -3, -2, -1, 0, 1, 2, 3], shrink=0.8)
    bar.ax.set_yticklabels(["≤1/16", "1/8", "1/4", "1/2", "1", "2", "4", "8"], fontsize=7)
    bar.set_label("splitting / moving", fontsize=8)
    return _save(figure, out / "splitting-map")


def draw_growth(rows: Sequence[Growth], out: Path) -> list[Path]:
    """The worst two Diracs against R², beside the mean-field bounds."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    squared = [r.radius**2 for r in rows]
    axes.semilogy(squared, [r.value for r in rows], "o-", color=COLOURS[6], ms=4, label="best two Diracs")
    styles = {"B4": "-", "B5": "--", "B8m": "-.", "B12m": ":"}
    names = {"B4": "B4 (upper)", "B5": "B5 (lower)", "B8m": "B8 (upper)", "B12m": "B12 (upper)"}
    for k, id in enumerate(BOUNDS):
        values = [(x, r.bounds[id]) for x, r in zip(squared, rows, strict=True)]
        values = [(x, v) for x, v in values if v is not None and 0 < v < math.inf]
        if values:
            axes.semilogy(*zip(*values, strict=True), styles[id], color=COLOURS[k], lw=1.6, label=names[id])
    axes.set_xlabel("R²")
    axes.set_ylabel("Wasserstein-2 Lipschitz constant")
    axes.set_title(f"Measures in the ball of radius R, A = {rows[0].alpha:g}, V = 1", fontsize=10)
    axes.legend(fontsize=8)
    return _save(figure, out / "meanfield-growth")


def draw_convergence(rows: Sequence[Convergence], out: Path) -> list[Path]:
    """Constants of n tokens divided by the mean-field one: drawn from a density on the left, the worst ones on the right."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for k, kind in enumerate(("samples", "grid")):
        part = [r for r in rows if r.kind == kind]
        style = {"samples": ("o", 3.0), "grid": ("s-", 4.0)}[kind]
        left.loglog(
            [r.n for r in part], [max(r.error, 1e-9) for r in part], style[0], ms=style[1], color=COLOURS[k], label=kind
        )
    left.set_xlabel("atoms n")
    left.set_ylabel("|constant / mean-field constant − 1|")
    left.set_title("a density", fontsize=10)
    left.legend(fontsize=8)
    worst = [r for r in rows if r.kind == "worst"]
    right.loglog(
        [r.n for r in worst], [r.value / r.limit for r in worst], "o-", color=COLOURS[2], ms=4, label="worst two clusters"
    )
    if worst:
        first = worst[len(worst) // 3]
        right.loglog(
            [r.n for r in worst], [first.value / first.limit * (r.n / first.n) ** 0.5 for r in worst], "k:", lw=1, label="√n"
        )
    right.axhline(1, color="0.6", lw=0.8)
    right.set_ylim(top=2)
    right.set_xlabel("tokens n")
    right.set_ylabel("constant / worst mean-field constant")
    right.set_title("the worst tokens", fontsize=10)
    right.legend(fontsize=8)
    return _save(figure, out / "meanfield-convergence")


def draw_frequency(rows: Sequence[Share], out: Path) -> list[Path]:
    """How often splitting pays, and by how much at most, label by label."""
    pyplot = _pyplot()
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(max(4.0, 0.34 * len(rows) + 1.5), 4.6), sharex=True, layout="constrained"
    )
    places = range(len(rows))
    top.bar(places, [100 * r.share for r in rows], color=COLOURS[0])
    top.set_ylabel("splitting pays (%)")
    top.set_title(f"{sum(r.cases for r in rows)} inputs", fontsize=10)
    bottom.plot(places, [r.largest for r in rows], "v", color=COLOURS[1], label="largest gain")
    bottom.plot(places, [r.median for r in rows], "o", color=COLOURS[2], label="median gain")
    bottom.axhline(1, color="0.6", lw=0.8)
    bottom.set_ylabel("splitting / moving")
    bottom.set_xticks(list(places), [r.label for r in rows], rotation=90, fontsize=7)
    bottom.legend(fontsize=8)
    return _save(figure, out / "splitting-frequency")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, stem: Path) -> list[Path]:
    from matplotlib import pyplot

    paths = [stem.with_suffix(".png"), stem.with_suffix(".pdf")]
    for path in paths:
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return paths
