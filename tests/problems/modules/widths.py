"""Several copies of the stream, and fewer or more tokens than before."""

from typing import Any

import torch
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    N,
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
    split,
    tokens,
)


class Hyper(nn.Module):
    """Hyper-connections: two streams, read by a weighted sum, mixed, and written to by weights."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.att, self.mlp = nn.LayerNorm(D), Own(fused), mlp()
        self.read, self.write, self.mix = (
            nn.Parameter(torch.zeros(2, 2)),
            nn.Parameter(torch.zeros(2, 2)),
            nn.Parameter(torch.zeros(2, 2, 2)),
        )

    def forward(self, h: Tensor) -> Tensor:
        for i, run in enumerate((lambda t: self.att(self.ln(t)), self.mlp)):
            y = run(torch.einsum("s,bsnd->bnd", self.read[i], h))
            h = torch.einsum("st,btnd->bsnd", self.mix[i], h) + torch.einsum("s,bnd->bsnd", self.write[i], y)
        return h


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.layers, self.norm = nn.Linear(4, 2 * D), nn.ModuleList([Hyper(), Hyper()]), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).unflatten(-1, (2, D)).transpose(1, 2).contiguous()
        for layer in self.layers:
            h = layer(h)
        return self.norm(h.sum(1))


def copies(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return b.att.o(plain(b.att, t))

        def read(i: int, h: Tensor) -> Tensor:
            return b.read[i, 0] * h[:, 0] + b.read[i, 1] * h[:, 1]

        def write(i: int, h: Tensor, y: Tensor) -> Tensor:
            return torch.stack([b.mix[i, s, 0] * h[:, 0] + b.mix[i, s, 1] * h[:, 1] + b.write[i, s] * y for s in range(2)], 1)

        def block(h: Tensor) -> Tensor:
            h = write(0, h, attention(b.ln(read(0, h))))
            return write(1, h, b.mlp(read(1, h)))

        return Step(block, attention, lambda t: plain(b.att, t), lambda h: b.ln(read(0, h)))

    enter = split(m.into(x), 2)
    return Formula(enter, [of(b) for b in m.layers], lambda h: m.norm(h.sum(1)))


class SomeTokens(nn.Module):
    """Mixture of depths: a router sends three tokens through the block, the others pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(D, 1), Pre(Own(fused))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)[..., 0].topk(3, dim=1)
        places = chosen.sort(dim=1).values
        index = places[..., None].expand(-1, -1, D)
        inner = x.gather(1, index)
        gate = torch.sigmoid(self.router(inner))
        return x.scatter_add(1, index, gate * (self.block(inner) - inner))


def some_tokens(m: Any, x: Tensor) -> Formula:
    def of(b: Any, start: Tensor) -> Step:
        chosen = b.router(start)[0, :, 0].argsort(descending=True)[:3].sort().values
        inner = pre(b.block)

        def block(t: Tensor) -> Tensor:
            s = t[:, chosen]
            gate = 1 / (1 + (-b.router(s)).exp())
            return t.index_copy(1, chosen, s + gate * (inner.block(s) - s))

        return Step(block, inner.attention, inner.heads, lambda t: inner.norm(t[:, chosen]))

    first = pre(m.blocks[0])
    return Formula(x, [first, of(m.blocks[1], first.block(x))])


class Prompted(nn.Module):
    """Prompt tuning: learned tokens before the others, taken off behind the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.blocks, self.head = (
            nn.Parameter(torch.zeros(1, 2, D)),
            nn.ModuleList([Pre(Own(fused)) for _ in range(2)]),
            nn.Linear(D, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(x.shape[0], -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 2:])


class Merging(nn.Module):
    """Two tokens become one between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.merge = nn.ModuleList([Pre(Own(fused)) for _ in range(2)]), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](self.merge(x.reshape(1, -1, 2 * D)))


def merging(m: Any, x: Tensor) -> Formula:
    first, second = pre(m.blocks[0]), pre(m.blocks[1])

    def joined(t: Tensor) -> Tensor:
        t, w = first.block(t), m.merge.weight
        return t[:, ::2] @ w[:, :D].mT + t[:, 1::2] @ w[:, D:].mT + m.merge.bias

    span: Any = lambda t: (lambda s: second.block(joined(s)), t)  # noqa: E731
    maps = {"to 1": span, "model": span, "block": lambda t: (first.block, t)}
    return Formula(x, [Step(joined, first.attention, first.heads, first.norm, maps), second])


QUESTIONS: list[Question] = [
    *asks(
        "hyper-connections",
        lambda: seeded(Copies()),
        lambda: (tokens(N, 4),),
        copies,
        "attention 1, heads, normed 1, block, block 1, update, model, 0>1",
    ),
    *asks(
        "a mixture of depths",
        lambda: seeded(Stack(Pre(Own(fused)), SomeTokens(), norm=False)),
        one,
        some_tokens,
        "attention 1, block 1, model",
    ),
    *asks(
        "learned tokens before the others",
        lambda: seeded(Prompted()),
        one,
        lambda m, x: Formula(torch.cat([m.prompt, x], 1), [pre(b) for b in m.blocks]),
        "attention 1, block, 0>1, 0>final",
    ),
    *asks(
        "two tokens become one",
        lambda: seeded(Merging()),
        lambda: (tokens(6),),
        merging,
        "attention 1, block, block 1, 0>1, model",
    ),
]
