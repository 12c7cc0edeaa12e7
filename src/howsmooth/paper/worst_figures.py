"""Figures of worst inputs: the tokens in the plane, growth curves, the climb, and what attacks gained."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.paper.configurations import Growth
from howsmooth.paper.ladder import COLOURS
from howsmooth.paper.robustness import Robustness
from howsmooth.search.attacks import Attacks
from howsmooth.search.worst import WorstCase


def draw_worst(path: Path, growth: Growth | None, worst: WorstCase | None) -> Path:
    """Growth of the configurations, the worst tokens found, and the climb that led there; what is not given is left out."""
    panels = [p for p in (growth and "growth", worst and "tokens", worst and "climb") if p]
    figure = _figure(path, len(panels))
    for axes, panel in zip(figure.axes, panels, strict=True):
        if panel == "growth" and growth is not None:
            _growth(axes, growth)
        elif panel == "tokens" and worst is not None:
            _tokens(axes, worst)
        elif worst is not None:
            axes.plot(range(len(worst.trace)), worst.trace, color=COLOURS[0], lw=1.4)
            axes.set(xlabel="step", ylabel="best L of all starts", title="The climb")
    figure.savefig(path, dpi=160)
    return path


def draw_attacks(path: Path, attacks: Attacks) -> Path:
    """Gain of every attack against its budget, as a share of `L`."""
    figure = _figure(path, 1)
    axes = figure.axes[0]
    constant = attacks.estimate.value
    for k, method in enumerate(dict.fromkeys(row.method for row in attacks)):
        points = [(row.epsilon, row.gain / constant) for row in attacks if row.method == method and row.gain is not None]
        if points and constant > 0:
            axes.plot(*zip(*sorted(points), strict=True), "o-", ms=3, lw=1.4, color=COLOURS[k], label=method)
    axes.axhline(1.0, color="0.6", lw=0.8)
    axes.set(xscale="log", xlabel="budget ε", ylabel="gain / L", title=f"Attacks at L = {constant:.4g}")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=160)
    return path


def draw_robustness(path: Path, found: Robustness) -> Path:
    """For every budget, gains by layer (the mean over windows) beside the constant."""
    figure = _figure(path, len(found.budgets))
    layers = sorted({case.layer for case in found.cases})

    def by_layer(values: list[float]) -> list[float]:
        pairs = list(zip((case.layer for case in found.cases), values, strict=True))
        return [sum(v for at, v in pairs if at == i) / sum(at == i for at, _ in pairs) for i in layers]

    constants = by_layer([case.constant for case in found.cases])
    for axes, budget in zip(figure.axes, found.budgets, strict=True):
        axes.plot(layers, constants, "k--", lw=1.2, label="L")
        for k, method in enumerate(found.methods):
            axes.plot(layers, by_layer(found.gains(method, budget)), "o-", ms=3, lw=1.4, color=COLOURS[k], label=method)
        axes.set(xlabel="layer", ylabel="gain", title=f"budget {budget:g} of the input")
        axes.set_xticks(layers)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=160)
    return path


def check_figure(path: Path) -> None:
    """Refuse a name that no figure can have."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise BadInputError(f"expected a figure named .png, .pdf or .svg, got {path.name}; change its ending")


def _figure(path: Path, panels: int) -> Any:
    from matplotlib.figure import Figure

    check_figure(path)
    figure = Figure(figsize=(4.2 * max(panels, 1), 3.8), layout="constrained")
    figure.subplots(1, max(panels, 1))
    return figure


def _growth(axes: Any, growth: Growth) -> None:
    lengths = [row.n for row in growth.rows]
    values = [row.estimate.value for row in growth.rows]
    axes.plot(lengths, values, "o-", ms=3, lw=1.4, color=COLOURS[0], label=f"{growth.configuration.family} tokens")
    axes.plot(lengths, [math.exp(min(b, 700.0)) for b in growth.log_bounds], "--", lw=1.2, color=COLOURS[1], label="bound B7")
    root = [values[-1] * (n / lengths[-1]) ** 0.5 for n in lengths]
    axes.plot(lengths, root, ":", lw=1.2, color="0.5", label="√n")
    axes.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="L", title=f"Growth, exponent {growth.exponent:.3f}")
    axes.legend(fontsize=7)


def _tokens(axes: Any, worst: WorstCase) -> None:
    """Tokens and their worst direction; in more than two dimensions, in the plane that shows most of the tokens."""
    x, v = worst.tokens.double(), worst.estimate.direction.double().to(worst.tokens.device)
    x, v = in_plane(x, v)
    reach = float(x.norm(dim=-1).max()) or 1.0
    here = (torch.cdist(x, x) < 0.02 * reach).sum(-1)
    axes.scatter(x[:, 0], x[:, 1], s=18 * here, color=COLOURS[0], alpha=0.5)
    for i in torch.unique((torch.cdist(x, x) < 0.02 * reach).int().argmax(-1)).tolist():
        axes.annotate(f"{int(here[i])}", x[i].tolist(), fontsize=8, xytext=(5, 5), textcoords="offset points")
    v = 0.35 * reach * v / v.norm(dim=-1).max().clamp_min(1e-300)
    axes.quiver(x[:, 0], x[:, 1], v[:, 0], v[:, 1], angles="xy", scale_units="xy", scale=1, width=0.006, color=COLOURS[1])
    circle = torch.linspace(0, 2 * math.pi, 200).double()
    axes.plot(reach * circle.cos(), reach * circle.sin(), color="0.7", lw=0.8)
    axes.set(title=f"Worst tokens found, L = {worst.value:.4g}", aspect="equal")


def in_plane(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and directions in two coordinates: their own, padded with zero, or the two main axes of the tokens."""
    if x.shape[1] <= 2:
        pad = torch.zeros(len(x), 2 - x.shape[1], dtype=x.dtype)
        return torch.cat([x, pad], 1), torch.cat([v, pad], 1)
    axes = torch.linalg.svd(x, full_matrices=False)[2][:2]
    axes = torch.cat([axes, torch.zeros(2 - len(axes), x.shape[1], dtype=x.dtype)])
    return x @ axes.mT, v @ axes.mT
