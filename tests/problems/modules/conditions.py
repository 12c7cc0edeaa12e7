"""Blocks with more arguments than the tokens, several streams of tokens, and more returned than the tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (
    D,
    Formula,
    Own,
    Pre,
    Question,
    Step,
    asks,
    attend,
    fused,
    merge,
    mlp,
    one,
    plain,
    pre,
    seeded,
    split,
    tokens,
)


class Modulated(nn.Module):
    """One scale and one gate from a condition; `order` is how the block is called."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.att, self.ada, self.order = Own(fused), nn.Linear(D, 2 * D), order

    def run(self, x: Tensor, c: Tensor) -> Tensor:
        a, b = self.ada(c)[:, None].chunk(2, -1)
        return x + b * self.att(x * (1 + a))


class TokensFirst(Modulated):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.run(x, c)


class ConditionFirst(Modulated):
    def forward(self, c: Tensor, x: Tensor) -> Tensor:
        return self.run(x, c)


class ByName(Modulated):
    def forward(self, *, cond: Tensor, x: Tensor) -> Tensor:
        return self.run(x, cond)


class Diffusion(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        kind = {"x, c": TokensFirst, "c, x": ConditionFirst, "by name": ByName}[order]
        self.blocks, self.order = nn.ModuleList([kind(order), kind(order)]), order

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for b in self.blocks:
            x = b(cond=c, x=x) if self.order == "by name" else b(x, c) if self.order == "x, c" else b(c, x)
        return x


def diffusion(m: Any, x: Tensor, c: Tensor) -> Formula:
    def of(b: Any) -> Step:
        scale, gate = b.ada(c)[0].split(D)

        def attention(t: Tensor) -> Tensor:
            return b.att.o(plain(b.att, t))

        def norm(t: Tensor) -> Tensor:
            return t * (1 + scale)

        maps: Any = {"attention gated": lambda t: (lambda h: gate * attention(h), norm(t))}
        return Step(lambda t: t + gate * attention(norm(t)), attention, lambda t: plain(b.att, t), norm, maps)

    return Formula(x, [of(b) for b in m.blocks])


def conditioned() -> tuple[Tensor, Tensor]:
    return tokens(), tokens(1, seed=8)[0]


class AdaLNZero(nn.Module):
    """DiT's block: six vectors from the condition, norms without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(D, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn, self.mlp, self.adaLN = Own(fused), mlp(), nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(self.norm1(x) * (1 + scale_a.unsqueeze(1)) + shift_a.unsqueeze(1))
        return x + gate_m.unsqueeze(1) * self.mlp(self.norm2(x) * (1 + scale_m.unsqueeze(1)) + shift_m.unsqueeze(1))


class Dit(nn.Module):
    """A time step becomes the condition; the last layer is modulated too, and is a head."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.t_embedder = nn.Linear(4, D), nn.Sequential(nn.Linear(1, D), nn.SiLU(), nn.Linear(D, D))
        self.blocks, self.final = nn.ModuleList([AdaLNZero(), AdaLNZero()]), nn.Linear(D, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, c = self.x_embedder(x), self.t_embedder(t[:, None])
        for block in self.blocks:
            x = block(x, c)
        return self.final(x)


def dit(m: Any, x: Tensor, t: Tensor) -> Formula:
    c = m.t_embedder(t[:, None])

    def of(b: Any) -> Step:
        shift, scale, gate, shift_m, scale_m, gate_m = b.adaLN(c)[0].split(D)

        def normed(t: Tensor) -> Tensor:
            t = t - t.mean(-1, keepdim=True)
            return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt()

        def attention(t: Tensor) -> Tensor:
            return b.attn.o(plain(b.attn, t))

        def norm(t: Tensor) -> Tensor:
            return normed(t) * (1 + scale) + shift

        def block(t: Tensor) -> Tensor:
            t = t + gate * attention(norm(t))
            return t + gate_m * b.mlp(normed(t) * (1 + scale_m) + shift_m)

        maps: Any = {"attention gated": lambda t: (lambda h: gate * attention(h), norm(t))}
        return Step(block, attention, lambda t: plain(b.attn, t), norm, maps)

    return Formula(m.x_embedder(x), [of(b) for b in m.blocks])


class ConditionalAttention(nn.Module):
    """Attention called `attn(cond, x)`: the condition shifts the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.c = (nn.Linear(D, D) for _ in range(5))

    def forward(self, cond: Tensor, x: Tensor) -> Tensor:
        q = split(self.q(x) + self.c(cond)[:, None])
        return self.o(merge(F.scaled_dot_product_attention(q, split(self.k(x)), split(self.v(x)))))


class CondFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(D), ConditionalAttention()

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return x + self.attn(cond, self.ln(x))


def cond_first(m: Any, x: Tensor, cond: Tensor) -> Formula:
    a = m.attn

    def heads(t: Tensor) -> Tensor:
        return merge(attend(split(a.q(t) + a.c(cond)), split(a.k(t)), split(a.v(t))))

    return Formula(x, [Step(lambda t: t + a.o(heads(m.ln(t))), lambda t: a.o(heads(t)), heads, m.ln)])


class Timed(nn.Module):
    """A number times attention, and a time embedding added to the stream; called `block(t, x, emb)`."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.att, self.time = nn.LayerNorm(D), Own(fused), nn.Linear(4, D)

    def forward(self, t: Tensor, x: Tensor, emb: Tensor) -> Tensor:
        x = x + self.time(F.silu(emb))[:, None]
        return x + t * self.att(self.ln(x))


class TimedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Timed(), Timed()])

    def forward(self, x: Tensor, t: Tensor, emb: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(t, x, emb)
        return x


def timed(m: Any, x: Tensor, t: Tensor, emb: Tensor) -> Formula:
    def of(b: Any) -> Step:
        shift = b.time(emb / (1 + (-emb).exp()))[0]

        def block(h: Tensor) -> Tensor:
            h = h + shift
            return h + t * b.att.o(plain(b.att, b.ln(h)))

        return Step(block, norm=lambda h: b.ln(h + shift), heads=lambda h: plain(b.att, h))

    return Formula(x, [of(b) for b in m.layers])


def timed_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return tokens(), torch.tensor(0.6, dtype=torch.float64), tokens(1, 4, seed=8)[0]


@dataclass
class Hidden:
    last_hidden_state: Tensor
    weights: Tensor


class Pair(NamedTuple):
    weights: Tensor
    tokens: Tensor


class Returning(Pre):
    """A block that returns its weights as well, in the form `shape` says."""

    def __init__(self, shape: str) -> None:
        super().__init__(Own(fused))
        self.att: Any = self.att
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        h = self.ln1(x)
        weights = (split(self.att.q(h)) @ split(self.att.k(h)).mT / 2).softmax(-1)
        x = x + self.att.o(merge(weights @ split(self.att.v(h))))
        x = x + self.mlp(self.ln2(x))
        forms = {
            "(weights, x)": (weights, x),
            "(x, weights)": (x, weights),
            "{aux, x}": {"aux": weights.mean(1), "x": x},
            "a dataclass": Hidden(x, weights),
            "a named tuple": Pair(weights, x),
            "a list": [x, None, [weights]],
        }
        return forms[self.shape]


class Receiving(nn.Module):
    """What takes the tokens out of what its blocks return."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.layers, self.shape = nn.ModuleList([Returning(shape), Returning(shape)]), shape

    def forward(self, x: Tensor) -> Any:
        y: Any = x
        place: Any = {"(weights, x)": 1, "(x, weights)": 0, "{aux, x}": "x", "a list": 0, "a named tuple": 1}.get(self.shape)
        for layer in self.layers:
            y = layer(x)
            x = y.last_hidden_state if place is None else y[place]
        return y


class Lossy(nn.Module):
    """A model that returns (loss, y): the loss is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]), nn.Linear(D, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        return (y.square().mean(), y) if labels is None else F.cross_entropy(y[0], labels)


def listed(m: Any, x: Tensor, labels: Tensor | None = None) -> Formula:
    return Formula(x, [pre(b) for b in m.layers])


class TwoOutputs(Own):
    """Attention that returns its weights first."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        weights = (q @ k.mT / 2).softmax(-1)
        return weights, self.o(merge(weights @ v))


SHAPES = ["(weights, x)", "(x, weights)", "{aux, x}", "a dataclass", "a named tuple", "a list"]

QUESTIONS: list[Question] = [
    *(
        question
        for order in ("x, c", "c, x", "by name")
        for question in asks(
            f"a condition, {order}",
            lambda order=order: seeded(Diffusion(order)),
            conditioned,
            diffusion,
            "attention 1 or gated, heads 1, block, block 1, update, model",
        )
    ),
    *asks(
        "DiT",
        lambda: seeded(Dit()),
        lambda: (tokens(6, 4), torch.tensor([0.3], dtype=torch.float64)),
        dit,
        "attention or gated, attention 1 or gated, heads, block 1, update 1, 0>1, 1>final",
    ),
    *asks("attn(cond, x)", lambda: seeded(CondFirst()), conditioned, cond_first, "attention, heads, normed, block"),
    *asks("a number and a time", lambda: seeded(TimedStack()), timed_inputs, timed, "heads 1, block, block 1, update, model"),
    *(
        question
        for shape in SHAPES
        for question in asks(
            f"{shape} returned", lambda shape=shape: seeded(Receiving(shape)), one, listed, "attention, block, block 1, model"
        )
    ),
    *asks("(loss, y) returned", lambda: seeded(Lossy()), one, listed, "attention 1, block 1, model refused"),
    *asks(
        "a loss returned",
        lambda: seeded(Lossy()),
        lambda: {"x": tokens(), "labels": torch.tensor([0, 2, 1, 1, 0])},
        listed,
        "attention, block 1, model refused",
    ),
    *asks(
        "attention's weights first",
        lambda: seeded(TwoOutputs(fused)),
        one,
        lambda m, x: Formula(x, [Step(attention=lambda t: m.o(plain(m, t)), heads=lambda t: plain(m, t))]),
        "attention, heads",
    ),
]
