"""Attention between channels, class attention behind the blocks, convolutions before attention."""

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
    Step,
    asks,
    attend,
    fused,
    merge,
    mlp,
    pre,
    seeded,
    split,
)
from problems.modules.grids import four, gelu


class Xca(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.qkv, self.proj = nn.Parameter(torch.ones(H, 1, 1)), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 4, 1).unbind(0)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature
        return self.proj((attn.softmax(-1) @ v).permute(0, 3, 1, 2).reshape(b, n, c))


class Lpi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn, self.conv2 = (
            nn.Conv2d(D, D, 3, 1, 1, groups=D),
            nn.BatchNorm2d(D),
            nn.Conv2d(D, D, 3, 1, 1, groups=D),
        )

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        x = x.permute(0, 2, 1).reshape(1, D, h, w)
        return self.conv2(self.bn(F.gelu(self.conv1(x)))).reshape(1, D, h * w).permute(0, 2, 1)


class XcaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm3, self.lpi = nn.LayerNorm(D), Xca(), nn.LayerNorm(D), Lpi()
        self.norm2, self.mlp = nn.LayerNorm(D), mlp()
        self.gamma1, self.gamma2, self.gamma3 = (nn.Parameter(torch.ones(D)) for _ in range(3))

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        x = x + self.gamma1 * self.attn(self.norm1(x))
        x = x + self.gamma3 * self.lpi(self.norm3(x), h, w)
        return x + self.gamma2 * self.mlp(self.norm2(x))


class ClassAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(x[:, 0]).unsqueeze(1))
        return self.proj(merge(F.scaled_dot_product_attention(q, split(self.k(x)), split(self.v(x)))))


class ClassBlock(nn.Module):
    """CaiT's: the class token attends to all tokens, and the others go by unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(D), ClassAttention(), nn.LayerNorm(D), mlp()
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, x_cls: Tensor) -> Tensor:
        u = torch.cat((x_cls, x), dim=1)
        x_cls = x_cls + self.gamma1 * self.attn(self.norm1(u))
        return x_cls + self.gamma2 * self.mlp(self.norm2(x_cls))


class Xcit(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = XcaBlock) -> None:
        super().__init__()
        self.embed, self.cls_token = nn.Conv2d(3, D, 1), nn.Parameter(torch.zeros(1, 1, D))
        self.blocks = nn.ModuleList([kind(), kind()])
        self.cls_attn_blocks, self.norm, self.head = nn.ModuleList([ClassBlock()]), nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h, w = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        for b in self.blocks:
            x = b(x, h, w) if isinstance(b, XcaBlock) else b(x)
        cls = self.cls_token.expand(1, -1, -1)
        for b in self.cls_attn_blocks:
            cls = b(x, cls)
        x = self.norm(torch.cat((cls, x), 1))
        return self.head(x[:, 0])


def class_behind(m: Any) -> Any:
    def logits(t: Tensor) -> Tensor:
        (b,), cls = m.cls_attn_blocks, m.cls_token
        u = b.norm1(torch.cat([cls, t], 1))
        a = b.attn
        cls = cls + b.gamma1 * a.proj(merge(attend(split(a.q(u[:, :1])), split(a.k(u)), split(a.v(u)))))
        cls = cls + b.gamma2 * b.mlp(b.norm2(cls))
        return m.head(m.norm(cls)[:, 0])

    return logits


def xcit(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            parts = []
            q, k, v = b.attn.qkv(t).chunk(3, -1)
            for i in range(H):
                qi, ki, vi = (y[0, :, i * 4 : i * 4 + 4].mT for y in (q, k, v))
                qi, ki = (y / y.norm(dim=-1, keepdim=True) for y in (qi, ki))
                parts.append((qi @ ki.mT * b.attn.temperature[i]).softmax(-1) @ vi)
            return torch.cat(parts).mT[None]

        def block(t: Tensor) -> Tensor:
            t = t + b.gamma1 * b.attn.proj(heads(b.norm1(t)))
            y = b.norm3(t).mT.reshape(1, D, 4, 4)
            y = b.lpi.conv2(b.lpi.bn(gelu(b.lpi.conv1(y)))).flatten(2).mT
            t = t + b.gamma3 * y
            return t + b.gamma2 * b.mlp(b.norm2(t))

        maps: Any = {"attention scaled": lambda t: (lambda h: b.gamma1 * b.attn.proj(heads(h)), b.norm1(t))}
        return Step(block, lambda t: b.attn.proj(heads(t)), heads, b.norm1, maps)

    return Formula(m.embed(x).flatten(2).mT, [of(b) for b in m.blocks], logits=class_behind(m))


def cait(m: Any, x: Tensor) -> Formula:
    return Formula(m.embed(x).flatten(2).mT, [pre(b) for b in m.blocks], logits=class_behind(m))


class MbConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.dw, self.down = (
            nn.BatchNorm2d(D),
            nn.Conv2d(D, 16, 1),
            nn.Conv2d(16, 16, 3, 1, 1, groups=16),
            nn.Conv2d(16, D, 1),
        )
        self.se1, self.se2 = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.dw(F.gelu(self.up(self.norm(x)))))
        y = y * torch.sigmoid(self.se2(F.silu(self.se1(y.mean((2, 3), keepdim=True)))))
        return x + self.down(y)


def mbconv(b: Any) -> Step:
    def block(t: Tensor) -> Tensor:
        y = gelu(b.dw(gelu(b.up(b.norm(t)))))
        s = b.se1(y.mean((2, 3), keepdim=True))
        return t + b.down(y / (1 + (-b.se2(s / (1 + (-s).exp()))).exp()))

    return Step(block)


class MaxBlock(nn.Module):
    """MaxViT: a convolution, attention in windows, attention on a grid, each with its network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attn_block, self.attn_grid = MbConv(), Pre(Own(fused)), Pre(Own(fused))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).permute(0, 2, 3, 1)
        y = x.view(1, 2, 2, 2, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, D)
        x = self.attn_block(y).view(1, 2, 2, 2, 2, D).permute(0, 1, 3, 2, 4, 5).reshape(1, 4, 4, D)
        y = x.view(1, 2, 2, 2, 2, D).permute(0, 2, 4, 1, 3, 5).reshape(-1, 4, D)
        x = self.attn_grid(y).view(1, 2, 2, 2, 2, D).permute(0, 3, 1, 4, 2, 5).reshape(1, 4, 4, D)
        return x.permute(0, 3, 1, 2)


class MaxVit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, D, 3, 1, 1), nn.Sequential(MaxBlock(), MaxBlock()), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def cells(t: Tensor, grid: bool) -> Tensor:
    """(1, 4, 4, D) → (4, 4, D): windows of two by two, or the grid of every second place."""
    places = torch.arange(16).view(4, 4)
    parts = [places[i::2, j::2] if grid else places[2 * i : 2 * i + 2, 2 * j : 2 * j + 2] for i in (0, 1) for j in (0, 1)]
    return t.reshape(16, D)[torch.stack([p.reshape(-1) for p in parts])]


def back(t: Tensor, grid: bool) -> Tensor:
    where = cells(torch.arange(16.0).repeat_interleave(D).double().view(1, 4, 4, D), grid)[..., 0].long().reshape(-1)
    return torch.zeros(16, D).double().index_copy(0, where, t.reshape(16, D)).view(1, 4, 4, D)


def max_vit(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        conv, one, two = mbconv(b.conv), pre(b.attn_block), pre(b.attn_grid)

        def block(t: Tensor) -> Tensor:
            t = conv.block(t).permute(0, 2, 3, 1)
            t = back(one.block(cells(t, False)), False)
            return back(two.block(cells(t, True)), True).permute(0, 3, 1, 2)

        def inner(name: str) -> Any:
            def point(t: Tensor) -> Any:
                t = cells(conv.block(t).permute(0, 2, 3, 1), False)
                return getattr(one, name), one.norm(t)

            return point

        def second(t: Tensor) -> Any:
            t = cells(conv.block(t).permute(0, 2, 3, 1), False)
            t = cells(back(one.block(t), False), True)
            return two.attention, two.norm(t)

        return Step(block, maps={"attention": inner("attention"), "heads": inner("heads"), "attention call=1": second})

    def logits(t: Tensor) -> Tensor:
        return m.head(t.mean((2, 3)))

    return Formula(m.stem(x), [of(b) for b in m.blocks], logits=logits)


class RelativeAttention(nn.Module):
    """CoAtNet: attention with a table of relative positions on a flattened picture."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.out, self.table = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D), nn.Parameter(torch.zeros(49, H))
        c = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        r = c[:, :, None] - c[:, None] + 3
        self.register_buffer("index", (r[0] * 7 + r[1]).flatten().unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.to_qkv(x).chunk(3, -1))
        bias = self.table.gather(0, self.index.repeat(1, H)).view(16, 16, H).permute(2, 0, 1)[None]  # pyright: ignore
        return self.out(merge((q @ k.transpose(-1, -2) * 0.5 + bias).softmax(-1) @ v))


class CoTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(
            nn.Flatten(2), Transposed(), nn.LayerNorm(D), RelativeAttention(), Transposed(), nn.Unflatten(2, (4, 4))
        )
        self.ff = nn.Sequential(nn.Flatten(2), Transposed(), nn.LayerNorm(D), mlp(), Transposed(), nn.Unflatten(2, (4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ff(x)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class CoAtNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s0 = nn.Sequential(nn.Conv2d(3, D, 3, 1, 1), nn.GELU())
        self.s1, self.s2 = nn.Sequential(MbConv(), MbConv()), nn.Sequential(CoTransformer(), CoTransformer())
        self.fc = nn.Linear(D, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.s2(self.s1(self.s0(x)))
        return self.fc(F.avg_pool2d(x, 4).view(-1, D))


def coatnet(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        norm, a = b.attn[2], b.attn[3]

        def heads(t: Tensor) -> Tensor:
            q, k, v = (split(y) for y in (t @ a.to_qkv.weight.mT).chunk(3, -1))
            return merge(attend(q, k, v, a.table[a.index[:, 0]].view(16, 16, H).permute(2, 0, 1)))

        def block(t: Tensor) -> Tensor:
            t = t.flatten(2).mT
            t = t + a.out(heads(norm(t)))
            return (t + b.ff[3](b.ff[2](t))).mT.reshape(1, D, 4, 4)

        maps: Any = {
            "attention": lambda t: (lambda h: a.out(heads(h)), norm(t.flatten(2).mT)),
            "heads": lambda t: (heads, norm(t.flatten(2).mT)),
            "normed": lambda t: (lambda h: a.out(heads(norm(h.flatten(2).mT))), t),
        }
        return Step(block, maps=maps)

    start = gelu(m.s0[0](x))
    for b in m.s1:
        start = mbconv(b).block(start)
    return Formula(start, [of(b) for b in m.s2], logits=lambda t: m.fc(t.mean((2, 3))))


QUESTIONS: list[Question] = [
    *asks(
        "XCiT",
        lambda: seeded(Xcit()),
        four,
        xcit,
        "attention or scaled, heads 1, normed or scaled, block, block 1, update, 0>1, 0>logits, 1>logits",
    ),
    *asks(
        "class attention behind",
        lambda: seeded(Xcit(lambda: Pre(Own(fused)))),
        four,
        cait,
        "attention, block, block 1, 0>1, 0>logits, 1>logits",
    ),
    *asks(
        "MaxViT",
        lambda: seeded(MaxVit()),
        four,
        max_vit,
        "attention, heads, attention call=1, block, block 1, update, 0>1, 0>logits",
    ),
    *asks(
        "CoAtNet",
        lambda: seeded(CoAtNet()),
        four,
        coatnet,
        "attention, heads 1, normed or refused, block, block 1, update, 0>final, 0>logits",
    ),
]
