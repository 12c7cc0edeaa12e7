"""Functions that hide from autograd how their values move, each beside the same one without a trick; a search of the ball.

What is hidden is hidden from derivatives alone: both forms give the same values, so the plain one is the truth for both.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import HowSmoothError
from howsmooth.program.reading import read_function
from howsmooth.search import Radius
from howsmooth.search.radius import Per, length_of_change
from howsmooth.theory.around import Certified, Neighbourhood, around_graph

from .small_functions import Chance

Part = Callable[[Tensor], Tensor]
STEPS = 25


class Lying(torch.autograd.Function):
    """The identity, with a backward pass of its own."""

    @staticmethod
    def forward(ctx, t: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return t * 1.0

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 1e-3 * g


def without_gradients(t: Tensor) -> Tensor:
    with torch.no_grad():
        return 2 * (0.5 * t)


HIDING: dict[str, Part] = {
    "detach": lambda t: t.detach(),
    "half detached": lambda t: 0.5 * t + 0.5 * t.detach(),
    "data": lambda t: t.data,
    "no_grad": without_gradients,
    "straight through": lambda t: 1e-3 * t + (t - 1e-3 * t).detach(),
    "a backward pass of its own": Lying.apply,
    "written in place": lambda t: t.detach().clone().mul_(3).div_(3),
}
SHAPES: dict[str, Callable[[Tensor, Tensor, Part], Tensor]] = {
    "all of it": lambda u, v, hide: hide(u),
    "a gate": lambda u, v, hide: u * hide(torch.sigmoid(v)),
    "a gate a token": lambda u, v, hide: u * hide(torch.tanh(v[:, :1])),
    "a residual": lambda u, v, hide: 0.01 * u + hide(torch.nn.functional.gelu(v)),
    "a norm's scale": lambda u, v, hide: u / hide((u.square().mean(-1, keepdim=True) + 0.1).sqrt()),
    "a square": lambda u, v, hide: u * hide(u),
    "attention weights": lambda u, v, hide: hide(torch.softmax(u @ v.T, -1)) @ v,
    "attention weights of columns": lambda u, v, hide: hide(torch.softmax(u @ v.T, 0)).T @ v,
    "values": lambda u, v, hide: torch.softmax(u @ v.T, -1) @ hide(v),
    "a softmax": lambda u, v, hide: torch.softmax(u, -1) * hide(v),
}


@dataclass(frozen=True)
class Case:
    """Scores of tokens, (n, d) → (answers,), and the same without anything hidden. kinds: what it is made of."""

    f: Part
    plain: Part
    x: Tensor
    per: Per
    kinds: tuple[str, ...]


def case(seed: int, shape: str | None = None, hiding: str | None = None) -> Case:
    """The case of that number. shape, hiding: one of `SHAPES` and of `HIDING`, any by default."""
    r = Chance(seed)
    n, d, width, answers = (int(r.pick(*choices)) for choices in ("123", "23", "234", "234"))
    chosen, hidden = r.pick(*SHAPES), r.pick(*HIDING)
    shape, hiding = shape or chosen, hiding or hidden
    left, right, out = r.matrix(width, d), r.matrix(width, d), r.matrix(answers, width)
    first, second, offset = r.normal(width), r.normal(width), 0.3 * r.normal(answers)
    x = r.normal(n, d) * float(r.pick("0.3", "1", "3"))
    per: Per = "token" if r.happens(0.5) else "sequence"

    def scores(t: Tensor, hide: Part) -> Tensor:
        made = SHAPES[shape](t @ left.T + first, t @ right.T + second, hide)
        return (made @ out.T).mean(0) + offset

    return Case(lambda t: scores(t, HIDING[hiding]), lambda t: scores(t, lambda z: z), x, per, (shape, hiding))


@dataclass
class Looked:
    """What was compared. certified: radii above zero.  wrong: a sentence for each that is."""

    cases: int = 0
    certified: int = 0
    slopes: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tightness: list[float] = field(default_factory=list)  # shortest change found over certified radius


def lead(f: Part, x: Tensor, label: int) -> Tensor:
    """By how much an answer leads."""
    scores = f(x)
    others = torch.cat([scores[:label], scores[label + 1 :]])
    return scores[label] - others.max()


def least_lead(f: Part, x: Tensor, label: int, r: float, per: Per, starts: int = 4) -> float:
    """The smallest lead found within a ball: descent from random points of it, and from its middle."""
    random = torch.Generator().manual_seed(1)
    least = float(lead(f, x, label))
    for k in range(starts):
        step = torch.zeros_like(x) if k == 0 else onto(torch.randn(x.shape, generator=random, dtype=x.dtype), r, per)
        for _ in range(STEPS):
            at = (x + step).requires_grad_()
            value = lead(f, at, label)
            (slope,) = torch.autograd.grad(value, at, materialize_grads=True)
            least = min(least, float(value.detach()))
            step = onto(-slope, r, per) if k < 2 else within(step - 0.3 * onto(slope, r, per), r, per)
        least = min(least, float(lead(f, x + step, label)))
    return least


def onto(way: Tensor, r: float, per: Per) -> Tensor:
    """That way to the edge of a ball."""
    length = way.norm(dim=-1, keepdim=True) if per == "token" else way.norm()
    return r * way / length.clamp_min(1e-300)


def within(step: Tensor, r: float, per: Per) -> Tensor:
    length = step.norm(dim=-1, keepdim=True) if per == "token" else step.norm()
    return step * (r / length.clamp_min(1e-300)).clamp_max(1.0)


def examine(c: Case, looked: Looked) -> None:
    """The certified radius against a search of the ball, the attack against the function, the slope against Jacobians."""
    looked.cases += 1
    looked.kinds.update(c.kinds)
    try:
        radius = hs.certified_radius(c.f, c.x, per=c.per)
    except HowSmoothError:
        looked.refused += 1
        return
    looked.certified += radius.certified > 0
    looked.wrong += [f"{why}; {', '.join(c.kinds)}" for why in refuted(c, radius)]
    if radius.certified > 0 and radius.attacked < float("inf"):
        looked.tightness.append(radius.gap)
    area = Neighbourhood.of(c.x, max(radius.certified, 1e-3), c.per)
    try:
        slope = around_graph(Certified(read_function(c.f, c.x), c.x), area).slope
    except HowSmoothError:  # a softmax that is spelled out
        return
    looked.slopes += 1
    random = torch.Generator().manual_seed(2)
    for share in (0.0, 0.3, 1.0):
        y = c.x + share * onto(torch.randn(c.x.shape, generator=random, dtype=c.x.dtype), area.radii[0].item(), c.per)
        norm = float(torch.linalg.matrix_norm(_jacobian(c.plain, y), 2))
        if not norm <= slope * (1 + 1e-9):
            looked.wrong.append(f"a slope of {norm:g} above {slope:g}; {', '.join(c.kinds)}")


def refuted(c: Case, radius: Radius) -> list[str]:
    """Sentences on what is wrong with a radius."""
    found, label = [], radius.label or 0
    least = least_lead(c.plain, c.x, label, radius.certified * (1 - 1e-9), c.per)
    if radius.certified > 0 and not least > -1e-9 * float(c.plain(c.x).abs().max()):
        found.append(f"another answer leads by {-least:g} within {radius.certified:g}")
    if radius.point is not None and float(lead(c.plain, radius.point, label)) > 1e-9:
        found.append(f"the attack at {radius.attacked:g} changes no answer")
    if radius.point is not None and length_of_change(radius.point - c.x, c.per) > radius.attacked * (1 + 1e-9):
        found.append("the attack is longer than it says")
    return found


def _jacobian(f: Part, x: Tensor) -> Tensor:
    J = torch.autograd.functional.jacobian(f, x)
    assert isinstance(J, Tensor)
    return J.reshape(-1, x.numel())
