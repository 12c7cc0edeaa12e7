"""Attention over windows, rows, columns and pooled tokens of pictures."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (
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
    plain,
    seeded,
    split,
    tokens,
)

SIDE, W = 4, 2  # a picture of 4 × 4 tokens, windows of 2 × 2


def picture() -> tuple[Tensor]:
    return (tokens(SIDE * SIDE),)


def windows(x: Tensor) -> Tensor:
    """(1, 16, d) to (windows, 4, d)."""
    x = x.view(1, SIDE // W, W, SIDE // W, W, D)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, W * W, D)


def unwindowed(t: Tensor) -> Tensor:
    x = t.view(1, SIDE // W, SIDE // W, W, W, D)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(1, SIDE * SIDE, D)


class WindowAttention(nn.Module):
    """Swin's: a table of biases by relative position, and a mask where windows are wrapped around."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.softmax = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Softmax(dim=-1)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * W - 1) ** 2, H))
        coords = torch.stack(torch.meshgrid(torch.arange(W), torch.arange(W), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None]).permute(1, 2, 0) + W - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * W - 1) + relative[..., 1])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        count, n, c = x.shape
        q, k, v = self.qkv(x).reshape(count, n, 3, H, c // H).permute(2, 0, 3, 1, 4)
        table = self.relative_position_bias_table[self.relative_position_index.view(-1)]  # pyright: ignore
        attn = (q * 0.5) @ k.transpose(-2, -1) + table.view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            attn = attn.view(1, mask.shape[0], H, n, n) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, H, n, n)
        return self.proj((self.softmax(attn) @ v).transpose(1, 2).reshape(count, n, c))


class SwinBlock(nn.Module):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp, self.shift = (
            nn.LayerNorm(D),
            WindowAttention(),
            nn.LayerNorm(D),
            mlp(),
            shift,
        )
        mask = None
        if shift:
            area = torch.zeros(SIDE, SIDE)
            for i, rows in enumerate((slice(0, -W), slice(-W, -shift), slice(-shift, None))):
                for j, columns in enumerate((slice(0, -W), slice(-W, -shift), slice(-shift, None))):
                    area[rows, columns] = 3 * i + j
            flat = windows(area.view(1, -1, 1).expand(1, -1, D))[..., 0]
            mask = (flat[:, None] - flat[:, :, None]).masked_fill(flat[:, None] != flat[:, :, None], -100.0)
        self.register_buffer("attn_mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        if self.shift:
            h = torch.roll(h.view(1, SIDE, SIDE, D), (-self.shift, -self.shift), dims=(1, 2)).view(x.shape)
        h = unwindowed(self.attn(windows(h), mask=self.attn_mask))
        if self.shift:
            h = torch.roll(h.view(1, SIDE, SIDE, D), (self.shift, self.shift), dims=(1, 2)).view(x.shape)
        x = x + h
        return x + self.mlp(self.norm2(x))


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def swin_bias(b: Any) -> Tensor:
    """What is added to the logits of all 16 tokens, (heads, 16, 16): minus infinity between windows, -100 across an edge."""
    bias, table = torch.full((H, SIDE**2, SIDE**2), -torch.inf, dtype=torch.float64), b.attn.relative_position_bias_table
    for p in range(SIDE**2):
        for q in range(SIDE**2):
            shifted = [[(place - b.shift) % SIDE for place in divmod(token, SIDE)] for token in (p, q)]
            (i, j), (k, m) = shifted
            if i // W == k // W and j // W == m // W:
                edge = b.shift and any((a >= SIDE - b.shift) != (c >= SIDE - b.shift) for a, c in ((i, k), (j, m)))
                bias[:, p, q] = table[(i - k + W - 1) * (2 * W - 1) + j - m + W - 1] - (100.0 if edge else 0.0)
    return bias


def swin(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        bias = swin_bias(b)

        def heads(t: Tensor) -> Tensor:
            return merge(attend(*(split(part) for part in b.attn.qkv(t).chunk(3, -1)), bias=bias))

        def attention(t: Tensor) -> Tensor:
            return b.attn.proj(heads(t))

        def block(t: Tensor) -> Tensor:
            t = t + attention(b.norm1(t))
            return t + b.mlp(b.norm2(t))

        return Step(block, attention, heads, b.norm1)

    return Formula(x, [of(b) for b in m.blocks])


class PooledQueries(nn.Module):
    """Hiera: queries are the largest of four tokens each, and so are what the residual carries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj, self.norm2, self.mlp = (
            nn.LayerNorm(D),
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
            nn.LayerNorm(D),
            mlp(),
        )
        self.skip = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        q = q.view(1, 4, -1, D).max(dim=1).values
        out = self.proj(merge(F.scaled_dot_product_attention(split(q), split(k), split(v))))
        x = self.skip(h).view(1, 4, -1, D).amax(dim=1) + out
        return x + self.mlp(self.norm2(x))


def pooled_queries(m: Any, x: Tensor) -> Formula:
    b = m.blocks[0]
    h = b.norm1(x)
    chosen_q = b.qkv(h)[..., :D].view(1, 4, -1, D).argmax(1, keepdim=True)
    chosen_x = b.skip(h).view(1, 4, -1, D).argmax(1, keepdim=True)

    def heads(t: Tensor) -> Tensor:
        q, k, v = b.qkv(t).chunk(3, -1)
        return merge(attend(split(q.reshape(1, 4, -1, D).gather(1, chosen_q)[:, 0]), split(k), split(v)))

    def attention(t: Tensor) -> Tensor:
        return b.proj(heads(t))

    def block(t: Tensor) -> Tensor:
        h = b.norm1(t)
        t = b.skip(h).reshape(1, 4, -1, D).gather(1, chosen_x)[:, 0] + attention(h)
        return t + b.mlp(b.norm2(t))

    return Formula(x, [Step(block, attention, heads, b.norm1)])


class Reduced(nn.Module):
    """PVT: keys and values of fewer tokens, by a convolution with a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.q, self.kv, self.o = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.sr, self.norm = nn.Conv2d(D, D, 2, stride=2), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln(x)
        small = self.sr(h.permute(0, 2, 1).reshape(1, D, SIDE, SIDE)).reshape(1, D, -1).permute(0, 2, 1)
        k, v = self.kv(self.norm(small)).chunk(2, dim=-1)
        return x + self.o(merge(F.scaled_dot_product_attention(split(self.q(h)), split(k), split(v))))


def reduced(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        w = b.sr.weight  # (d, d, 2, 2)

        def heads(t: Tensor) -> Tensor:
            grid = t.reshape(SIDE // 2, 2, SIDE // 2, 2, D)
            small = torch.einsum("iajbc,ocab->ijo", grid, w).reshape(1, -1, D) + b.sr.bias
            k, v = b.kv(b.norm(small)).chunk(2, -1)
            return merge(attend(split(b.q(t)), split(k), split(v)))

        return Step(lambda t: t + b.o(heads(b.ln(t))), lambda t: b.o(heads(t)), heads, b.ln)

    return Formula(x, [of(b) for b in m.blocks])


class Axial(nn.Module):
    """Attention along rows, then along columns, each a batch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.rows, self.ln2, self.columns = nn.LayerNorm(D), Own(fused), nn.LayerNorm(D), Own(fused)
        self.ln3, self.mlp = nn.LayerNorm(D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x).view(SIDE, SIDE, D)
        x = x + self.rows(h).reshape(x.shape)
        h = self.ln2(x).view(SIDE, SIDE, D).transpose(0, 1)
        x = x + self.columns(h).transpose(0, 1).reshape(x.shape)
        return x + self.mlp(self.ln3(x))


def axial(m: Any, x: Tensor) -> Formula:
    place = torch.arange(SIDE**2)
    nothing = torch.zeros(SIDE**2, SIDE**2, dtype=torch.float64)
    row = nothing.masked_fill(place[:, None] // SIDE != place // SIDE, -torch.inf)
    column = nothing.masked_fill(place[:, None] % SIDE != place % SIDE, -torch.inf)

    def of(b: Any) -> Step:
        def along(a: Any, t: Tensor, bias: Tensor) -> Tensor:
            return a.o(merge(attend(split(a.q(t)), split(a.k(t)), split(a.v(t)), bias)))

        def first(t: Tensor) -> Tensor:
            return t + along(b.rows, b.ln1(t), row)

        def block(t: Tensor) -> Tensor:
            t = first(t)
            t = t + along(b.columns, b.ln2(t), column)
            return t + b.mlp(b.ln3(t))

        maps: Any = {"attention call=1": lambda t: (lambda h: along(b.columns, h, column), b.ln2(first(t)))}
        return Step(block, lambda t: along(b.rows, t, row), norm=b.ln1, maps=maps)

    return Formula(x, [of(b) for b in m.blocks])


class NonLocal(nn.Module):
    """Attention over the places of a picture (a diffusion network's block): a group norm, 1×1 convolutions, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.GroupNorm(2, D), nn.Conv2d(D, 3 * D, 1), nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, rows, columns = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b * H, 3 * c // H, rows * columns).chunk(3, dim=1)
        weights = torch.einsum("bct,bcs->bts", q * 4**-0.25, k * 4**-0.25).softmax(-1)
        return x + self.proj(torch.einsum("bts,bcs->bct", weights, v).reshape(b, c, rows, columns))


def non_local(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        w, bias = b.qkv.weight[..., 0, 0], b.qkv.bias

        def heads(t: Tensor) -> Tensor:
            rows = t.flatten(2).mT @ w.mT + bias  # (1, places, heads of queries, keys, values)
            return merge(attend(*(part for part in split(rows).chunk(3, -1))))

        def attention(t: Tensor) -> Tensor:
            return (heads(t) @ b.proj.weight[..., 0, 0].mT + b.proj.bias).mT.reshape(t.shape)

        return Step(lambda t: t + attention(b.norm(t)), attention, heads, b.norm)

    return Formula(x, [of(b) for b in m.blocks])


class Stem(nn.Module):
    """A convolution before one block, as in CoAtNet: a convolutional block in the list, then one with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.conv, self.mlp = nn.LayerNorm(D), nn.Conv1d(D, D, 3, padding=1, groups=D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(self.ln(x).mT).mT
        return x + self.mlp(x)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.att, self.mlp = nn.LayerNorm(D), Own(fused), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.ln(x))
        return x + self.mlp(x)


def convolved(m: Any, x: Tensor) -> Formula:
    def conv(b: Any) -> Step:
        def block(t: Tensor) -> Tensor:
            h, w = F.pad(b.ln(t), (0, 0, 1, 1)), b.conv.weight[:, 0]
            t = t + sum(h[:, i : i + t.shape[1]] * w[:, i] for i in range(3)) + b.conv.bias
            return t + b.mlp(t)

        return Step(block)

    def att(b: Any) -> Step:
        def block(t: Tensor) -> Tensor:
            t = t + b.att.o(plain(b.att, b.ln(t)))
            return t + b.mlp(t)

        return Step(block, lambda t: b.att.o(plain(b.att, t)), lambda t: plain(b.att, t), b.ln)

    return Formula(x, [conv(b) if isinstance(b, Stem) else att(b) for b in m.blocks])


def channels() -> tuple[Tensor]:
    return (tokens(6).mT.reshape(1, D, 2, 3).contiguous(),)


QUESTIONS: list[Question] = [
    *asks(
        "Swin",
        lambda: seeded(Blocks(SwinBlock(0), SwinBlock(1))),
        picture,
        swin,
        "attention, attention 1, heads, normed 1, block, block 1, update, 0>1",
    ),
    *asks(
        "Hiera's pooling",
        lambda: seeded(Blocks(PooledQueries())),
        lambda: (tokens(8),),
        pooled_queries,
        "attention, heads, normed, block",
    ),
    *asks(
        "PVT's smaller keys",
        lambda: seeded(Blocks(Reduced(), Reduced())),
        picture,
        reduced,
        "attention 1, heads, normed, block 1",
    ),
    *asks("rows and columns", lambda: seeded(Blocks(Axial())), picture, axial, "attention, attention call=1, normed, block"),
    *asks(
        "a picture's places",
        lambda: seeded(Blocks(NonLocal(), NonLocal())),
        channels,
        non_local,
        "attention, heads 1, normed, block 1, model",
    ),
    *asks(
        "a convolutional block first",
        lambda: seeded(Blocks(Stem(), Attentive(), Attentive())),
        lambda: (tokens(),),
        convolved,
        "block, attention 1, block 1, update 2, model, 0>2, attention refused, heads refused",
    ),
]
