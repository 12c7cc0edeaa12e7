"""Layers and neighbourhoods that try to break a bound around an input, and a checker that looks inside them."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import HowSmoothError
from howsmooth.maps import Attention, RMSNorm
from howsmooth.search import find_near
from howsmooth.settings import PER, Per, choice
from howsmooth.solve import Options, solve
from howsmooth.theory.around import Around, AroundAttention, Neighbourhood
from howsmooth.theory.around.attention import SECOND
from howsmooth.theory.upper import lengths

from .hostile_layers import hostile, jacobians

ROUNDING = 1e-9  # of a truth: an SVD in float64 of a Jacobian in extended precision
_RANGE = 1e140  # sizes past which squares leave float64


@dataclass(frozen=True)
class Near:
    """A layer, a neighbourhood of an input, the tokens that may move (all where nothing), and what it was made of."""

    layer: Attention
    area: Neighbourhood
    per: Per
    within: float
    tokens: tuple[int, ...] | None
    name: str

    @property
    def kinds(self) -> list[str]:
        """What the layer has that plain attention has not."""
        layer = self.layer
        norms = [t for t in (layer.q_norm, layer.k_norm) if t is not None]
        here = {
            "several heads": layer.heads > 1,
            "heads that cancel": "opposed heads" in self.name,
            "shared keys": layer.kv_heads < layer.heads,
            "causal or windowed": layer.causal or layer.window is not None,
            "bias of logits": layer.bias is not None,
            "padding": layer.attention_mask is not None,
            "rotary": layer.rotary is not None,
            "soft-cap": layer.softcap is not None,
            "norms": bool(norms),
            "norms over all heads": layer.coupled,
            "tokens held": self.tokens is not None,
            "per sequence": self.per == "sequence",
        }
        return [kind for kind, there in here.items() if there]


def near(seed: int) -> Near:
    """The neighbourhood of that number: radii over six decades of the tokens' own size."""
    case, r = hostile(seed, items=1), np.random.default_rng(seed)
    layer, x = case.layer.to(dtype=torch.float64), case.x[0].double()
    n = len(x)
    size = float(np.mean([np.linalg.norm(t / (np.abs(t).max() or 1)) * (np.abs(t).max() or 1) for t in x.numpy()])) or 1.0
    within = size * 10.0 ** r.uniform(-6, 0)
    per = choice(str(r.choice(["token", "token", "sequence"])), "per", PER)
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
    """What was compared: neighbourhoods, points inside them, upper ends of infinity, bounds that are refused, neighbourhoods
    without a lower end, how many there are of each kind; a sentence for each that is wrong."""

    neighbourhoods: int = 0
    points: int = 0
    infinite: int = 0
    refused: int = 0
    unmeasured: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    widths: list[tuple[float, float, float]] = field(default_factory=list)  # r over size, lower, upper


class Truth(NamedTuple):
    """`‖D_Y f‖`, `‖D_Y f − D_X f‖`, `|f(Y)_i − f(X)_i|`, what `f` does beyond first order, and what rounding hides of these."""

    norm: float
    change: float
    moved: Tensor
    rest: float
    fuzz: float


def examine(case: Near, looked: Looked, samples: int = 3, steps: int = 3) -> None:
    """Compare the bounds with points of the neighbourhood: random ones, the way that stretches most, where ascent leads."""
    try:
        around = AroundAttention(case.layer, case.area.point, tokens=case.tokens)
        bound = around.within(case.area)
    except HowSmoothError:
        looked.refused += 1
        return
    looked.neighbourhoods += 1
    looked.infinite += not math.isfinite(bound.slope)
    looked.kinds.update([*case.kinds, *(["bounded by second derivatives"] if bound.reason == SECOND else [])])
    derivatives = sum(around.by_derivatives(case.area))  # a bound on the change, whether it is the smallest or not
    looked.kinds.update(["second derivatives reach"] if math.isfinite(derivatives) else [])
    points = _inside(case, samples)
    found = _attained(case, steps, bound.slope)
    if found is not None:
        assert found.point is not None
        way = found.direction.double() / float(lengths(found.direction.double().flatten()))
        points += [_held(case, sign * case.area.far * way) for sign in (1, -1)] + [found.point]
    looked.unmeasured += found is None
    for y, truth in zip(points, truths(case, points), strict=True):
        if truth is None:
            continue
        looked.points += 1
        also = replace(bound, change=derivatives, reason=SECOND)
        looked.wrong += [f"{why}; {case.name}" for one in (bound, also) for why in refuted(one, *truth)]
        if found is not None and y is found.point:
            looked.wrong += [f"{why}; {case.name}" for why in not_attained(found, case, truth.norm)]
    if found is not None and found.lower > 0 and math.isfinite(found.upper):
        looked.widths.append((case.within / max(float(lengths(case.area.point).mean()), 1e-300), found.lower, found.upper))


def _attained(case: Near, steps: int, upper: float) -> hs.Estimate | None:
    """The lower end by ascent; nothing where products at the input are lost in rounding."""
    options = Options(tokens=case.tokens)
    try:
        here = solve(case.layer, case.area.point, options).estimate
        best = find_near(case.layer, case.area, case.tokens, steps, options, here)
    except HowSmoothError:
        return None
    return replace(best.estimate, point=best.point, upper=upper)


def _held(case: Near, step: Tensor) -> Tensor:
    """The point a step leads to, shortened to where it may lead."""
    long = lengths(step)[:, None]
    step = step * (case.area.radii[:, None] / torch.where(long > 0, long, 1.0)).clamp_max(1.0)
    whole = float(lengths(step.flatten()))
    if case.area.total is not None and whole > case.area.total:
        step = step * (case.area.total / whole)
    return case.area.point + step * (1 - 1e-12)


def _inside(case: Near, samples: int) -> list[Tensor]:
    """Random points, on the boundary and inside."""
    r, (n, d) = torch.Generator().manual_seed(7), case.area.point.shape
    points = []
    for k in range(samples):
        step = torch.randn(n, d, generator=r, dtype=torch.float64)
        step = step / step.norm(dim=-1, keepdim=True) * case.area.radii[:, None]
        points.append(_held(case, step if k % 2 == 0 else step * torch.rand(n, 1, generator=r, dtype=torch.float64)))
    return points


def truths(case: Near, points: list[Tensor]) -> list[Truth | None]:
    """What is true at points; nothing past the range of float64."""
    layer, x = case.layer, case.area.point
    every = torch.stack([x, *points])
    try:
        values = torch.cat([layer.linearize(t[None])[0] for t in every])
    except HowSmoothError:
        return [None] * len(points)
    J, (n, d) = _jacobians(layer, every), x.shape
    columns = np.array([i * d + k for i in (range(n) if case.tokens is None else case.tokens) for k in range(d)])
    J = J[:, :, columns]
    sizes = float(np.abs(J).max()), float(values.abs().max())
    if not all(s < _RANGE for s in sizes):
        return [None] * len(points)
    longest = float(lengths(every).max())
    w_v, b_v, w_o = (0.0 if t is None else float(lengths(t.flatten())) for t in (layer.w_v, layer.b_v, layer.w_o))
    fuzz = 1e-13 * n * (w_v * longest + b_v) * (1.0 if layer.w_o is None else w_o) + 1e-14 * longest * sizes[0]
    moved = lengths(values[1:] - values[0])
    steps = (every[1:] - x).flatten(1)[:, torch.as_tensor(columns)]
    bent = (values[1:] - values[0]).flatten(1) - steps @ torch.as_tensor(J[0].astype(np.float64)).mT
    return [Truth(_norm(K), _norm(K - J[0]), m, float(lengths(b)), fuzz) for K, m, b in zip(J[1:], moved, bent, strict=True)]


def _jacobians(layer: Attention, x: Tensor) -> np.ndarray:
    """In extended precision, padding too: keys that no query sees, and outputs that are zero."""
    if layer.attention_mask is None:
        return jacobians(layer, x)
    real, n = layer.attention_mask[0], x.shape[1]
    bias = torch.zeros(1, 1, n, n, dtype=torch.float64) if layer.bias is None else layer.bias.double()
    bare = replace(layer, attention_mask=None, bias=bias.masked_fill(~real, -math.inf))
    J = jacobians(bare, x)
    return J * np.repeat(real.numpy(), J.shape[1] // n)[None, :, None]


def _norm(J: np.ndarray) -> float:
    size = np.abs(J).max()
    return float(np.linalg.norm((J / size).astype(np.float64), 2) * size) if size > 0 else 0.0


def refuted(bound: Around, norm: float, change: float, moved: Tensor, rest: float, fuzz: float) -> list[str]:
    """Sentences for every bound that a point of the neighbourhood is above of, or that is no number."""
    wrong = []
    for what, most, got, room in (
        ("slope", bound.slope, norm, 1e-13 * norm),
        ("change", bound.change, change, 1e-12 * norm),
        ("rest", bound.rest, rest, fuzz + 1e-13 * float(lengths(moved))),
        ("moved_total", bound.moved_total, float(lengths(moved)), fuzz),
        *(("moved", float(a), float(b), fuzz) for a, b in zip(bound.moved, moved, strict=True)),
    ):
        if not got <= most * (1 + ROUNDING) + room:  # nan is no bound
            wrong.append(f"{what} {most!r} is below {got!r} ({bound.reason})")
    return wrong


def not_attained(found: hs.Estimate, case: Near, norm: float) -> list[str]:
    """Sentences where `lower` is not attained at `point`, or that lies outside."""
    assert found.point is not None
    step = lengths(found.point - case.area.point)
    unit = 1e-15 * float(case.area.point.abs().max()) * case.area.point.shape[1]
    wrong = []
    if (
        bool((step > case.area.radii * (1 + ROUNDING) + unit).any())
        or float(lengths(step)) > case.area.far * (1 + ROUNDING) + unit
    ):
        wrong.append("the point lies outside")
    known = case.layer.linearize(found.point[None])[1].rounding()  # of products, where heads or values cancel
    lost = math.inf if known is None else known.error + known.fixed
    if not found.lower <= norm * (1 + 1e-6) + lost:
        wrong.append(f"lower {found.lower!r} is not attained at the point, where the norm is {norm!r}")
    if not found.lower <= found.upper * (1 + ROUNDING) + lost:
        wrong.append(f"lower {found.lower!r} is above upper {found.upper!r}")
    return wrong
