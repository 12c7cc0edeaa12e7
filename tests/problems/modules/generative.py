"""Transformers of diffusion models and mobile networks: long skips, two attentions beside each other, cosine windows."""

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
    one,
    plain,
    pre,
    seeded,
    split,
    tokens,
)
from problems.modules.decoders import silu
from problems.modules.grids import four


class SkipBlock(nn.Module):
    """U-ViT: later blocks take what left an earlier one, side by side with the tokens."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(D), Own(fused), nn.LayerNorm(D), mlp()
        self.skip_linear = nn.Linear(2 * D, D) if skip else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None and skip is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class UVit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_blocks, self.mid_block, self.out_blocks = (
            nn.ModuleList([SkipBlock(False)]),
            SkipBlock(False),
            nn.ModuleList([SkipBlock(True)]),
        )
        self.embed, self.time, self.norm, self.decoder_pred = nn.Linear(6, D), nn.Linear(1, D), nn.LayerNorm(D), nn.Linear(D, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = torch.cat((self.time(t[:, None])[:, None], self.embed(x)), dim=1)
        skips = []
        for b in self.in_blocks:
            x = b(x)
            skips.append(x)
        x = self.mid_block(x)
        for b in self.out_blocks:
            x = b(x, skips.pop())
        return self.decoder_pred(self.norm(x))[:, 1:]


def u_vit(m: Any, x: Tensor, t: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def run(t: Tensor) -> Tensor:
            return b.attn.o(plain(b.attn, t))

        def block(t: Tensor) -> Tensor:
            t = t + run(b.norm1(t))
            return t + b.mlp(b.norm2(t))

        return Step(block, run, lambda t: plain(b.attn, t), b.norm1)

    first, middle, last = of(m.in_blocks[0]), of(m.mid_block), of(m.out_blocks[0])

    def whole(t: Tensor) -> Tensor:
        t = first.block(t)
        y = middle.block(t)
        w, b = m.out_blocks[0].skip_linear.weight, m.out_blocks[0].skip_linear.bias
        return last.block(y @ w[:, :D].mT + t @ w[:, D:].mT + b)

    maps: Any = {
        "to final": lambda t: (whole, t),
        "model": lambda t: (lambda s: m.norm(whole(s)), t),
        "to logits": lambda t: (lambda s: m.decoder_pred(m.norm(whole(s)))[:, 1:], t),
    }
    enter = torch.cat([m.time(t[:, None])[:, None], m.embed(x)], 1)
    return Formula(enter, [Step(first.block, first.attention, first.heads, first.norm, maps), middle, last])


def with_time() -> tuple[Tensor, Tensor]:
    return tokens(4, 6), torch.tensor([0.3], dtype=torch.float64)


class Dual(nn.Module):
    """SD3.5: the image attends together with the text, and a second time alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ada, self.norm1, self.norm1_context, self.norm2 = (
            nn.Linear(D, 4 * D),
            *(nn.LayerNorm(D, elementwise_affine=False) for _ in range(3)),
        )
        self.qkv, self.qkv_c, self.out, self.out_c = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.attn2, self.ff, self.ff_c = Own(fused), mlp(), mlp()

    def forward(self, x: Tensor, c: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        scale, gate, scale2, gate2 = self.ada(F.silu(temb))[:, None].chunk(4, -1)
        h, e = self.norm1(x), self.norm1_context(c)
        n = x.shape[1]
        q, k, v = (
            torch.cat(p, 1) for p in zip(self.qkv(h * (1 + scale)).chunk(3, -1), self.qkv_c(e).chunk(3, -1), strict=True)
        )
        y = merge(F.scaled_dot_product_attention(split(q), split(k), split(v)))
        x = x + gate * self.out(y[:, :n]) + gate2 * self.attn2(h * (1 + scale2))
        c = c + self.out_c(y[:, n:])
        return x + self.ff(self.norm2(x)), c + self.ff_c(self.norm2(c))


class Sd35(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks, self.proj = nn.ModuleList([Dual(), Dual()]), nn.Linear(D, 4)

    def forward(self, x: Tensor, c: Tensor, temb: Tensor) -> Tensor:
        for b in self.transformer_blocks:
            x, c = b(x, c, temb)
        return self.proj(x)


def sd35(m: Any, x: Tensor, c: Tensor, temb: Tensor) -> Formula:
    n = x.shape[1] * D

    def apart(t: Tensor) -> tuple[Tensor, Tensor]:
        return t[:n].reshape(1, -1, D), t[n:].reshape(1, -1, D)

    def together(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a.reshape(-1), b.reshape(-1)])

    def of(b: Any) -> Step:
        scale, gate, scale2, gate2 = b.ada(silu(temb)).chunk(4, -1)

        def block(t: Tensor) -> Tensor:
            x, c = apart(t)
            h, e = b.norm1(x), b.norm1_context(c)
            q, k, v = (torch.cat(p, 1) for p in zip(b.qkv(h * (1 + scale)).chunk(3, -1), b.qkv_c(e).chunk(3, -1), strict=True))
            y = merge(attend(split(q), split(k), split(v)))
            x = x + gate * b.out(y[:, : x.shape[1]]) + gate2 * b.attn2.o(plain(b.attn2, h * (1 + scale2)))
            c = c + b.out_c(y[:, x.shape[1] :])
            return together(x + b.ff(b.norm2(x)), c + b.ff_c(b.norm2(c)))

        return Step(block)

    return Formula(together(x, c), [of(b) for b in m.transformer_blocks])


def image_text_time() -> tuple[Tensor, Tensor, Tensor]:
    return tokens(5), tokens(3, seed=8), tokens(1, seed=9)[0]


class Reversible(nn.Module):
    """Reformer: two halves of the channels, each moved by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_f, self.f, self.norm_g, self.g = nn.LayerNorm(D), Own(fused), nn.LayerNorm(D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = torch.chunk(x, 2, dim=2)
        y1 = x1 + self.f(self.norm_f(x2))
        y2 = x2 + self.g(self.norm_g(y1))
        return torch.cat([y1, y2], dim=2)


class Reformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Reversible(), Reversible()]), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x], dim=-1)
        for b in self.blocks:
            x = b(x)
        return self.norm(torch.stack(x.chunk(2, dim=-1)).mean(dim=0))


def reformer(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def run(t: Tensor) -> Tensor:
            return b.f.o(plain(b.f, t))

        def block(t: Tensor) -> Tensor:
            one = t[..., :D] + run(b.norm_f(t[..., D:]))
            return torch.cat([one, t[..., D:] + b.g(b.norm_g(one))], -1)

        maps: Any = {
            "attention": lambda t: (run, b.norm_f(t[..., D:])),
            "heads": lambda t: (lambda h: plain(b.f, h), b.norm_f(t[..., D:])),
        }
        return Step(block, maps=maps)

    return Formula(torch.cat([x, x], -1), [of(b) for b in m.blocks])


class MobileVit(nn.Module):
    """A convolution, blocks on unfolded patches, and both side by side behind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.transformer = (
            nn.Conv2d(3, 6, 3, 1, 1),
            nn.Conv2d(6, D, 1),
            nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]),
        )
        self.conv3, self.conv4 = nn.Conv2d(D, 6, 1), nn.Conv2d(12, 6, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        y = x.clone()
        x = self.conv2(F.silu(x))
        x = x.reshape(1, D, 2, 2, 2, 2).permute(0, 3, 5, 2, 4, 1).reshape(4, 4, D)
        for b in self.transformer:
            x = b(x)
        x = x.reshape(1, 2, 2, 2, 2, D).permute(0, 5, 3, 1, 4, 2).reshape(1, D, 4, 4)
        return self.conv4(torch.cat((self.conv3(x), y), 1))


def mobile_vit(m: Any, x: Tensor) -> Formula:
    y = m.conv2(silu(m.conv1(x)))
    enter = torch.stack([y[0, :, i::2, j::2].flatten(1).mT for i in (0, 1) for j in (0, 1)])
    return Formula(enter, [pre(b) for b in m.transformer])


class Cosine(nn.Module):
    """Swin's second version: cosines with a learned temperature, and norms behind attention and network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.logit_scale = (
            nn.Linear(D, 3 * D, bias=False),
            nn.Linear(D, D),
            nn.Parameter(torch.zeros(H, 1, 1)),
        )
        self.q_bias, self.v_bias, self.norm1, self.norm2, self.mlp = (
            nn.Parameter(torch.zeros(D)),
            nn.Parameter(torch.zeros(D)),
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            mlp(),
        )

    def attend(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias))
        q, k, v = (split(t) for t in F.linear(x, self.qkv.weight, bias).chunk(3, -1))
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.logit_scale, max=4.6).exp()
        return self.proj(merge(attn.softmax(-1) @ v))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attend(x))
        return x + self.norm2(self.mlp(x))


class SwinTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = nn.ModuleList([Cosine(), Cosine()]), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def swin_two(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            wq, wk, wv = b.qkv.weight.chunk(3)
            q, k, v = split(t @ wq.mT + b.q_bias), split(t @ wk.mT), split(t @ wv.mT + b.v_bias)
            q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
            return merge((q @ k.mT * b.logit_scale.exp()).softmax(-1) @ v)

        def block(t: Tensor) -> Tensor:
            t = t + b.norm1(b.proj(heads(t)))
            return t + b.norm2(b.mlp(t))

        return Step(block, lambda t: b.proj(heads(t)), heads)

    return Formula(x, [of(b) for b in m.blocks], m.norm, m.head)


QUESTIONS: list[Question] = [
    *asks(
        "U-ViT",
        lambda: seeded(UVit()),
        with_time,
        u_vit,
        "attention, heads 1, normed, block, block 1, 0>1, 0>final, model, 0>logits",
    ),
    *asks("SD3.5", lambda: seeded(Sd35()), image_text_time, sd35, "block, block 1, update, 0>1", parts=(5 * D, 3 * D)),
    *asks("Reformer", lambda: seeded(Reformer()), one, reformer, "attention, heads 1, block, block 1, update, 0>1"),
    *asks(
        "MobileViT",
        lambda: seeded(MobileVit()),
        four,
        mobile_vit,
        "attention, heads 1, normed, block, block 1, update, 0>1, 0>final",
    ),
    *asks(
        "Swin's second version",
        lambda: seeded(SwinTwo()),
        one,
        swin_two,
        "attention, heads 1, block, update 1, model, 0>final, 0>logits",
    ),
]
