"""Mean-field constants: the worst two Diracs against the radius, the limit of many tokens, and where splitting pays."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, Map
from howsmooth.measures import Measure
from howsmooth.paper.drawing import new_figure, save_both
from howsmooth.report import COLOURS
from howsmooth.theory import ball_bounds
from howsmooth.verbs import lipschitz, splitting

BOUNDS = ("B4", "B5", "B8m", "B12m")
KINDS = ("grid", "samples", "worst")  # of tokens beside the measure they stand for

_LARGEST = 600  # of |A|R², so that e^{|A|R²} and its inverse are numbers of float64


def two_diracs(
    alpha: float, x: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"], log_odds: Float[Tensor, "*shape"]
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """What moving and splitting do to `μ = a δ_x + (1−a) δ_y` in dimension one, `A = α`, `V = 1`; the larger is its constant.

    The closed form M2 (Proposition 5.8): `‖D^½ J D^{−½}‖`, and the larger of `|S_x|` and `|S_y|`. Masses are given by
    `log_odds = log(a/(1−a))`, so that tiny ones lose nothing.

    >>> one = torch.ones(()).double()
    >>> round(float(two_diracs(-1.0, -one, one, math.log(0.25) * one)[0]), 6)  # a = 1/5
    2.458405
    """
    gap = y - x
    p, p_c = torch.sigmoid(alpha * x * gap - log_odds), torch.sigmoid(log_odds - alpha * x * gap)  # x attends to y, to x
    q, q_c = torch.sigmoid(log_odds - alpha * y * gap), torch.sigmoid(alpha * y * gap - log_odds)  # y attends to x, to y
    split = alpha * gap.square() * torch.stack([p * p_c, q * q_c])
    m11 = p_c * (1 - p * gap * alpha * x) + split[0]
    m12 = p * (1 + p_c * gap * alpha * x) * (log_odds / 2).exp()
    m21 = q * (1 - q_c * gap * alpha * y) * (-log_odds / 2).exp()
    m22 = q_c * (1 + q * gap * alpha * y) + split[1]
    moved = (torch.hypot(m11 + m22, m21 - m12) + torch.hypot(m11 - m22, m12 + m21)) / 2
    return moved, split.abs().amax(0)


def _on_a_line(alpha: float) -> Attention:
    """`A = α`, `V = 1`."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return Attention.from_matrices(alpha * one, one)


def worst_measures(alpha: float, radii: Sequence[float]) -> list[dict[str, Any]]:
    """A row for every radius: the worst two Diracs in that ball, beside B4, B5, B8 and B12 in their mean-field forms.

    split: whether splitting an atom is what gives the constant.  Bounds go by their row names, infinite where they overflow.
    """
    if not radii or not all(isinstance(r, int | float) and 0 < r < math.inf for r in radii):
        raise BadInputError(f"expected positive radii, got {list(radii)!r}; try 1, 1.5, 2")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha == 0:
        raise BadInputError(f"expected a finite A other than 0, got {alpha!r}; -1 is the case that grows fastest")
    rows = []
    for radius in radii:
        value, x, y, log_odds = worst_two_diracs(alpha, radius)
        moved, split = two_diracs(alpha, *torch.tensor([x, y, log_odds], dtype=torch.float64))
        table = {b.id: b.value for b in ball_bounds(_on_a_line(alpha), 2, radius)}
        row = {"alpha": alpha, "radius": radius, "value": value, "split": bool(split > moved), "x": x, "y": y}
        rows.append(row | {"log_odds": log_odds} | {k: table[k] for k in BOUNDS})
    return rows


def worst_two_diracs(alpha: float, radius: float, points: int = 41, rounds: int = 12) -> tuple[float, ...]:
    """The largest constant over two Diracs in `[−R, R]`: value, x, y, log odds. A grid, refined around its best point."""
    if not abs(alpha) * radius * radius <= _LARGEST:
        raise BadInputError(
            f"expected |A|R² of at most {_LARGEST}, got {abs(alpha) * radius * radius:.3g}; the constant beyond it, about "
            "e^{|A|R²}, leaves the range of float64"
        )
    limits = (radius, radius, 2 * abs(alpha) * radius**2 + 6)  # best odds are of the order e^{2|α|R²}
    best: tuple[float, ...] = (-math.inf, 0.0, 0.0, 0.0)
    share = 1.0
    for _ in range(rounds):
        # both ends of the range are on every grid that reaches them
        axes = [
            torch.linspace(max(-limit, c - share * limit), min(limit, c + share * limit), points, dtype=torch.float64)
            for c, limit in zip(best[1:], limits, strict=True)
        ]
        grid = torch.meshgrid(*axes, indexing="ij")
        value = torch.maximum(*two_diracs(alpha, *grid))
        i = int(value.argmax())
        best = max(best, tuple(float(t.flatten()[i]) for t in (value, *grid)))
        share *= 0.3
    return best


def _row(kind: str, n: int, seed: int, moved: float, split: float, limit: float) -> dict[str, Any]:
    """The constant of `n` tokens beside that of the measure they stand for.

    kind: `samples` (independent), `grid` (evenly spaced, with the density's masses), or `worst` (the worst two clusters of n
    equal tokens).  moved, split: its two terms.
    """
    value = max(moved, split)
    about = {"kind": kind, "n": n, "seed": seed, "value": value, "moved": moved, "split": split}
    return about | {"limit": limit, "error": abs(value / limit - 1)}


def gaussian_convergence(alpha: float, radius: float, lengths: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """How the discrete constant reaches the mean-field one: `A = α`, `V = 1`, and a Gaussian cut to `[−R, R]`.

    The limit is the constant on a fine grid; a measure without atoms has nothing to split (Corollary 5.5).
    """
    if not lengths or min(lengths) < 2:
        raise BadInputError(f"expected lengths of 2 or more, got {list(lengths)}; count atoms")

    def grid(n: int) -> Measure:
        axis = torch.linspace(-radius, radius, n, dtype=torch.float64)
        return Measure.from_density(lambda x: torch.exp(-x[:, 0].square() / 2), [axis])

    attn, fine = _on_a_line(alpha), max(1024, 4 * max(lengths))
    limit_measure, cell = grid(fine), 2 * radius / (fine - 1)
    limit = lipschitz(attn, limit_measure, tol=1e-6).value
    rows = []
    for n in lengths:
        cases = [("grid", 0, grid(n))]
        for seed in range(seeds):
            random = torch.Generator().manual_seed(seed)
            pick = torch.multinomial(limit_measure.mass, n, replacement=True, generator=random)
            # uniform within a cell of the grid, so that samples are distinct
            jitter = (torch.rand(n, 1, generator=random, dtype=torch.float64) - 0.5) * cell
            cases.append(("samples", seed, Measure(limit_measure.points[pick] + jitter)))
        for kind, seed, mu in cases:
            s = splitting(attn, mu, tol=1e-6)
            rows.append(_row(kind, n, seed, s.moved.value, s.split.value, limit))
    return rows


def worst_clusters(alpha: float, radius: float, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """How the worst of `n` equal tokens reaches the worst measure: two clusters in `[−R, R]`, every way to share n tokens.

    Each way is tried where the worst measure has its atoms and on a grid of places.
    """
    if not lengths or min(lengths) < 2:
        raise BadInputError(f"expected lengths of 2 or more, got {list(lengths)}; two clusters need two tokens")
    limit, x, y, _ = worst_two_diracs(alpha, radius)
    axis = torch.cat([torch.linspace(-radius, radius, 33, dtype=torch.float64), torch.tensor([x, y], dtype=torch.float64)])
    rows = []
    for n in lengths:
        halves = {round(n * 2.0**-j) for j in range(1, 20)}
        counts = sorted(k for k in {*range(1, 33), *halves} if 1 <= k < n)
        k = torch.tensor(counts, dtype=torch.float64)
        at, other, share = torch.meshgrid(axis, axis, (k / (n - k)).log(), indexing="ij")
        moved, split = two_diracs(alpha, at, other, share)
        i = int(torch.maximum(moved, split).argmax())
        rows.append(_row("worst", n, 0, float(moved.flatten()[i]), float(split.flatten()[i]), limit))
    return rows


def convergence_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The mean error for every kind and length."""
    table = []
    for kind, n in sorted(dict.fromkeys((row["kind"], row["n"]) for row in rows), key=lambda group: KINDS.index(group[0])):
        part = [row for row in rows if (row["kind"], row["n"]) == (kind, n)]
        table.append({"kind": kind, "n": n, "mean error": fmean(r["error"] for r in part), "limit": part[0]["limit"]})
    return table


def draw_worst_measures(rows: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """The worst two Diracs against R², beside the mean-field bounds."""
    figure, axes = new_figure(6, 4)
    squared = [r["radius"] ** 2 for r in rows]
    axes.semilogy(squared, [r["value"] for r in rows], "o-", color=COLOURS[6], ms=4, label="best two Diracs")
    names = ("B4 (upper)", "B5 (lower)", "B8 (upper)", "B12 (upper)")
    for id, name, style, colour in zip(BOUNDS, names, ("-", "--", "-.", ":"), COLOURS, strict=False):
        pairs = [(x, r[id]) for x, r in zip(squared, rows, strict=True)]
        shown = [(x, v) for x, v in pairs if v is not None and 0 < v < math.inf]
        if shown:
            axes.semilogy(*zip(*shown, strict=True), style, color=colour, lw=1.6, label=name)
    axes.set(xlabel="R²", ylabel="Wasserstein-2 Lipschitz constant")
    axes.set_title(f"Measures in the ball of radius R, A = {rows[0]['alpha']:g}, V = 1", fontsize=10)
    axes.legend(fontsize=8)
    return save_both(figure, out / "meanfield-growth")


def draw_convergence(rows: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """Constants of n tokens divided by the mean-field one: drawn from a density on the left, the worst ones on the right."""
    figure, (left, right) = new_figure(8, 3.6, 1, 2)
    for kind, style, size, colour in (("samples", "o", 3.0, COLOURS[0]), ("grid", "s-", 4.0, COLOURS[1])):
        points = [(r["n"], max(r["error"], 1e-9)) for r in rows if r["kind"] == kind]
        left.loglog(*(zip(*points, strict=True) if points else ((), ())), style, ms=size, color=colour, label=kind)
    left.set(xlabel="atoms n", ylabel="|constant / mean-field constant − 1|")
    left.set_title("a density", fontsize=10)
    worst = [r for r in rows if r["kind"] == "worst"]
    lengths, shares = [r["n"] for r in worst], [r["value"] / r["limit"] for r in worst]
    right.loglog(lengths, shares, "o-", color=COLOURS[2], ms=4, label="worst two clusters")
    if worst:
        k = len(worst) // 3  # where growth is still that of the root
        right.loglog(lengths, [shares[k] * (n / lengths[k]) ** 0.5 for n in lengths], "k:", lw=1, label="√n")
    right.axhline(1, color="0.6", lw=0.8)
    right.set_ylim(top=2)
    right.set(xlabel="tokens n", ylabel="constant / worst mean-field constant")
    right.set_title("the worst tokens", fontsize=10)
    for axes in (left, right):
        axes.legend(fontsize=8)
    return save_both(figure, out / "meanfield-convergence")


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
    figure, grid = new_figure(2.7 * len(masses) + 0.9, 2.5 * len(alphas) + 0.4, len(alphas), len(masses), squeeze=False)
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
    figure, (top, bottom) = new_figure(max(4.0, 0.34 * len(rows) + 1.5), 4.6, 2, 1, sharex=True)
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
