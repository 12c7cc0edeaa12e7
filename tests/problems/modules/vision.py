"""Transformers for pictures: timm's, vit-pytorch's, and residuals as modules."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    H,
    Own,
    Question,
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
)
from problems.modules.models import SPANS


class PackedAttention(nn.Module):
    """timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.proj_drop, self.q_norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Dropout(0.1), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), k, v, dropout_p=0.1 if self.training else 0.0)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(b, n, c)))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class TimmBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = nn.LayerNorm(D), PackedAttention(), LayerScale(), nn.Identity()
        self.norm2, self.mlp, self.ls2, self.drop_path2 = nn.LayerNorm(D), mlp(), LayerScale(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Module):
    """timm's: patches by a convolution, a class token, blocks in an `nn.Sequential`, a norm, a head on the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.cls_token = nn.Conv2d(3, D, 2, stride=2), nn.Parameter(torch.zeros(1, 1, D))
        self.pos_embed, self.blocks = nn.Parameter(torch.zeros(1, 5, D)), nn.Sequential(TimmBlock(), TimmBlock())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


def picture() -> tuple[Tensor]:
    return (torch.randn(1, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7)),)


def patches(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution whose stride is its width, as a product."""
    size = weight.shape[-1]
    squares = image.unfold(2, size, size).unfold(3, size, size)  # (1, c, rows, columns, size, size)
    return squares.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2) @ weight.flatten(1).mT + bias


def packed_heads(a: Any, t: Tensor) -> Tensor:
    w, b = a.qkv.weight.chunk(3), a.qkv.bias.chunk(3)
    return merge(attend(*(split(t @ wi.mT + bi) for wi, bi in zip(w, b, strict=True))))


def timm(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return b.attn.proj(packed_heads(b.attn, t))

        def block(t: Tensor) -> Tensor:
            t = t + b.ls1.gamma * attention(b.norm1(t))
            return t + b.ls2.gamma * b.mlp(b.norm2(t))

        maps: Any = {"attention scaled": lambda t: (lambda h: b.ls1.gamma * attention(h), b.norm1(t))}
        return Step(block, attention, lambda t: packed_heads(b.attn, t), b.norm1, maps)

    rows = patches(x, m.patch_embed.weight, m.patch_embed.bias)
    enter = torch.cat([m.cls_token, rows], 1) + m.pos_embed
    return Formula(enter, [of(b) for b in m.blocks], m.norm, lambda t: m.head(t[:, 0]))


class PreNorm(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(D), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class NormInside(nn.Module):
    """vit-pytorch today: attention begins with its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_qkv, self.to_out = (
            nn.LayerNorm(D),
            nn.Linear(D, 3 * D, bias=False),
            nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1)),
        )
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        return self.to_out(merge(torch.matmul(self.attend(torch.matmul(q, k.transpose(-1, -2)) * 0.5), v)))


class Pairwise(nn.Module):
    """vit-pytorch: every element of the list is a pair, attention and network, and the residuals stand outside."""

    def __init__(self, norm_inside: bool) -> None:
        super().__init__()
        feed = lambda: nn.Sequential(nn.LayerNorm(D), mlp()) if norm_inside else PreNorm(mlp())  # noqa: E731
        att = lambda: NormInside() if norm_inside else PreNorm(Own(fused))  # noqa: E731
        self.layers = nn.ModuleList([nn.ModuleList([att(), feed()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = attn(x) + x
            x = ff(x) + x
        return x


def pairwise(m: Any, x: Tensor) -> Formula:
    def of(attn: Any, ff: Any) -> Step:
        inside = isinstance(attn, NormInside)

        def heads(t: Tensor) -> Tensor:
            if not inside:
                return plain(attn.fn, t)
            return merge(attend(*(split(t @ w.mT) for w in attn.to_qkv.weight.chunk(3))))

        def attention(t: Tensor) -> Tensor:
            return attn.to_out(heads(t)) if inside else attn.fn.o(heads(t))

        def block(t: Tensor) -> Tensor:
            t = t + attention(attn.norm(t))
            return t + (ff[1](ff[0](t)) if inside else ff.fn(ff.norm(t)))

        return Step(block, attention, heads, attn.norm)

    return Formula(x, [of(*pair) for pair in m.layers])


class ResidualSequence(nn.Module):
    """One `nn.Sequential` a block, each residual a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(Residual(PreNorm(Own(fused))), Residual(PreNorm(mlp()))) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def residual_sequence(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        att, ff = b[0].fn, b[1].fn

        def block(t: Tensor) -> Tensor:
            t = t + att.fn.o(plain(att.fn, att.norm(t)))
            return t + ff.fn(ff.norm(t))

        return Step(block, lambda t: att.fn.o(plain(att.fn, t)), lambda t: plain(att.fn, t), att.norm)

    return Formula(x, [of(b) for b in m.net])


QUESTIONS: list[Question] = [
    *asks(
        "timm",
        lambda: seeded(VisionTransformer()),
        picture,
        timm,
        "attention 1 or scaled, heads 1, block, update 1",
        SPANS,
        "0>logits",
    ),
    *asks(
        "pairs in a list",
        lambda: seeded(Pairwise(False)),
        one,
        pairwise,
        "attention 1, heads 1, normed, block, block 1, update",
        SPANS,
    ),
    *asks(
        "pairs in a list, norms inside",
        lambda: seeded(Pairwise(True)),
        one,
        pairwise,
        "attention 1, heads 1, normed, block, block 1",
        SPANS,
    ),
    *asks(
        "residuals as modules",
        lambda: seeded(ResidualSequence()),
        one,
        residual_sequence,
        "attention 1, normed, block 1, model",
    ),
]
