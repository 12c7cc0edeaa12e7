"""What must be refused: rounding, randomness, memory, numbers that leave the tensors, and what is not there."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    H,
    Own,
    Pre,
    Question,
    Stack,
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
    tokens,
)
from problems.modules.blocks import Block, second_attention
from problems.modules.pictures import Blocks, PooledQueries
from problems.modules.softmax import alone, qkv, stack_of


def nothing(m: Any, *inputs: Any, **named: Any) -> Formula:
    raise NotImplementedError("a question that is refused has no formula")


def refused(name: str, build: Callable[[], nn.Module], *specs: str, inputs: Any = one) -> list[Question]:
    return asks(name, build, inputs, nothing, *(f"{spec} refused" for spec in ", ".join(specs).split(", ")))


class Beside(nn.Module):
    """Attention by `way`, with a residual beside it."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], **extras: Any) -> None:
        super().__init__()
        self.att = Own(way, **extras)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.att(x)


def beside(way: Callable[[Any, Tensor], Tensor], **extras: Any) -> Callable[[], nn.Module]:
    return lambda: seeded(Beside(way, **extras))


def single() -> tuple[Tensor]:
    return (tokens().float(),)


def quantised(*names: str) -> Callable[[], nn.Module]:
    """torch's dynamic int8 for these layers of two pre-norm blocks, in float32, which is all that it knows."""

    def build() -> nn.Module:
        m = seeded(Stack(Pre(Own(fused)), Pre(Own(fused)), norm=False)).float()
        layers = {name for name, _ in m.named_modules() if any(part in name for part in names)}
        with warnings.catch_warnings(action="ignore"):
            return torch.ao.quantization.quantize_dynamic(m, layers, dtype=torch.qint8)

    return build


def float_block(m: Any, x: Tensor) -> Formula:
    return Formula(x.double(), [pre(copy.deepcopy(m.blocks[0]).double())])


def rounded(m: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.round(t * 16) / 16 for t in qkv(m, x))
    return merge(attend(q, k, v))


def to_integers(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scale = v.abs().amax(-1, keepdim=True) / 127
    return merge((q @ k.mT / 2).softmax(-1) @ ((v / scale).to(torch.int8).to(x.dtype) * scale))


def straight_through(m: Any, x: Tensor) -> Tensor:
    y = fused(m, x)
    return y + ((y * 8).round() / 8 - y).detach()


class WeightOnly(nn.Module):
    """Weights in int8 with a scale a row, multiplied out in forward: nothing that depends on the tokens is rounded."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)  # pyright: ignore


def weight_only() -> nn.Module:
    m: Any = seeded(Stack(Pre(Own(fused)), norm=False))
    for name in "qkvo":
        setattr(m.blocks[0].att, name, WeightOnly(getattr(m.blocks[0].att, name)))
    return m


class HalfSoftmax(nn.Module):
    """The weights pass through bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Own(in_bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.att(x)


def in_bfloat16(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge((q @ k.mT / 2).to(torch.bfloat16).softmax(-1).to(x.dtype) @ v)


def dropped(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(F.dropout((q @ k.mT / 2).softmax(-1), 0.2) @ v)


def dropped_by_sdpa(m: Any, x: Tensor) -> Tensor:
    return merge(F.scaled_dot_product_attention(*qkv(m, x), dropout_p=0.2))


def noisy(m: Any, x: Tensor) -> Tensor:
    return fused(m, x + 0.1 * torch.randn_like(x))


def some_heads(m: Any, x: Tensor) -> Tensor:
    return merge(F.scaled_dot_product_attention(*qkv(m, x)) * torch.bernoulli(torch.full((1, H, 1, 1), 0.5, dtype=x.dtype)))


class Masking(nn.Module):
    """A masked autoencoder: a random half of the tokens is kept, in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))])

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(1, x.shape[1]).argsort(dim=1)[:, :3]
        x = x.gather(1, kept[..., None].expand(-1, -1, D))
        for block in self.blocks:
            x = block(x)
        return x


class Cache(nn.Module):
    """Keys and values of all calls so far, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Own(fused)
        self.past: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = qkv(self.att, x)
        self.past.append((k, v))
        k, v = (torch.cat(parts, 2) for parts in zip(*self.past, strict=True))
        return x + self.att.o(merge(F.scaled_dot_product_attention(q, k, v)))


class Running(nn.Module):
    """A buffer that every call moves towards its tokens' mean, and that attention reads."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Own(fused)
        self.register_buffer("mean", torch.zeros(D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))  # pyright: ignore
        return x + self.att(x - self.mean)  # pyright: ignore


class Counting(nn.Module):
    """The scale of the residual depends on how often the module was called."""

    def __init__(self) -> None:
        super().__init__()
        self.att, self.calls = Own(fused), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.att(x) / self.calls


class Recurrent(nn.Module):
    """The state of the last call is one more token of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Own(fused)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, :1] if self.state is None else self.state
        y = self.att(torch.cat([state, x], 1))
        self.state = y[:, -1:].detach()
        return x + y[:, 1:]


class Decaying(nn.Module):
    """Every call makes a weight smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Own(fused)

    def forward(self, x: Tensor) -> Tensor:
        self.att.o.weight.data.mul_(0.9)
        return x + self.att(x)


def by_numpy(m: Any, x: Tensor) -> Tensor:
    q, k, v = (t.detach().numpy() for t in qkv(m, x))
    weights = torch.from_numpy(q @ k.swapaxes(-1, -2) / 2).softmax(-1).numpy()
    return merge(torch.from_numpy(weights @ v))


def scaled_by_a_number(m: Any, x: Tensor) -> Tensor:
    return merge(F.scaled_dot_product_attention(*qkv(m, x), scale=float(x.square().mean())))


def divided_by_an_item(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(F.scaled_dot_product_attention(q * (4 / q.norm().item()), k, v))


def listed(m: Any, x: Tensor) -> Tensor:
    gains = torch.tensor(x.mean(-1).tolist(), dtype=x.dtype)
    return fused(m, x) * (1 + gains[..., None])


def branched(m: Any, x: Tensor) -> Tensor:
    """A choice made from the tokens: which branch runs changes nothing about its derivative."""
    if x.mean() > 10:
        return torch.tanh(m.v(x))
    return fused(m, x)


class Lengths(nn.Module):
    """A length read from a mask that is an input of its own; the tokens' values stay tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Own(fused)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        n = int(lengths.max())
        return x[:, :n] + self.att(x[:, :n])


def with_lengths(m: Any, x: Tensor, lengths: Tensor) -> Formula:
    def attention(t: Tensor) -> Tensor:
        return m.att.o(plain(m.att, t))

    return Formula(x[:, :4], [Step(attention=attention, heads=lambda t: plain(m.att, t))])


class Towers(nn.Module):
    """Two encoders that do not meet before the end: neither is the model's stream."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.ModuleList([Pre(Own(fused)) for _ in range(2)]),
            nn.ModuleList([Pre(Own(fused)) for _ in range(2)]),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for a, b in zip(self.left, self.right, strict=True):
            x, y = a(x), b(y)
        return x.mean(1) * y.mean(1)


class Apart(nn.Module):
    """A block with two streams that attention does not join."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Own(fused), Own(fused)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.first(x), y + self.second(y)


class Abreast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Apart(), Apart()])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x, y = block(x, y)
        return x, y


class Number(nn.Module):
    """A model that returns no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pre(Own(fused))])

    def forward(self, x: Tensor) -> float:
        return float(self.blocks[0](x).detach().square().sum())


class LastOfLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def pair() -> tuple[Tensor, Tensor]:
    return tokens(), tokens(seed=8)


def two() -> nn.Module:
    return seeded(Stack(Pre(Own(fused)), Pre(Own(fused))))


def second() -> nn.Module:
    return seeded(Stack(Block(second_attention, att2=Own(fused), ln3=nn.LayerNorm(D))))


RANDOM = {"dropout always": dropped, "dropout in sdpa": dropped_by_sdpa, "noise": noisy, "heads left out": some_heads}
NUMBERS = {
    "numpy": by_numpy,
    "a scale by float": scaled_by_a_number,
    "an item": divided_by_an_item,
    "a list of numbers": listed,
}
ROUNDED = {"rounded": rounded, "int8 values": to_integers, "rounded, straight through": straight_through}

QUESTIONS: list[Question] = [
    *refused("int8, all", quantised("att.", "mlp."), "attention, block 1, model", inputs=single),
    *refused("int8, o", quantised("att.o"), "attention, block", inputs=single),
    *refused("int8, q and k", quantised("att.q", "att.k"), "attention, heads 1", inputs=single),
    *refused("int8, networks", quantised("mlp."), "block, model", inputs=single),
    *asks("int8, networks", quantised("mlp."), single, float_block, "attention, heads", tolerance=1e-5),
    *(question for name, way in ROUNDED.items() for question in refused(name, beside(way), "attention, block")),
    *asks("int8 weights alone", weight_only, one, stack_of(plain), "attention, block"),
    *asks(
        "weights in bfloat16",
        lambda: seeded(HalfSoftmax()),
        one,
        lambda m, x: Formula(x, [Step(lambda t: t + m.att.o(plain(m.att, t)), lambda t: m.att.o(plain(m.att, t)))]),
        "attention or refused, block or refused",
        tolerance=1e-2,
        hidden="attention or refused, block or refused",
    ),
    *(question for name, way in RANDOM.items() for question in refused(name, beside(way), "attention, block")),
    *refused("random tokens kept", lambda: seeded(Masking()), "attention, block 1, model"),
    *refused("a cache that grows", lambda: seeded(Cache()), "attention, block"),
    *refused("a running mean", lambda: seeded(Running()), "block"),
    *refused("calls that are counted", lambda: seeded(Counting()), "block"),
    *refused("a state of the last call", lambda: seeded(Recurrent()), "attention, block"),
    *refused("a weight that decays", lambda: seeded(Decaying()), "attention, block"),
    *(question for name, way in NUMBERS.items() for question in refused(name, beside(way), "attention, block")),
    *asks("a branch on a value", lambda: seeded(Own(branched)), one, alone(plain), "attention or refused"),
    *asks(
        "a length from a mask",
        lambda: seeded(Lengths()),
        lambda: (tokens(), torch.tensor([3, 4])),
        with_lengths,
        "attention, heads",
    ),
    *refused("two towers", lambda: seeded(Towers()), "model", inputs=pair),
    *refused("two streams that do not meet", lambda: seeded(Abreast()), "block, model", inputs=pair),
    *refused("no tensor returned", lambda: seeded(Number()), "model"),
    *refused(
        "a network without attention",
        lambda: seeded(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))),
        "attention, block, model",
    ),
    *refused("an LSTM", lambda: seeded(LastOfLstm()), "attention, block"),
    *refused("a small network", lambda: seeded(mlp()), "attention, heads"),
    *refused(
        "two blocks",
        two,
        "attention 2, block 5, heads head=2, attention head=7, cross, context 1, attention call=1, block stream=1",
    ),
    *refused("attention twice", second, "heads head=3, attention call=2"),
    *refused("two blocks, spans", two, "0>2, 1>0, 0>middle"),
    *refused("fewer tokens behind a block", lambda: seeded(Blocks(PooledQueries())), "update", inputs=lambda: (tokens(8),)),
]
