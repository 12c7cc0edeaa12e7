"""Attention on pictures: windows, smaller keys, channels as tokens, convolutions beside it."""

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
    plain,
    pre,
    seeded,
    split,
)


def image(h: int = 4, w: int = 4, c: int = D, seed: int = 7) -> Tensor:
    return torch.randn(1, c, h, w, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def picture() -> tuple[Tensor]:
    return (image(),)


def gelu(t: Tensor) -> Tensor:
    return t * (1 + torch.erf(t / 2**0.5)) / 2


# ---- Segformer
class EfficientAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))
        self.sr, self.norm = nn.Conv2d(D, D, 2, stride=2), nn.LayerNorm(D)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        q = split(self.q(x))
        y = self.sr(x.permute(0, 2, 1).reshape(1, D, h, w)).reshape(1, D, -1).permute(0, 2, 1)
        y = self.norm(y)
        k, v = split(self.k(y)), split(self.v(y))
        weights = torch.matmul(q, k.transpose(-1, -2)) / 2.0
        return self.proj(merge(weights.softmax(-1) @ v))


class MixFfn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense1, self.dwconv, self.dense2 = nn.Linear(D, 12), nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Linear(12, D)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        y = self.dense1(x)
        y = self.dwconv(y.transpose(1, 2).view(1, 12, h, w)).flatten(2).transpose(1, 2)
        return self.dense2(F.gelu(y))


class SegLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(D), EfficientAttention(), nn.LayerNorm(D), MixFfn()

    def forward(self, x: Tensor, h: int, w: int) -> tuple[Tensor]:
        x = x + self.attn(self.norm1(x), h, w)
        return (x + self.mlp(self.norm2(x), h, w),)


class Segformer(nn.Module):
    """Stages: overlapping patches, layers, a norm; every stage halves the picture and is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embeddings = nn.ModuleList([nn.Conv2d(3, D, 3, 1, 1), nn.Conv2d(D, D, 3, 2, 1)])
        self.norms0 = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.block = nn.ModuleList([nn.ModuleList([SegLayer(), SegLayer()]), nn.ModuleList([SegLayer()])])
        self.layer_norm = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for embed, n0, blocks, norm in zip(self.patch_embeddings, self.norms0, self.block, self.layer_norm, strict=True):
            x = embed(x)
            h, w = x.shape[-2:]
            x = n0(x.flatten(2).transpose(1, 2))
            for b in blocks:  # pyright: ignore
                x = b(x, h, w)[0]
            x = norm(x).reshape(1, h, w, -1).permute(0, 3, 1, 2).contiguous()
            found.append(x)
        return found


def segformer(m: Any, x: Tensor) -> Formula:
    def of(b: Any, size: int) -> Step:
        def heads(t: Tensor) -> Tensor:
            a = b.attn
            y = F.unfold(t.mT.reshape(1, D, size, size), 2, stride=2).mT @ a.sr.weight.flatten(1).mT + a.sr.bias
            y = a.norm(y)
            return merge(attend(split(a.q(t)), split(a.k(y)), split(a.v(y))))

        def block(t: Tensor) -> Tensor:
            t = t + b.attn.proj(heads(b.norm1(t)))
            y = b.mlp.dense1(b.norm2(t))
            y = F.conv2d(y.mT.reshape(1, 12, size, size), b.mlp.dwconv.weight, b.mlp.dwconv.bias, padding=1, groups=12)
            return t + b.mlp.dense2(gelu(y.flatten(2).mT))

        return Step(block, lambda t: b.attn.proj(heads(t)), heads, b.norm1)

    start = m.norms0[0](m.patch_embeddings[0](x).flatten(2).mT)
    return Formula(start, [of(b, 4) for b in m.block[0]])


# ---- SAM: windows in the block, channels last, decomposed relative positions
class SamAttention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.rel_pos_h, self.rel_pos_w = (nn.Parameter(torch.zeros(2 * size - 1, D // H)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        qkv = self.qkv(x).reshape(b, h * w, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * H, h * w, -1).unbind(0)
        attn = (q * 0.5) @ k.transpose(-2, -1)
        coords = torch.arange(h)[:, None] - torch.arange(h)[None] + h - 1
        r = q.reshape(b * H, h, w, -1)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r, self.rel_pos_h[coords])
        rel_w = torch.einsum("bhwc,wkc->bhwk", r, self.rel_pos_w[coords])
        attn = (attn.view(b * H, h, w, h, w) + rel_h[..., :, None] + rel_w[..., None, :]).view(b * H, h * w, h * w)
        x = (attn.softmax(-1) @ v).view(b, H, h, w, -1).permute(0, 2, 3, 1, 4).reshape(b, h, w, -1)
        return self.proj(x)


class SamBlock(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), SamAttention(window or 3)
        self.norm2, self.mlp, self.window = nn.LayerNorm(D), mlp(), window

    def forward(self, x: Tensor) -> Tensor:
        shortcut, x = x, self.norm1(x)
        h = x.shape[1]
        if self.window:
            s, pad = self.window, -h % self.window
            x = F.pad(x, (0, 0, 0, pad, 0, pad))
            p = h + pad
            x = x.view(1, p // s, s, p // s, s, D).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, s, s, D)
        x = self.attn(x)
        if self.window:
            x = x.view(1, p // s, p // s, s, s, D).permute(0, 1, 3, 2, 4, 5).contiguous().view(1, p, p, D)
            if pad:
                x = x[:, :h, :h, :].contiguous()
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class Sam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Conv2d(3, D, 2, 2), nn.Parameter(torch.zeros(1, 3, 3, D))
        self.blocks = nn.ModuleList([SamBlock(2), SamBlock(0)])
        self.neck = nn.Sequential(nn.Conv2d(D, 6, 1, bias=False), nn.GroupNorm(1, 6), nn.Conv2d(6, 6, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).permute(0, 2, 3, 1) + self.pos_embed
        for b in self.blocks:
            x = b(x)
        return self.neck(x.permute(0, 3, 1, 2))


def sam(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def one_window(t: Tensor) -> Tensor:
            """(s, s, D) → (s, s, D), before the projection."""
            s = len(t)
            q, k, v = (split(part) for part in b.attn.qkv(t.reshape(s * s, D)).chunk(3, -1))
            c = torch.arange(s)[:, None] - torch.arange(s)[None] + s - 1
            r = q.reshape(H, s, s, -1)
            bias = (r[:, :, :, None] * b.attn.rel_pos_h[c][:, None]).sum(-1)[..., :, None] + (
                r[:, :, :, None] * b.attn.rel_pos_w[c][None]
            ).sum(-1)[..., None, :]
            return merge(attend(q, k, v, bias.reshape(H, s * s, s * s))).reshape(s, s, D)

        def heads(t: Tensor) -> Tensor:
            if not b.window:
                return one_window(t[0])[None]
            t = F.pad(t, (0, 0, 0, 1, 0, 1))[0]
            rows = [torch.cat([one_window(t[i : i + 2, j : j + 2]) for j in (0, 2)], 1) for i in (0, 2)]
            return torch.cat(rows)[None]

        def run(t: Tensor) -> Tensor:
            return b.attn.proj(heads(t))[:, :3, :3]

        def block(t: Tensor) -> Tensor:
            t = t + run(b.norm1(t))
            return t + b.mlp(b.norm2(t))

        def windows(t: Tensor) -> Tensor:
            """(w, s, s, D) → the same, with the projection."""
            return torch.stack([b.attn.proj(one_window(part)) for part in t])

        def cut(t: Tensor) -> Any:
            y = F.pad(b.norm1(t), (0, 0, 0, 1, 0, 1))[0]
            return windows, torch.stack([y[i : i + 2, j : j + 2] for i in (0, 2) for j in (0, 2)])

        maps: Any = {"attention windows": cut} if b.window else {}
        return Step(block, run, heads, b.norm1, maps)

    return Formula(m.patch_embed(x).permute(0, 2, 3, 1) + m.pos_embed, [of(b) for b in m.blocks])


def six() -> tuple[Tensor]:
    return (image(6, 6, 3),)


# ---- CvT: convolutional projections, smaller keys, a class token that goes around the convolution
class ConvProjection(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv, self.bn, self.stride = nn.Conv2d(D, D, 3, stride, 1, groups=D, bias=False), nn.BatchNorm2d(D), stride

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).flatten(2).transpose(1, 2)


class CvtAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cq, self.ck, self.cv = ConvProjection(1), ConvProjection(2), ConvProjection(2)
        self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        cls, x = torch.split(x, [1, h * w], 1)
        x = x.transpose(1, 2).reshape(1, D, h, w)
        q, k, v = (torch.cat((cls, c(x)), 1) for c in (self.cq, self.ck, self.cv))
        q, k, v = split(self.q(q)), split(self.k(k)), split(self.v(v))
        score = torch.einsum("bhlk,bhtk->bhlt", [q, k]) * D**-0.5
        return self.proj(merge(torch.einsum("bhlt,bhtv->bhlv", [F.softmax(score, -1), v])))


class CvtBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(D), CvtAttention(), nn.LayerNorm(D), mlp()

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        res, x = x, self.norm1(x)
        x = res + self.attn(x, h, w)
        return x + self.mlp(self.norm2(x))


class Cvt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.cls_token = nn.Conv2d(3, D, 3, 1, 1), nn.Parameter(torch.zeros(1, 1, D))
        self.blocks, self.norm, self.head = nn.ModuleList([CvtBlock(), CvtBlock()]), nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        h, w = x.shape[2:]
        x = torch.cat((self.cls_token.expand(1, -1, -1), x.flatten(2).transpose(1, 2)), 1)
        for b in self.blocks:
            x = b(x, h, w)
        cls, x = torch.split(x, [1, h * w], 1)
        return self.head(self.norm(cls).squeeze(1))


def cvt(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            a, grid = b.attn, t[:, 1:].mT.reshape(1, D, 4, 4)
            q, k, v = (torch.cat([t[:, :1], c.bn(c.conv(grid)).flatten(2).mT], 1) for c in (a.cq, a.ck, a.cv))
            return merge(attend(split(a.q(q)), split(a.k(k)), split(a.v(v)), scale=D**-0.5))

        def block(t: Tensor) -> Tensor:
            t = t + b.attn.proj(heads(b.norm1(t)))
            return t + b.mlp(b.norm2(t))

        return Step(block, lambda t: b.attn.proj(heads(t)), heads, b.norm1)

    enter = torch.cat([m.cls_token, m.proj(x).flatten(2).mT], 1)
    return Formula(enter, [of(b) for b in m.blocks], logits=lambda t: m.head(m.norm(t[:, 0])))


def four() -> tuple[Tensor]:
    return (image(4, 4, 3),)


# ---- XCiT: channels attend to channels, and a local patch interaction; class attention behind
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
        self.conv1, self.bn, self.conv2 = nn.Conv2d(D, D, 3, 1, 1, groups=D), nn.BatchNorm2d(D), nn.Conv2d(D, D, 3, 1, 1, groups=D)

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
    def __init__(self, kind: type = XcaBlock) -> None:
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


# ---- CoAtNet / MaxViT
class MbConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.dw, self.down = nn.BatchNorm2d(D), nn.Conv2d(D, 16, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Conv2d(16, D, 1)
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
        self.attn = nn.Sequential(nn.Flatten(2), Transposed(), nn.LayerNorm(D), RelativeAttention(), Transposed(), nn.Unflatten(2, (4, 4)))
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


# ---- diffusion: attention of a VAE, a U-Net's transformer
class AttnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, D)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(D, D, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h_ = self.norm(x)
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        w_ = torch.bmm(q.reshape(b, c, h * w).permute(0, 2, 1), k.reshape(b, c, h * w)) * c**-0.5
        w_ = F.softmax(w_, dim=2).permute(0, 2, 1)
        h_ = torch.bmm(v.reshape(b, c, h * w), w_).reshape(b, c, h, w)
        return x + self.proj_out(h_)


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.conv1, self.norm2, self.conv2 = nn.GroupNorm(2, D), nn.Conv2d(D, D, 3, 1, 1), nn.GroupNorm(2, D), nn.Conv2d(D, D, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class Middle(nn.Module):
    """A VAE's middle: a convolutional block, attention, another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, D, 3, 1, 1)
        self.mid = nn.Module()
        self.mid.block_1, self.mid.attn_1, self.mid.block_2 = Resnet(), AttnBlock(), Resnet()
        self.norm_out, self.conv_out = nn.GroupNorm(2, D), nn.Conv2d(D, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.conv_in(x)
        mid: Any = self.mid
        h = mid.block_2(mid.attn_1(mid.block_1(h)))
        return self.conv_out(F.silu(self.norm_out(h)))


def middle(m: Any, x: Tensor) -> Formula:
    a, silu = m.mid.attn_1, lambda t: t / (1 + (-t).exp())

    def res(b: Any, t: Tensor) -> Tensor:
        return t + b.conv2(silu(b.norm2(b.conv1(silu(b.norm1(t))))))

    def heads(t: Tensor) -> Tensor:
        q, k, v = (c(t).flatten(2).mT for c in (a.q, a.k, a.v))
        return attend(q, k, v).mT.reshape(t.shape)

    step = Step(lambda t: t + a.proj_out(heads(a.norm(t))), lambda t: a.proj_out(heads(t)), heads, a.norm)
    return Formula(res(m.mid.block_1, m.conv_in(x)), [step])


class GeGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(D, 24), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return self.out(x * F.gelu(gate))


class CrossAttention(nn.Module):
    """CompVis's: the context is the tokens where there is none."""

    def __init__(self, context: int = D) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(D, D, bias=False), nn.Linear(context, D, bias=False), nn.Linear(context, D, bias=False)
        self.to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        c = x if context is None else context
        q, k, v = split(self.to_q(x)).flatten(0, 1), split(self.to_k(c)).flatten(0, 1), split(self.to_v(c)).flatten(0, 1)
        attn = (torch.einsum("bid,bjd->bij", q, k) * 0.5).softmax(dim=-1)
        return self.to_out(merge(torch.einsum("bij,bjd->bid", attn, v).unflatten(0, (-1, H))))


class BasicTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1, self.attn2, self.ff = CrossAttention(), CrossAttention(6), GeGlu()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x


class SpatialTransformer(nn.Module):
    """Stable Diffusion's: a norm and a convolution around the blocks, and a residual around all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj_in, self.proj_out = nn.GroupNorm(2, D), nn.Conv2d(D, D, 1), nn.Conv2d(D, D, 1)
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock(), BasicTransformerBlock()])

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x_in = x
        x = self.proj_in(self.norm(x)).view(b, c, h * w).transpose(1, 2).contiguous()
        for block in self.transformer_blocks:
            x = block(x, context=context)
        return self.proj_out(x.transpose(1, 2).view(b, c, h, w)) + x_in


def spatial(m: Any, x: Tensor, context: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(a: Any, t: Tensor, c: Tensor) -> Tensor:
            return merge(attend(split(a.to_q(t)), split(a.to_k(c)), split(a.to_v(c))))

        def attention(t: Tensor) -> Tensor:
            return b.attn1.to_out[0](heads(b.attn1, t, t))

        def cross(t: Tensor, c: Tensor) -> Tensor:
            return b.attn2.to_out[0](heads(b.attn2, t, c))

        def block(t: Tensor) -> Tensor:
            t = t + attention(b.norm1(t))
            t = t + cross(b.norm2(t), context)
            y, gate = b.ff.proj(b.norm3(t)).chunk(2, -1)
            return t + b.ff.out(y * gelu(gate))

        def queries(t: Tensor) -> Tensor:
            return b.norm2(t + attention(b.norm1(t)))

        maps: Any = {
            "cross": lambda t: (lambda h: cross(h, context), queries(t)),
            "context": lambda t: (lambda c: cross(queries(t), c), context),
        }
        return Step(block, attention, lambda t: heads(b.attn1, t, t), b.norm1, maps)

    return Formula(m.proj_in(m.norm(x)).flatten(2).mT, [of(b) for b in m.transformer_blocks])


def with_context() -> tuple[Tensor, Tensor]:
    return image(2, 3), torch.randn(1, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


# ---- SAGAN, an attention pool, BoTNet
class Sagan(nn.Module):
    """Self-attention of GANs: channels first, fewer channels for queries and keys, a gain that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.gamma = nn.Conv1d(D, 2, 1), nn.Conv1d(D, 2, 1), nn.Conv1d(D, D, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        size = x.size()
        x = x.view(*size[:2], -1)
        f, g, h = self.query(x), self.key(x), self.value(x)
        beta = F.softmax(torch.bmm(f.transpose(1, 2), g), dim=1)
        o = self.gamma * torch.bmm(h, beta) + x
        return o.view(*size).contiguous()


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.attn, self.conv2, self.fc = nn.Conv2d(3, D, 3, 1, 1), Sagan(), nn.Conv2d(D, D, 3, 2, 1), nn.Linear(D * 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv1(x), 0.1)
        x = F.leaky_relu(self.conv2(self.attn(x)), 0.1)
        return self.fc(x.flatten(1))


def discriminator(m: Any, x: Tensor) -> Formula:
    a = m.attn

    def heads(t: Tensor) -> Tensor:
        f, g, h = (t.flatten(2).mT @ c.weight[..., 0].mT + c.bias for c in (a.query, a.key, a.value))
        logits = f @ g.mT
        weights = logits.exp() / logits.exp().sum(1, keepdim=True)
        return (weights.mT @ h).mT.reshape(t.shape)

    maps: Any = {"attention scaled": lambda t: (lambda h: a.gamma * heads(h), t)}
    return Formula(F.leaky_relu(m.conv1(x), 0.1), [Step(lambda t: a.gamma * heads(t) + t, heads, heads, maps=maps)])


class AttentionPool2d(nn.Module):
    """CLIP's: the mean token attends to all, by torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.zeros(17, D))
        self.k_proj, self.q_proj, self.v_proj, self.c_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(start_dim=2).permute(2, 0, 1)
        x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0)
        x = x + self.positional_embedding[:, None, :].to(x.dtype)
        x, _ = F.multi_head_attention_forward(
            query=x[:1], key=x, value=x, embed_dim_to_check=D, num_heads=H, q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight, v_proj_weight=self.v_proj.weight, in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]), bias_k=None, bias_v=None,
            add_zero_attn=False, dropout_p=0.0, out_proj_weight=self.c_proj.weight, out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True, training=self.training, need_weights=False,
        )  # fmt: skip
        return x.squeeze(0)


class ClipResnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attnpool = nn.Conv2d(3, D, 3, 1, 1), AttentionPool2d()

    def forward(self, x: Tensor) -> Tensor:
        return self.attnpool(F.relu(self.conv(x)))


def clip_resnet(m: Any, x: Tensor) -> Formula:
    p = m.attnpool
    t = F.relu(m.conv(x)).flatten(2).mT
    t = torch.cat([t.mean(1, keepdim=True), t], 1) + p.positional_embedding

    def heads(t: Tensor) -> Tensor:
        return merge(attend(split(p.q_proj(t[:, :1])), split(p.k_proj(t)), split(p.v_proj(t))))

    return Formula(t, [Step(heads, lambda t: p.c_proj(heads(t)), heads)])


QUESTIONS: list[Question] = [
    *asks("Segformer", lambda: seeded(Segformer()), four, segformer, "attention, attention 1, heads 1, normed, block, block 1, update 1, 0>1"),
    *asks("SAM", lambda: seeded(Sam()), six, sam, "attention or windows, attention 1, normed, heads 1, block, block 1, update, model, 0>1"),
    *asks("CvT", lambda: seeded(Cvt()), four, cvt, "attention, heads, normed 1, block, block 1, 0>final, 0>logits, 1>logits"),
    *asks("XCiT", lambda: seeded(Xcit()), four, xcit, "attention or scaled, heads 1, normed or scaled, block, block 1, update, 0>1, 0>logits, 1>logits"),
    *asks("class attention behind", lambda: seeded(Xcit(lambda: Pre(Own(fused)))), four, cait, "attention, block, block 1, 0>1, 0>logits, 1>logits"),
    *asks("MaxViT", lambda: seeded(MaxVit()), four, max_vit, "attention, heads, attention call=1, block, block 1, update, 0>1, 0>logits"),
    *asks("CoAtNet", lambda: seeded(CoAtNet()), four, coatnet, "attention, heads 1, normed or refused, block, block 1, update, 0>final, 0>logits"),
    *asks("a VAE's middle", lambda: seeded(Middle()), four, middle, "attention, heads, normed, block, update"),
    *asks("Stable Diffusion's transformer", lambda: seeded(SpatialTransformer()), with_context, spatial, "attention, heads 1, normed, block, block 1, update, cross, cross 1, context, context 1, 0>final"),
    *asks("self-attention of a GAN", lambda: seeded(Discriminator()), four, discriminator, "attention or scaled, block, update or scaled"),
    *asks("CLIP's attention pool", lambda: seeded(ClipResnet()), four, clip_resnet, "attention, heads"),
]
