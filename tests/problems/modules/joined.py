"""Attention that joins text and video, agents, graphs, and pairs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.approximate import by
from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    H,
    N,
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
from problems.modules.decoders import silu
from problems.modules.mixing import stack


class CogBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.q, self.k, self.v, self.o, self.ff = (
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            *(nn.Linear(D, D) for _ in range(4)),
            mlp(),
        )
        self.ada = nn.Linear(D, 4 * D)

    def forward(self, hidden: Tensor, encoder: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate, enc_gate = self.ada(F.silu(temb)).chunk(4, dim=1)
        n = encoder.size(1)
        h, e = self.norm1(hidden) * (1 + scale)[:, None] + shift[:, None], self.norm1(encoder)
        x = torch.cat([e, h], dim=1)
        y = self.o(merge(F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)))))
        e, h = y.split([n, y.size(1) - n], dim=1)
        hidden, encoder = hidden + gate[:, None] * h, encoder + enc_gate[:, None] * e
        f = self.ff(torch.cat([self.norm2(encoder), self.norm2(hidden)], dim=1))
        return hidden + gate[:, None] * f[:, n:], encoder + enc_gate[:, None] * f[:, :n]


class Cog(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm, self.proj = nn.ModuleList([CogBlock(), CogBlock()]), nn.LayerNorm(D), nn.Linear(D, 4)

    def forward(self, hidden: Tensor, encoder: Tensor, temb: Tensor) -> Tensor:
        for b in self.blocks:
            hidden, encoder = b(hidden, encoder, temb)
        return self.proj(self.norm(hidden))


def cog(m: Any, hidden: Tensor, encoder: Tensor, temb: Tensor) -> Formula:
    """Streams in the order of the arguments: video (5 tokens), text (3)."""

    def apart(t: Tensor) -> tuple[Tensor, Tensor]:
        return t[: 5 * D].reshape(1, 5, D), t[5 * D :].reshape(1, 3, D)

    def together(h: Tensor, e: Tensor) -> Tensor:
        return torch.cat([h.reshape(-1), e.reshape(-1)])

    def of(b: Any) -> Step:
        shift, scale, gate, enc = b.ada(silu(temb)).chunk(4, 1)

        def block(t: Tensor) -> Tensor:
            h, e = apart(t)
            x = torch.cat([b.norm1(e), b.norm1(h) * (1 + scale) + shift], 1)
            y = b.o(merge(attend(split(b.q(x)), split(b.k(x)), split(b.v(x)))))
            h, e = h + gate * y[:, 3:], e + enc * y[:, :3]
            return together(h + gate * b.ff(b.norm2(h)), e + enc * b.ff(b.norm2(e)))

        def joint(t: Tensor) -> Any:
            h, e = apart(t)
            x = torch.cat([b.norm1(e), b.norm1(h) * (1 + scale) + shift], 1)
            return (lambda y: b.o(merge(attend(split(b.q(y)), split(b.k(y)), split(b.v(y)))))), x

        def one_of(k: int) -> Any:
            def point(t: Tensor) -> Any:
                fixed = apart(t)
                return (lambda s: apart(block(together(*(s if i == k else f for i, f in enumerate(fixed)))))[k]), fixed[k]

            return point

        return Step(block, maps={"attention": joint, "block stream=0": one_of(0), "block stream=1": one_of(1)})

    return Formula(together(hidden, encoder), [of(b) for b in m.blocks])


def video() -> tuple[Tensor, Tensor, Tensor]:
    return tokens(5), tokens(3, seed=8), tokens(1, seed=9)[0]


class Agents(nn.Module):
    """Agent attention: a few pooled tokens look at all, and all look at those."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        agents = F.adaptive_avg_pool1d(q.flatten(0, 1).mT, 2).mT.reshape(1, H, 2, 4)
        gathered = (agents @ k.mT * 0.5).softmax(-1) @ v
        return self.o(merge((q @ agents.mT * 0.5).softmax(-1) @ gathered))


def agents(a: Any, x: Tensor) -> Tensor:
    q, k, v = split(a.q(x)), split(a.k(x)), split(a.v(x))
    pooled = torch.stack([q[:, :, 0:3].mean(2), q[:, :, 2:5].mean(2)], 2)
    return merge(attend(q, pooled, attend(pooled, k, v)))


class Gat(nn.Module):
    """Graph attention: logits are sums of two numbers, on the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.att_src, self.att_dst, self.bias = (
            nn.Linear(D, D, bias=False),
            nn.Parameter(torch.zeros(H, 4)),
            nn.Parameter(torch.zeros(H, 4)),
            nn.Parameter(torch.zeros(D)),
        )

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.lin(x).unflatten(-1, (H, 4))
        src, dst = (h * self.att_src).sum(-1), (h * self.att_dst).sum(-1)
        e = F.leaky_relu(dst[:, :, None] + src[:, None], 0.2)
        e = e.masked_fill(adjacency[None, :, :, None] == 0, float("-inf"))
        return torch.einsum("bijh,bjhc->bihc", e.softmax(2), h).flatten(2) + self.bias


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Gat(), Gat()])

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x, adjacency)
            if i == 0:
                x = F.elu(x)
        return x


def graph(m: Any, x: Tensor, adjacency: Tensor) -> Formula:
    def run(c: Any, t: Tensor) -> Tensor:
        h = split(t @ c.lin.weight.mT)
        src, dst = (h * c.att_src[:, None]).sum(-1), (h * c.att_dst[:, None]).sum(-1)
        e = dst[..., :, None] + src[..., None, :]
        e = torch.where(e > 0, e, 0.2 * e).masked_fill(adjacency == 0, -torch.inf)
        return merge(e.softmax(-1) @ h) + c.bias

    def elu(t: Tensor) -> Tensor:
        return torch.where(t > 0, t, t.exp() - 1)

    def first(t: Tensor) -> Tensor:
        return elu(run(m.convs[0], t))

    maps: Any = {
        "block bare": lambda t: (lambda s: run(m.convs[0], s), t),
        "attention": lambda t: (lambda s: run(m.convs[0], s), t),
    }
    return Formula(x, [Step(first, maps=maps), Step(lambda t: run(m.convs[1], t))])


def nodes() -> tuple[Tensor, Tensor]:
    edges = torch.eye(N) + torch.eye(N).roll(1, 0) + torch.eye(N).roll(-1, 0)
    return tokens(), (edges > 0).double()


class PairBias(nn.Module):
    """AlphaFold's rows: gated attention with a bias from pairs, given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_pair, self.to_bias = nn.LayerNorm(D), nn.LayerNorm(6), nn.Linear(6, H, bias=False)
        self.q, self.k, self.v, self.gating, self.o = (
            *(nn.Linear(D, D, bias=False) for _ in range(3)),
            nn.Linear(D, D),
            nn.Linear(D, D),
        )

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        h = self.norm(x)
        bias = self.to_bias(self.norm_pair(pair)).permute(0, 3, 1, 2)
        q, k, v = split(self.q(h)), split(self.k(h)), split(self.v(h))
        logits = torch.einsum("...qc,...kc->...qk", q * 0.5, k) + bias[:, None]
        out = merge(torch.einsum("...qk,...kc->...qc", logits.softmax(-1), v))
        return self.o(torch.sigmoid(self.gating(h)) * out)


class Evo(nn.Module):
    """Rows of sequences, (1, sequences, places, D), and columns after them."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.ln, self.column, self.transition = (
            PairBias(),
            nn.LayerNorm(D),
            Own(fused),
            nn.Sequential(nn.LayerNorm(D), mlp()),
        )

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        msa = msa + self.row(msa, pair)
        msa = msa + self.column(self.ln(msa).transpose(-2, -3)).transpose(-2, -3)
        return msa + self.transition(msa)


class Evoformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Evo(), Evo()])

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        for b in self.blocks:
            msa = b(msa, pair)
        return msa


def evoformer(m: Any, msa: Tensor, pair: Tensor) -> Formula:
    def of(b: Any) -> Step:
        r = b.row
        bias = (r.norm_pair(pair) @ r.to_bias.weight.mT).permute(0, 3, 1, 2)[:, None]

        def rows(h: Tensor) -> Tensor:
            return merge(attend(split(r.q(h)), split(r.k(h)), split(r.v(h)), bias))

        def run(h: Tensor) -> Tensor:
            return r.o(rows(h) / (1 + (-r.gating(h)).exp()))

        def block(t: Tensor) -> Tensor:
            t = t + run(r.norm(t))
            t = t + b.column.o(plain(b.column, b.ln(t).transpose(1, 2))).transpose(1, 2)
            return t + b.transition(t)

        maps: Any = {
            "attention call=1": lambda t: (lambda h: b.column.o(plain(b.column, h)), b.ln(t + run(r.norm(t))).transpose(1, 2)),
            "heads gated": lambda t: (lambda h: rows(h) / (1 + (-r.gating(h)).exp()), r.norm(t)),
        }
        return Step(block, run, rows, r.norm, maps)

    return Formula(msa, [of(b) for b in m.blocks])


def alignment() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(1, 3, 4, D, dtype=torch.float64, generator=g), torch.randn(1, 4, 4, 6, dtype=torch.float64, generator=g)


QUESTIONS: list[Question] = [
    *asks(
        "CogVideoX",
        lambda: seeded(Cog()),
        video,
        cog,
        "attention, block, block 1, block stream=0, block 1 stream=1, update, 0>1",
        parts=(5 * D, 3 * D),
    ),
    *stack("agents", Agents, by(agents, "o"), "attention, heads 1 or refused, block, block 1, update"),
    *asks("a graph", lambda: seeded(Graph()), nodes, graph, "block or bare, block 1, 0>1, attention or refused"),
    *asks(
        "rows with pairs, columns",
        lambda: seeded(Evoformer()),
        alignment,
        evoformer,
        "attention, heads or gated, attention call=1, attention 1 call=1, normed, block, block 1, update, 0>1",
    ),
]
