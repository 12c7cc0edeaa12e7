"""Mean-field constants: the worst two Diracs against the radius, and how n tokens reach the constant of a measure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.measures import Measure
from howsmooth.paper.drawing import Drawn, new_figure
from howsmooth.paper.protocol import Experiment, MeasureRow, Protocol
from howsmooth.report import COLOURS
from howsmooth.study import Job, Question, Steps, grouped, task
from howsmooth.theory import ball_bounds
from howsmooth.verbs import lipschitz, splitting

_LARGEST = 600  # of |A|R², so that e^{|A|R²} and its inverse are numbers of float64
_BOUNDS = {"B4": "B4 (upper)", "B5": "B5 (lower)", "B8m": "B8 (upper)", "B12m": "B12 (upper)"}
_TOKENS = ("grid", "samples", "worst")  # that stand for a measure


@final
@dataclass(frozen=True, kw_only=True)
class DiracsRow(MeasureRow):
    """The worst two Diracs in a ball, at x and y with these log odds, beside the mean-field bounds, which may be infinite.

    split: whether splitting an atom is what gives the constant.
    """

    kind = "diracs"
    alpha: float
    radius: float
    value: float
    split: bool
    x: float
    y: float
    log_odds: float
    B4: float | None
    B5: float | None
    B8m: float | None
    B12m: float | None


@final
@dataclass(frozen=True, kw_only=True)
class TokensRow(MeasureRow):
    """The constant of `n` tokens beside that of the measure they stand for.

    tokens: `samples` (independent), `grid` (evenly spaced, with the density's masses), or `worst` (the worst two clusters of n
    equal tokens).  moved, split: the two terms of the constant.
    """

    kind = "tokens"
    tokens: str
    n: int = field()
    seed: int
    value: float
    moved: float
    split: float
    limit: float
    error: float

    @classmethod
    def beside(cls, limit: float, moved: float, split: float, tokens: str, n: int, seed: int = 0) -> "TokensRow":
        value = max(moved, split)
        error = abs(value / limit - 1)
        return cls(tokens=tokens, n=n, seed=seed, value=value, moved=moved, split=split, limit=limit, error=error)


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


def on_a_line(alpha: float) -> Attention:
    """`A = α`, `V = 1`."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return Attention.from_matrices(alpha * one, one)


def worst_measure(alpha: float, radius: float) -> DiracsRow:
    """The worst two Diracs in a ball, beside B4, B5, B8 and B12 in their mean-field forms."""
    if not isinstance(radius, int | float) or not 0 < radius < math.inf:
        raise BadInputError(f"expected a positive radius, got {radius!r}; try 1, 1.5 or 2")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha == 0:
        raise BadInputError(f"expected a finite A other than 0, got {alpha!r}; -1 is the case that grows fastest")
    value, x, y, log_odds = worst_two_diracs(alpha, radius)
    moved, split = two_diracs(alpha, *torch.tensor([x, y, log_odds], dtype=torch.float64))
    bounds = {b.id: b.value for b in ball_bounds(on_a_line(alpha), 2, radius) if b.id in _BOUNDS}
    place = {"alpha": alpha, "radius": radius, "x": x, "y": y, "log_odds": log_odds}
    return DiracsRow.of(place | {"value": value, "split": bool(split > moved)} | bounds)


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


def _check_lengths(lengths: Sequence[int]) -> None:
    if not lengths or min(lengths) < 2:
        raise BadInputError(f"expected lengths of 2 or more, got {list(lengths)}; count tokens")


def gaussian_convergence(alpha: float, radius: float, lengths: Sequence[int], seeds: int) -> list[TokensRow]:
    """How the discrete constant reaches the mean-field one: `A = α`, `V = 1`, and a Gaussian cut to `[−R, R]`.

    The limit is the constant on a fine grid; a measure without atoms has nothing to split (Corollary 5.5).
    """
    _check_lengths(lengths)

    def grid(n: int) -> Measure:
        axis = torch.linspace(-radius, radius, n, dtype=torch.float64)
        return Measure.from_density(lambda x: torch.exp(-x[:, 0].square() / 2), [axis])

    attn, fine = on_a_line(alpha), max(1024, 4 * max(lengths))
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
        for tokens, seed, mu in cases:
            s = splitting(attn, mu, tol=1e-6)
            rows.append(TokensRow.beside(limit, s.moved.value, s.split.value, tokens, n, seed))
    return rows


def worst_clusters(alpha: float, radius: float, lengths: Sequence[int]) -> list[TokensRow]:
    """How the worst of `n` equal tokens reaches the worst measure: two clusters in `[−R, R]`, every way to share n tokens.

    Each way is tried where the worst measure has its atoms and on a grid of places.
    """
    _check_lengths(lengths)
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
        rows.append(TokensRow.beside(limit, float(moved.flatten()[i]), float(split.flatten()[i]), "worst", n))
    return rows


def convergence_table(rows: Sequence[TokensRow]) -> list[dict[str, Any]]:
    """The mean error for every kind of tokens and length."""
    return [
        {"tokens": tokens, "n": n, "mean error": fmean(r.error for r in part), "limit": part[0].limit}
        for (tokens, n), part in grouped(sorted(rows, key=lambda r: _TOKENS.index(r.tokens)), lambda r: (r.tokens, r.n)).items()
    ]


@task
def measure_diracs(alpha: float, radius: float) -> list[DiracsRow]:
    """The worst two Diracs in one ball."""
    return [worst_measure(alpha, radius)]


@task
def measure_tokens(alpha: float, radius: float, lengths: list[int], seeds: int) -> list[TokensRow]:
    """Tokens drawn from a Gaussian cut to the ball. seeds: samples a length; none for the worst two clusters."""
    return gaussian_convergence(alpha, radius, lengths, seeds) if seeds else worst_clusters(alpha, radius, lengths)


def radius_tasks(protocol: Protocol) -> Steps:
    """Every radius."""
    yield [Job(measure_diracs, {"alpha": -1.0, "radius": r}) for r in protocol.radii]


def convergence_tasks(protocol: Protocol) -> Steps:
    """A density, and the worst case."""
    density, clusters = list(protocol.tokens), [2**k for k in range(1, 21)]
    ball = {"alpha": -1.0, "radius": 2.0}
    yield [
        Job(measure_tokens, ball | {"lengths": lengths, "seeds": seeds})
        for lengths, seeds in ((density, protocol.seeds), (clusters, 0))
    ]


def radius_figure(diracs: Sequence[DiracsRow]) -> Drawn:
    """The worst two Diracs against R², beside the mean-field bounds."""
    figure, axes = new_figure(6, 4)
    squared = [r.radius**2 for r in diracs]
    axes.semilogy(squared, [r.value for r in diracs], "o-", color=COLOURS[6], ms=4, label="best two Diracs")
    for (bound, name), style, colour in zip(_BOUNDS.items(), ("-", "--", "-.", ":"), COLOURS, strict=False):
        pairs = [(x, getattr(r, bound)) for x, r in zip(squared, diracs, strict=True)]
        shown = [(x, v) for x, v in pairs if v is not None and 0 < v < math.inf]
        if shown:
            axes.semilogy(*zip(*shown, strict=True), style, color=colour, lw=1.6, label=name)
    axes.set(xlabel="R²", ylabel="Wasserstein-2 Lipschitz constant")
    axes.set_title(f"Measures in the ball of radius R, A = {diracs[0].alpha:g}, V = 1", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def convergence_figure(constants: Sequence[TokensRow]) -> Drawn:
    """Constants of n tokens divided by the mean-field one: drawn from a density on the left, the worst ones on the right."""
    figure, (left, right) = new_figure(8, 3.6, 1, 2)
    for tokens, style, size, colour in (("samples", "o", 3.0, COLOURS[0]), ("grid", "s-", 4.0, COLOURS[1])):
        part = [r for r in constants if r.tokens == tokens]
        left.loglog([r.n for r in part], [max(r.error, 1e-9) for r in part], style, ms=size, color=colour, label=tokens)
    left.set(xlabel="atoms n", ylabel="|constant / mean-field constant − 1|")
    left.set_title("a density", fontsize=10)
    worst = [r for r in constants if r.tokens == "worst"]
    lengths, shares = [r.n for r in worst], [r.value / r.limit for r in worst]
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
    return figure


RADIUS = Experiment(
    Question(name="meanfield-growth", row=DiracsRow, tasks=radius_tasks, title="Measures in a ball"),
    "The worst two Diracs against the radius, between the mean-field bounds.",
    radius_figure,
)
CONVERGENCE = Experiment(
    Question(name="meanfield-convergence", row=TokensRow, tasks=convergence_tasks, title="Many tokens"),
    "Constants of n tokens reach that of the measure they stand for.",
    convergence_figure,
)
