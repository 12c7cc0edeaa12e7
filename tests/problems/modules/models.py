"""Whole models: where their blocks stand, how they are called, what comes before the first and after the last."""

from dataclasses import dataclass
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
    Stack,
    Step,
    asks,
    attend,
    causal,
    fused,
    merge,
    one,
    pre,
    seeded,
    split,
)
from problems.modules.layouts import Adapted, dense_adapted
from problems.modules.positions import rms, rotate_half, rotations

VOCABULARY = 11


def ids() -> tuple[Tensor]:
    return (torch.tensor([[3, 1, 4, 9, 5]]),)


def block() -> Pre:
    return Pre(Own(fused))


class Conv1D(nn.Module):
    """GPT-2's linear layer, its weight the other way round."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.resid_dropout = Conv1D(3 * D, D), Conv1D(D, D), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.c_attn(x).split(D, dim=2))
        return self.resid_dropout(self.c_proj(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(VOCABULARY, D), nn.Embedding(8, D), nn.Dropout(0.1)
        self.h = nn.ModuleList([Pre(CausalSelfAttention()) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.drop(self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device)))
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def gpt(m: Any, input_ids: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            return merge(
                attend(*(split(part) for part in (t @ b.att.c_attn.weight + b.att.c_attn.bias).chunk(3, -1)), bias=causal())
            )

        def attention(t: Tensor) -> Tensor:
            return heads(t) @ b.att.c_proj.weight + b.att.c_proj.bias

        def block(t: Tensor) -> Tensor:
            t = t + attention(b.ln1(t))
            return t + b.mlp(b.ln2(t))

        return Step(block, attention, heads, b.ln1)

    enter = m.wte.weight[input_ids[0]][None] + m.wpe.weight[: input_ids.shape[1]]
    return Formula(enter, [of(b) for b in m.h], m.ln_f, lambda t: t @ m.wte.weight.mT)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(D, 12, bias=False),
            nn.Linear(D, 12, bias=False),
            nn.Linear(12, D, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k_proj, self.v_proj = nn.Linear(D, D // H, bias=False), nn.Linear(D, D // H, bias=False)

    def forward(self, hidden: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = split(self.q_proj(hidden)), split(self.k_proj(hidden), 1), split(self.v_proj(hidden), 1)
        cos, sin = positions
        q, k = (t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin for t in (q, k))
        k, v = (t.expand(-1, H, -1, -1) for t in (k, v))
        weights = q @ k.transpose(2, 3) * 0.5
        if mask is not None:
            weights = weights + mask[:, :, :, : k.shape[-2]]
        weights = F.softmax(weights, dim=-1)
        out = (weights @ v).transpose(1, 2).contiguous()
        return self.o_proj(out.reshape(*hidden.shape[:-1], -1)), weights


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(), SwiGLU()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)

    def forward(self, hidden: Tensor, **others: Any) -> tuple[Tensor, ...]:
        residual = hidden
        hidden, weights = self.self_attn(self.input_layernorm(hidden), **others)
        hidden = residual + hidden
        return (hidden + self.mlp(self.post_attention_layernorm(hidden)),)


@dataclass
class Output:
    logits: Tensor
    hidden_states: tuple[Tensor, ...]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(VOCABULARY, D), nn.ModuleList([LlamaLayer() for _ in range(3)])
        self.norm, self.lm_head = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Output:
        hidden, states = self.embed_tokens(input_ids), []
        n = input_ids.shape[1]
        angles = torch.arange(n, dtype=hidden.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=hidden.dtype).repeat(2)
        mask = torch.full((n, n), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)[None, None]
        for layer in self.layers:
            states.append(hidden)
            hidden = layer(hidden, positions=(angles.cos(), angles.sin()), mask=mask)[0]
        hidden = self.norm(hidden)
        return Output(self.lm_head(hidden), (*states, hidden))


def llama(m: Any, input_ids: Tensor) -> Formula:
    turns = rotations(half=True)

    def of(b: Any) -> Step:
        a = b.self_attn

        def heads(t: Tensor) -> Tensor:
            q, k, v = (split(t @ a.q_proj.weight.mT), t @ a.k_proj.weight.mT, t @ a.v_proj.weight.mT)
            q, k = (turns @ q[..., None])[..., 0], (turns @ k[..., None])[..., 0]
            return merge(attend(q, k[:, None], v[:, None], causal()))

        def attention(t: Tensor) -> Tensor:
            return dense_adapted(a.o_proj, heads(t)) if isinstance(a.o_proj, Adapted) else heads(t) @ a.o_proj.weight.mT

        def norm(t: Tensor) -> Tensor:
            return rms(t, b.input_layernorm.weight)

        def block(t: Tensor) -> Tensor:
            t = t + attention(norm(t))
            return t + b.mlp(rms(t, b.post_attention_layernorm.weight))

        return Step(block, attention, heads, norm)

    return Formula(m.embed_tokens(input_ids), [of(b) for b in m.layers], lambda t: rms(t, m.norm.weight), m.lm_head)


def adapted_llama() -> nn.Module:
    """With LoRA on every output projection."""
    m: Any = Llama()
    for layer in m.layers:
        layer.self_attn.o_proj = Adapted()
    return seeded(m)


class BertSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dropout = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), nn.Dropout(0.1)

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (p(hidden).view(1, -1, H, D // H).permute(0, 2, 1, 3) for p in (self.query, self.key, self.value))
        probabilities = F.softmax(torch.matmul(q, k.transpose(-1, -2)) / 2.0 + mask, dim=-1)
        context = torch.matmul(self.dropout(probabilities), v).permute(0, 2, 1, 3).contiguous()
        return context.view(1, -1, D), probabilities


class BertOutput(nn.Module):
    """A linear layer, the residual and the norm, in one module."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(width, D), nn.LayerNorm(D), nn.Dropout(0.1)

    def forward(self, hidden: Tensor, given: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden)) + given)


class BertAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self, self.output = BertSelfAttention(), BertOutput()

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        outputs = self.self(hidden, mask)
        return (self.output(outputs[0], hidden), *outputs[1:])


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = BertAttention(), nn.Linear(D, 2 * D), BertOutput(2 * D)

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        outputs = self.attention(hidden, mask)
        return (self.output(F.gelu(self.intermediate(outputs[0])), outputs[0]), *outputs[1:])


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.LayerNorm = nn.Embedding(VOCABULARY, D), nn.LayerNorm(D)
        self.layer, self.pooler = nn.ModuleList([BertLayer(), BertLayer()]), nn.Linear(D, D)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.LayerNorm(self.embeddings(input_ids))
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = (1.0 - mask[:, None, None].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        for layer in self.layer:
            hidden = layer(hidden, mask)[0]
        return hidden, torch.tanh(self.pooler(hidden[:, 0]))


def bert(m: Any, input_ids: Tensor) -> Formula:
    def of(b: Any) -> Step:
        s, first, last = b.attention.self, b.attention.output, b.output

        def heads(t: Tensor) -> Tensor:
            return merge(attend(split(s.query(t)), split(s.key(t)), split(s.value(t))))

        def block(t: Tensor) -> Tensor:
            t = first.LayerNorm(t + first.dense(heads(t)))
            y = b.intermediate(t)
            return last.LayerNorm(t + last.dense(y * (1 + torch.erf(y / 2**0.5)) / 2))

        return Step(block, lambda t: first.dense(heads(t)), heads)

    return Formula(m.LayerNorm(m.embeddings.weight[input_ids[0]][None]), [of(b) for b in m.layer])


SPANS = "0>1, 1>final, model"

QUESTIONS: list[Question] = [
    *asks(
        "GPT-2", lambda: seeded(GPT()), ids, gpt, "attention, heads 1, normed 1, block 1, update", SPANS, "0>final, 1>logits"
    ),
    *asks(
        "Llama", lambda: seeded(Llama()), ids, llama, "attention 2, heads, normed 1, block 2, update 1", SPANS, "0>2, 0>logits"
    ),
    *asks("Llama with LoRA on o", adapted_llama, ids, llama, "attention, attention 1, heads, block 1"),
    *asks("BERT", lambda: seeded(Bert()), ids, bert, "attention, attention 1, heads 1, block, block 1, update", SPANS),
    *asks(
        "an nn.Sequential of blocks",
        lambda: seeded(nn.Sequential(nn.Linear(D, D), block(), block(), nn.LayerNorm(D))),
        one,
        lambda m, x: Formula(m[0](x), [pre(m[1]), pre(m[2])], m[3]),
        "attention 1, block, 0>final",
    ),
    *asks(
        "causal rotary blocks",
        lambda: seeded(Stack(Pre(Own(rotate_half)), Pre(Own(rotate_half)))),
        one,
        lambda m, x: Formula(x, [pre(b, rotate_half) for b in m.blocks], m.norm),
        "normed 1, 1>final",
    ),
]
