"""Over a ball of tokens, as figures: every bound against the number of tokens, how bad tokens grow, the worst ones found."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth.maps import Attention
from howsmooth.paper.adversarial import TokenGrowth
from howsmooth.paper.drawing import new_figure, save_figure
from howsmooth.report import COLOURS
from howsmooth.search import WorstCase, configurations
from howsmooth.theory import Bound, ball_bounds
from howsmooth.verbs import lipschitz_batch

Rung = tuple[int, Bound]  # a bound for so many tokens


def ladder(attn: Attention, radius: float, lengths: Sequence[int] | None = None) -> list[Rung]:
    """Every bound that applies for every n, for n = 1 … 10⁹ unless lengths are given."""
    lengths = lengths or sorted({round(10 ** (k / 8)) for k in range(73)})
    return [(n, b) for n in lengths for b in ball_bounds(attn, n, radius) if b.applies]


def attained(attn: Attention, radius: float) -> dict[int, float]:
    """Constants attained by the paper's eigenvector tokens, n = 2 … 512; nothing where no head's `A` has a real eigenvalue.

    For every head both of its configurations, `opposite` and `half`; the largest constant counts.
    """
    if radius == 0:  # one point, nothing to place
        return {}
    pairs = [c for c in configurations(attn, 2, radius) if c.gamma is not None]
    lengths = [2**k for k in range(1, 10)] if pairs else []
    batches = {n: torch.stack([c.place(n) for c in pairs]).to(attn.w_q.device) for n in lengths}
    return {n: float(lipschitz_batch(attn, batch).value.max()) for n, batch in batches.items()}


def crossover(rungs: Sequence[Rung]) -> int | None:
    """The first n from which the smallest upper bound no longer grows: the mean-field regime."""
    best: dict[int, float] = {}
    for n, bound in rungs:
        if bound.side == "upper" and bound.log_value is not None:
            best[n] = min(best.get(n, math.inf), bound.log_value)
    flat = [n for n, later in itertools.pairwise(sorted(best)) if best[later] <= best[n] + 1e-9]
    return flat[0] if flat else None


def draw_ladder(path: Path, attn: Attention, radius: float) -> Path:
    """The ladder as a figure: upper bounds solid, lower bounds dashed (dotted for some n), measured constants as points."""
    rungs = ladder(attn, radius)
    figure, axes = new_figure(7, 4.5)
    for k, (id, first) in enumerate({b.id: b for _, b in rungs}.items()):
        points = [(n, (b.log_value or 0.0) / math.log(10)) for n, b in rungs if b.id == id]
        lower = ":" if first.mean_field else "--"
        style = ("-" if k < len(COLOURS) else "-.") if first.side == "upper" else lower
        axes.plot(*zip(*points, strict=True), style, color=COLOURS[k % len(COLOURS)], lw=1.4, label=f"{id}: {first.name}")
    measured = attained(attn, radius)
    if measured:
        axes.plot(list(measured), [math.log10(v) for v in measured.values()], "k.", label="measured, eigenvector tokens")
    cross = crossover(rungs)
    if cross is not None:
        axes.axvline(cross, color="0.7", lw=0.8)
        at = (cross, axes.get_ylim()[0])
        axes.annotate("√n ends", at, fontsize=7, color="0.4", xytext=(3, 3), textcoords="offset points")
    axes.set(xscale="log", xlabel="tokens n", ylabel="log₁₀ of the Lipschitz constant")
    axes.set_title(f"Bounds over the ball of radius {radius:g}", fontsize=10)
    axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return save_figure(figure, path)


def draw_worst(path: Path, growth: TokenGrowth | None, worst: WorstCase | None) -> Path:
    """Growth of the configurations, the worst tokens found, and the climb that led there; what is not given is left out."""
    count = max(1, (growth is not None) + 2 * (worst is not None))
    figure, (axes,) = new_figure(4.2 * count, 3.8, 1, count, squeeze=False)
    panels = list(axes)
    if growth is not None:
        _growth(panels.pop(0), growth)
    if worst is not None:
        _tokens(panels[0], worst)
        panels[1].plot(range(len(worst.trace)), worst.trace, color=COLOURS[0], lw=1.4)
        panels[1].set(xlabel="step", ylabel="best L of all starts", title="The climb")
    return save_figure(figure, path)


def _growth(axes: Any, growth: TokenGrowth) -> None:
    lengths = [row.n for row in growth.rows]
    values = [row.estimate.value for row in growth.rows]
    root = [values[-1] * (n / lengths[-1]) ** 0.5 for n in lengths]
    axes.plot(lengths, values, "o-", ms=3, lw=1.4, color=COLOURS[0], label=f"{growth.configuration.family} tokens")
    axes.plot(lengths, growth.bounds, "--", lw=1.2, color=COLOURS[1], label="bound B7")
    axes.plot(lengths, root, ":", lw=1.2, color="0.5", label="√n")
    axes.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="L", title=f"Growth, exponent {growth.exponent:.3f}")
    axes.legend(fontsize=7)


def _tokens(axes: Any, worst: WorstCase) -> None:
    """Tokens and their worst direction; in more than two dimensions, in the plane that shows most of the tokens."""
    x, v = in_plane(worst.tokens.double(), worst.estimate.direction.double().to(worst.tokens.device))
    reach = float(x.norm(dim=-1).max()) or 1.0
    together = torch.cdist(x, x) < 0.02 * reach  # closer than a dot of the figure
    here = together.sum(-1)
    axes.scatter(x[:, 0], x[:, 1], s=18 * here, color=COLOURS[0], alpha=0.5)
    for i in torch.unique(together.int().argmax(-1)).tolist():
        axes.annotate(f"{int(here[i])}", x[i].tolist(), fontsize=8, xytext=(5, 5), textcoords="offset points")
    v = 0.35 * reach * v / v.norm(dim=-1).max().clamp_min(1e-300)
    axes.quiver(x[:, 0], x[:, 1], v[:, 0], v[:, 1], angles="xy", scale_units="xy", scale=1, width=0.006, color=COLOURS[1])
    circle = torch.linspace(0, 2 * math.pi, 200).double()
    axes.plot(reach * circle.cos(), reach * circle.sin(), color="0.7", lw=0.8)
    axes.set(title=f"Worst tokens found, L = {worst.value:.4g}", aspect="equal")


def in_plane(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and directions in two coordinates: their own, padded with zero, or the two main axes of the tokens."""
    d = x.shape[1]
    axes = torch.eye(d).to(x) if d <= 2 else torch.linalg.svd(x, full_matrices=False)[2][:2]
    axes = torch.cat([axes, axes.new_zeros(2 - len(axes), d)])
    return x @ axes.mT, v @ axes.mT
