"""Tokens that look at others: latents, resamplers, gated cross-attention, joint attention, agents, pairs."""

import math
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
    causal,
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
from problems.modules.language_more import by, gelu, silu, stack


class Attend(nn.Module):
    """lucidrains': queries of the tokens, keys and values of a context, or of the tokens where there is none."""

    def __init__(self, context: int = D) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.to_out = nn.Linear(D, D, bias=False), nn.Linear(context, 2 * D, bias=False), nn.Linear(D, D)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q = self.to_q(x)
        k, v = self.to_kv(x if context is None else context).chunk(2, dim=-1)
        q, k, v = (split(t).reshape(-1, t.shape[1], 4) for t in (q, k, v))
        attn = (torch.einsum("bid,bjd->bij", q, k) * 0.5).softmax(dim=-1)
        return self.to_out(merge(torch.einsum("bij,bjd->bid", attn, v).reshape(-1, H, q.shape[1], 4)))


def heads_of(a: Any, x: Tensor, c: Tensor) -> Tensor:
    k, v = (c @ a.to_kv.weight.mT).chunk(2, -1)
    return merge(attend(split(x @ a.to_q.weight.mT), split(k), split(v)))


class PreNormed(nn.Module):
    def __init__(self, fn: nn.Module, context: int = 0) -> None:
        super().__init__()
        self.fn, self.norm, self.norm_context = fn, nn.LayerNorm(D), nn.LayerNorm(context) if context else None

    def forward(self, x: Tensor, **named: Any) -> Tensor:
        x = self.norm(x)
        if self.norm_context is not None:
            named["context"] = self.norm_context(named["context"])
        return self.fn(x, **named)


class PerceiverIo(nn.Module):
    """Latents look at the data, then at each other; queries look at the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(4, D))
        self.cross_attend_blocks = nn.ModuleList([PreNormed(Attend(6), 6), PreNormed(mlp())])
        self.layers = nn.ModuleList([nn.ModuleList([PreNormed(Attend()), PreNormed(mlp())]) for _ in range(2)])
        self.decoder_cross_attn, self.to_logits = PreNormed(Attend(), D), nn.Linear(D, 3)

    def forward(self, data: Tensor, queries: Tensor | None = None) -> Tensor:
        x = self.latents.unsqueeze(0).repeat(data.shape[0], 1, 1)
        cross_attn, cross_ff = self.cross_attend_blocks
        x = cross_attn(x, context=data) + x
        x = cross_ff(x) + x
        for self_attn, self_ff in self.layers:  # pyright: ignore
            x = self_attn(x) + x
            x = self_ff(x) + x
        if queries is None:
            return x
        return self.to_logits(self.decoder_cross_attn(queries, context=x))


def perceiver_io(m: Any, data: Tensor, queries: Tensor | None = None) -> Formula:
    (ca, cf), x = m.cross_attend_blocks, m.latents[None]
    x = x + ca.fn.to_out(heads_of(ca.fn, ca.norm(x), ca.norm_context(data)))
    x = x + cf.fn(cf.norm(x))

    def of(a: Any, f: Any) -> Step:
        def run(t: Tensor) -> Tensor:
            return a.fn.to_out(heads_of(a.fn, t, t))

        def block(t: Tensor) -> Tensor:
            t = t + run(a.norm(t))
            return t + f.fn(f.norm(t))

        return Step(block, run, lambda t: heads_of(a.fn, t, t), a.norm)

    return Formula(x, [of(*pair) for pair in m.layers])


def data() -> tuple[Tensor]:
    return (tokens(7, 6),)


def data_and_queries() -> tuple[Tensor, Tensor]:
    return tokens(7, 6), tokens(3, seed=9)


class PerceiverLayers(nn.Module):
    """Every layer looks at the data again; a mean and a head behind."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(4, D))
        self.layers = nn.ModuleList(
            [nn.ModuleList([PreNormed(Attend(6), 6), PreNormed(mlp()), PreNormed(Attend()), PreNormed(mlp())]) for _ in range(2)]
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 3))

    def forward(self, data: Tensor) -> Tensor:
        x = self.latents.expand(data.shape[0], -1, -1)
        for cross_attn, cross_ff, self_attn, self_ff in self.layers:  # pyright: ignore
            x = cross_attn(x, context=data) + x
            x = cross_ff(x) + x
            x = self_attn(x) + x
            x = self_ff(x) + x
        return self.to_logits(x.mean(1))


def perceiver_layers(m: Any, data: Tensor) -> Formula:
    def of(ca: Any, cf: Any, a: Any, f: Any) -> Step:
        def first(t: Tensor) -> Tensor:
            t = t + ca.fn.to_out(heads_of(ca.fn, ca.norm(t), ca.norm_context(data)))
            return t + cf.fn(cf.norm(t))

        def block(t: Tensor) -> Tensor:
            t = first(t)
            t = t + a.fn.to_out(heads_of(a.fn, a.norm(t), a.norm(t)))
            return t + f.fn(f.norm(t))

        maps: Any = {
            "attention": lambda t: (lambda h: a.fn.to_out(heads_of(a.fn, h, h)), a.norm(first(t))),
            "heads": lambda t: (lambda h: heads_of(a.fn, h, h), a.norm(first(t))),
            "cross": lambda t: (lambda h: ca.fn.to_out(heads_of(ca.fn, h, ca.norm_context(data))), ca.norm(t)),
            "context": lambda t: (lambda c: ca.fn.to_out(heads_of(ca.fn, ca.norm(t), c)), ca.norm_context(data)),
        }
        return Step(block, maps=maps)

    return Formula(m.latents[None], [of(*four) for four in m.layers], logits=lambda t: m.to_logits(t.mean(1)))


class Resampler(nn.Module):
    """Flamingo's: latents look at the data and at themselves at once."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.norm = nn.Parameter(torch.zeros(3, D)), nn.LayerNorm(D)
        self.layers = nn.ModuleList([nn.ModuleList([ResamplerAttention(), nn.Sequential(nn.LayerNorm(D), mlp())]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents[None].expand(x.shape[0], -1, -1)
        for attn, ff in self.layers:  # pyright: ignore
            latents = attn(x, latents) + latents
            latents = ff(latents) + latents
        return self.norm(latents)


class ResamplerAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_media, self.norm_latents = nn.LayerNorm(D), nn.LayerNorm(D)
        self.to_q, self.to_kv, self.to_out = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        x, latents = self.norm_media(x), self.norm_latents(latents)
        q = split(self.to_q(latents)) * 0.5
        k, v = (split(t) for t in self.to_kv(torch.cat((x, latents), dim=-2)).chunk(2, dim=-1))
        sim = torch.einsum("...id,...jd->...ij", q, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        return self.to_out(merge(torch.einsum("...ij,...jd->...id", sim.softmax(dim=-1), v)))


def resampler(m: Any, x: Tensor) -> Formula:
    def of(a: Any, f: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            c = torch.cat([a.norm_media(x), t], 1)
            k, v = (c @ a.to_kv.weight.mT).chunk(2, -1)
            return merge(attend(split(t @ a.to_q.weight.mT), split(k), split(v)))

        def run(t: Tensor) -> Tensor:
            return heads(t) @ a.to_out.weight.mT

        def block(t: Tensor) -> Tensor:
            t = t + run(a.norm_latents(t))
            return t + f(t)

        return Step(block, run, heads, a.norm_latents)

    return Formula(m.latents[None], [of(*pair) for pair in m.layers], m.norm)


class Gated(nn.Module):
    """Flamingo's language model: gated cross-attention before each causal block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_ff, self.attn, self.ff = nn.LayerNorm(D), nn.LayerNorm(D), Attend(6), mlp()
        self.attn_gate, self.ff_gate, self.block = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), Pre(Own(fused))

    def forward(self, x: Tensor, media: Tensor) -> Tensor:
        x = self.attn(self.norm(x), media) * self.attn_gate.tanh() + x
        x = self.ff(self.norm_ff(x)) * self.ff_gate.tanh() + x
        return self.block(x)


class Flamingo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.norm, self.head = nn.Embedding(9, D), nn.ModuleList([Gated(), Gated()]), nn.LayerNorm(D), nn.Linear(D, 9)

    def forward(self, ids: Tensor, media: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, media)
        return self.head(self.norm(x))


def flamingo(m: Any, ids: Tensor, media: Tensor) -> Formula:
    def of(b: Any) -> Step:
        own = pre(b.block)

        def first(t: Tensor) -> Tensor:
            t = t + torch.tanh(b.attn_gate) * b.attn.to_out(heads_of(b.attn, b.norm(t), media))
            return t + torch.tanh(b.ff_gate) * b.ff(b.norm_ff(t))

        maps: Any = {
            "attention": lambda t: (own.attention, own.norm(first(t))),
            "cross": lambda t: (lambda h: b.attn.to_out(heads_of(b.attn, h, media)), b.norm(t)),
            "context": lambda t: (lambda c: b.attn.to_out(heads_of(b.attn, b.norm(t), c)), media),
            "cross gated": lambda t: (lambda h: torch.tanh(b.attn_gate) * b.attn.to_out(heads_of(b.attn, h, media)), b.norm(t)),
            "context gated": lambda t: (lambda c: torch.tanh(b.attn_gate) * b.attn.to_out(heads_of(b.attn, b.norm(t), c)), media),
        }
        return Step(lambda t: own.block(first(t)), maps=maps)

    return Formula(m.embed.weight[ids], [of(b) for b in m.layers], m.norm, m.head)


def words_and_media() -> tuple[Tensor, Tensor]:
    return torch.tensor([[3, 1, 4, 1, 5]]), tokens(4, 6, seed=8)


# ---- CogVideoX: text and video, one attention with the same weights, streams apart in the block
class CogBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.q, self.k, self.v, self.o, self.ff = nn.LayerNorm(D), nn.LayerNorm(D), *(nn.Linear(D, D) for _ in range(4)), mlp()
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


# ---- SD3.5: joint attention, and one of the image alone beside it
# ---- agents, slots, a graph, vector attention, pairs
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
        self.lin, self.att_src, self.att_dst, self.bias = nn.Linear(D, D, bias=False), nn.Parameter(torch.zeros(H, 4)), nn.Parameter(torch.zeros(H, 4)), nn.Parameter(torch.zeros(D))

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

    maps: Any = {"block bare": lambda t: (lambda s: run(m.convs[0], s), t), "attention": lambda t: (lambda s: run(m.convs[0], s), t)}
    return Formula(x, [Step(first, maps=maps), Step(lambda t: run(m.convs[1], t))])


def nodes() -> tuple[Tensor, Tensor]:
    edges = torch.eye(N) + torch.eye(N).roll(1, 0) + torch.eye(N).roll(-1, 0)
    return tokens(), (edges > 0).double()


class PairBias(nn.Module):
    """AlphaFold's rows: gated attention with a bias from pairs, given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_pair, self.to_bias = nn.LayerNorm(D), nn.LayerNorm(6), nn.Linear(6, H, bias=False)
        self.q, self.k, self.v, self.gating, self.o = *(nn.Linear(D, D, bias=False) for _ in range(3)), nn.Linear(D, D), nn.Linear(D, D)

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
        self.row, self.ln, self.column, self.transition = PairBias(), nn.LayerNorm(D), Own(fused), nn.Sequential(nn.LayerNorm(D), mlp())

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


# ---- slots, offsets, inverted tokens, tables, hourglass
class Offset(nn.Module):
    """Point cloud transformer: channels first, weights by columns, and what is left of the tokens goes through a network."""

    def __init__(self) -> None:
        super().__init__()
        self.q_conv, self.k_conv, self.v_conv, self.trans_conv = nn.Conv1d(D, 2, 1, bias=False), nn.Conv1d(D, 2, 1, bias=False), nn.Conv1d(D, D, 1), nn.Conv1d(D, D, 1)
        self.after_norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_conv(x).permute(0, 2, 1), self.k_conv(x), self.v_conv(x)
        attention = torch.bmm(q, k).softmax(-1)
        attention = attention / (1e-9 + attention.sum(dim=1, keepdim=True))
        r = torch.bmm(v, attention)
        return x + F.relu(self.after_norm(self.trans_conv(x - r)))


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.sa1, self.sa2 = nn.Conv1d(3, D, 1), Offset(), Offset()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x1 = self.sa1(x)
        x2 = self.sa2(x1)
        return torch.cat((x1, x2), dim=1)


def points(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            q, k, v = b.q_conv.weight[..., 0] @ t, b.k_conv.weight[..., 0] @ t, b.v_conv(t)
            w = (q.mT @ k).softmax(-1)
            return v @ (w / (1e-9 + w.sum(1, keepdim=True)))

        return Step(lambda t: t + F.relu(b.after_norm(b.trans_conv(t - heads(t)))), heads, heads)

    return Formula(F.relu(m.conv1(x)), [of(m.sa1), of(m.sa2)])


class Tabular(nn.Module):
    """FT-Transformer: a token for each number, a class token, the readout of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.cls = nn.Parameter(torch.zeros(4, D)), nn.Parameter(torch.zeros(4, D)), nn.Parameter(torch.zeros(D))
        self.layers, self.head_norm, self.head = nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]), nn.LayerNorm(D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        t = self.weight[None] * x[..., None] + self.bias[None]
        t = torch.cat([t, self.cls.expand(len(x), 1, -1)], dim=1)
        for layer in self.layers:
            t = layer(t)
        return self.head(F.relu(self.head_norm(t[:, -1])))


def tabular(m: Any, x: Tensor) -> Formula:
    t = torch.cat([m.weight * x[..., None] + m.bias, m.cls[None, None]], 1)
    return Formula(t, [pre(b) for b in m.layers], logits=lambda t: m.head(m.head_norm(t[:, -1]).relu()))


class Inverted(nn.Module):
    """iTransformer: series are tokens; normalised over time before and put back behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.norm, self.projector = nn.Linear(6, D), nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]), nn.LayerNorm(D), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean(1, keepdim=True).detach()
        x = x - means
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x = x / stdev
        t = self.embed(x.permute(0, 2, 1))
        for layer in self.layers:
            t = layer(t)
        y = self.projector(self.norm(t)).permute(0, 2, 1)
        return y * stdev + means


def inverted(m: Any, x: Tensor) -> Formula:
    y = x - x.mean(1, keepdim=True)
    y = y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return Formula(m.embed(y.mT), [pre(b) for b in m.layers], m.norm)


class Hourglass(nn.Module):
    """Fewer tokens in the middle, and what was before added behind."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.norm = nn.Linear(2 * D, D), nn.Linear(D, 2 * D), nn.LayerNorm(D)
        self.pre, self.middle, self.post = nn.ModuleList([Pre(Own(fused))]), nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]), nn.ModuleList([Pre(Own(fused))])

    def forward(self, x: Tensor) -> Tensor:
        for b in self.pre:
            x = b(x)
        y = self.down(x.reshape(1, -1, 2 * D))
        for b in self.middle:
            y = b(y)
        x = x + self.up(y).reshape(x.shape)
        for b in self.post:
            x = b(x)
        return self.norm(x)


def hourglass(m: Any, x: Tensor) -> Formula:
    first, last = pre(m.pre[0]), pre(m.post[0])
    middle = [pre(b) for b in m.middle]

    def join(t: Tensor, y: Tensor) -> Tensor:
        return t + m.up(y).reshape(t.shape)

    def rest(t: Tensor) -> Tensor:
        y = m.down(t.reshape(1, -1, 2 * D))
        for s in middle:
            y = s.block(y)
        return last.block(join(t, y))

    whole: Any = lambda t: (lambda s: m.norm(rest(first.block(s))), t)  # noqa: E731
    to_last: Any = lambda t: (lambda s: rest(first.block(s)), t)  # noqa: E731
    enters = Step(lambda t: m.down(first.block(t).reshape(1, -1, 2 * D)), first.attention, first.heads, first.norm, {"model": whole, "to 3": to_last, "block": lambda t: (first.block, t)})
    return Formula(x, [enters, *middle, last])


def hourglass_end(m: Any, x: Tensor) -> Formula:
    y = x = pre(m.pre[0]).block(x)
    y = m.down(y.reshape(1, -1, 2 * D))
    for b in m.middle:
        y = pre(b).block(y)
    return Formula(x + m.up(y).reshape(x.shape), [Step(), Step(), Step(), pre(m.post[0])])


QUESTIONS: list[Question] = [
    *asks("Perceiver IO's latents", lambda: seeded(PerceiverIo()), data, perceiver_io, "attention, heads 1, normed, block, block 1, update, 0>1"),
    *asks("Perceiver IO", lambda: seeded(PerceiverIo()), data_and_queries, perceiver_io, "attention, heads 1, block, block 1, 0>1"),
    *asks("a perceiver's layers", lambda: seeded(PerceiverLayers()), data, perceiver_layers, "attention, heads 1, block, block 1, update, cross, context, cross 1, context 1, 0>1, 0>logits"),
    *asks("a resampler", lambda: seeded(Resampler()), lambda: (tokens(),), resampler, "attention, heads 1, normed, block, block 1, update 1, 0>1"),
    *asks("Flamingo", lambda: seeded(Flamingo()), words_and_media, flamingo, "attention, block, block 1, update, cross or gated, context 1 or gated, 0>1, model, 0>logits"),
    *asks("CogVideoX", lambda: seeded(Cog()), video, cog, "attention, block, block 1, block stream=0, block 1 stream=1, update, 0>1", parts=(5 * D, 3 * D)),
    *stack("agents", Agents, by(agents, "o"), "attention, heads 1 or refused, block, block 1, update"),
    *asks("a graph", lambda: seeded(Graph()), nodes, graph, "block or bare, block 1, 0>1, attention or refused"),
    *asks("rows with pairs, columns", lambda: seeded(Evoformer()), alignment, evoformer, "attention, heads or gated, attention call=1, attention 1 call=1, normed, block, block 1, update, 0>1"),
    *asks("a point cloud", lambda: seeded(Points()), lambda: (tokens(3, N),), points, "attention or refused, block, block 1, update, 0>1"),
    *asks("a table", lambda: seeded(Tabular()), lambda: (tokens(1, 4)[0],), tabular, "attention, heads 1, normed, block, block 1, 0>1, 1>final, 0>logits"),
    *asks("series as tokens", lambda: seeded(Inverted()), lambda: (tokens(N, 4).mT.reshape(1, 5, 4).new_tensor(tokens(6, 4)),), inverted, "attention, normed, block 1, model, 0>final"),
    *asks("an hourglass", lambda: seeded(Hourglass()), lambda: (tokens(6),), hourglass, "attention, attention 1, block, block 1, block 2, model, 0>3"),
    *asks("an hourglass, its end", lambda: seeded(Hourglass()), lambda: (tokens(6),), hourglass_end, "attention 3, update 3"),
]
