"""Attention on pictures: fewer keys, windows with relative positions, convolutional projections."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    H,
    Question,
    Step,
    asks,
    attend,
    merge,
    mlp,
    seeded,
    split,
)


def image(h: int = 4, w: int = 4, c: int = D, seed: int = 7) -> Tensor:
    return torch.randn(1, c, h, w, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def picture() -> tuple[Tensor]:
    return (image(),)


def gelu(t: Tensor) -> Tensor:
    return t * (1 + torch.erf(t / 2**0.5)) / 2


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
        s = self.window or h
        pad = -h % s
        p = h + pad
        if self.window:
            x = F.pad(x, (0, 0, 0, pad, 0, pad))
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


def scaled(bn: Any, t: Tensor) -> Tensor:
    """A batch norm in eval mode; torch's own gives wrong gradients in some layouts."""
    by = bn.weight / (bn.running_var + bn.eps).sqrt()
    return (t - bn.running_mean[:, None, None]) * by[:, None, None] + bn.bias[:, None, None]


def cvt(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            a, grid = b.attn, t[:, 1:].mT.reshape(1, D, 4, 4)
            q, k, v = (torch.cat([t[:, :1], scaled(c.bn, c.conv(grid)).flatten(2).mT], 1) for c in (a.cq, a.ck, a.cv))
            return merge(attend(split(a.q(q)), split(a.k(k)), split(a.v(v)), scale=D**-0.5))

        def block(t: Tensor) -> Tensor:
            t = t + b.attn.proj(heads(b.norm1(t)))
            return t + b.mlp(b.norm2(t))

        return Step(block, lambda t: b.attn.proj(heads(t)), heads, b.norm1)

    enter = torch.cat([m.cls_token, m.proj(x).flatten(2).mT], 1)
    return Formula(enter, [of(b) for b in m.blocks], logits=lambda t: m.head(m.norm(t[:, 0])))


def four() -> tuple[Tensor]:
    return (image(4, 4, 3),)


QUESTIONS: list[Question] = [
    *asks(
        "Segformer",
        lambda: seeded(Segformer()),
        four,
        segformer,
        "attention, attention 1, heads 1, normed, block, block 1, update 1, 0>1",
    ),
    *asks(
        "SAM",
        lambda: seeded(Sam()),
        six,
        sam,
        "attention or windows, attention 1, normed, heads 1, block, block 1, update, model, 0>1",
    ),
    *asks("CvT", lambda: seeded(Cvt()), four, cvt, "attention, heads, normed 1, block, block 1, 0>final, 0>logits, 1>logits"),
]
