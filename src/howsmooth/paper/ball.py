"""Over a ball of tokens: every bound against the number of tokens, how the paper's bad tokens grow, the worst ones found."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.paper.drawing import check_figure, new_figure, save_figure
from howsmooth.report import COLOURS
from howsmooth.search import (
    Ball,
    Configuration,
    Configured,
    WorstCase,
    configurations,
    eigenvector_configuration,
    worst_configuration,
)
from howsmooth.study import fit_growth
from howsmooth.theory import ball_bounds, constants_of, sqrt_bound
from howsmooth.verbs import lipschitz, lipschitz_batch

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
_KEPT = ("id", "name", "side", "log_value", "mean_field")
_LARGEST_LOG = 700.0  # of a number that float64 holds, rounded down


def ladder(attn: Attention, radius: float, lengths: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """A row per bound that applies and per n, for n = 1 … 10⁹ unless lengths are given."""
    lengths = lengths or sorted({round(10 ** (k / 8)) for k in range(73)})
    table = ((n, b.to_dict()) for n in lengths for b in ball_bounds(attn, n, radius) if b.log_value is not None)
    return [{k: row[k] for k in _KEPT} | {"n": n} for n, row in table]


def seen(attn: Attention, radius: float) -> dict[int, float]:
    """Constants attained by the paper's eigenvector tokens, n = 2 … 512; nothing where no head's `A` has a real eigenvalue.

    For every head both of its configurations, `opposite` and `half`; the largest constant counts.
    """
    if radius == 0:  # one point, nothing to place
        return {}
    pairs = [c for c in configurations(attn, 2, radius) if c.gamma is not None]
    lengths = [2**k for k in range(1, 10)] if pairs else []
    batches = {n: torch.stack([c.place(n) for c in pairs]).to(attn.w_q.device) for n in lengths}
    return {n: float(lipschitz_batch(attn, batch).value.max()) for n, batch in batches.items()}


def crossover(rows: Sequence[dict[str, Any]]) -> int | None:
    """The first n from which the smallest upper bound no longer grows: the mean-field regime."""
    best: dict[int, float] = {}
    for row in rows:
        if row["side"] == "upper":
            best[row["n"]] = min(best.get(row["n"], math.inf), row["log_value"])
    lengths = sorted(best)
    flat = [n for n, later in itertools.pairwise(lengths) if best[later] <= best[n] + 1e-9]
    return flat[0] if flat else None


def draw_ladder(path: Path, attn: Attention, radius: float) -> Path:
    """The ladder as a figure: upper bounds solid, lower bounds dashed (dotted for some n), measured constants as points."""
    check_figure(path)
    rows = ladder(attn, radius)
    figure, axes = new_figure(7, 4.5)
    for k, id in enumerate(dict.fromkeys(row["id"] for row in rows)):
        mine = [row for row in rows if row["id"] == id]
        points = [(row["n"], row["log_value"] / math.log(10)) for row in mine]
        lower = ":" if mine[0]["mean_field"] else "--"
        style = ("-" if k < len(COLOURS) else "-.") if mine[0]["side"] == "upper" else lower
        label = f"{id}: {mine[0]['name']}"
        axes.plot(*zip(*points, strict=True), style, color=COLOURS[k % len(COLOURS)], lw=1.4, label=label)
    measured = seen(attn, radius)
    if measured:
        axes.plot(list(measured), [math.log10(v) for v in measured.values()], "k.", label="measured, eigenvector tokens")
    cross = crossover(rows)
    if cross is not None:
        axes.axvline(cross, color="0.7", lw=0.8)
        at = (cross, axes.get_ylim()[0])
        axes.annotate("√n ends", at, fontsize=7, color="0.4", xytext=(3, 3), textcoords="offset points")
    axes.set(xscale="log", xlabel="tokens n", ylabel="log₁₀ of the Lipschitz constant")
    axes.set_title(f"Bounds over the ball of radius {radius:g}", fontsize=10)
    axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return save_figure(figure, path)


@final
@dataclass(frozen=True, eq=False)
class TokenGrowth:
    """One configuration at growing lengths.

    rows: measured, one per length.  log_bounds: logarithms of the upper bound B7 beside them.  exponent: the slope of `log L`
    in `log n`.
    """

    configuration: Configuration
    rows: tuple[Configured, ...]
    log_bounds: tuple[float, ...]
    exponent: float

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() | {"log_B7": log} for row, log in zip(self.rows, self.log_bounds, strict=True)]
        return {"configuration": str(self.configuration), "exponent": self.exponent, "rows": rows}


def grow(
    attn: Attention, radius: float, lengths: Sequence[int] = LENGTHS, *, head: int | None = None, seed: int = 0
) -> TokenGrowth:
    """The paper's eigenvector tokens of one head at every length, the whole layer measured.

    head: whose matrix builds the tokens; by default the head that gives the largest `L` at the longest length. √n is expected
    while every head's logits keep the two places apart, `2R²|⟨A_h u, u⟩| > log n` (docs/explanation/worst-inputs.md §1).

    >>> growth = grow(Attention.from_matrices(-torch.eye(1), torch.eye(1)), 3.0)
    >>> abs(growth.exponent - 0.5) < 0.02
    True
    """
    space, lengths = Ball(radius), _growing(lengths)
    heads = range(attn.heads) if head is None else [head]
    candidates = [c for c in (eigenvector_configuration(attn, space, head=h) for h in heads) if c is not None]
    if not candidates:
        raise BadInputError("expected a head with a real eigenvalue, got none; use worst_configuration, which needs none")

    def measured(c: Configuration, n: int) -> Configured:
        x = c.place(n).to(torch.promote_types(attn.dtype, torch.float32))
        return Configured(n, space.reach, c, x, lipschitz(attn, x, seed=seed))

    longest = max((measured(c, lengths[-1]) for c in candidates), key=lambda row: row.estimate.value)
    rows = [*(measured(longest.configuration, n) for n in lengths[:-1]), longest]
    layer = constants_of(attn)
    logs = [b.log_value if b.log_value is not None else math.inf for b in (sqrt_bound(layer, n, radius) for n in lengths)]
    exponent = fit_growth(lengths, [row.estimate.value for row in rows]).exponent.value
    return TokenGrowth(longest.configuration, tuple(rows), tuple(logs), exponent)


def scan(attn: Attention, radii: Sequence[float], lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[Configured]:
    """The worst configuration of any family and head, at every radius and length."""
    return [worst_configuration(attn, n, radius, seed=seed) for radius in radii for n in _growing(lengths)]


def _growing(lengths: Sequence[int]) -> list[int]:
    whole = [n for n in lengths if isinstance(n, int) and not isinstance(n, bool) and n >= 2]
    if not whole or len(whole) != len(lengths) or sorted(set(whole)) != whole:
        raise BadInputError(f"expected growing whole lengths of at least 2, got {list(lengths)}; as in 8, 16, 32")
    return whole


def draw_worst(path: Path, growth: TokenGrowth | None, worst: WorstCase | None) -> Path:
    """Growth of the configurations, the worst tokens found, and the climb that led there; what is not given is left out."""
    check_figure(path)
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
    bound = [math.exp(min(b, _LARGEST_LOG)) for b in growth.log_bounds]
    root = [values[-1] * (n / lengths[-1]) ** 0.5 for n in lengths]
    axes.plot(lengths, values, "o-", ms=3, lw=1.4, color=COLOURS[0], label=f"{growth.configuration.family} tokens")
    axes.plot(lengths, bound, "--", lw=1.2, color=COLOURS[1], label="bound B7")
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
