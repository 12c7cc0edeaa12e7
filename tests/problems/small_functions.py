"""Small functions of tokens that try to break bounds around an input, and a checker that looks inside neighbourhoods."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from howsmooth.maps import Attention
from howsmooth.maps.graph import Graph
from howsmooth.maps.recording import Recorder, record
from howsmooth.theory.around import Around, Neighbourhood
from howsmooth.theory.around_blocks import around_graph, scalar_changes
from howsmooth.theory.around_norms import Certified
from howsmooth.theory.around_values import Moved, expand

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


@dataclass(frozen=True)
class Case:
    """A function, the same with its attention taken whole, and a neighbourhood."""

    f: Callable[[Tensor], Tensor]
    graph: Graph
    whole: Graph
    area: Neighbourhood
    name: str


def case(seed: int) -> Case:
    """The case of that number: a block, or two, of one kind or another; radii over six decades of the tokens' own size."""
    r = torch.Generator().manual_seed(seed)

    def pick(*choices: str) -> str:
        return choices[int(torch.randint(len(choices), (1,), generator=r))]

    def matrix(out: int, into: int) -> Tensor:
        scale = 3.0 ** float(torch.randint(-1, 2, (1,), generator=r))
        return scale * torch.randn(out, into, generator=r, dtype=torch.float64) / into**0.5

    n, heads = int(torch.randint(1, 5, (1,), generator=r)), int(torch.randint(1, 3, (1,), generator=r))
    d, hidden = 2 * heads + 2 * int(torch.randint(0, 2, (1,), generator=r)) * heads, 6
    kind = pick("first", "behind", "side by side", "no attention")
    act, norm, gated, causal = (
        pick(*ACTIVATIONS),
        pick("layer", "rms"),
        pick("gated", "plain"),
        pick("causal", "full") == "causal",
    )
    layers = []
    for _ in range(1 if pick("one", "two") == "one" else 2):
        layer = Attention(*(matrix(d, d) for _ in range(4)), heads=heads, causal=causal)
        layers.append((layer, matrix(hidden, d), matrix(hidden, d), matrix(d, hidden), 1 + 0.3 * matrix(1, d)[0]))
    recorder = Recorder()

    def normalise(t: Tensor, weight: Tensor) -> Tensor:
        if norm == "layer":
            return nn.functional.layer_norm(t, t.shape[-1:], weight, None, 1e-5)
        return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def attend(layer: Attention, t: Tensor, taken: bool) -> Tensor:
        if taken:
            return recorder.take_whole(t, torch.zeros_like(t), lambda z: layer.value(z[None])[0], layer)
        return _written_out(layer, t)

    def run(x: Tensor, taken: bool) -> Tensor:
        for layer, up, gate, down, weight in layers:

            def mlp(t: Tensor, up=up, gate=gate, down=down) -> Tensor:
                z = ACTIVATIONS[act](t @ up.T)
                return (z * (t @ gate.T) if gated == "gated" else z) @ down.T

            if kind == "side by side":
                t = normalise(x, weight)
                x = x + attend(layer, t, taken) + mlp(t)
                continue
            if kind != "no attention":
                x = (
                    normalise(x + attend(layer, x, taken), weight)
                    if kind == "behind"
                    else x + attend(layer, normalise(x, weight), taken)
                )
            x = normalise(x + mlp(x), weight) if kind == "behind" else x + mlp(normalise(x, weight))
        return x

    size = 10.0 ** float(torch.randint(-1, 2, (1,), generator=r))
    x = size * torch.randn(n, d, generator=r, dtype=torch.float64)
    within = float(x.norm(dim=-1).mean()) * 10.0 ** (-6 * float(torch.rand(1, generator=r)))
    per = pick("token", "sequence")
    plain = record(lambda t: run(t, False), x)
    whole = record(lambda t: run(t, True), x, recorder, lambda t: run(t, False))
    said = f"{len(layers)} blocks, {kind}, {act}, {norm}, {gated}, causal {causal}, n {n}, d {d}, within {within:g} per {per}"
    return Case(lambda t: run(t, False), plain, whole, Neighbourhood.of(x, within, per), f"case {seed}: {said}")


def _written_out(layer: Attention, t: Tensor) -> Tensor:
    q, k, v = (p[0] for p in layer.vectors(t[None]))  # (heads, n, d_h)
    logits = layer.scale * (q @ k.transpose(1, 2))
    if layer.causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf)
    return (torch.softmax(logits, -1) @ v).transpose(0, 1).flatten(1) @ layer.w_o.T  # pyright: ignore[reportOptionalMemberAccess]


@dataclass
class Looked:
    """What was compared; a sentence for each that is wrong."""

    cases: int = 0
    points: int = 0
    infinite: int = 0
    wrong: list[str] = field(default_factory=list)


def examine(c: Case, looked: Looked) -> None:
    """Both kinds of bounds against random points, and points that ascent on margins and on the change leads to."""
    x, area = c.area.point, c.area
    together = area.total is not None
    radii = torch.tensor([area.total], dtype=torch.float64) if together else area.radii
    moved = expand(c.graph, x, together).at(radii)
    certified = Certified(c.whole, x)
    around = around_graph(certified, area)
    scalars = scalar_changes(certified, area)
    looked.cases += 1
    looked.infinite += not math.isfinite(around.slope)
    at = jacobian(c.f, x)
    for y in points(c):
        looked.points += 1
        looked.wrong += [f"{why}; {c.name}" for why in refuted(c, moved, around, scalars, at, y)]


def jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    J = torch.autograd.functional.jacobian(f, x)
    assert isinstance(J, Tensor)
    return J.reshape(-1, x.numel())


def points(c: Case) -> list[Tensor]:
    """Points of the neighbourhood: random, and uphill on the distance from the output and on one entry of it."""
    random, x, y0 = torch.Generator().manual_seed(1), c.area.point, c.f(c.area.point)
    found = []
    for k in range(4):
        step = _onto(torch.randn(x.shape, generator=random, dtype=torch.float64), c.area)
        for _ in range(0 if k == 0 else 6):
            t = (x + step).requires_grad_()
            change = c.f(t) - y0
            aim = change.norm() if k == 1 else change.flatten()[int(change.abs().argmax())] * (1 if k == 2 else -1)
            (slope,) = torch.autograd.grad(aim, t)
            step = _onto(slope, c.area)
        found.append(x + (1 - 1e-12) * step)
    return found


def _onto(direction: Tensor, area: Neighbourhood) -> Tensor:
    if area.total is not None:
        return area.total * direction / direction.norm().clamp_min(1e-300)
    return area.radii[:, None] * direction / direction.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def refuted(c: Case, moved: Moved, around: Around, scalars: Tensor, at: Tensor, y: Tensor) -> list[str]:
    """Sentences for every bound that a point of the neighbourhood is above of, or that is no number."""
    change, J = c.f(y) - c.f(c.area.point), jacobian(c.f, y)
    room = 1e-12 * (float(c.f(y).abs().max()) + float(c.area.point.abs().max()) * float(at.abs().max()))
    norm, turned = (float(torch.linalg.matrix_norm(m, 2)) for m in (J, J - at))
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
