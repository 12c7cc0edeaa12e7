"""Attention inside networks of convolutions: a VAE's, Stable Diffusion's, a GAN's, CLIP's."""

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
    seeded,
    split,
)
from problems.modules.grids import four, gelu, image


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
        self.norm1, self.conv1, self.norm2, self.conv2 = (
            nn.GroupNorm(2, D),
            nn.Conv2d(D, D, 3, 1, 1),
            nn.GroupNorm(2, D),
            nn.Conv2d(D, D, 3, 1, 1),
        )

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
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(D, D, bias=False),
            nn.Linear(context, D, bias=False),
            nn.Linear(context, D, bias=False),
        )
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


class Sagan(nn.Module):
    """Self-attention of GANs: channels first, fewer channels for queries and keys, a gain that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.gamma = (
            nn.Conv1d(D, 2, 1),
            nn.Conv1d(D, 2, 1),
            nn.Conv1d(D, D, 1),
            nn.Parameter(torch.ones(1)),
        )

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
        self.conv1, self.attn, self.conv2, self.fc = (
            nn.Conv2d(3, D, 3, 1, 1),
            Sagan(),
            nn.Conv2d(D, D, 3, 2, 1),
            nn.Linear(D * 4, 1),
        )

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
    *asks("a VAE's middle", lambda: seeded(Middle()), four, middle, "attention, heads, normed, block, update"),
    *asks(
        "Stable Diffusion's transformer",
        lambda: seeded(SpatialTransformer()),
        with_context,
        spatial,
        "attention, heads 1, normed, block, block 1, update, cross, cross 1, context, context 1, 0>final",
        hidden="context 1",
    ),
    *asks(
        "self-attention of a GAN",
        lambda: seeded(Discriminator()),
        four,
        discriminator,
        "attention or scaled, block, update",
    ),
    *asks("CLIP's attention pool", lambda: seeded(ClipResnet()), four, clip_resnet, "attention, heads"),
]
