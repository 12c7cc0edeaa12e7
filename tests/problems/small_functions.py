"""Small functions of tokens that try to break bounds around an input, and a checker that looks inside neighbourhoods."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.errors import HowSmoothError
from howsmooth.maps import Attention, RMSNorm, Rotary
from howsmooth.program.pieces import Pieces, PiecesMap
from howsmooth.program.reading import read_function
from howsmooth.search import find_near
from howsmooth.solve import Options, solve
from howsmooth.theory.around import Around, Certified, Expansion, Moved, Neighbourhood, around_graph, expand, scalar_changes

ROUNDING = 1e-9
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "tanh gelu": lambda t: nn.functional.gelu(t, approximate="tanh"),
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
    "spelled gelu": lambda t: 0.5 * t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))),
    "quick gelu": lambda t: t * torch.sigmoid(1.702 * t),
}
KINDS = ("norm first", "norm behind", "side by side", "no attention", "no residual")
TOKENS = ("gaussian", "gaussian", "equal", "nearly constant", "one zero", "one far")
HIDDEN = 6


@dataclass(frozen=True)
class Case:
    """A function, the same with its attention taken whole, an input and radii around it.

    together: whether a radius is of all tokens.  tokens: those that may move, all where nothing.  kinds: what it is made of.
    """

    f: Callable[[Tensor], Tensor]
    graph: Pieces
    whole: Pieces
    x: Tensor
    radii: tuple[float, ...]
    together: bool
    tokens: tuple[int, ...] | None
    kinds: tuple[str, ...]
    name: str

    def area(self, within: float) -> Neighbourhood:
        return Neighbourhood.of(self.x, within, "sequence" if self.together else "token", self.tokens)


class Chance:
    """Choices and matrices of a number."""

    def __init__(self, seed: int):
        self.random = torch.Generator().manual_seed(seed)

    def pick(self, *choices: str) -> str:
        return choices[int(torch.randint(len(choices), (1,), generator=self.random))]

    def happens(self, chance: float) -> bool:
        return float(torch.rand(1, generator=self.random)) < chance

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64)

    def matrix(self, out: int, into: int) -> Tensor:
        scale = 3.0 ** float(torch.randint(-1, 2, (1,), generator=self.random))
        if self.happens(0.15):  # of rank one
            return scale * self.normal(out, 1) @ self.normal(1, into) / into**0.5
        return scale * self.normal(out, into) / into**0.5


def case(seed: int) -> Case:
    """The case of that number: a block, or two, of one kind or another; radii over six decades of the tokens' own size."""
    r = Chance(seed)
    n, heads = int(r.pick(*"1234")), int(r.pick(*"12"))
    d = heads * int(r.pick(*"24"))
    kind, act, norm, gated = r.pick(*KINDS), r.pick(*ACTIVATIONS), r.pick("layer norm", "rms norm"), r.pick("gated", "plain")
    eps, tokens = float(r.pick("1e-5", "1e-5", "1e-12", "0.1")), r.pick(*TOKENS)
    x = tokens_of(r, tokens, n, d)

    def normalise(t: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        if norm == "layer norm":
            return nn.functional.layer_norm(t, t.shape[-1:], weight, shift, eps)
        return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + eps) * weight

    blocks, kinds = [], [kind, act, norm, gated]
    for _ in range(int(r.pick(*"12"))):
        layer, has = attention_of(r, n, d, heads)
        up, weight, shift = r.matrix(HIDDEN, d), 1 + 0.3 * r.normal(d), 0.3 * r.normal(d)
        bias = r.normal(HIDDEN)
        if r.happens(0.3):  # the first token sits where ReLU has its kink, unless something comes between
            bias, has = -(up @ normalise(x, weight, shift)[0]), [*has, "at the kink"]
        blocks.append((layer, up, bias, r.matrix(HIDDEN, d), r.matrix(d, HIDDEN), weight, shift))
        kinds += has

    def run(x: Tensor, ends: list[Tensor]) -> Tensor:
        def attend(layer: Attention, t: Tensor) -> Tensor:
            ends.extend((t, written_out(layer, t)))
            return ends[-1]

        for layer, up, bias, gate, down, *affine in blocks:

            def mlp(t: Tensor, up=up, bias=bias, gate=gate, down=down) -> Tensor:
                z = ACTIVATIONS[act](t @ up.T + bias)
                return (z * (t @ gate.T) if gated == "gated" else z) @ down.T

            if kind == "side by side":
                t = normalise(x, *affine)
                x = x + attend(layer, t) + mlp(t)
            elif kind == "norm first":
                x = x + attend(layer, normalise(x, *affine))
                x = x + mlp(normalise(x, *affine))
            elif kind == "norm behind":
                x = normalise(x + attend(layer, x), *affine)
                x = normalise(x + mlp(x), *affine)
            elif kind == "no attention":
                x = x + mlp(normalise(x, *affine))
            else:
                x = mlp(normalise(x + attend(layer, x), *affine))
        return x

    size = float(x.norm(dim=-1).mean())
    radii = tuple(size * 10.0 ** (-2 * (k + float(torch.rand(1, generator=r.random)))) for k in range(3))
    free = tuple(sorted({int(k) for k in torch.randint(n, (2,), generator=r.random)})) if r.happens(0.25) else None
    together = r.happens(0.5)
    plain, whole = both_ways(run, x, [layer for layer, *_ in blocks if kind != "no attention"])
    kinds += [f"tokens {tokens}"] + ["tokens held"] * (free is not None)
    said = (
        f"{len(blocks)} blocks, {', '.join(kinds)}, eps {eps:g}, n {n}, d {d}, {heads} heads, together {together}, free {free}"
    )
    return Case(
        lambda t: run(t, []), plain, whole, x, radii, together, free, tuple(dict.fromkeys(kinds)), f"case {seed}: {said}"
    )


def both_ways(run: Callable[[Tensor, list[Tensor]], Tensor], x: Tensor, layers: list[Attention]) -> tuple[Pieces, Pieces]:
    """A function as pieces, and with its attention layers taken whole. run: notes what enters and leaves each of them."""

    def with_ends(t: Tensor) -> tuple[Tensor, ...]:
        ends: list[Tensor] = []
        y = run(t, ends)
        return *ends, y

    return read_function(lambda t: run(t, []), x), read_function(with_ends, x, layers, truth=lambda t: run(t, []))


def tokens_of(r: Chance, kind: str, n: int, d: int) -> Tensor:
    x = r.normal(n, d)
    if kind == "equal":
        x[:] = x[:1]
    elif kind == "nearly constant":  # what a layer norm centres away
        x = 1 + 1e-6 * x
    elif kind == "one zero":
        x[0] = 1e-9 * x[0]
    elif kind == "one far":
        x[0] *= 100
    return x * float(r.pick("0.1", "1", "10"))


def attention_of(r: Chance, n: int, d: int, heads: int) -> tuple[Attention, list[str]]:
    """An attention layer, and what it has that plain attention has not."""
    w_q, w_k, w_v, w_o = (r.matrix(d, d) for _ in range(4))
    has: list[str] = []
    options: dict[str, Any] = {}
    head = d // heads
    if heads == 2 and r.happens(0.3):  # the second undoes the first up to a little
        has.append("heads that cancel")
        w_q, w_k, w_v = (torch.cat([w[:head]] * 2) for w in (w_q, w_k, w_v))
        w_o = torch.cat([w_o[:, :head], -w_o[:, :head] * (1 + 1e-4)], 1)
    if r.happens(0.4):
        has, options = [*has, "causal"], options | {"causal": True}
    if r.happens(0.25):
        has, options = [*has, "rotary"], options | {"rotary": Rotary.from_base(2, n)}
    if r.happens(0.25):
        has, options = [*has, "soft-cap"], options | {"softcap": float(r.pick("0.5", "3"))}
    if r.happens(0.25):
        own = RMSNorm(1 + 0.3 * r.normal(head), eps=float(r.pick("1e-6", "0.1")))
        has, options = [*has, "norms of queries and keys"], options | {"q_norm": own, "k_norm": own}
    return Attention(w_q, w_k, w_v, w_o, heads=heads, **options), has


def written_out(layer: Attention, t: Tensor) -> Tensor:
    q, k, v = layer.project(t[None], with_bias=True)  # (1, heads, n, d_h)
    q, k = (
        p if own is None else p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + own.eps) * own.weight
        for p, own in ((q, layer.q_norm), (k, layer.k_norm))
    )
    q, k = (p if layer.rotary is None else layer.rotary.turn(p) for p in (q, k))
    q, k, v = q[0], k[0], v[0]
    logits = layer.scale * (q @ k.transpose(1, 2))
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    if layer.causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf)
    return (torch.softmax(logits, -1) @ v).transpose(0, 1).flatten(1) @ layer.w_o.T  # pyright: ignore[reportOptionalMemberAccess]


@dataclass
class Looked:
    """What was compared: functions, neighbourhoods, points inside them, upper ends of infinity, lower ends, those refused, how
    many functions there are of each kind; a sentence for each that is wrong."""

    functions: int = 0
    neighbourhoods: int = 0
    points: int = 0
    infinite: int = 0
    lower_ends: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    widths: list[tuple[float, float, float]] = field(default_factory=list)  # r over size, largest seen, upper


@dataclass(frozen=True)
class Bounds:
    """What is certified of a function within a radius, in the two ways there are."""

    moved: Moved
    around: Around
    scalars: Tensor


def examine(c: Case, looked: Looked, lower: bool = True) -> None:
    """Both kinds of bounds against points of neighbourhoods of three sizes; in the largest, also the lower end."""
    certified, expanded = Certified(c.whole, c.x, c.tokens), expand(c.graph, c.x, c.together, c.tokens)
    at = jacobian(c, c.x)
    looked.functions += 1
    looked.kinds.update(c.kinds)
    for within in c.radii:
        area = c.area(within)
        bounds = bounds_within(certified, expanded, area)
        looked.neighbourhoods += 1
        looked.infinite += not math.isfinite(bounds.around.slope)
        inside = points(c, area, at)
        if lower and within == max(c.radii):
            y = _lower_end(c, area, looked)
            inside += [] if y is None else [y]
        most = 0.0
        for y in inside:
            J = jacobian(c, y)
            looked.points += 1
            looked.wrong += [f"{why}; within {within:g}, {c.name}" for why in refuted(c, bounds, at, y, J)]
            most = max(most, _norm(J))
        looked.widths.append((within / float(c.x.norm(dim=-1).mean()), most, bounds.around.slope))


def bounds_within(certified: Certified, expanded: Expansion, area: Neighbourhood) -> Bounds:
    return Bounds(expanded.at(area), around_graph(certified, area), scalar_changes(certified, area))


def _lower_end(c: Case, area: Neighbourhood, looked: Looked) -> Tensor | None:
    """The point where ascent ends, once what is said of it is checked."""
    f, options = PiecesMap(c.whole), Options(tokens=c.tokens)
    try:
        found = find_near(f, area, c.tokens, 2, options, solve(f, c.x, options).estimate)
    except HowSmoothError:
        looked.refused += 1
        return None
    looked.lower_ends += 1
    step, norm = (found.point - c.x).norm(dim=-1), _norm(jacobian(c, found.point))
    unit = 1e-15 * float(c.x.abs().max()) * c.x.shape[1]
    if bool((step > area.radii * (1 + ROUNDING) + unit).any()) or float(step.norm()) > area.far * (1 + ROUNDING) + unit:
        looked.wrong.append(f"the point lies outside; {c.name}")
    # centred, two entries are one number: of a layer norm's derivative only what epsilon leaves, the rest cancels in float64
    apart = 0.01 if c.x.shape[1] == 2 and "layer norm" in c.name else 1e-6
    if not found.estimate.lower <= norm * (1 + apart):
        looked.wrong.append(
            f"lower {found.estimate.lower!r} is not attained at the point, where the norm is {norm!r}; {c.name}"
        )
    return found.point


def jacobian(c: Case, x: Tensor) -> Tensor:
    """By the tokens that may move."""
    J = torch.autograd.functional.jacobian(c.f, x, vectorize=True)
    assert isinstance(J, Tensor)
    J = J.reshape(-1, *x.shape)
    return (J if c.tokens is None else J[:, list(c.tokens)]).flatten(1)


def points(c: Case, area: Neighbourhood, at: Tensor) -> list[Tensor]:
    """Points of a neighbourhood: a random one; uphill on the distance from the output, on one entry of it, and on the norm of
    the Jacobian; both ways along what is stretched most."""
    random, y0 = torch.Generator().manual_seed(1), c.f(c.x)
    found = []
    for aim in ("none", "distance", "entry", "minus entry", "stretch"):
        step = _onto(torch.randn(c.x.shape, generator=random, dtype=torch.float64), area)
        for _ in range(0 if aim == "none" else 4):
            step = _onto(_uphill(c, c.x + step, aim, y0), area)
        found.append(step)
    along = torch.zeros_like(c.x)
    along[list(range(len(c.x)) if c.tokens is None else c.tokens)] = torch.linalg.svd(at)[2][0].reshape(-1, c.x.shape[1])
    found += [sign * _onto(along, area) for sign in (1, -1)]
    return [c.x + (1 - 1e-12) * step for step in found]


def _uphill(c: Case, y: Tensor, aim: str, y0: Tensor) -> Tensor:
    t = y.clone().requires_grad_()
    out = c.f(t)
    if aim == "stretch":
        u, _, v = torch.linalg.svd(jacobian(c, y), full_matrices=False)
        (back,) = torch.autograd.grad(out, t, u[:, 0].reshape(out.shape), create_graph=True)
        rows = slice(None) if c.tokens is None else list(c.tokens)
        up = (back[rows].flatten() * v[0]).sum()
        return torch.autograd.grad(up, t, materialize_grads=True)[0] if up.requires_grad else torch.zeros_like(y)
    change = out - y0
    top = change.flatten()[int(change.abs().argmax())]
    return torch.autograd.grad({"distance": change.norm(), "entry": top, "minus entry": -top}[aim], t)[0]


def _onto(direction: Tensor, area: Neighbourhood) -> Tensor:
    """The boundary of a neighbourhood, that way; nowhere where a gradient is none."""
    direction = torch.nan_to_num(direction) * (area.radii > 0)[:, None]
    top = direction.abs().amax(-1, keepdim=True)  # before any square
    direction = direction / (top if area.total is None else top.max()).clamp_min(1e-300)
    if area.total is not None:
        return area.total * direction / direction.norm().clamp_min(1e-300)
    return area.radii[:, None] * direction / direction.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def _largest(c: Case) -> float:
    """The largest number on the way to the output, whose rounding an output that cancels is left with."""
    with torch.no_grad():
        sizes = [float(t.abs().max()) for t in c.graph.values(c.x) if isinstance(t, Tensor)]
    return max(size for size in sizes if size < math.inf)  # what a mask hides is minus infinity


def _norm(J: Tensor) -> float:
    return float(torch.linalg.matrix_norm(J, 2))


def refuted(c: Case, bounds: Bounds, at: Tensor, y: Tensor, J: Tensor) -> list[str]:
    """Sentences for every bound that a point of the neighbourhood is above of, or that is no number."""
    change, norm, turned = c.f(y) - c.f(c.x), _norm(J), _norm(J - at)
    room = 1e-12 * (float(c.f(y).abs().max()) + float(c.x.abs().max()) * float(at.abs().max())) + 1e-14 * _largest(c)
    moved, around, scalars = bounds.moved, bounds.around, bounds.scalars
    pairs = [
        ("slope", norm, around.slope, 1e-12 * norm),
        ("change", turned, around.change, 1e-12 * norm),
        ("moved_total", float(change.norm()), around.moved_total, room),
        ("expanded total", float(change.norm()), moved.total, room),
        *(("moved", float(a), float(b), room) for a, b in zip(change.norm(dim=-1), around.moved, strict=True)),
        *(("scalar", float(a), float(b), room) for a, b in zip(change.abs().flatten(), scalars, strict=True)),
        *(
            ("entry", a, b, room)
            for a, b in zip((change - moved.shift).abs().flatten().tolist(), moved.spread.flatten().tolist(), strict=True)
        ),
    ]
    return [f"{what} {most!r} is below {got!r}" for what, got, most, more in pairs if not got <= most * (1 + ROUNDING) + more]
