"""Attention from tokens to other tokens: decoders, latents, learned queries, pooling."""

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
from problems.modules.torch_modules import mha, two_sides


class Cross(nn.Module):
    """Cross-attention of one's own; `way` says what keys and values are made of."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.way = *(nn.Linear(D, D) for _ in range(4)), way
        self.pos = nn.Parameter(torch.zeros(1, 1, D))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        keys, values = (c + self.pos if self.way == "positions" else c), (c.clone() if self.way == "clone" else c)
        return self.o(merge(F.scaled_dot_product_attention(split(self.q(x)), split(self.k(keys)), split(self.v(values)))))


def cross_heads(m: Any, t: Tensor, c: Tensor) -> Tensor:
    keys = c + m.pos if m.way == "positions" else c
    return merge(attend(split(m.q(t)), split(m.k(keys)), split(m.v(c))))


def cross(m: Any, t: Tensor, c: Tensor) -> Tensor:
    return m.o(cross_heads(m, t, c))


class Decoder(nn.Module):
    """A pre-norm block: self-attention, cross-attention, a network; without `attend`, no self-attention."""

    def __init__(self, way: str = "", attend: bool = True, norm_context: bool = False) -> None:
        super().__init__()
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.att = Own(fused) if attend else None
        self.cross, self.mlp = Cross(way), mlp()
        self.ln_context = nn.LayerNorm(D) if norm_context else nn.Identity()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        if self.att is not None:
            x = x + self.att(self.ln1(x))
        x = x + self.cross(self.ln2(x), self.ln_context(context))
        return x + self.mlp(self.ln3(x))


def decoder(b: Any, context: Tensor) -> Step:
    def attention(t: Tensor) -> Tensor:
        return b.att.o(plain(b.att, t))

    def first(t: Tensor) -> Tensor:
        return t if b.att is None else t + attention(b.ln1(t))

    def block(t: Tensor) -> Tensor:
        t = first(t)
        t = t + cross(b.cross, b.ln2(t), b.ln_context(context))
        return t + b.mlp(b.ln3(t))

    maps: Any = {
        "cross": lambda t: (lambda h: cross(b.cross, h, b.ln_context(context)), b.ln2(first(t))),
        "context": lambda t: (lambda c: cross(b.cross, b.ln2(first(t)), c), b.ln_context(context)),
    }
    return Step(block, attention, lambda t: plain(b.att, t), b.ln1, maps)


class Decoders(nn.Module):
    """Blocks that look at one context; `latents`: the tokens are learned, and the input is the context."""

    def __init__(self, *blocks: nn.Module, latents: int = 0) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(blocks), nn.LayerNorm(D)
        self.latents = nn.Parameter(torch.zeros(1, latents, D)) if latents else None

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.latents is not None:
            x, context = self.latents.expand(x.shape[0], -1, -1), x
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x)


def decoders(m: Any, x: Tensor, context: Tensor | None = None) -> Formula:
    if context is None:
        x, context = m.latents, x
    given: Tensor = context
    return Formula(x, [decoder(b, given) for b in m.layers], m.norm)


class Detr(nn.Module):
    """DETR: an encoder's and a decoder's layer, post-norm, positions added to queries and keys wherever they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.pos, self.query_pos, self.target = (nn.Parameter(torch.zeros(1, n, D)) for n in (6, 4, 4))
        self.encoder, self.decoder = (
            nn.ModuleList([DetrEncoder(), DetrEncoder()]),
            nn.ModuleList([DetrDecoder(), DetrDecoder()]),
        )

    def forward(self, src: Tensor) -> Tensor:
        for layer in self.encoder:
            src = layer(src, self.pos)
        target = self.target
        for layer in self.decoder:
            target = layer(target, src, pos=self.pos, query_pos=self.query_pos)
        return target


class DetrEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, H, batch_first=True)
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), mlp()

    def forward(self, src: Tensor, pos: Tensor) -> Tensor:
        q = k = src + pos
        src = self.norm1(src + self.self_attn(q, k, value=src)[0])
        return self.norm2(src + self.mlp(src))


class DetrDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, H, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(D, H, batch_first=True)
        self.norm1, self.norm2, self.norm3, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D), mlp()

    def forward(self, tgt: Tensor, memory: Tensor, pos: Tensor, query_pos: Tensor) -> Tensor:
        q = k = tgt + query_pos
        tgt = self.norm1(tgt + self.self_attn(q, k, value=tgt)[0])
        tgt = self.norm2(tgt + self.multihead_attn(query=tgt + query_pos, key=memory + pos, value=memory)[0])
        return self.norm3(tgt + self.mlp(tgt))


def detr_encoder(m: Any, src: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return mha(b.self_attn, t + m.pos, t + m.pos, t)

        def block(t: Tensor) -> Tensor:
            t = b.norm1(t + attention(t))
            return b.norm2(t + b.mlp(t))

        return Step(block, attention)

    return Formula(src, [of(b) for b in m.encoder])


def detr_decoder(m: Any, src: Tensor) -> Formula:
    memory = detr_encoder(m, src).chain(0, 1)(src)

    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return mha(b.self_attn, t + m.query_pos, t + m.query_pos, t)

        def look(t: Tensor, c: Tensor) -> Tensor:
            return mha(b.multihead_attn, t + m.query_pos, c + m.pos, c)

        def first(t: Tensor) -> Tensor:
            return b.norm1(t + attention(t))

        def block(t: Tensor) -> Tensor:
            t = first(t)
            t = b.norm2(t + look(t, memory))
            return b.norm3(t + b.mlp(t))

        maps: Any = {
            "cross": lambda t: (lambda h: look(h, memory), first(t)),
            "context": lambda t: (lambda c: look(first(t), c), memory),
        }
        return Step(block, attention, maps=maps)

    return Formula(m.target, [of(b) for b in m.decoder])


class QFormer(nn.Module):
    """Learned queries; every other block looks at the picture as well."""

    def __init__(self) -> None:
        super().__init__()
        self.query_tokens = nn.Parameter(torch.zeros(1, 4, D))
        self.layer = nn.ModuleList([Decoder(norm_context=False), SelfOnly(), Decoder()])

    def forward(self, picture: Tensor) -> Tensor:
        x = self.query_tokens.expand(picture.shape[0], -1, -1)
        for layer in self.layer:
            x = layer(x, picture) if isinstance(layer, Decoder) else layer(x)
        return x


class SelfOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.att, self.ln3, self.mlp = nn.LayerNorm(D), Own(fused), nn.LayerNorm(D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.ln1(x))
        return x + self.mlp(self.ln3(x))


def self_only(b: Any) -> Step:
    def attention(t: Tensor) -> Tensor:
        return b.att.o(plain(b.att, t))

    def block(t: Tensor) -> Tensor:
        t = t + attention(b.ln1(t))
        return t + b.mlp(b.ln3(t))

    return Step(block, attention, lambda t: plain(b.att, t), b.ln1)


def q_former(m: Any, picture: Tensor) -> Formula:
    return Formula(m.query_tokens, [decoder(m.layer[0], picture), self_only(m.layer[1]), decoder(m.layer[2], picture)])


class Mab(nn.Module):
    """Set Transformer: queries, their projections as residual, no norms."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = split(self.fc_q(queries)), split(self.fc_k(keys)), split(self.fc_v(keys))
        o = merge(q + torch.softmax(q @ k.transpose(-2, -1) / D**0.5, -1) @ v)
        return o + F.relu(self.fc_o(o))


def mab(m: Any, queries: Tensor, keys: Tensor) -> Tensor:
    q = m.fc_q(queries)
    o = q + merge(attend(split(q), split(m.fc_k(keys)), split(m.fc_v(keys)), scale=D**-0.5))
    return o + m.fc_o(o).clamp(min=0)


class Isab(nn.Module):
    """Induced set attention: learned points look at the set, and the set at them."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.mab0, self.mab1 = nn.Parameter(torch.zeros(1, 3, D)), Mab(), Mab()

    def forward(self, x: Tensor) -> Tensor:
        return self.mab1(x, self.mab0(self.points.repeat(x.size(0), 1, 1), x))


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleList([Isab(), Isab()])
        self.seeds, self.pma, self.out = nn.Parameter(torch.zeros(1, 2, D)), Mab(), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.enc:
            x = layer(x)
        return self.out(self.pma(self.seeds, x))


def sets(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        return Step(lambda t: mab(b.mab1, t, mab(b.mab0, b.points, t)))

    return Formula(x, [of(b) for b in m.enc], logits=lambda t: m.out(mab(m.pma, m.seeds, t)))


class Pool(nn.Module):
    """A learned query pools the tokens (SigLIP's head), behind one block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = SelfOnly()
        self.probe, self.attention = nn.Parameter(torch.zeros(1, 1, D)), nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return self.attention(self.probe, x, x)[0][:, 0]


class PoolAlone(nn.Module):
    """Nothing but the pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.probe, self.attention = nn.Parameter(torch.zeros(1, 2, D)), nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.probe, x, x, need_weights=False)[0]


def pool_alone(m: Any, x: Tensor) -> Formula:
    maps: Any = {
        "cross": lambda t: (lambda q: mha(m.attention, q, x, x), m.probe),
        "context": lambda t: (lambda c: mha(m.attention, m.probe, c, c), x),
    }
    return Formula(x, [Step(maps=maps)])


class Learned(nn.Module):
    """Learned tokens are what enters the first block; the input is added behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.lat, self.blocks, self.i = nn.Parameter(torch.zeros(1, 5, D)), nn.ModuleList([Own(fused)]), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.lat) + self.i(x)


def learned(m: Any, x: Tensor) -> Formula:
    b = m.blocks[0]
    run = lambda t: b.o(plain(b, t))  # noqa: E731
    return Formula(m.lat, [Step(run, run, lambda t: plain(b, t))], lambda t: t + m.i(x))


def one_context() -> tuple[Tensor]:
    return (tokens(6, seed=8),)


ALL = "attention 1, heads, normed 1, cross, cross 1, context, context 1, block 1, update, model, 0>1"

QUESTIONS: list[Question] = [
    *asks("a decoder", lambda: seeded(Decoders(Decoder(), Decoder())), two_sides, decoders, ALL, hidden="context 1"),
    *asks("values a clone of keys", lambda: seeded(Decoders(Decoder("clone"))), two_sides, decoders, "cross, context, block"),
    *asks("keys with positions", lambda: seeded(Decoders(Decoder("positions"))), two_sides, decoders, "cross, context, block"),
    *asks(
        "the context's own norm", lambda: seeded(Decoders(Decoder(norm_context=True))), two_sides, decoders, "cross, context"
    ),
    *asks(
        "cross-attention alone",
        lambda: seeded(Decoders(Decoder(attend=False), Decoder(attend=False))),
        two_sides,
        decoders,
        "cross 1, context, block 1, update",
    ),
    *asks(
        "a perceiver",
        lambda: seeded(Decoders(Decoder(norm_context=True), Decoder(norm_context=True), latents=4)),
        one_context,
        decoders,
        "attention 1, cross, cross 1, context, context 1, block, block 1",
    ),
    *asks("DETR, encoder", lambda: seeded(Detr()), one_context, detr_encoder, "attention 1 side=encoder, block 1 side=encoder"),
    *asks(
        "DETR, decoder",
        lambda: seeded(Detr()),
        one_context,
        detr_decoder,
        "attention side=decoder, attention 1 side=decoder, cross 1 side=decoder, context side=decoder, block 1 side=decoder",
    ),
    *asks(
        "a Q-Former",
        lambda: seeded(QFormer()),
        one_context,
        q_former,
        "attention, attention 1, cross 2, context, block 1, block 2",
    ),
    *asks("a Q-Former", lambda: seeded(QFormer()), one_context, q_former, "cross 1 refused, context 1 refused"),
    *asks("Set Transformer", lambda: seeded(Sets()), one_context, sets, "block, block 1, 0>1"),
    *asks(
        "pooling by a learned query",
        lambda: seeded(Pool()),
        one_context,
        lambda m, x: Formula(x, [self_only(m.block)]),
        "attention, block",
    ),
    *asks("pooling alone", lambda: seeded(PoolAlone()), one_context, pool_alone, "cross, context"),
    *asks("learned tokens", lambda: seeded(Learned()), lambda: (tokens(seed=8),), learned, "attention, heads, model"),
]
