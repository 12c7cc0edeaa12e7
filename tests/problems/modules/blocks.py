"""Blocks: where norms and residuals stand, what is scaled, what runs beside attention, what shares its `forward`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    Own,
    Pre,
    Question,
    Stack,
    Step,
    asks,
    fused,
    mlp,
    one,
    plain,
    pre,
    seeded,
    tokens,
)

Forward = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """Attention, a small network, two norms; `way` puts them together."""

    def __init__(self, way: Forward, **extras: Any) -> None:
        super().__init__()
        self.ln1, self.att, self.ln2, self.mlp, self.way = nn.LayerNorm(D), Own(fused), nn.LayerNorm(D), mlp(), way
        for name, extra in extras.items():
            setattr(self, name, extra)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def attention(b: Any, t: Tensor) -> Tensor:
    return b.att.o(plain(b.att, t))


def blocks(
    name: str,
    way: Forward,
    formula: Callable[[Any], Step],
    *specs: str,
    extras: Callable[[], dict[str, Any]] = dict,
    **others: Any,
) -> list[Question]:
    """Questions about two such blocks in a list."""

    def build() -> nn.Module:
        return seeded(Stack(*(Block(way, **extras()) for _ in range(2)), norm=False))

    return asks(name, build, one, lambda m, x: Formula(x, [formula(b) for b in m.blocks]), *specs, **others)


def step(block: Forward, norm: Forward | None = None, **maps: Forward) -> Callable[[Any], Step]:
    """A layer of `Block`: attention starts behind `norm`; `maps` are other answers to the map `attention`."""

    def of(b: Any) -> Step:
        def start(t: Tensor) -> Tensor:
            return t if norm is None else norm(b, t)

        def other(f: Forward) -> Any:
            return lambda t: (lambda h: f(b, h), start(t))

        return Step(
            lambda t: block(b, t),
            lambda t: attention(b, t),
            lambda t: plain(b.att, t),
            start,
            {key.replace("_", " "): other(f) for key, f in maps.items()},
        )

    return of


def first_norm(b: Any, t: Tensor) -> Tensor:
    return b.ln1(t)


def then_mlp(b: Any, t: Tensor) -> Tensor:
    return t + b.mlp(b.ln2(t))


def post_norm(b: Any, x: Tensor) -> Tensor:
    x = b.ln1(x + b.att(x))
    return b.ln2(x + b.mlp(x))


def post_norm_formula(b: Any, t: Tensor) -> Tensor:
    t = b.ln1(t + attention(b, t))
    return b.ln2(t + b.mlp(t))


def sandwich(b: Any, x: Tensor) -> Tensor:
    x = x + b.ln3(b.att(b.ln1(x)))
    return x + b.ln4(b.mlp(b.ln2(x)))


def sandwich_formula(b: Any, t: Tensor) -> Tensor:
    t = t + b.ln3(attention(b, b.ln1(t)))
    return t + b.ln4(b.mlp(b.ln2(t)))


def parallel(b: Any, x: Tensor) -> Tensor:
    h = b.ln1(x)
    return b.att(h) + b.mlp(h) + x


def two_norms(b: Any, x: Tensor) -> Tensor:
    return x + b.att(b.ln1(x)) + b.mlp(b.ln2(x))


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    if p == 0.0 or not training:
        return x
    return x / (1 - p) * torch.bernoulli(torch.full((x.shape[0], 1, 1), 1 - p))


def dropped_paths(b: Any, x: Tensor) -> Tensor:
    x = x + drop_path(b.att(b.ln1(x)), 0.2, b.training)
    return x + drop_path(b.mlp(b.ln2(x)), 0.2, b.training)


def layer_scale(b: Any, x: Tensor) -> Tensor:
    x = x + b.ls1 * b.att(b.ln1(x))
    return x + b.ls2 * b.mlp(b.ln2(x))


def layer_scale_formula(b: Any, t: Tensor) -> Tensor:
    t = t + b.ls1 * attention(b, b.ln1(t))
    return t + b.ls2 * b.mlp(b.ln2(t))


def rezero(b: Any, x: Tensor) -> Tensor:
    x = x + b.resweight * b.att(x)
    return x + b.resweight * b.mlp(x)


def rezero_formula(b: Any, t: Tensor) -> Tensor:
    t = t + b.resweight * attention(b, t)
    return t + b.resweight * b.mlp(t)


def deep_norm(b: Any, x: Tensor) -> Tensor:
    x = b.ln1(x * 1.7 + b.att(x))
    return b.ln2(x * 1.7 + b.mlp(x))


def deep_norm_formula(b: Any, t: Tensor) -> Tensor:
    t = b.ln1(1.7 * t + attention(b, t))
    return b.ln2(1.7 * t + b.mlp(t))


def highway(b: Any, x: Tensor) -> Tensor:
    """GTrXL: a gate decides between the stream and attention."""
    y = b.att(b.ln1(x))
    z = torch.sigmoid(b.gate(torch.cat([x, y], -1)))
    return (1 - z) * x + z * y


def highway_formula(b: Any, t: Tensor) -> Tensor:
    y = attention(b, b.ln1(t))
    z = 1 / (1 + (-(t @ b.gate.weight[:, :D].mT + y @ b.gate.weight[:, D:].mT + b.gate.bias)).exp())
    return t + z * (y - t)


def houlsby(b: Any, x: Tensor) -> Tensor:
    """A bottleneck with its own residual behind attention and behind the network."""
    y = b.att(b.ln1(x))
    y = y + b.up(F.relu(b.down(y)))
    x = x + y
    return x + b.mlp(b.ln2(x))


def houlsby_attention(b: Any, t: Tensor) -> Tensor:
    t = attention(b, t)
    return t + b.up(b.down(t).clamp(min=0))


def in_place(b: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x += b.att(b.ln1(x))
    x.add_(b.mlp(b.ln2(x)))
    return x


def into_a_view(b: Any, x: Tensor) -> Tensor:
    """The first token stays as it is."""
    y = x.clone()
    y[:, 1:] += b.att(b.ln1(x))[:, 1:]
    return y


def into_a_view_formula(b: Any, t: Tensor) -> Tensor:
    rest = torch.ones(t.shape[1], 1, dtype=t.dtype).index_fill(0, torch.tensor([0]), 0.0)
    return t + rest * attention(b, b.ln1(t))


def with_alpha(b: Any, x: Tensor) -> Tensor:
    x = torch.add(x, b.att(b.ln1(x)), alpha=0.5)
    return torch.add(x, b.mlp(b.ln2(x)), alpha=0.5)


def with_alpha_formula(b: Any, t: Tensor) -> Tensor:
    t = t + attention(b, b.ln1(t)) / 2
    return t + b.mlp(b.ln2(t)) / 2


def macaron(b: Any, x: Tensor) -> Tensor:
    """Conformer: half a network, attention, a gated depthwise convolution, half a network, a norm."""
    x = x + 0.5 * b.mlp(b.ln2(x))
    x = x + b.att(b.ln1(x))
    y = F.glu(b.pointwise(x.transpose(1, 2)), dim=1)
    x = x + F.silu(b.batch_norm(b.depthwise(y))).transpose(1, 2)
    return b.ln3(x + 0.5 * b.mlp2(x))


def macaron_formula(b: Any, t: Tensor) -> Tensor:
    t = t + b.mlp(b.ln2(t)) / 2
    t = t + attention(b, b.ln1(t))
    y = t @ b.pointwise.weight[..., 0].mT + b.pointwise.bias
    y = F.pad(y[..., :D] / (1 + (-y[..., D:]).exp()), (0, 0, 1, 1))
    y = sum(y[:, i : i + t.shape[1]] * b.depthwise.weight[:, 0, i] for i in range(3)) + b.depthwise.bias
    n = b.batch_norm
    y = (y - n.running_mean) / (n.running_var + n.eps).sqrt() * n.weight + n.bias
    t = t + y / (1 + (-y).exp())
    return b.ln3(t + b.mlp2(t) / 2)


def macaron_extras() -> dict[str, Any]:
    return {
        "ln3": nn.LayerNorm(D),
        "mlp2": mlp(),
        "pointwise": nn.Conv1d(D, 2 * D, 1),
        "depthwise": nn.Conv1d(D, D, 3, padding=1, groups=D),
        "batch_norm": nn.BatchNorm1d(D),
    }


def second_attention(b: Any, x: Tensor) -> Tensor:
    x = x + b.att(b.ln1(x))
    x = x + b.att2(b.ln3(x))
    return x + b.mlp(b.ln2(x))


def second_attention_formula(b: Any) -> Step:
    def second(t: Tensor) -> Tensor:
        return b.att2.o(plain(b.att2, t))

    def block(t: Tensor) -> Tensor:
        t = t + attention(b, b.ln1(t))
        t = t + second(b.ln3(t))
        return then_mlp(b, t)

    def start(t: Tensor) -> Tensor:
        return b.ln3(t + attention(b, b.ln1(t)))

    maps = {
        "attention call=0": lambda t: (lambda h: attention(b, h), b.ln1(t)),
        "attention call=1": lambda t: (second, start(t)),
        "heads call=1": lambda t: (lambda h: plain(b.att2, h), start(t)),
    }
    return Step(block, lambda t: attention(b, t), lambda t: plain(b.att, t), b.ln1, maps)


def scales() -> dict[str, Any]:
    return {"ls1": nn.Parameter(torch.zeros(D)), "ls2": nn.Parameter(torch.zeros(D))}


def pre_norm(b: Any, t: Tensor) -> Tensor:
    t = t + attention(b, b.ln1(t))
    return then_mlp(b, t)


MOST = "attention 1, heads 1, block 1, model"

QUESTIONS: list[Question] = [
    *blocks("post-norm", post_norm, step(post_norm_formula), "attention", MOST, "update, 0>1"),
    *blocks(
        "sandwich norms",
        sandwich,
        step(sandwich_formula, first_norm),
        MOST,
        "normed 1",
        extras=lambda: {"ln3": nn.LayerNorm(D), "ln4": nn.LayerNorm(D)},
    ),
    *blocks(
        "parallel, one norm",
        parallel,
        step(lambda b, t: t + attention(b, b.ln1(t)) + b.mlp(b.ln1(t)), first_norm),
        MOST,
        "normed",
    ),
    *blocks(
        "parallel, two norms",
        two_norms,
        step(lambda b, t: t + attention(b, b.ln1(t)) + b.mlp(b.ln2(t)), first_norm),
        MOST,
        "update 1",
    ),
    *blocks("DropPath in eval mode", dropped_paths, step(pre_norm, first_norm), MOST, "normed"),
    *blocks(
        "LayerScale",
        layer_scale,
        step(layer_scale_formula, first_norm, attention_scaled=lambda b, h: b.ls1 * attention(b, h)),
        "attention 1 or scaled, heads 1, block 1, update, model",
        extras=scales,
    ),
    *blocks(
        "ReZero",
        rezero,
        step(rezero_formula, attention_scaled=lambda b, h: b.resweight * attention(b, h)),
        "attention 1 or scaled, block 1, update 1",
        extras=lambda: {"resweight": nn.Parameter(torch.zeros(1))},
    ),
    *blocks("DeepNorm", deep_norm, step(deep_norm_formula), "attention 1, block 1, update"),
    *blocks(
        "a gated residual",
        highway,
        step(highway_formula, first_norm),
        "attention 1, normed, block 1, update",
        extras=lambda: {"gate": nn.Linear(2 * D, D)},
    ),
    *blocks(
        "bottlenecks behind attention",
        houlsby,
        step(lambda b, t: then_mlp(b, t + houlsby_attention(b, b.ln1(t))), first_norm, attention_adapted=houlsby_attention),
        "attention or adapted, heads, block 1",
        extras=lambda: {"down": nn.Linear(D, 3), "up": nn.Linear(3, D)},
    ),
    *blocks("residuals in place", in_place, step(pre_norm, first_norm), MOST, "update 1"),
    *blocks("a residual into a view", into_a_view, step(into_a_view_formula, first_norm), "attention 1, block, update"),
    *blocks("residuals with alpha", with_alpha, step(with_alpha_formula, first_norm), "attention, block 1, model"),
    *blocks("conformer", macaron, step(macaron_formula), "block, block 1, update, model", extras=macaron_extras),
    *blocks(
        "attention twice",
        second_attention,
        second_attention_formula,
        "attention, attention 1 call=0, attention 1 call=1, heads call=1, normed, block 1",
        extras=lambda: {"att2": Own(fused), "ln3": nn.LayerNorm(D)},
    ),
    *asks(
        "one block alone",
        lambda: seeded(Pre(Own(fused))),
        lambda: (tokens(6),),
        lambda m, x: Formula(x, [pre(m)]),
        "attention, heads, normed, block, update",
    ),
]
