"""torch's own attention and its transformer layers, in the ways that they are called."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import D, Formula, H, N, Question, Step, asks, attend, causal, merge, mlp, one, seeded, split, tokens

NEAR = (torch.arange(N)[:, None] - torch.arange(N)).abs() > 1  # True is forbidden
Attention = Callable[[Any, Tensor], Tensor]


def mha_heads(m: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """The heads' outputs of an `nn.MultiheadAttention`, from its weights; tokens are rows of the last two axes."""
    w = m.in_proj_weight.chunk(3) if m.in_proj_weight is not None else (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    b = m.in_proj_bias.chunk(3) if m.in_proj_bias is not None else (0.0, 0.0, 0.0)
    q, k, v = q @ w[0].mT + b[0], k @ w[1].mT + b[1], v @ w[2].mT + b[2]
    if m.bias_k is not None:
        k, v = torch.cat([k, m.bias_k.expand_as(k[..., :1, :])], -2), torch.cat([v, m.bias_v.expand_as(v[..., :1, :])], -2)
    if m.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    if isinstance(bias, Tensor):
        bias = F.pad(bias, (0, k.shape[-2] - bias.shape[-1]))
    return merge(attend(split(q, m.num_heads), split(k, m.num_heads), split(v, m.num_heads), bias))


def mha(m: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    return m.out_proj(mha_heads(m, q, k, v, bias))


class Called(nn.Module):
    """A residual around an `nn.MultiheadAttention`, called by `way`."""

    def __init__(self, way: Attention, **options: Any) -> None:
        super().__init__()
        self.ln, self.mha, self.way = nn.LayerNorm(D), nn.MultiheadAttention(D, H, **({"batch_first": True} | options)), way

    def forward(self, x: Tensor) -> Tensor:
        return x + self.way(self, x)


def called(bias: Tensor | float = 0.0, norm: bool = False) -> Callable[..., Formula]:
    def formula(m: Any, x: Tensor) -> Formula:
        def attention(t: Tensor) -> Tensor:
            rows = t if m.mha.batch_first else t.transpose(0, 1)
            out = mha(m.mha, rows, rows, rows, bias)
            return out if m.mha.batch_first else out.transpose(0, 1)

        def heads(t: Tensor) -> Tensor:
            rows = t if m.mha.batch_first else t.transpose(0, 1)
            return mha_heads(m.mha, rows, rows, rows, bias)

        start = m.ln if norm else lambda t: t
        return Formula(x, [Step(lambda t: t + attention(start(t)), attention, heads, start)])

    return formula


def three_norms(m: Any, x: Tensor) -> Tensor:
    return m.mha(m.ln(x), m.ln(x), m.ln(x))[0]


def one_norm(m: Any, x: Tensor) -> Tensor:
    h = m.ln(x)
    return m.mha(h, h, h, need_weights=False)[0]


def plainly(m: Any, x: Tensor) -> Tensor:
    return m.mha(x, x, x)[0]


def every_weight(m: Any, x: Tensor) -> Tensor:
    out, weights = m.mha(x, x, x, need_weights=True, average_attn_weights=False)
    return out


def copied(m: Any, x: Tensor) -> Tensor:
    return m.mha(query=x, key=x.clone(), value=x + 0, need_weights=False)[0]


def float_mask(m: Any, x: Tensor) -> Tensor:
    mask = torch.full((N, N), float("-inf"), dtype=x.dtype).triu(1)
    return m.mha(x, x, x, attn_mask=mask, need_weights=False)[0]


def boolean_mask(m: Any, x: Tensor) -> Tensor:
    return m.mha(x, x, x, attn_mask=NEAR)[0]


def said_causal(m: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(N, dtype=x.dtype)
    return m.mha(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def padded(m: Any, x: Tensor) -> Tensor:
    return m.mha(x, x, x, key_padding_mask=torch.tensor([[False] * 3 + [True] * 2]), need_weights=False)[0]


def transposed(m: Any, x: Tensor) -> Tensor:
    t = x.transpose(0, 1)
    return m.mha(t, t, t)[0].transpose(0, 1)


def by_function(m: Any, x: Tensor) -> Tensor:
    t = x.transpose(0, 1)
    a = m.mha
    out, _ = F.multi_head_attention_forward(
        t,
        t,
        t,
        D,
        H,
        a.in_proj_weight,
        a.in_proj_bias,
        None,
        None,
        False,
        0.0,
        a.out_proj.weight,
        a.out_proj.bias,
        training=False,
    )
    return out.transpose(0, 1)


def with_positions(m: Any, x: Tensor) -> Tensor:
    """DETR: positions are added to queries and keys, not to values."""
    q = k = x + m.pos
    return m.mha(q, k, value=x)[0]


def three_with_positions(m: Any, x: Tensor) -> Tensor:
    return m.mha(m.ln(x) + m.pos, m.ln(x) + m.pos, m.ln(x), need_weights=False)[0]


class Positioned(Called):
    def __init__(self, way: Attention) -> None:
        super().__init__(way)
        self.pos = nn.Parameter(torch.zeros(1, N, D))


def positioned(norm: bool) -> Callable[..., Formula]:
    def formula(m: Any, x: Tensor) -> Formula:
        def heads(t: Tensor) -> Tensor:
            return mha_heads(m.mha, t + m.pos, t + m.pos, t)

        start = m.ln if norm else lambda t: t
        return Formula(
            x, [Step(lambda t: t + m.mha.out_proj(heads(start(t))), lambda t: m.mha.out_proj(heads(t)), heads, start)]
        )

    return formula


PADDED = torch.tensor([0.0] * 3 + [-torch.inf] * 2, dtype=torch.float64).expand(N, N)
FAR = torch.zeros(N, N, dtype=torch.float64).masked_fill(NEAR, -torch.inf)


def rows_first() -> tuple[Tensor]:
    return (tokens().transpose(0, 1).contiguous(),)


def unbatched() -> tuple[Tensor]:
    return (tokens()[0],)


def feed(b: Any, t: Tensor) -> Tensor:
    hidden = b.linear1(t)
    hidden = hidden.clamp(min=0) if b.activation is F.relu else hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    return b.linear2(hidden)


def encoder_step(b: Any, bias: Tensor | float = 0.0) -> Step:
    def attention(t: Tensor) -> Tensor:
        return mha(b.self_attn, t, t, t, bias)

    def block(t: Tensor) -> Tensor:
        if b.norm_first:
            t = t + attention(b.norm1(t))
            return t + feed(b, b.norm2(t))
        t = b.norm1(t + attention(t))
        return b.norm2(t + feed(b, t))

    return Step(block, attention, lambda t: mha_heads(b.self_attn, t, t, t, bias), b.norm1 if b.norm_first else lambda t: t)


def encoder(m: Any, x: Tensor) -> Formula:
    return Formula(x, [encoder_step(b) for b in m.layers], m.norm or (lambda t: t))


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, H, 2 * D, batch_first=True, **options)


class Masked(nn.Module):
    """An encoder under a causal mask, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, D), nn.Linear(D, 11)
        self.encoder = nn.TransformerEncoder(encoder_layer(norm_first=True), 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), float("-inf"), dtype=torch.float64), diagonal=1)
        return self.head(self.encoder(self.embed(ids), mask=mask, is_causal=True))


def masked(m: Any, ids: Tensor) -> Formula:
    return Formula(m.embed.weight[ids[0]][None], [encoder_step(b, causal()) for b in m.encoder.layers], logits=m.head)


def decoder_step(b: Any, memory: Tensor, bias: Tensor | float = 0.0) -> Step:
    def attention(t: Tensor) -> Tensor:
        return mha(b.self_attn, t, t, t, bias)

    def cross(t: Tensor, c: Tensor) -> Tensor:
        return mha(b.multihead_attn, t, c, c)

    def until_cross(t: Tensor) -> Tensor:
        return t + attention(b.norm1(t)) if b.norm_first else b.norm1(t + attention(t))

    def queries(t: Tensor) -> Tensor:
        return b.norm2(until_cross(t)) if b.norm_first else until_cross(t)

    def block(t: Tensor) -> Tensor:
        t = until_cross(t)
        if b.norm_first:
            t = t + cross(b.norm2(t), memory)
            return t + feed(b, b.norm3(t))
        t = b.norm2(t + cross(t, memory))
        return b.norm3(t + feed(b, t))

    maps: Any = {
        "cross": lambda t: (lambda h: cross(h, memory), queries(t)),
        "context": lambda t: (lambda c: cross(queries(t), c), memory),
    }
    heads = lambda t: mha_heads(b.self_attn, t, t, t, bias)  # noqa: E731
    return Step(block, attention, heads, b.norm1 if b.norm_first else lambda t: t, maps)


def decoder(m: Any, tgt: Tensor, memory: Tensor) -> Formula:
    return Formula(tgt, [decoder_step(b, memory) for b in m.layers], m.norm or (lambda t: t))


def decoder_layer(norm_first: bool) -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(D, H, 2 * D, batch_first=True, norm_first=norm_first)


def two_sides() -> tuple[Tensor, Tensor]:
    return tokens(4), tokens(6, seed=8)


class Translator(nn.Module):
    """`nn.Transformer` with a causal mask on the side that decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(D, H, 2, 2, 2 * D, batch_first=True)
        self.generator = nn.Linear(D, 11)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=tgt.dtype)
        return self.generator(self.transformer(src, tgt, tgt_mask=mask))


def translator_encoder(m: Any, src: Tensor, tgt: Tensor) -> Formula:
    return encoder(m.transformer.encoder, src)


def translator_decoder(m: Any, src: Tensor, tgt: Tensor) -> Formula:
    first = translator_encoder(m, src, tgt)
    memory = first.final(first.chain(0, 1)(src))
    d = m.transformer.decoder
    return Formula(tgt, [decoder_step(b, memory, causal(tgt.shape[1])) for b in d.layers], d.norm, m.generator)


class Context(nn.Module):
    """Cross-attention whose keys and values have widths of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.mlp = nn.LayerNorm(D), mlp()
        self.att = nn.MultiheadAttention(D, H, kdim=6, vdim=6, batch_first=True)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.att(self.ln(x), context, context)[0]
        return x + self.mlp(x)


def context(m: Any, x: Tensor, context: Tensor) -> Formula:
    def block(t: Tensor) -> Tensor:
        t = t + mha(m.att, m.ln(t), context, context)
        return t + m.mlp(t)

    maps: Any = {
        "cross": lambda t: (lambda h: mha(m.att, h, context, context), m.ln(t)),
        "context": lambda t: (lambda c: mha(m.att, m.ln(t), c, c), context),
    }
    return Formula(x, [Step(block, maps=maps)])


def two_widths() -> tuple[Tensor, Tensor]:
    return tokens(4), tokens(6, 6, seed=8)


def ways(name: str, way: Attention, formula: Callable[..., Formula], *specs: str, **options: Any) -> list[Question]:
    return asks(f"nn.MultiheadAttention, {name}", lambda: seeded(Called(way, **options)), one, formula, *specs)


DECODER = "attention 1, heads, block 1, update, cross, cross 1, context, context 1, model, 0>1"

QUESTIONS: list[Question] = [
    *ways("three norms", three_norms, called(norm=True), "attention, heads, normed, block, update"),
    *ways("one norm", one_norm, called(norm=True), "attention, heads, normed, block"),
    *ways("no options", plainly, called(), "attention, heads, block"),
    *ways("without biases", plainly, called(), "attention, heads", bias=False),
    *ways("weights of every head", every_weight, called(), "attention, block"),
    *ways("copies", copied, called(), "attention, heads, block"),
    *ways("a float mask", float_mask, called(causal()), "attention, heads"),
    *ways("a boolean mask", boolean_mask, called(FAR), "attention, block"),
    *ways("is_causal", said_causal, called(causal()), "attention, block"),
    *ways("padding", padded, called(PADDED), "attention, block"),
    *ways("bias_kv", plainly, called(), "attention, heads, block", add_bias_kv=True),
    *ways("zero_attn", plainly, called(), "attention, heads, block", add_zero_attn=True),
    *ways("bias_kv and zero_attn", one_norm, called(norm=True), "attention, normed", add_bias_kv=True, add_zero_attn=True),
    *asks(
        "nn.MultiheadAttention, tokens first",
        lambda: seeded(Called(plainly, batch_first=False)),
        rows_first,
        called(),
        "attention, heads, block",
    ),
    *asks("nn.MultiheadAttention, no batch", lambda: seeded(Called(plainly)), unbatched, called(), "attention, heads, block"),
    *asks(
        "nn.MultiheadAttention, turned inside",
        lambda: seeded(Called(transposed, batch_first=False)),
        one,
        lambda m, x: Formula(
            x, [Step(lambda t: t + mha(m.mha, t, t, t), lambda t: mha(m.mha, t, t, t), lambda t: mha_heads(m.mha, t, t, t))]
        ),
        "attention, heads, block",
    ),
    *ways("its function", by_function, called(), "attention, heads, block"),
    *asks(
        "DETR's positions",
        lambda: seeded(Positioned(with_positions)),
        one,
        positioned(False),
        "attention, heads, block, update",
    ),
    *asks(
        "DETR's positions, three tensors",
        lambda: seeded(Positioned(three_with_positions)),
        one,
        positioned(True),
        "attention, heads, normed, block",
    ),
    *asks(
        "nn.TransformerEncoderLayer",
        lambda: seeded(encoder_layer()),
        one,
        lambda m, x: Formula(x, [encoder_step(m)]),
        "attention, heads, block",
    ),
    *asks(
        "nn.TransformerEncoderLayer, norm first",
        lambda: seeded(encoder_layer(norm_first=True, activation="gelu")),
        one,
        lambda m, x: Formula(x, [encoder_step(m)]),
        "attention, heads, normed, block, update",
    ),
    *asks(
        "nn.TransformerEncoder",
        lambda: seeded(nn.TransformerEncoder(encoder_layer(activation="gelu"), 2)),
        one,
        encoder,
        "attention 1, heads, block 1, update, model, 0>1",
    ),
    *asks(
        "nn.TransformerEncoder, norm first",
        lambda: seeded(nn.TransformerEncoder(encoder_layer(norm_first=True), 2, nn.LayerNorm(D), enable_nested_tensor=False)),
        one,
        encoder,
        "attention 1, heads 1, normed, block 1, model, 1>final",
    ),
    *asks(
        "nn.TransformerEncoder, causal model",
        lambda: seeded(Masked()),
        lambda: (torch.tensor([[3, 1, 4, 9, 5]]),),
        masked,
        "attention 1, block, 0>final, 1>logits",
    ),
    *asks(
        "nn.TransformerDecoder",
        lambda: seeded(nn.TransformerDecoder(decoder_layer(False), 2)),
        two_sides,
        decoder,
        DECODER,
        hidden="context 1",
    ),
    *asks(
        "nn.TransformerDecoder, norm first",
        lambda: seeded(nn.TransformerDecoder(decoder_layer(True), 2, nn.LayerNorm(D))),
        two_sides,
        decoder,
        DECODER,
        "normed 1, 1>final",
        hidden="context 1",
    ),
    *asks(
        "nn.Transformer",
        lambda: seeded(Translator()),
        lambda: (tokens(6, seed=8), tokens(4)),
        translator_encoder,
        "attention 1 side=encoder, block side=encoder, model side=encoder",
    ),
    *asks(
        "nn.Transformer",
        lambda: seeded(Translator()),
        lambda: (tokens(6, seed=8), tokens(4)),
        translator_decoder,
        "attention 1 side=decoder, cross 1 side=decoder, context side=decoder, block side=decoder, model side=decoder",
    ),
    *asks("kdim and vdim", lambda: seeded(Context()), two_widths, context, "cross, context, block"),
]
