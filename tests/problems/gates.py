"""Blocks with a product of parts of different shapes, so that entries of one part meet many of the other."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .small_functions import Case, Chance, attention_of, both_ways, tokens_of, written_out

HEADS = 2
Product = Callable[[Tensor, Tensor], Tensor]  # of units (n, width) and gates (n, their number) into (n, any width)


def _by_head(t: Tensor) -> Tensor:
    return t.unflatten(-1, (HEADS, -1))


def _many(width: int) -> int:
    return width


# how many gates there are beside so many units, and what is made of both
SHAPES: dict[str, tuple[Callable[[int], int], Product]] = {
    "a gate an entry": (_many, lambda u, g: u * g),
    "a gate a token": (lambda _: 1, lambda u, g: u * g),
    "a gate a token, on the left": (lambda _: 1, lambda u, g: g * u),
    "a gate a token, repeated before": (lambda _: 1, lambda u, g: u * g.expand(-1, u.shape[1])),
    "a gate a unit": (_many, lambda u, g: u * g.mean(0, keepdim=True)),
    "a gate a unit, without tokens' axis": (_many, lambda u, g: g.mean(0) * u),
    "a gate a head": (lambda _: HEADS, lambda u, g: (_by_head(u) * g[..., None]).flatten(1)),
    "a gate for all heads": (lambda width: width // HEADS, lambda u, g: (_by_head(u) * g[:, None]).flatten(1)),
    "one gate": (lambda _: 1, lambda u, g: u * g[:1]),
    "one number": (lambda _: 1, lambda u, g: g.mean() * u),
    "a product of two numbers": (lambda _: 1, lambda u, g: (g.mean() * u.mean()) * u),
    "every token with every token": (_many, lambda u, g: (u[:, None] * g[None]).mean(1)),
    "every unit with every gate": (_many, lambda u, g: (u[:, :, None] * g[:, None]).flatten(1)),
    "an outer product": (_many, lambda u, g: torch.outer(u[:, 0], g[0])),
    "gates that are added up": (_many, lambda u, g: u * (g[:, :1] + g.mean(0))),
    "two gates": (lambda _: 1, lambda u, g: u * g * u.mean(0)),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda t: t,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": nn.functional.silu,
    "square": torch.square,
}


def gated(seed: int, shape: str | None = None) -> Case:
    """The case of that number: a product, its second part behind an activation, inside a block; radii as for `case`.

    shape: one of `SHAPES`, any by default.
    """
    r = Chance(seed)
    n, d, width = int(r.pick("1", "2", "3")), int(r.pick("2", "4")), HEADS * int(r.pick("1", "3", "16"))
    chosen, act = r.pick(*SHAPES), r.pick(*ACTIVATIONS)
    shape = chosen if shape is None else shape
    tokens = r.pick("gaussian", "gaussian", "one zero", "one far")
    # all of the derivative comes with the move, and what one entry meets adds up
    adds_up = r.happens(0.5)
    norm, residual, attends, centred = (r.happens(p) and not adds_up for p in (0.3, 0.3, 0.3, 0.5))
    if "every" in shape:
        width = min(width, 6)
    x, (gates, product) = tokens_of(r, tokens, n, d), SHAPES[shape]
    start = x if (centred and not norm) or adds_up else torch.zeros_like(x)
    up = _matrix(r, width, d, adds_up)
    gate = up[: gates(width)] if adds_up else _matrix(r, gates(width), d, False)
    bias = torch.zeros(gates(width), dtype=torch.float64) if adds_up else r.normal(gates(width))
    down = _matrix(r, product(x @ up.T, x @ gate.T).shape[1], d, adds_up).T
    layer, has = attention_of(r, n, d, 1) if attends else (None, [])

    def run(x: Tensor, ends: list[Tensor]) -> Tensor:
        t = nn.functional.layer_norm(x, (d,)) if norm else x
        y = product((t - start) @ up.T, ACTIVATIONS[act]((t - start) @ gate.T + bias)) @ down.T
        if layer is not None:
            ends += [t, written_out(layer, t)]
            y = y + ends[-1]
        return x + y if residual else y

    size = float(x.norm(dim=-1).mean())
    radii = tuple(size * 10.0 ** (-1.5 * (k + float(torch.rand(1, generator=r.random)))) for k in range(3))
    free = tuple(sorted({int(k) for k in torch.randint(n, (2,), generator=r.random)})) if r.happens(0.2) else None
    together = r.happens(0.5)
    plain, whole = both_ways(run, x, [] if layer is None else [layer])
    kinds = [shape, f"gates {act}", f"tokens {tokens}", *["layer norm"] * norm, *has, *["tokens held"] * (free is not None)]
    said = f"{', '.join(kinds)}, n {n}, d {d}, width {width}, together {together}, free {free}"
    return Case(
        lambda t: run(t, []), plain, whole, x, radii, together, free, tuple(dict.fromkeys(kinds)), f"gated {seed}: {said}"
    )


def _matrix(r: Chance, out: int, into: int, alike: bool) -> Tensor:
    """alike: whether its rows are, as they also are some of the time if not."""
    if alike or r.happens(0.3):
        return float(r.pick("0.3", "1", "3")) * r.normal(1, into).repeat(out, 1)
    return r.matrix(out, into)
