"""Learned latents that look at data, and words that look at pictures."""

from typing import Any

import torch
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
    pre,
    seeded,
    split,
    tokens,
)


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
            [
                nn.ModuleList([PreNormed(Attend(6), 6), PreNormed(mlp()), PreNormed(Attend()), PreNormed(mlp())])
                for _ in range(2)
            ]
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
        self.layers = nn.ModuleList(
            [nn.ModuleList([ResamplerAttention(), nn.Sequential(nn.LayerNorm(D), mlp())]) for _ in range(2)]
        )

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
        self.to_q, self.to_kv, self.to_out = (
            nn.Linear(D, D, bias=False),
            nn.Linear(D, 2 * D, bias=False),
            nn.Linear(D, D, bias=False),
        )

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
        self.embed, self.layers, self.norm, self.head = (
            nn.Embedding(9, D),
            nn.ModuleList([Gated(), Gated()]),
            nn.LayerNorm(D),
            nn.Linear(D, 9),
        )

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
            "context gated": lambda t: (
                lambda c: torch.tanh(b.attn_gate) * b.attn.to_out(heads_of(b.attn, b.norm(t), c)),
                media,
            ),
        }
        return Step(lambda t: own.block(first(t)), maps=maps)

    return Formula(m.embed.weight[ids], [of(b) for b in m.layers], m.norm, m.head)


def words_and_media() -> tuple[Tensor, Tensor]:
    return torch.tensor([[3, 1, 4, 1, 5]]), tokens(4, 6, seed=8)


QUESTIONS: list[Question] = [
    *asks(
        "Perceiver IO's latents",
        lambda: seeded(PerceiverIo()),
        data,
        perceiver_io,
        "attention, heads 1, normed, block, block 1, update, 0>1",
    ),
    *asks(
        "Perceiver IO", lambda: seeded(PerceiverIo()), data_and_queries, perceiver_io, "attention, heads 1, block, block 1, 0>1"
    ),
    *asks(
        "a perceiver's layers",
        lambda: seeded(PerceiverLayers()),
        data,
        perceiver_layers,
        "attention, heads 1, block, block 1, update, cross, context, cross 1, context 1, 0>1, 0>logits",
    ),
    *asks(
        "a resampler",
        lambda: seeded(Resampler()),
        lambda: (tokens(),),
        resampler,
        "attention, heads 1, normed, block, block 1, update 1, 0>1",
    ),
    *asks(
        "Flamingo",
        lambda: seeded(Flamingo()),
        words_and_media,
        flamingo,
        "attention, block, block 1, update, cross or gated, context 1 or gated, 0>1, model, 0>logits",
        hidden="context 1 or gated",
    ),
]
