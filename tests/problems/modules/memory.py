"""Attention of near tokens: chunks that look back, memory of an earlier segment."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    H,
    N,
    Pre,
    Question,
    Stack,
    Step,
    asks,
    attend,
    merge,
    mlp,
    one,
    seeded,
    split,
)
from problems.modules.decoders import ids


class XlAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_net, self.r_net, self.o_net = (
            nn.Linear(D, 3 * D, bias=False),
            nn.Linear(D, D, bias=False),
            nn.Linear(D, D, bias=False),
        )
        self.r_w_bias, self.r_r_bias = nn.Parameter(torch.zeros(H, 4)), nn.Parameter(torch.zeros(H, 4))
        self.layer_norm = nn.LayerNorm(D)

    def shift(self, x: Tensor) -> Tensor:
        pad = torch.zeros((x.size(0), 1, *x.size()[2:]), dtype=x.dtype)
        padded = torch.cat([pad, x], dim=1)
        return padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])[1:].view_as(x)

    def forward(self, w: Tensor, r: Tensor, mems: Tensor, mask: Tensor) -> Tensor:
        qlen, n = w.size(0), w.size(0) + mems.size(0)
        cat = torch.cat([mems, w], 0)
        q, k, v = torch.chunk(self.qkv_net(cat), 3, dim=-1)
        q = q[-qlen:]
        rk = self.r_net(r).view(n, H, 4)
        q, k, v = q.view(qlen, -1, H, 4), k.view(n, -1, H, 4), v.view(n, -1, H, 4)
        ac = torch.einsum("ibnd,jbnd->ijbn", (q + self.r_w_bias, k))
        bd = self.shift(torch.einsum("ibnd,jnd->ijbn", (q + self.r_r_bias, rk)))
        score = (ac + bd) * 0.5
        score = score.float().masked_fill(mask[:, :, None, None], -1e30).type_as(score)
        vec = torch.einsum("ijbn,jbnd->ibnd", (F.softmax(score, dim=1), v))
        return self.layer_norm(w + self.o_net(vec.contiguous().view(qlen, -1, D)))


class XlLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dec_attn, self.pos_ff, self.norm = XlAttention(), mlp(), nn.LayerNorm(D)

    def forward(self, x: Tensor, r: Tensor, mems: Tensor, mask: Tensor) -> Tensor:
        x = self.dec_attn(x, r, mems, mask)
        return self.norm(x + self.pos_ff(x))


class TransformerXl(nn.Module):
    """Tokens lead, and the memories are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.emb = nn.ModuleList([XlLayer(), XlLayer()]), nn.Embedding(9, D)
        self.register_buffer("mems", torch.randn(2, 3, 1, D, generator=torch.Generator().manual_seed(3)).double())

    def forward(self, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.emb(input_ids).transpose(0, 1)
        n = x.shape[0]
        pos = torch.arange(n + 2, -1, -1.0, dtype=torch.float64)
        r = torch.cat(
            [
                torch.sin(pos[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])),
                torch.cos(pos[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])),
            ],
            -1,
        )
        mask = torch.triu(torch.ones(n, n + 3), diagonal=4).bool()
        states = []
        for i, layer in enumerate(self.layers):
            states.append(x)
            x = layer(x, r, self.mems[i], mask)  # pyright: ignore[reportIndexIssue]
        return x.transpose(0, 1), states


def xl(m: Any, input_ids: Tensor) -> Formula:
    pos = torch.arange(N + 2, -1, -1.0, dtype=torch.float64)
    waves = pos[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    r = torch.cat([waves.sin(), waves.cos()], -1)

    def of(b: Any, mem: Tensor) -> Step:
        a = b.dec_attn

        def heads(t: Tensor) -> Tensor:
            wq, wk, wv = a.qkv_net.weight.chunk(3)
            full = torch.cat([mem, t], 0)[:, 0]
            q, k, v, rk = split(t[:, 0] @ wq.mT), split(full @ wk.mT), split(full @ wv.mT), split(r @ a.r_net.weight.mT)
            content = (q + a.r_w_bias[:, None]) @ k.mT
            position = (q + a.r_r_bias[:, None]) @ rk.mT  # the column of r is N + 2 − distance
            i, j = torch.arange(N)[:, None], torch.arange(N + 3)[None]
            distance = i + 3 - j
            column = (N + 2 - distance).clamp(0, N + 2)
            logits = (content + position.gather(-1, column.expand(H, -1, -1))) / 2
            logits = logits.masked_fill(distance < 0, -torch.inf)
            return merge(logits.softmax(-1) @ v)[:, None]

        def attention(t: Tensor) -> Tensor:
            return heads(t) @ a.o_net.weight.mT

        def block(t: Tensor) -> Tensor:
            t = a.layer_norm(t + attention(t))
            return b.norm(t + b.pos_ff(t))

        return Step(block, attention, heads)

    return Formula(m.emb.weight[input_ids].transpose(0, 1), [of(b, m.mems[i]) for i, b in enumerate(m.layers)])


class LocalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        w, n = 2, x.shape[1]
        q, k, v = (split(t) for t in self.to_qkv(x).chunk(3, dim=-1))
        pad = -n % w
        q, k, v = (F.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
        b_t = torch.arange(n + pad).view(1, -1, w)
        bq, bk, bv = (t.reshape(*t.shape[:2], -1, w, t.shape[-1]) for t in (q, k, v))

        def look_around(t: Tensor, value: float) -> Tensor:
            dim = 1 if t.ndim == 3 else 2
            before = torch.full_like(t.narrow(dim, 0, 1), value)
            return torch.cat([torch.cat([before, t.narrow(dim, 0, t.shape[dim] - 1)], dim), t], dim=dim + 1)

        bk, bv, at = look_around(bk, 0.0), look_around(bv, 0.0), look_around(b_t.float(), -1.0).long()
        sim = torch.einsum("bhwie,bhwje->bhwij", bq, bk) * 0.5
        mask = (b_t[..., :, None] < at[..., None, :]) | (at[..., None, :] == -1) | (at[..., None, :] >= n)
        sim = sim.masked_fill(mask, -torch.finfo(sim.dtype).max)
        out = torch.einsum("bhwij,bhwje->bhwie", sim.softmax(-1), bv).flatten(2, 3)[:, :, :n]
        return self.to_out(merge(out))


def local_heads(a: Any, t: Tensor) -> Tensor:
    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    near = (j <= i) & (j // 2 >= i // 2 - 1)
    bias = torch.zeros(N, N, dtype=torch.float64).masked_fill(~near, -torch.inf)
    return merge(attend(*(split(y) for y in (t @ a.to_qkv.weight.mT).chunk(3, -1)), bias))  # pyright: ignore


def local(b: Any) -> Step:
    def run(t: Tensor) -> Tensor:
        return local_heads(b.att, t) @ b.att.to_out.weight.mT

    def block(t: Tensor) -> Tensor:
        t = t + run(b.ln1(t))
        return t + b.mlp(b.ln2(t))

    return Step(block, run, lambda t: local_heads(b.att, t), b.ln1)


QUESTIONS: list[Question] = [
    *asks(
        "Transformer-XL",
        lambda: seeded(TransformerXl()),
        ids,
        xl,
        "attention, heads 1, block, block 1, update, 0>1, model",
        tolerance=1e-5,
    ),
    *asks(
        "chunks that look back",
        lambda: seeded(Stack(Pre(LocalAttention()), Pre(LocalAttention()))),
        one,
        lambda m, x: Formula(x, [local(b) for b in m.blocks], m.norm),
        "attention, heads 1, normed, block, update 1, 0>1",
    ),
]
