"""Tokens that are points, numbers or series, and fewer tokens in the middle."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    N,
    Own,
    Pre,
    Question,
    Step,
    asks,
    fused,
    pre,
    seeded,
    tokens,
)


class Offset(nn.Module):
    """Point cloud transformer: channels first, weights by columns, and what is left of the tokens goes through a network."""

    def __init__(self) -> None:
        super().__init__()
        self.q_conv, self.k_conv, self.v_conv, self.trans_conv = (
            nn.Conv1d(D, 2, 1, bias=False),
            nn.Conv1d(D, 2, 1, bias=False),
            nn.Conv1d(D, D, 1),
            nn.Conv1d(D, D, 1),
        )
        self.after_norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_conv(x).permute(0, 2, 1), self.k_conv(x), self.v_conv(x)
        attention = torch.bmm(q, k).softmax(-1)
        attention = attention / (1e-9 + attention.sum(dim=1, keepdim=True))
        r = torch.bmm(v, attention)
        return x + F.relu(self.after_norm(self.trans_conv(x - r)))


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.sa1, self.sa2 = nn.Conv1d(3, D, 1), Offset(), Offset()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x1 = self.sa1(x)
        x2 = self.sa2(x1)
        return torch.cat((x1, x2), dim=1)


def points(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            q, k, v = b.q_conv.weight[..., 0] @ t, b.k_conv.weight[..., 0] @ t, b.v_conv(t)
            w = (q.mT @ k).softmax(-1)
            return v @ (w / (1e-9 + w.sum(1, keepdim=True)))

        return Step(lambda t: t + F.relu(b.after_norm(b.trans_conv(t - heads(t)))), heads, heads)

    return Formula(F.relu(m.conv1(x)), [of(m.sa1), of(m.sa2)])


class Tabular(nn.Module):
    """FT-Transformer: a token for each number, a class token, the readout of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.cls = (
            nn.Parameter(torch.zeros(4, D)),
            nn.Parameter(torch.zeros(4, D)),
            nn.Parameter(torch.zeros(D)),
        )
        self.layers, self.head_norm, self.head = (
            nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]),
            nn.LayerNorm(D),
            nn.Linear(D, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        t = self.weight[None] * x[..., None] + self.bias[None]
        t = torch.cat([t, self.cls.expand(len(x), 1, -1)], dim=1)
        for layer in self.layers:
            t = layer(t)
        return self.head(F.relu(self.head_norm(t[:, -1])))


def tabular(m: Any, x: Tensor) -> Formula:
    t = torch.cat([m.weight * x[..., None] + m.bias, m.cls[None, None]], 1)
    return Formula(t, [pre(b) for b in m.layers], logits=lambda t: m.head(m.head_norm(t[:, -1]).relu()))


class Inverted(nn.Module):
    """iTransformer: series are tokens; normalised over time before and put back behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.norm, self.projector = (
            nn.Linear(6, D),
            nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]),
            nn.LayerNorm(D),
            nn.Linear(D, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean(1, keepdim=True).detach()
        x = x - means
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x = x / stdev
        t = self.embed(x.permute(0, 2, 1))
        for layer in self.layers:
            t = layer(t)
        y = self.projector(self.norm(t)).permute(0, 2, 1)
        return y * stdev + means


def inverted(m: Any, x: Tensor) -> Formula:
    y = x - x.mean(1, keepdim=True)
    y = y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return Formula(m.embed(y.mT), [pre(b) for b in m.layers], m.norm)


class Hourglass(nn.Module):
    """Fewer tokens in the middle, and what was before added behind."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.norm = nn.Linear(2 * D, D), nn.Linear(D, 2 * D), nn.LayerNorm(D)
        self.pre, self.middle, self.post = (
            nn.ModuleList([Pre(Own(fused))]),
            nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]),
            nn.ModuleList([Pre(Own(fused))]),
        )

    def forward(self, x: Tensor) -> Tensor:
        for b in self.pre:
            x = b(x)
        y = self.down(x.reshape(1, -1, 2 * D))
        for b in self.middle:
            y = b(y)
        x = x + self.up(y).reshape(x.shape)
        for b in self.post:
            x = b(x)
        return self.norm(x)


def hourglass(m: Any, x: Tensor) -> Formula:
    first, last = pre(m.pre[0]), pre(m.post[0])
    middle = [pre(b) for b in m.middle]

    def join(t: Tensor, y: Tensor) -> Tensor:
        return t + m.up(y).reshape(t.shape)

    def rest(t: Tensor) -> Tensor:
        y = m.down(t.reshape(1, -1, 2 * D))
        for s in middle:
            y = s.block(y)
        return last.block(join(t, y))

    whole: Any = lambda t: (lambda s: m.norm(rest(first.block(s))), t)  # noqa: E731
    to_last: Any = lambda t: (lambda s: rest(first.block(s)), t)  # noqa: E731
    enters = Step(
        lambda t: m.down(first.block(t).reshape(1, -1, 2 * D)),
        first.attention,
        first.heads,
        first.norm,
        {"model": whole, "to 3": to_last, "block": lambda t: (first.block, t)},
    )
    return Formula(x, [enters, *middle, last])


def hourglass_end(m: Any, x: Tensor) -> Formula:
    y = x = pre(m.pre[0]).block(x)
    y = m.down(y.reshape(1, -1, 2 * D))
    for b in m.middle:
        y = pre(b).block(y)
    return Formula(x + m.up(y).reshape(x.shape), [Step(), Step(), Step(), pre(m.post[0])])


QUESTIONS: list[Question] = [
    *asks(
        "a point cloud",
        lambda: seeded(Points()),
        lambda: (tokens(3, N),),
        points,
        "attention or refused, block, block 1, update, 0>1",
    ),
    *asks(
        "a table",
        lambda: seeded(Tabular()),
        lambda: (tokens(1, 4)[0],),
        tabular,
        "attention, heads 1, normed, block, block 1, 0>1, 1>final, 0>logits",
    ),
    *asks(
        "series as tokens",
        lambda: seeded(Inverted()),
        lambda: (tokens(6, 4),),
        inverted,
        "attention, normed, block 1, model, 0>final",
    ),
    *asks(
        "an hourglass",
        lambda: seeded(Hourglass()),
        lambda: (tokens(6),),
        hourglass,
        "attention, attention 1, block, block 1, block 2, model, 0>3",
    ),
    *asks("an hourglass, its end", lambda: seeded(Hourglass()), lambda: (tokens(6),), hourglass_end, "attention 3, update 3"),
]
