"""Approximations and relatives of attention: Linformer, Performer, sigmoids, norms inside, Nyström."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    H,
    N,
    Question,
    Step,
    attend,
    merge,
    split,
    tokens,
)
from problems.modules.mixing import of_mixer, stack


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
        self.q, self.k, self.v, self.o, self.inner, self.gain = (
            *(nn.Linear(D, D) for _ in range(4)),
            nn.LayerNorm(D),
            nn.Parameter(torch.ones(H)),
        )

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


QUESTIONS: list[Question] = [
    *stack("Linformer", Linformer, by(linformer, "to_out"), "attention, heads 1, block, update"),
    *stack("Performer", Performer, of_mixer(performer), "block, block 1, update 1, 0>1"),
    *stack("sigmoid attention", Sigmoid, by(sigmoid, "out"), "attention, heads 1, block"),
    *stack("a norm of the heads", SubNorm, by(sub_norm, "o", True), "attention, heads or refused, normed 1, block 1"),
    *stack("Nyström", Nystrom, by(nystrom, "o"), "attention, heads 1 or refused, block, block 1", inputs=lambda: (tokens(6),)),
]
