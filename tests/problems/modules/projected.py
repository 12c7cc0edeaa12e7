"""What stands between the tokens and the queries, keys and values: convolutions, rotations, adapters, padding, gates."""

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
    one,
    pre,
    seeded,
    split,
    tokens,
)
from problems.modules.grids import picture
from problems.modules.layouts import Adapted, adapted, dense_adapted
from problems.modules.softmax import stack_of

Heads = Callable[[Any, Tensor], Tensor]


def convolved(conv: Any, t: Tensor) -> Tensor:
    """A depthwise convolution of three tokens at a time, over (1, n, d)."""
    t, w = F.pad(t, (0, 0, 1, 1)), conv.weight[:, 0]
    return sum((t[:, j : t.shape[1] - 2 + j] * w[:, j] for j in range(3)), torch.zeros(1)) + conv.bias


class Behind(nn.Module):
    """One projection for queries, keys and values, and a linear map of some of them behind it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.o, self.way = nn.Linear(D, 3 * D), nn.Linear(D, D), way
        if way == "a convolution of all three":
            self.conv = nn.Conv1d(3 * D, 3 * D, 3, padding=1, groups=3 * D)
        elif way == "a convolution of the values":
            self.conv = nn.Conv1d(D, D, 3, padding=1, groups=D)
        elif way == "a matrix for each token":
            self.register_buffer("turns", torch.linalg.qr(tokens(N * 4, 4)[0].view(N, 4, 4)).Q)
        elif way == "one matrix for all heads":
            self.shared = nn.Linear(D // H, D // H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        if self.way == "a convolution of all three":
            y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        q, k, v = y.chunk(3, dim=-1)
        if self.way == "a convolution of the values":
            v = self.conv(v.transpose(1, 2)).transpose(1, 2)
        q, k, v = split(q), split(k), split(v)
        if self.way == "a matrix for each token":
            q, k = (torch.einsum("bhnd,nde->bhne", t, self.turns) for t in (q, k))
        elif self.way == "one matrix for all heads":
            q, k = self.shared(q), self.shared(k)
        return self.o(merge(F.scaled_dot_product_attention(q, k, v)))


def behind(m: Any, x: Tensor) -> Tensor:
    q, k, v = (x @ w.mT + b for w, b in zip(m.qkv.weight.chunk(3), m.qkv.bias.chunk(3), strict=True))
    if m.way == "a convolution of all three":
        q, k, v = convolved(m.conv, torch.cat([q, k, v], -1)).chunk(3, -1)
    elif m.way == "a convolution of the values":
        v = convolved(m.conv, v)
    q, k, v = split(q), split(k), split(v)
    if m.way == "a matrix for each token":
        q, k = ((t[..., None, :] @ m.turns).squeeze(-2) for t in (q, k))
    elif m.way == "one matrix for all heads":
        q, k = q @ m.shared.weight.mT, k @ m.shared.weight.mT
    return merge(attend(q, k, v))


WAYS = ("a convolution of all three", "a convolution of the values", "a matrix for each token", "one matrix for all heads")


class ChannelAttention(nn.Module):
    """Restormer: channels attend to channels, behind a depthwise convolution of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project_out = nn.Conv2d(D, 3 * D, 1), nn.Conv2d(D, D, 1)
        self.dw, self.weight = nn.Conv2d(3 * D, 3 * D, 3, padding=1, groups=3 * D), nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(1, H, D // H, -1) for t in self.dw(self.qkv(x)).chunk(3, dim=1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        out = ((q @ k.transpose(-2, -1)) * self.weight).softmax(dim=-1) @ v
        return self.project_out(out.reshape(x.shape))


class Restormer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.att, self.norm2 = nn.GroupNorm(1, D), ChannelAttention(), nn.GroupNorm(1, D)
        self.ffn = nn.Sequential(nn.Conv2d(D, 12, 1), nn.GELU(), nn.Conv2d(12, D, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm1(x))
        return x + self.ffn(self.norm2(x))


def restormer(m: Any, x: Tensor) -> Formula:
    a = m.att

    def attention(t: Tensor) -> Tensor:
        y = torch.einsum("oi,bihw->bohw", a.qkv.weight[..., 0, 0], t) + a.qkv.bias[:, None, None]
        q, k, v = (part.reshape(1, H, D // H, -1) for part in a.dw(y).chunk(3, 1))
        q, k = (part / part.square().sum(-1, keepdim=True).sqrt() for part in (q, k))
        out = attend(q * a.weight, k, v, scale=1.0).reshape(t.shape)
        return torch.einsum("oi,bihw->bohw", a.project_out.weight[..., 0, 0], out) + a.project_out.bias[:, None, None]

    def block(t: Tensor) -> Tensor:
        t = t + attention(m.norm1(t))
        return t + m.ffn(m.norm2(t))

    return Formula(x, [Step(block, attention, norm=m.norm1)])


class Dropped(Adapted):
    """An adapter as PEFT writes it, with dropout before the low-rank layer, which eval mode switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_b(self.lora_a(self.lora_dropout(x)))


def dropped(names: str) -> dict[str, Any]:
    return {name: Dropped() for name in names}


def adapted_heads(m: Any, x: Tensor) -> Tensor:
    made = (getattr(m, name) for name in "qkv")
    return merge(attend(*(split(dense_adapted(p, x) if isinstance(p, Adapted) else p(x)) for p in made)))


class Gated(nn.Module):
    """WavLM: the bias of positions is multiplied by gates that tokens make, head by head, before they are turned around."""

    def __init__(self, separate: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.gru, self.const, self.separate = nn.Linear(D // H, 8), nn.Parameter(torch.ones(1, H, 1, 1)), separate
        self.rel = nn.Parameter(torch.zeros(H, N, N))

    def forward(self, x: Tensor) -> Tensor:
        gated = x.view(*x.shape[:-1], H, -1).permute(0, 2, 1, 3)
        made = self.gru(gated).view(*gated.shape[:-1], 2, 4).sum(-1)
        a, b = torch.sigmoid(made).chunk(2, dim=-1)
        gate = a * (b * self.const - 1.0) + 2.0
        bias = gate.view(x.shape[0] * H, -1, 1) * self.rel
        if not self.separate:
            q, k, v = (split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
            return self.out_proj(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.view(1, H, N, N))))
        t = x.transpose(0, 1)
        out, _ = F.multi_head_attention_forward(
            t,
            t,
            t,
            D,
            H,
            torch.empty([0]),
            torch.cat((self.q_proj.bias, self.k_proj.bias, self.v_proj.bias)),
            None,
            None,
            False,
            0.0,
            self.out_proj.weight,
            self.out_proj.bias,
            False,
            None,
            True,
            bias,
            use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
        )
        return out.transpose(0, 1)


def gated(m: Any, x: Tensor) -> Formula:
    a = m.att

    def heads(t: Tensor) -> Tensor:
        made = (split(t) @ a.gru.weight.mT + a.gru.bias).unflatten(-1, (2, 4)).sum(-1)
        first, second = (1 / (1 + (-made).exp())).split(1, -1)
        gate = first * (second * a.const - 1) + 2
        return merge(attend(split(a.q_proj(t)), split(a.k_proj(t)), split(a.v_proj(t)), gate * a.rel))

    def attention(t: Tensor) -> Tensor:
        return a.out_proj(heads(t))

    def block(t: Tensor) -> Tensor:
        t = t + attention(m.ln1(t))
        return t + m.mlp(m.ln2(t))

    return Formula(x, [Step(block, attention, heads, m.ln1)])


class Windows(nn.Module):
    """Tokens are padded to whole windows of three inside the attention module, and the padding attends."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        y = F.pad(x, (0, 0, 0, -n % 3)).view(-1, 3, D)
        q, k, v = (split(t) for t in self.qkv(y).chunk(3, -1))
        return self.o(merge(F.scaled_dot_product_attention(q, k, v)).reshape(1, -1, D)[:, :n])


def windows(m: Any, x: Tensor) -> Tensor:
    t = torch.cat([x, torch.zeros(1, 1, D, dtype=x.dtype)], 1)
    outs = [merge(attend(*(split(part) for part in m.qkv(t[:, i : i + 3]).chunk(3, -1)))) for i in (0, 3)]
    return torch.cat(outs, 1)[:, :N]


class Lagged(nn.Module):
    """Queries, keys and values by convolutions of what came before, with zeros in front of the first tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.convs, self.o = nn.ModuleList([nn.Conv1d(D, D, 3, groups=D) for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x.transpose(1, 2), (2, 0))
        q, k, v = (split(conv(y).transpose(1, 2)) for conv in self.convs)
        return self.o(merge(F.scaled_dot_product_attention(q, k, v)))


def lagged(m: Any, x: Tensor) -> Tensor:
    t = torch.cat([torch.zeros(1, 2, D, dtype=x.dtype), x], 1)
    made = [sum((t[:, j : j + N] * c.weight[:, 0, j] for j in range(3)), torch.zeros(1)) + c.bias for c in m.convs]
    return merge(attend(*(split(t) for t in made)))


class ClassToken(nn.Module):
    """The first token is projected as it is, the others, a picture of 2 × 2, behind a convolution; CvT, or MViT behind qkv."""

    def __init__(self, projected_first: bool) -> None:
        super().__init__()
        self.qkv, self.o, self.projected_first = nn.Linear(D, 3 * D), nn.Linear(D, D), projected_first
        self.convs = nn.ModuleList([nn.Conv2d(D, D, 3, padding=1, groups=D, bias=False) for _ in range(3)])

    def pooled(self, t: Tensor, conv: nn.Module) -> Tensor:
        cls, rest = t[:, :1], t[:, 1:]
        rest = conv(rest.transpose(1, 2).reshape(1, D, 2, 2)).flatten(2).transpose(1, 2)
        return torch.cat((cls, rest), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.projected_first:
            q, k, v = (self.pooled(t, conv) for t, conv in zip(self.qkv(x).chunk(3, -1), self.convs, strict=True))
        else:
            weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
            q, k, v = (F.linear(self.pooled(x, conv), w, b) for conv, w, b in zip(self.convs, weights, biases, strict=True))
        return self.o(merge(F.scaled_dot_product_attention(split(q), split(k), split(v))))


def class_token(m: Any, x: Tensor) -> Tensor:
    def pooled(t: Tensor, conv: Any) -> Tensor:
        grid, w = F.pad(t[0, 1:].reshape(2, 2, D), (0, 0, 1, 1, 1, 1)), conv.weight[:, 0]
        cells = [(grid[i : i + 3, j : j + 3] * w.permute(1, 2, 0)).sum((0, 1)) for i in range(2) for j in range(2)]
        return torch.cat([t[:, :1], torch.stack(cells)[None]], 1)

    made = []
    for conv, w, b in zip(m.convs, m.qkv.weight.chunk(3), m.qkv.bias.chunk(3), strict=True):
        made.append(split(pooled(x @ w.mT + b, conv) if m.projected_first else pooled(x, conv) @ w.mT + b))
    return merge(attend(*made))


ALL = "attention, heads, normed, block, update"


def in_a_block(name: str, att: Callable[[], nn.Module], heads: Heads, *specs: str) -> list[Question]:
    return asks(name, lambda: seeded(Pre(att())), one, lambda m, x: Formula(x, [pre(m, heads)]), *(specs or (ALL,)))


QUESTIONS: list[Question] = [
    *(question for way in WAYS for question in in_a_block(f"fused qkv, {way}", lambda way=way: Behind(way), behind)),
    *asks("Restormer", lambda: seeded(Restormer()), picture, restormer, "attention, normed, block, update"),
    *asks(
        "LoRA with dropout on q, k and v",
        lambda: seeded(Own(fused, **dropped("qkv"))),
        one,
        adapted(*"qkv"),
        "attention, heads",
    ),
    *asks("LoRA with dropout on all", lambda: seeded(Own(fused, **dropped("qkvo"))), one, adapted(*"qkvo"), "attention, heads"),
    *asks(
        "LoRA with dropout, blocks",
        lambda: seeded(Stack(*(Pre(Own(fused, **dropped(names))) for names in ("qkv", "qv")))),
        one,
        stack_of(adapted_heads),
        "attention, attention 1, heads 1, normed, block 1, 0>1",
    ),
    *(
        question
        for separate in (True, False)
        for question in asks(
            f"a gated bias of positions, {'WavLM' if separate else 'sdpa'}",
            lambda separate=separate: seeded(Pre(Gated(separate))),
            one,
            gated,
            ALL,
        )
    ),
    *in_a_block("padded to whole windows", Windows, windows, "attention, normed, block, update"),
    *in_a_block("padded in front, convolutions", Lagged, lagged),
    *in_a_block("a class token, then convolved", lambda: ClassToken(True), class_token),
    *in_a_block("a class token, convolved first", lambda: ClassToken(False), class_token),
]
