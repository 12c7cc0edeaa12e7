"""Layers and neighbourhoods that try to break a bound around an input, and a checker that looks inside them."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import HowSmoothError
from howsmooth.maps import Attention, RMSNorm
from howsmooth.search import find_near
from howsmooth.solve import Options, solve
from howsmooth.theory.around import Around, AroundAttention, Neighbourhood

from .hostile_layers import hostile, jacobians

ROUNDING = 1e-9  # of a truth: an SVD in float64 of a Jacobian in extended precision
_RANGE = 1e140  # sizes past which squares leave float64


@dataclass(frozen=True)
class Near:
    """A layer, a neighbourhood of an input, the tokens that may move (all where nothing), and what it was made of."""

    layer: Attention
    area: Neighbourhood
    per: str
    within: float
    tokens: tuple[int, ...] | None
    name: str


def near(seed: int) -> Near:
    """The neighbourhood of that number: radii over six decades of the tokens' own size."""
    case, r = hostile(seed, items=1), np.random.default_rng(seed)
    layer, x = case.layer.to(dtype=torch.float64), case.x[0].double()
    n = len(x)
    size = float(np.mean([np.linalg.norm(t / (np.abs(t).max() or 1)) * (np.abs(t).max() or 1) for t in x.numpy()])) or 1.0
    within = size * 10.0 ** r.uniform(-6, 0)
    per = str(r.choice(["token", "token", "sequence"]))
    tokens = tuple(sorted(set(r.integers(0, n, 2).tolist()))) if r.random() < 0.3 else None
    said = []
    full = layer.heads * layer.head_width
    if layer.heads > 1 and layer.kv_heads == layer.heads and r.random() < 0.2:
        norm = RMSNorm(torch.as_tensor(r.standard_normal(full)), eps=0.01)
        layer, said = replace(layer, q_norm=norm, k_norm=norm), ["norms over all heads"]
    if n > 1 and r.random() < 0.1:
        real = torch.arange(n)[None] < n - 1
        layer, said = replace(layer, attention_mask=real), [*said, "padding"]
    area = Neighbourhood.of(x, within, per, tokens)
    return Near(layer, area, per, within, tokens, f"{', '.join([case.name, *said])}; within {within:g} per {per} of {tokens}")


@dataclass
class Looked:
    """What was compared: neighbourhoods, points inside them, upper ends of infinity, cases refused;
    a sentence for each that is wrong."""

    neighbourhoods: int = 0
    points: int = 0
    infinite: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    widths: list[tuple[float, float, float]] = field(default_factory=list)  # r over size, lower, upper


def examine(case: Near, looked: Looked, samples: int = 3, steps: int = 3) -> None:
    """Compare the bounds with points of the neighbourhood: random ones, and where ascent leads."""
    try:
        bound = AroundAttention(case.layer, case.area.point, tokens=case.tokens).within(case.area)
        options = Options(tokens=case.tokens)
        here = solve(case.layer, case.area.point, options).estimate
        best = find_near(case.layer, case.area, case.tokens, steps, options, here)
        found = replace(best.estimate, point=best.point, upper=bound.slope)
    except HowSmoothError:
        looked.refused += 1
        return
    looked.neighbourhoods += 1
    looked.infinite += not math.isfinite(bound.slope)
    assert found.point is not None
    points = [*_inside(case, samples), found.point]
    for k, y in enumerate(points):
        truth = truth_at(case, y)
        if truth is None:
            continue
        looked.points += 1
        looked.wrong += [f"{why}; {case.name}" for why in refuted(bound, *truth)]
        if k == len(points) - 1:
            looked.wrong += [f"{why}; {case.name}" for why in not_attained(found, case, truth[0])]
    if found.lower > 0 and math.isfinite(found.upper):
        looked.widths.append((case.within / max(float(case.area.point.norm(dim=-1).mean()), 1e-300), found.lower, found.upper))


def _inside(case: Near, samples: int) -> list[Tensor]:
    """Random points, on the boundary and inside."""
    r, (n, d) = torch.Generator().manual_seed(7), case.area.point.shape
    points = []
    for k in range(samples):
        step = torch.randn(n, d, generator=r, dtype=torch.float64)
        step = step / step.norm(dim=-1, keepdim=True) * case.area.radii[:, None]
        step = step if k % 2 == 0 else step * torch.rand(n, 1, generator=r, dtype=torch.float64)
        long = float(step.norm())
        if case.area.total is not None and long > case.area.total:
            step = step * (case.area.total / long)
        points.append(case.area.point + step * (1 - 1e-12))
    return points


def truth_at(case: Near, y: Tensor) -> tuple[float, float, Tensor, float] | None:
    """`‖D_Y f‖`, `‖D_Y f − D_X f‖`, `|f(Y)_i − f(X)_i|` and what rounding hides of these; nothing past the range of float64."""
    layer, x = case.layer, case.area.point
    both = torch.stack([x, y])
    try:
        values = torch.cat([layer.linearize(t[None])[0] for t in both])
    except HowSmoothError:
        return None
    if layer.attention_mask is None:
        J = jacobians(layer, both)
    else:
        bare = replace(layer, b_v=None)  # which moves nothing, and hides digits of float64
        J = torch.cat([bare.linearize(t[None])[1].dense() for t in both]).numpy()
    n, d = x.shape
    columns = np.array([i * d + k for i in (range(n) if case.tokens is None else case.tokens) for k in range(d)])
    J = J[:, :, columns]
    sizes = float(np.abs(J).max()), float(values.abs().max())
    if not all(s < _RANGE for s in sizes):
        return None
    longest = float(both.norm(dim=-1).max())
    terms = float(layer.w_v.norm()) * longest + (0.0 if layer.b_v is None else float(layer.b_v.norm()))
    fuzz = 1e-13 * n * terms * (1.0 if layer.w_o is None else float(layer.w_o.norm())) + 1e-14 * longest * sizes[0]
    return _norm(J[1]), _norm(J[1] - J[0]), (values[1] - values[0]).norm(dim=-1), fuzz


def _norm(J: np.ndarray) -> float:
    size = np.abs(J).max()
    return float(np.linalg.norm((J / size).astype(np.float64), 2) * size) if size > 0 else 0.0


def refuted(bound: Around, norm: float, change: float, moved: Tensor, fuzz: float) -> list[str]:
    """Sentences for every bound that a point of the neighbourhood is above of, or that is no number."""
    wrong = []
    for what, most, got, room in (
        ("slope", bound.slope, norm, 1e-13 * norm),
        ("change", bound.change, change, 1e-12 * norm),
        ("moved_total", bound.moved_total, float(moved.norm()), fuzz),
        *(("moved", float(a), float(b), fuzz) for a, b in zip(bound.moved, moved, strict=True)),
    ):
        if not got <= most * (1 + ROUNDING) + room:  # nan is no bound
            wrong.append(f"{what} {most!r} is below {got!r} ({bound.reason})")
    return wrong


def not_attained(found: hs.Estimate, case: Near, norm: float) -> list[str]:
    """Sentences where `lower` is not attained at `point`, or that lies outside."""
    assert found.point is not None
    step = (found.point - case.area.point).norm(dim=-1)
    unit = 1e-15 * float(case.area.point.abs().max()) * case.area.point.shape[1]
    wrong = []
    if (
        bool((step > case.area.radii * (1 + ROUNDING) + unit).any())
        or float(step.norm()) > case.area.far * (1 + ROUNDING) + unit
    ):
        wrong.append("the point lies outside")
    known = case.layer.linearize(found.point[None])[1].rounding()  # of products, where heads or values cancel
    lost = math.inf if known is None else known.error + known.fixed
    if not found.lower <= norm * (1 + 1e-6) + lost:
        wrong.append(f"lower {found.lower!r} is not attained at the point, where the norm is {norm!r}")
    if not found.lower <= found.upper * (1 + ROUNDING) + lost:
        wrong.append(f"lower {found.lower!r} is above upper {found.upper!r}")
    return wrong
