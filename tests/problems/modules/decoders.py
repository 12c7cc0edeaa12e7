"""Language models as people write them: nanoGPT, T5's encoder, GPT-J."""

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
    Question,
    Step,
    asks,
    attend,
    causal,
    merge,
    seeded,
    split,
)


def gelu(t: Tensor) -> Tensor:
    return t * (1 + torch.erf(t / 2**0.5)) / 2


def silu(t: Tensor) -> Tensor:
    return t / (1 + (-t).exp())


def ids() -> tuple[Tensor]:
    return (torch.tensor([[3, 1, 4, 1, 5]]),)


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(D), NanoAttention(), nn.LayerNorm(D), NanoMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.resid_dropout = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(D, dim=2)
        q, k, v = (y.view(b, t, H, c // H).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))  # pyright: ignore
        y = F.softmax(att, dim=-1) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class NanoMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj, self.dropout = nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(9, D),
                "wpe": nn.Embedding(16, D),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([NanoBlock(), NanoBlock()]),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, 9, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        t: Any = self.transformer
        x = t.drop(t.wte(idx) + t.wpe(pos))
        for block in t.h:
            x = block(x)
        x = t.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, 9), targets.view(-1), ignore_index=-1)
        return self.lm_head(x[:, [-1], :]), None


def nano(m: Any, idx: Tensor, targets: Tensor | None = None) -> Formula:
    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            return merge(attend(*(split(y) for y in b.attn.c_attn(t).chunk(3, -1)), causal()))  # pyright: ignore

        def block(t: Tensor) -> Tensor:
            t = t + b.attn.c_proj(heads(b.ln_1(t)))
            return t + b.mlp.c_proj(gelu(b.mlp.c_fc(b.ln_2(t))))

        return Step(block, lambda t: b.attn.c_proj(heads(t)), heads, b.ln_1)

    x = m.transformer.wte.weight[idx] + m.transformer.wpe.weight[:N]
    last = (lambda t: t[:, -1:] @ m.lm_head.weight.mT) if targets is None else (lambda t: t @ m.lm_head.weight.mT)
    return Formula(x, [of(b) for b in m.transformer.h], m.transformer.ln_f, last)


def with_targets() -> tuple[Tensor, Tensor]:
    return ids()[0], torch.tensor([[1, 4, 1, 5, 2]])


class T5Attention(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(8, H) if biased else None

    def compute_bias(self, n: int) -> Tensor:
        relative = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        buckets = (relative > 0).long() * 4
        relative = relative.abs()
        large = 2 + (torch.log(relative.float().clamp(min=1) / 2) / math.log(8 / 2) * 2).long()
        buckets = buckets + torch.where(relative < 2, relative, large.clamp(max=3))
        assert self.relative_attention_bias is not None
        return self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = torch.matmul(q, k.transpose(3, 2))
        if position_bias is None:
            position_bias = self.compute_bias(x.shape[1])
        scores = scores + position_bias
        weights = F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), 0.1, self.training)
        return self.o(merge(torch.matmul(weights, v))), position_bias


class T5SelfLayer(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.SelfAttention, self.layer_norm, self.dropout = T5Attention(biased), nn.RMSNorm(D, eps=1e-6), nn.Dropout(0.1)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, bias = self.SelfAttention(self.layer_norm(x), bias)
        return x + self.dropout(out), bias


class T5Ff(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.wi_0, self.wi_1, self.wo = (
            nn.RMSNorm(D, eps=1e-6),
            nn.Linear(D, 12, bias=False),
            nn.Linear(D, 12, bias=False),
            nn.Linear(12, D, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer_norm(x)
        return x + self.wo(F.gelu(self.wi_0(h)) * self.wi_1(h))


class T5Block(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList([T5SelfLayer(biased), T5Ff()])

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x, bias = self.layer[0](x, bias)
        return self.layer[-1](x), bias


class T5Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.block, self.final_layer_norm = (
            nn.Embedding(9, D),
            nn.ModuleList([T5Block(True), T5Block(False)]),
            nn.RMSNorm(D, eps=1e-6),
        )

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        x, bias = self.embed_tokens(input_ids), None
        states = (x,)
        for block in self.block:
            x, bias = block(x, bias)
            states = (*states, x)
        return {"hidden_states": states, "last_hidden_state": self.final_layer_norm(x), "position_bias": bias}


def rms(t: Tensor, w: Tensor) -> Tensor:
    return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w


def t5(m: Any, input_ids: Tensor) -> Formula:
    first = m.block[0].layer[0].SelfAttention
    table = torch.tensor([[0, 5, 6, 6, 7], [1, 0, 5, 6, 6], [2, 1, 0, 5, 6], [2, 2, 1, 0, 5], [3, 2, 2, 1, 0]])
    bias = first.relative_attention_bias.weight[table].permute(2, 0, 1)

    def of(b: Any) -> Step:
        a, norm, ff = b.layer[0].SelfAttention, b.layer[0].layer_norm, b.layer[1]

        def heads(t: Tensor) -> Tensor:
            return merge(attend(split(a.q(t)), split(a.k(t)), split(a.v(t)), bias, scale=1.0))

        def block(t: Tensor) -> Tensor:
            t = t + a.o(heads(rms(t, norm.weight)))
            h = rms(t, ff.layer_norm.weight)
            return t + ff.wo(gelu(ff.wi_0(h)) * ff.wi_1(h))

        return Step(block, lambda t: a.o(heads(t)), heads, lambda t: rms(t, norm.weight))

    return Formula(m.embed_tokens.weight[input_ids], [of(b) for b in m.block], lambda t: rms(t, m.final_layer_norm.weight))


class GptJ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.fc_in, self.fc_out = nn.LayerNorm(D), nn.Linear(D, 16), nn.Linear(16, D)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor, past: Any = None, use_cache: bool = True) -> tuple[Tensor, Any]:
        residual, h = x, self.ln_1(x)
        q, k, v = (p(h).view(*h.shape[:2], H, 4) for p in (self.q_proj, self.k_proj, self.v_proj))
        angle = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * torch.tensor([1.0], dtype=h.dtype)
        sin, cos = angle.sin().repeat_interleave(2, 1)[None, :, None], angle.cos().repeat_interleave(2, 1)[None, :, None]

        def turn(t: Tensor) -> Tensor:
            a, rest = t[..., :2], t[..., 2:]
            back = torch.stack((-a[..., 1::2], a[..., ::2]), dim=-1).flatten(-2)
            return torch.cat((a * cos + back * sin, rest), dim=-1)

        q, k, v = turn(q).permute(0, 2, 1, 3), turn(k).permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        w = torch.matmul(q.float(), k.transpose(-1, -2).float())
        n = w.shape[-1]
        w = torch.where(torch.ones(n, n).tril().bool(), w, torch.finfo(w.dtype).min) / 2.0
        a = torch.matmul(F.softmax(w, dim=-1).to(v.dtype), v)
        a = self.out_proj(a.permute(0, 2, 1, 3).contiguous().view(*h.shape[:2], D))
        return a + self.fc_out(F.gelu(self.fc_in(h))) + residual, (k, v)


class GptJModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h, self.ln_f, self.lm_head = (
            nn.Embedding(9, D),
            nn.ModuleList([GptJ(), GptJ()]),
            nn.LayerNorm(D),
            nn.Linear(D, 9),
        )

    def forward(self, input_ids: Tensor) -> tuple[Any, ...]:
        x, cache = self.wte(input_ids), ()
        for block in self.h:
            x, present = block(x)
            cache = (*cache, present)
        return self.lm_head(self.ln_f(x)), cache


def gptj(m: Any, input_ids: Tensor) -> Formula:
    angle = torch.arange(N, dtype=torch.float64)

    def turn(t: Tensor) -> Tensor:
        a, b = t[..., 0], t[..., 1]
        return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), t[..., 2], t[..., 3]], -1)

    def of(b: Any) -> Step:
        def heads(t: Tensor) -> Tensor:
            return merge(attend(turn(split(b.q_proj(t))), turn(split(b.k_proj(t))), split(b.v_proj(t)), causal()))

        def block(t: Tensor) -> Tensor:
            h = b.ln_1(t)
            return t + b.out_proj(heads(h)) + b.fc_out(gelu(b.fc_in(h)))

        return Step(block, lambda t: b.out_proj(heads(t)), heads, b.ln_1)

    return Formula(m.wte.weight[input_ids], [of(b) for b in m.h], m.ln_f, m.lm_head)


MODELS = "attention, heads 1, normed, block, block 1, update 1, model, 0>final, 0>logits"


QUESTIONS: list[Question] = [
    *asks("nanoGPT", lambda: seeded(NanoGpt()), ids, nano, MODELS),
    *asks(
        "nanoGPT with targets",
        lambda: seeded(NanoGpt()),
        with_targets,
        nano,
        "attention, block 1, 0>1, model refused, 0>logits refused",
    ),
    *asks(
        "a T5 encoder",
        lambda: seeded(T5Encoder()),
        ids,
        t5,
        "attention, attention 1, heads 1, normed, block, block 1, update 1, model, 0>final",
        tolerance=1e-5,
    ),
    *asks("GPT-J", lambda: seeded(GptJModel()), ids, gptj, MODELS, tolerance=1e-5),
]
