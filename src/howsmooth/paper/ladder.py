"""The bound ladder: every bound against the number of tokens."""

import itertools
import math
from pathlib import Path
from typing import Any

import torch

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.theory.ball import ball_bounds
from howsmooth.theory.castin2024 import not_bilinear
from howsmooth.verbs import lipschitz_batch

# Okabe & Ito's palette, told apart by colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")

_KEPT = ("id", "name", "side", "log_value", "mean_field")


def ladder(attn: Attention, radius: float, lengths: list[int] | None = None) -> list[dict[str, Any]]:
    """A row per bound that applies and per n, for n = 1 … 10⁹ unless lengths are given."""
    lengths = lengths or sorted({round(10 ** (k / 8)) for k in range(73)})
    rows = []
    for n in lengths:
        for b in ball_bounds(attn, n, radius):
            if b.log_value is not None:
                rows.append({k: v for k, v in b.to_dict().items() if k in _KEPT} | {"n": n})
    return rows


def draw(attn: Attention, radius: float, path: Path) -> Path:
    """The ladder as a figure: upper bounds solid, lower bounds dashed (dotted for some n), measured constants as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if path.suffix not in (".png", ".pdf", ".svg"):
        raise BadInputError(f"expected a figure named .png, .pdf or .svg, got {path.name}; change its ending")
    rows = ladder(attn, radius)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    ids = list(dict.fromkeys(row["id"] for row in rows))
    for k, id in enumerate(ids):
        points = [(row["n"], row["log_value"] / math.log(10)) for row in rows if row["id"] == id]
        row = next(row for row in rows if row["id"] == id)
        style = ("-" if k < len(COLOURS) else "-.") if row["side"] == "upper" else ":" if row["mean_field"] else "--"
        axes.plot(*zip(*points, strict=True), style, color=COLOURS[k % len(COLOURS)], lw=1.4, label=f"{id}: {row['name']}")
    measured = seen(attn, radius)
    if measured:
        axes.plot(list(measured), [math.log10(v) for v in measured.values()], "k.", label="measured, eigenvector tokens")
    cross = crossover(rows)
    if cross is not None:
        axes.axvline(cross, color="0.7", lw=0.8)
        axes.annotate(
            "√n ends", (cross, axes.get_ylim()[0]), fontsize=7, color="0.4", xytext=(3, 3), textcoords="offset points"
        )
    axes.set_xscale("log")
    axes.set_xlabel("tokens n")
    axes.set_ylabel("log₁₀ of the Lipschitz constant")
    axes.set_title(f"Bounds over the ball of radius {radius:g}", fontsize=10)
    axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
    return path


def seen(attn: Attention, radius: float) -> dict[int, float]:
    """Constants attained by the paper's eigenvector configurations, n = 2 … 512; nothing where `A` has no real eigenvalue.

    With real eigenpairs `(γ, u)` of one head's `A`: one token at `−R u` against the others at `R u` for the least `γ`, one at
    `R u` against the others at `R u/2` for the largest. The larger of the two counts.
    """
    if attn.heads != 1 or attn.w_k is not None or not_bilinear(attn) is not None:
        return {}
    values, vectors = torch.linalg.eig(attn.w_q.double())
    real = values.imag.abs() <= 1e-9 * values.abs().max()
    if not bool(real.any()):
        return {}
    gamma, u = values.real[real], vectors.real[:, real]
    least, largest = (radius * u[:, k] / u[:, k].norm() for k in (int(gamma.argmin()), int(gamma.argmax())))
    found = {}
    for n in (2**k for k in range(1, 10)):
        pairs = ((-least, least), (largest, largest / 2))
        batch = torch.stack([torch.cat([one[None], other.expand(n - 1, -1)]) for one, other in pairs])
        found[n] = float(lipschitz_batch(attn, batch).value.max())
    return found


def crossover(rows: list[dict[str, Any]]) -> int | None:
    """The first n from which the smallest upper bound no longer grows: the mean-field regime."""
    best: dict[int, float] = {}
    for row in rows:
        if row["side"] == "upper":
            best[row["n"]] = min(best.get(row["n"], math.inf), row["log_value"])
    lengths = sorted(best)
    flat = [n for n, later in itertools.pairwise(lengths) if best[later] <= best[n] + 1e-9]
    return flat[0] if flat else None
