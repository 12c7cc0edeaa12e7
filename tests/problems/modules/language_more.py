"""Language models as people write them: T5's buckets, memory of earlier segments, chunks, decay, recurrence beside attention."""

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


def gelu(t: Tensor) -> Tensor:
    return t * (1 + torch.erf(t / 2**0.5)) / 2


def silu(t: Tensor) -> Tensor:
    return t / (1 + (-t).exp())


def ids() -> tuple[Tensor]:
    return (torch.tensor([[3, 1, 4, 1, 5]]),)


# ---- nanoGPT with a cache-free generate head: logits of the last place only
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
            dict(
                wte=nn.Embedding(9, D), wpe=nn.Embedding(16, D), drop=nn.Dropout(0.1),
                h=nn.ModuleList([NanoBlock(), NanoBlock()]), ln_f=nn.LayerNorm(D),
            )
        )  # fmt: skip
        self.lm_head = nn.Linear(D, 9, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

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


# ---- T5 encoder: RMS norms, buckets in the first layer, the bias handed on
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

    def forward(self, x: Tensor, position_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
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

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        out, bias = self.SelfAttention(self.layer_norm(x), bias)
        return x + self.dropout(out), bias


class T5Ff(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.wi_0, self.wi_1, self.wo = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, 12, bias=False), nn.Linear(D, 12, bias=False), nn.Linear(12, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer_norm(x)
        return x + self.wo(F.gelu(self.wi_0(h)) * self.wi_1(h))


class T5Block(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList([T5SelfLayer(biased), T5Ff()])

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        x, bias = self.layer[0](x, bias)
        return self.layer[-1](x), bias


class T5Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.block, self.final_layer_norm = nn.Embedding(9, D), nn.ModuleList([T5Block(True), T5Block(False)]), nn.RMSNorm(D, eps=1e-6)

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


# ---- Transformer-XL: memory of an earlier segment beside the tokens, relative positions by a shift
class XlAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_net, self.r_net, self.o_net = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
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
        r = torch.cat([torch.sin(pos[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])), torch.cos(pos[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001]))], -1)
        mask = torch.triu(torch.ones(n, n + 3), diagonal=4).bool()
        states = []
        for i, layer in enumerate(self.layers):
            states.append(x)
            x = layer(x, r, self.mems[i], mask)
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


# ---- RetNet's retention, RWKV's mixing, FFT convolutions, gMLP, MLP-Mixer, FNet
class Retention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.g, self.o = (nn.Linear(D, D, bias=False) for _ in range(5))
        self.group_norm = nn.RMSNorm(4, eps=1e-6, elementwise_affine=False)
        i = torch.arange(16.0)
        decay = (0.9 ** (i[:, None] - i[None])).tril()
        self.register_buffer("decay", torch.stack([decay, decay.square()]))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = (q @ k.transpose(-1, -2)) * self.decay[:, :n, :n]  # pyright: ignore
        out = self.group_norm(scores @ v)
        return self.o(F.silu(self.g(x)) * merge(out))


def retention(m: Any, x: Tensor) -> Tensor:
    i = torch.arange(N, dtype=torch.float64)
    decay = torch.stack([m.decay[h, :N, :N] for h in range(H)]).double()
    out = ((split(m.q(x)) @ split(m.k(x)).mT) * decay) @ split(m.v(x))
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return m.o(silu(m.g(x)) * merge(out))


class TimeMix(nn.Module):
    """RWKV-4: a weighted mean of what came before, in a loop with a running maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.time_decay, self.time_first, self.mix = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
        self.key, self.value, self.receptance, self.output = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        xx = self.time_shift(x)
        xk = x * self.mix + xx * (1 - self.mix)
        k, v, r = self.key(xk), self.value(xk), torch.sigmoid(self.receptance(xk))
        w, u = -torch.exp(self.time_decay), self.time_first
        aa, bb, pp = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], -1e30)
        out = []
        for t in range(x.shape[1]):
            ww = u + k[:, t]
            qq = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - qq), torch.exp(ww - qq)
            out.append((e1 * aa + e2 * v[:, t]) / (e1 * bb + e2))
            ww = pp + w
            qq = torch.maximum(ww, k[:, t])
            e1, e2 = torch.exp(ww - qq), torch.exp(k[:, t] - qq)
            aa, bb, pp = e1 * aa + e2 * v[:, t], e1 * bb + e2, qq
        return self.output(r * torch.stack(out, 1))


def time_mix(m: Any, x: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    y = x * m.mix + before * (1 - m.mix)
    k, v, r = m.key(y), m.value(y), 1 / (1 + (-m.receptance(y)).exp())
    rows = []
    for t in range(x.shape[1]):
        e = [(k[:, s] - (t - 1 - s) * m.time_decay.exp() if s < t else k[:, s] + m.time_first).exp() for s in range(t + 1)]
        rows.append(sum(e[s] * v[:, s] for s in range(t + 1)) / sum(e))  # pyright: ignore
    return m.output(r * torch.stack(rows, 1))


class Hyena(nn.Module):
    """A long convolution by the Fourier transform, gated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj, self.filter = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Parameter(torch.zeros(D, 16))
        self.short = nn.Conv1d(3 * D, 3 * D, 3, padding=2, groups=3 * D)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        a, b, v = self.short(self.in_proj(x).transpose(1, 2))[..., :n].chunk(3, 1)
        v = v * b
        y = torch.fft.irfft(torch.fft.rfft(v, n=2 * n) * torch.fft.rfft(self.filter[:, :n], n=2 * n), n=2 * n)[..., :n]
        return self.out_proj((y * a).transpose(1, 2))


def hyena(m: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    y = m.in_proj(x).mT
    padded = torch.cat([torch.zeros_like(y[..., :2]), y], -1)
    y = sum(m.short.weight[:, 0, i, None] * padded[..., i : i + n] for i in range(3)) + m.short.bias[:, None]
    a, b, v = y.chunk(3, 1)
    v = v * b
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    toeplitz = m.filter[:, (i - j).clamp(0)] * (i >= j)
    return m.out_proj((torch.einsum("dij,bdj->bdi", toeplitz, v) * a).mT)


class Spatial(nn.Module):
    """gMLP's spatial gating."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.norm, self.spatial, self.proj_out = nn.Linear(D, 16), nn.LayerNorm(8), nn.Conv1d(N, N, 1), nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.proj_in(x)).chunk(2, dim=-1)
        return self.proj_out(u * self.spatial(self.norm(v)))


def spatial(m: Any, x: Tensor) -> Tensor:
    u, v = gelu(m.proj_in(x)).chunk(2, -1)
    return m.proj_out(u * (m.spatial.weight[..., 0] @ m.norm(v) + m.spatial.bias[:, None]))


class Fourier(nn.Module):
    """FNet."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


def fourier(m: Any, x: Tensor) -> Tensor:
    def wave(n: int) -> Tensor:
        i = torch.arange(n, dtype=torch.float64)
        return torch.exp(-2j * math.pi * i[:, None] * i[None] / n)

    return (wave(x.shape[-2]) @ (x.to(torch.complex128) @ wave(x.shape[-1]))).real


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mlp_tokens = nn.LayerNorm(D), nn.Sequential(nn.Linear(N, 7), nn.GELU(), nn.Linear(7, N))
        self.norm2, self.mlp_channels = nn.LayerNorm(D), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.norm, self.head = nn.Linear(6, D), nn.Sequential(MixerBlock(), MixerBlock()), nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x))).mean(dim=1))


def mixer(m: Any, x: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def block(t: Tensor) -> Tensor:
            t = t + b.mlp_tokens(b.norm1(t).mT).mT
            return t + b.mlp_channels(b.norm2(t))

        return Step(block)

    return Formula(m.stem(x), [of(b) for b in m.blocks], m.norm, lambda t: m.head(t.mean(1)))


def of_mixer(run: Any) -> Any:
    def of(b: Any) -> Step:
        def block(t: Tensor) -> Tensor:
            t = t + run(b.att, b.ln1(t))
            return t + b.mlp(b.ln2(t))

        return Step(block)

    return of


MIXERS: dict[str, Any] = {
    "retention": (Retention, retention),
    "RWKV's time mixing": (TimeMix, time_mix),
    "a long convolution": (Hyena, hyena),
    "a spatial gate": (Spatial, spatial),
    "a Fourier transform": (Fourier, fourier),
}


def hybrid(run: Any) -> Any:
    return lambda m, x: Formula(x, [of_mixer(run)(m.blocks[0]), pre(m.blocks[1]), of_mixer(run)(m.blocks[2])], m.norm)


# ---- local attention in chunks with a look back (lucidrains), Longformer's chunks
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


# ---- GPT-J: parallel, rotary on a part, a cache returned
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
        self.wte, self.h, self.ln_f, self.lm_head = nn.Embedding(9, D), nn.ModuleList([GptJ(), GptJ()]), nn.LayerNorm(D), nn.Linear(D, 9)

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


# ---- Nyström, Linformer, Performer, sigmoid attention, sub-layer norms
class Linformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(D, D) for _ in range(4))
        self.proj_k, self.proj_v = nn.Parameter(torch.zeros(N, 3)), nn.Parameter(torch.zeros(N, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        k, v = torch.einsum("bnd,nk->bkd", k, self.proj_k), torch.einsum("bnd,nk->bkd", v, self.proj_v)
        dots = torch.einsum("bhnd,bhkd->bhnk", split(q), split(k)) * 0.5
        return self.to_out(merge(torch.einsum("bhnk,bhkd->bhnd", dots.softmax(dim=-1), split(v))))


def linformer(a: Any, t: Tensor) -> Tensor:
    return merge(attend(split(a.to_q(t)), split(a.proj_k.mT @ a.to_k(t)), split(a.proj_v.mT @ a.to_v(t))))


class Performer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.to_out = (nn.Linear(D, D) for _ in range(4))
        self.register_buffer("projection", torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))

        def features(t: Tensor) -> Tensor:
            y = t * 4**-0.25 @ self.projection.T  # pyright: ignore
            return (y - t.square().sum(-1, keepdim=True) / 4 - y.amax(dim=(-1, -2), keepdim=True).detach()).exp() + 1e-4

        q, k = features(q), features(k)
        inverse = 1.0 / torch.einsum("...nd,...d->...n", q, k.sum(dim=-2))
        context = torch.einsum("...nd,...ne->...de", k, v)
        return self.to_out(merge(torch.einsum("...de,...nd,...n->...ne", context, q, inverse)))


def performer(a: Any, x: Tensor) -> Tensor:
    def features(t: Tensor) -> Tensor:
        y = t * 4**-0.25 @ a.projection.mT
        top = y.amax((-1, -2), keepdim=True)
        return (y - t.square().sum(-1, keepdim=True) / 4 - top).exp() + 1e-4

    q, k, v = features(split(a.q(x))), features(split(a.k(x))), split(a.v(x))
    w = q @ k.mT
    return a.to_out(merge(w / w.sum(-1, keepdim=True) @ v))


class Sigmoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        w = torch.sigmoid(split(q) @ split(k).mT / 2 - math.log(x.shape[1]))
        return self.out(merge(w @ split(v)))


def sigmoid(a: Any, t: Tensor) -> Tensor:
    q, k, v = (split(y) for y in a.qkv(t).chunk(3, -1))
    return merge(1 / (1 + (-(q @ k.mT / 2 - math.log(N))).exp()) @ v)


class SubNorm(nn.Module):
    """Magneto, NormFormer: a norm of the heads' outputs and a gain for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.inner, self.gain = *(nn.Linear(D, D) for _ in range(4)), nn.LayerNorm(D), nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)))
        return self.o(self.inner(merge(y * self.gain[:, None, None])))


def sub_norm(a: Any, t: Tensor) -> Tensor:
    return merge(attend(split(a.q(t)), split(a.k(t)), split(a.v(t))) * a.gain[:, None, None])


class Nystrom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)) * 0.5, split(self.k(x)), split(self.v(x))
        ql, kl = q.unflatten(2, (3, 2)).mean(3), k.unflatten(2, (3, 2)).mean(3)
        k1, k2, k3 = (q @ kl.mT).softmax(-1), (ql @ kl.mT).softmax(-1), (ql @ k.mT).softmax(-1)
        i = torch.eye(3, dtype=x.dtype)
        z = k2.mT / (k2.abs().sum(-2).max() * k2.abs().sum(-1).max())
        for _ in range(4):
            kz = k2 @ z
            z = 0.25 * z @ (13 * i - kz @ (15 * i - kz @ (7 * i - kz)))
        return self.o(merge(k1 @ z @ (k3 @ v)))


def nystrom(a: Any, x: Tensor) -> Tensor:
    q, k, v = split(a.q(x)) * 0.5, split(a.k(x)), split(a.v(x))
    ql, kl = (q[:, :, ::2] + q[:, :, 1::2]) / 2, (k[:, :, ::2] + k[:, :, 1::2]) / 2
    k1, k2, k3 = (q @ kl.mT).softmax(-1), (ql @ kl.mT).softmax(-1), (ql @ k.mT).softmax(-1)
    i = torch.eye(3, dtype=x.dtype)
    z = k2.mT / (k2.sum(-2).max() * k2.sum(-1).max())
    for _ in range(4):
        kz = k2 @ z
        z = 0.25 * z @ (13 * i - kz @ (15 * i - kz @ (7 * i - kz)))
    return merge(k1 @ z @ (k3 @ v))


def by(heads: Any, out: str, inner: Any = None) -> Any:
    def of(b: Any) -> Step:
        def run(t: Tensor) -> Tensor:
            y = heads(b.att, t)
            return getattr(b.att, out)(b.att.inner(y) if inner else y)

        def block(t: Tensor) -> Tensor:
            t = t + run(b.ln1(t))
            return t + b.mlp(b.ln2(t))

        return Step(block, run, lambda t: b.att.inner(heads(b.att, t)) if inner else heads(b.att, t), b.ln1)

    return of


def stack(name: str, kind: Any, of: Any, *specs: str, inputs: Any = one) -> list[Question]:
    return asks(name, lambda: seeded(Stack(Pre(kind()), Pre(kind()))), inputs, lambda m, x: Formula(x, [of(b) for b in m.blocks], m.norm), *specs)


MODELS = "attention, heads 1, normed, block, block 1, update 1, model, 0>final, 0>logits"
QUESTIONS: list[Question] = [
    *asks("nanoGPT", lambda: seeded(NanoGpt()), ids, nano, MODELS),
    *asks("nanoGPT with targets", lambda: seeded(NanoGpt()), with_targets, nano, "attention, block 1, 0>1, model refused"),
    *asks("a T5 encoder", lambda: seeded(T5Encoder()), ids, t5, "attention, attention 1, heads 1, normed, block, block 1, update 1, model, 0>final", tolerance=1e-5),
    *asks("Transformer-XL", lambda: seeded(TransformerXl()), ids, xl, "attention, heads 1, block, block 1, update, 0>1, model", tolerance=1e-5),
    *(
        q
        for name, (kind, run) in MIXERS.items()
        for q in (
            *asks(f"{name} around attention", lambda kind=kind: seeded(Stack(Pre(kind()), Pre(Own(fused)), Pre(kind()))), one, hybrid(run), "block, attention 1, block 2, update 2, 0>2, model"),
            *stack(f"{name} in every block", kind, of_mixer(run), "block, block 1, model, 0>1"),
        )
    ),
    *asks("MLP-Mixer", lambda: seeded(Mixer()), lambda: (tokens(N, 6),), mixer, "block, block 1, update, model or refused, 0>logits, 1>final, attention refused"),
    *stack("chunks that look back", LocalAttention, local, "attention, heads 1, normed, block, update 1, 0>1"),
    *asks("GPT-J", lambda: seeded(GptJModel()), ids, gptj, MODELS, tolerance=1e-5),
    *stack("Linformer", Linformer, by(linformer, "to_out"), "attention, heads 1, block, update"),
    *stack("Performer", Performer, of_mixer(performer), "block, block 1, update 1, 0>1"),
    *stack("sigmoid attention", Sigmoid, by(sigmoid, "out"), "attention, heads 1, block"),
    *stack("a norm of the heads", SubNorm, by(sub_norm, "o", True), "attention, heads or refused, normed 1, block 1"),
    *stack("Nyström", Nystrom, by(nystrom, "o"), "attention, heads 1 or refused, block, block 1", inputs=lambda: (tokens(6),)),
]
