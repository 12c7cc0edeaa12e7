"""Where attention ends: gates in the block's own forward, one projection for heads and network, batch norms beside it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    H,
    N,
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
    seeded,
    split,
    tokens,
)
from problems.modules.grids import gelu, image

Gate = Callable[[Any, Tensor], Tensor]

GATES: dict[str, Gate] = {
    "LayerScale": lambda b, h: b.gain,
    "ReZero": lambda b, h: b.alpha,
    "tanh": lambda b, h: b.alpha.tanh(),
    "data": lambda b, h: torch.sigmoid(b.gate(h)),
}


class Inline(nn.Module):
    """Attention and the network in the block's own forward, and a gate on what each adds to the stream."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.ln1, self.ln2, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), mlp()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.gain, self.alpha, self.gate, self.way = (
            nn.Parameter(torch.ones(D)),
            nn.Parameter(torch.ones(1)),
            nn.Linear(D, D),
            gate,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        x = x + GATES[self.way](self, h) * self.o(fused(self, h))
        h = self.ln2(x)
        return x + GATES[self.way](self, h) * self.mlp(h)


def inline(b: Any) -> Step:
    def attention(t: Tensor) -> Tensor:
        return GATES[b.way](b, t) * b.o(plain(b, t))

    def block(t: Tensor) -> Tensor:
        t = t + attention(b.ln1(t))
        h = b.ln2(t)
        return t + GATES[b.way](b, h) * b.mlp(h)

    return Step(block, attention, lambda t: plain(b, t), b.ln1)


class Gained(Own):
    """A gain for each channel at the end of the attention module."""

    def __init__(self) -> None:
        super().__init__(fused)
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * super().forward(x)


def gained(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return b.att.gain * b.att.o(plain(b.att, t))

        def block(t: Tensor) -> Tensor:
            t = t + attention(b.ln1(t))
            return t + b.mlp(b.ln2(t))

        return Step(block, attention, lambda t: plain(b.att, t), b.ln1)

    return Formula(x, [of(b) for b in m.blocks], m.norm)


class OneProjection(nn.Module):
    """Flux's single blocks, ViT-22B: one matrix in front of heads and network, and one behind both."""

    def __init__(self, network_first: bool) -> None:
        super().__init__()
        self.norm, self.linear1, self.linear2 = nn.LayerNorm(D), nn.Linear(D, 3 * D + 12), nn.Linear(D + 12, D)
        self.network_first = network_first

    def forward(self, x: Tensor) -> Tensor:
        qkv, hidden = self.linear1(self.norm(x)).split([3 * D, 12], dim=-1)
        q, k, v = qkv.view(1, N, 3, H, -1).permute(2, 0, 3, 1, 4)
        parts = (merge(F.scaled_dot_product_attention(q, k, v)), F.gelu(hidden))
        return x + self.linear2(torch.cat(parts[::-1] if self.network_first else parts, 2))


def one_projection(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        into, out = b.linear1.weight.split([D, D, D, 12]), b.linear2.weight
        shifts = b.linear1.bias.split([D, D, D, 12])
        first, last = (out[:, 12:], out[:, :12]) if b.network_first else (out[:, :D], out[:, D:])

        def heads(t: Tensor) -> Tensor:
            return merge(attend(*(split(t @ into[i].mT + shifts[i]) for i in range(3))))

        def block(t: Tensor) -> Tensor:
            h = b.norm(t)
            return t + heads(h) @ first.mT + gelu(h @ into[3].mT + shifts[3]) @ last.mT + b.linear2.bias

        def head(h: int) -> Any:
            columns = first[:, h * (D // H) : (h + 1) * (D // H)]
            return lambda t: (lambda s: heads(s).unflatten(-1, (H, -1))[..., h, :] @ columns.mT, b.norm(t))

        maps = {f"attention head={h}": head(h) for h in range(H)}
        return Step(block, lambda t: heads(t) @ first.mT, heads, b.norm, maps)

    return Formula(x, [of(b) for b in m.blocks])


def normed(bn: Any, t: Tensor, axis: int) -> Tensor:
    """A batch norm in eval mode, written out: torch's own gives wrong gradients in some layouts."""
    shape = [-1 if i == axis else 1 for i in range(t.ndim)]
    mean, var, weight, bias = (p.reshape(shape) for p in (bn.running_mean, bn.running_var, bn.weight, bn.bias))
    return (t - mean) / (var + bn.eps).sqrt() * weight + bias


class Convolving(nn.Module):
    """A depthwise convolution and a batch norm behind attention's residual, over tokens seen as a picture."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.ln, self.att = nn.LayerNorm(D), Own(fused)
        self.conv, self.bn, self.copied = nn.Conv2d(D, D, 3, padding=1, groups=D, bias=False), nn.BatchNorm2d(D), copied

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.ln(x))
        grid = x.transpose(1, 2).reshape(1, D, 2, 3) if self.copied else x.view(1, 2, 3, D).permute(0, 3, 1, 2)
        return x + self.bn(self.conv(grid)).flatten(2).transpose(1, 2)


def convolving(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return b.att.o(plain(b.att, t))

        def block(t: Tensor) -> Tensor:
            t = t + attention(b.ln(t))
            grid, w = F.pad(t.reshape(2, 3, D), (0, 0, 1, 1, 1, 1)), b.conv.weight[:, 0].permute(1, 2, 0)
            cells = [(grid[i : i + 3, j : j + 3] * w).sum((0, 1)) for i in range(2) for j in range(3)]
            return t + normed(b.bn, torch.stack(cells)[None], 2)

        return Step(block, attention, lambda t: plain(b.att, t), b.ln)

    return Formula(x, [of(b) for b in m.blocks])


class Normalised(nn.Module):
    """Batch norms where others have layer norms, over channels that are the last axis or turned to the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.att, self.bn2, self.mlp = nn.BatchNorm1d(D), Own(fused), nn.BatchNorm1d(D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.bn1(x.transpose(1, 2)).transpose(1, 2))
        return x + self.mlp(self.bn2(x.flatten(0, 1)).view_as(x))


def normalised(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return b.att.o(plain(b.att, t))

        def block(t: Tensor) -> Tensor:
            t = t + attention(normed(b.bn1, t, 2))
            return t + b.mlp(normed(b.bn2, t, 2))

        return Step(block, attention, lambda t: plain(b.att, t), lambda t: normed(b.bn1, t, 2))

    return Formula(x, [of(b) for b in m.blocks])


class NonLocal(nn.Module):
    """A non-local block: attention over a picture's places, and a convolution and a batch norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.theta, self.phi, self.g = (nn.Conv2d(D, D // 2, 1) for _ in range(3))
        self.W = nn.Sequential(nn.Conv2d(D // 2, D, 1), nn.BatchNorm2d(D))

    def forward(self, x: Tensor) -> Tensor:
        theta, phi, g = (f(x).view(1, D // 2, -1) for f in (self.theta, self.phi, self.g))
        weights = torch.matmul(theta.permute(0, 2, 1), phi).softmax(dim=-1)
        y = torch.matmul(weights, g.permute(0, 2, 1)).permute(0, 2, 1).contiguous()
        return self.W(y.view(1, D // 2, *x.shape[2:])) + x


def non_local(m: Any, x: Tensor) -> Formula:
    def through(conv: Any, rows: Tensor) -> Tensor:
        return rows @ conv.weight[..., 0, 0].mT + conv.bias

    def heads(t: Tensor) -> Tensor:
        rows = t.flatten(2).mT
        return attend(through(m.theta, rows), through(m.phi, rows), through(m.g, rows), scale=1.0)

    def attention(t: Tensor) -> Tensor:
        return through(m.W[0], heads(t)).mT.reshape(t.shape)

    def whole(t: Tensor) -> Tensor:
        return normed(m.W[1], attention(t), 1)

    maps: Any = {"attention normed": lambda t: (whole, t)}
    return Formula(x, [Step(lambda t: t + whole(t), attention, heads, maps=maps)])


def two(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: seeded(Stack(kind(), kind(), norm=False))


ALL = "attention, attention 1, heads 1, normed, block, block 1, update, 0>1"
ONE_PROJECTION = "attention, attention 1, heads, block, block 1, update, attention head=0, attention head=1"

QUESTIONS: list[Question] = [
    *(
        question
        for gate in GATES
        for question in asks(
            f"{gate} in the block's forward",
            two(lambda gate=gate: Inline(gate)),
            one,
            lambda m, x: Formula(x, [inline(b) for b in m.blocks]),
            ALL,
        )
    ),
    *asks("a gain inside the attention module", lambda: seeded(Stack(Pre(Gained()), Pre(Gained()))), one, gained, ALL),
    *(
        question
        for first in (False, True)
        for question in asks(
            f"one projection behind {'network and heads' if first else 'heads and network'}",
            two(lambda first=first: OneProjection(first)),
            one,
            one_projection,
            ONE_PROJECTION,
            hidden="attention, attention 1, attention head=0, attention head=1",
        )
    ),
    *(
        question
        for copied in (True, False)
        for question in asks(
            f"a batch norm behind a convolution, {'copied' if copied else 'a view'}",
            two(lambda copied=copied: Convolving(copied)),
            lambda: (tokens(6),),
            convolving,
            ALL,
        )
    ),
    *asks("batch norms for layer norms", two(Normalised), one, normalised, ALL),
    *asks(
        "a non-local block",
        lambda: seeded(NonLocal()),
        lambda: (image(3, 2),),
        non_local,
        "heads, block, update, attention or normed",
    ),
]
