"""Blocks that mix tokens without attention: retention, recurrence, convolutions, gates, Fourier transforms."""

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
    fused,
    merge,
    mlp,
    one,
    pre,
    seeded,
    split,
    tokens,
)
from problems.modules.decoders import gelu, silu


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
    decay = torch.stack([m.decay[h, :N, :N] for h in range(H)]).double()
    out = ((split(m.q(x)) @ split(m.k(x)).mT) * decay) @ split(m.v(x))
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return m.o(silu(m.g(x)) * merge(out))


class TimeMix(nn.Module):
    """RWKV-4: a weighted mean of what came before, in a loop with a running maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.time_decay, self.time_first, self.mix = (
            nn.Parameter(torch.zeros(D)),
            nn.Parameter(torch.zeros(D)),
            nn.Parameter(torch.zeros(D)),
        )
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
        self.proj_in, self.norm, self.spatial, self.proj_out = (
            nn.Linear(D, 16),
            nn.LayerNorm(8),
            nn.Conv1d(N, N, 1),
            nn.Linear(8, D),
        )

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
        self.stem, self.blocks, self.norm, self.head = (
            nn.Linear(6, D),
            nn.Sequential(MixerBlock(), MixerBlock()),
            nn.LayerNorm(D),
            nn.Linear(D, 3),
        )

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


def stack(name: str, kind: Any, of: Any, *specs: str, inputs: Any = one) -> list[Question]:
    return asks(
        name,
        lambda: seeded(Stack(Pre(kind()), Pre(kind()))),
        inputs,
        lambda m, x: Formula(x, [of(b) for b in m.blocks], m.norm),
        *specs,
    )


QUESTIONS: list[Question] = [
    *(
        q
        for name, (kind, run) in MIXERS.items()
        for q in (
            *asks(
                f"{name} around attention",
                lambda kind=kind: seeded(Stack(Pre(kind()), Pre(Own(fused)), Pre(kind()))),
                one,
                hybrid(run),
                "block, attention 1, block 2, update 2, 0>2, model",
            ),
            *stack(f"{name} in every block", kind, of_mixer(run), "block, block 1, model, 0>1"),
        )
    ),
    *asks(
        "MLP-Mixer",
        lambda: seeded(Mixer()),
        lambda: (tokens(N, 6),),
        mixer,
        "block, block 1, update, model or refused, 0>logits, 1>final, attention refused",
    ),
]
