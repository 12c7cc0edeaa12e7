"""Blocks with a `forward` of their own: experts, one module for all, projections elsewhere, residuals inside."""

import math
from collections.abc import Callable
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
    fused,
    merge,
    mlp,
    one,
    plain,
    pre,
    seeded,
    split,
)
from problems.modules.blocks import MOST, Block, attention, first_norm, step


class Experts(nn.Module):
    """Two experts of four for each token, weighted by a softmax over the chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 4, bias=False), nn.ModuleList([mlp() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, D)
        top, chosen = torch.topk(self.gate(flat).softmax(-1), 2, dim=-1)
        top, out = top / top.sum(-1, keepdim=True), torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, ranks = torch.where(chosen == i)
            out.index_add_(0, rows, expert(flat[rows]) * top[rows, ranks, None])
        return out.view(x.shape)


class DenseExperts(Experts):
    """The same experts, all of them run and those not chosen multiplied by zero."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        top, chosen = logits.topk(2, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))
        return torch.einsum("bne,bned->bnd", weights, torch.stack([e(x) for e in self.experts], 2))


def experts(b: Any) -> Step:
    def run(t: Tensor) -> Tensor:
        logits = b.mlp.gate(t)
        closed = logits < logits.sort(-1).values[..., -2:-1]
        weights = logits.exp().masked_fill(closed.detach(), 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        return sum((weights[..., i : i + 1] * e(t) for i, e in enumerate(b.mlp.experts)), torch.zeros(1))

    def block(t: Tensor) -> Tensor:
        t = t + attention(b, b.ln1(t))
        return t + run(b.ln2(t))

    return Step(block, lambda t: attention(b, t), lambda t: plain(b.att, t), b.ln1)


class OneForward(nn.Module):
    """Attention and the network in one `forward`, without a module for either."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(fused(self, self.ln1(x)))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


def one_forward(b: Any) -> Step:
    def block(t: Tensor) -> Tensor:
        t = t + b.o(plain(b, b.ln1(t)))
        y = b.up(b.ln2(t))
        return t + b.down(y * (1 + torch.erf(y / 2**0.5)) / 2)

    return Step(block, lambda t: b.o(plain(b, t)), lambda t: plain(b, t), b.ln1)


class FusedParallel(nn.Module):
    """PaLM: one matrix for queries, keys, values and the network, and both results added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fused, self.sizes = nn.LayerNorm(D), nn.Linear(D, D + 4 + 4 + 32, bias=False), [D, 4, 4, 32]
        self.attn_out, self.ff_out = nn.Linear(D, D, bias=False), nn.Linear(16, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, ff = self.fused(self.norm(x)).split(self.sizes, dim=-1)
        scores = torch.einsum("bhid,bjd->bhij", split(q), k) * 0.5
        out = torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)
        a, gate = ff.chunk(2, dim=-1)
        return x + self.attn_out(merge(out)) + self.ff_out(F.silu(gate) * a)


def fused_parallel(b: Any) -> Step:
    q, k, v, ff = b.fused.weight.split(b.sizes)

    def heads(t: Tensor) -> Tensor:
        return merge(attend(split(t @ q.mT), (t @ k.mT)[:, None], (t @ v.mT)[:, None]))

    def block(t: Tensor) -> Tensor:
        h = b.norm(t)
        a, gate = (h @ ff.mT).chunk(2, -1)
        return t + heads(h) @ b.attn_out.weight.mT + (a * gate / (1 + (-gate).exp())) @ b.ff_out.weight.mT

    return Step(block, lambda t: heads(t) @ b.attn_out.weight.mT, heads, b.norm)


class Added(nn.Module):
    """The residual is added by the output matrix's own product: `addmm(x, heads, w)`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.wo = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.zeros(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x[0], fused(self, x)[0], self.wo)[None]


def added(b: Any) -> Step:
    return Step(lambda t: t + plain(b, t) @ b.wo, lambda t: plain(b, t) @ b.wo, lambda t: plain(b, t))


class ResidualInside(nn.Module):
    """The residual belongs to the attention's own module, as in the first transformers of many."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.ln = *(nn.Linear(D, D) for _ in range(4)), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        out = torch.softmax(q @ k.mT / math.sqrt(D // H), -1) @ v
        return self.ln(self.o(merge(out)) + x)


def residual_inside(b: Any) -> Step:
    return Step(lambda t: b.ln(t + b.o(plain(b, t))), lambda t: b.o(plain(b, t)), lambda t: plain(b, t))


class NoCopy(nn.Module):
    """Every residual overwrites the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(D, D), nn.ModuleList([Overwriting(Own(fused)), Overwriting(Own(fused))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        return x


class Overwriting(Pre):
    def forward(self, x: Tensor) -> Tensor:
        x += self.att(self.ln1(x))
        x += self.mlp(self.ln2(x))
        return x


def no_copy(m: Any, x: Tensor) -> Formula:
    return Formula(m.embed(x), [pre(b) for b in m.blocks])


class Kernel(nn.Module):
    """Attention that is given queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(D, D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.o(merge(F.scaled_dot_product_attention(split(q), split(k), split(v))))


class Outside(nn.Module):
    """Queries, keys and values are projected outside the module that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.q, self.k, self.v, self.kernel = (
            nn.LayerNorm(D),
            nn.Linear(D, D),
            nn.Linear(D, D),
            nn.Linear(D, D),
            Kernel(),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln(x)
        return x + self.kernel(self.q(h), self.k(h), self.v(h))


def outside(b: Any) -> Step:
    def run(t: Tensor) -> Tensor:
        return b.kernel.o(plain(b, t))

    return Step(lambda t: t + run(b.ln(t)), run, lambda t: plain(b, t), b.ln)


class Three(Own):
    """Attention of three arguments."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.o(merge(F.scaled_dot_product_attention(split(self.q(query)), split(self.k(key)), split(self.v(value)))))


class ThreeNorms(nn.Module):
    """One norm, run once for each of attention's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.att = nn.LayerNorm(D), Three(fused)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.att(self.ln1(x), self.ln1(x), self.ln1(x))


def three_norms_formula(b: Any, t: Tensor) -> Tensor:
    return t + attention(b, b.ln1(t))


class Narrow(nn.Module):
    """MobileBERT: queries and keys come from a narrower tensor that is made of the tokens, values from the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.ln, self.q, self.k = nn.Linear(D, 6), nn.LayerNorm(6), nn.Linear(6, D), nn.Linear(6, D)
        self.v, self.o = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln(self.down(x))
        return x + self.o(merge(F.scaled_dot_product_attention(split(self.q(h)), split(self.k(h)), split(self.v(x)))))


def narrow(b: Any) -> Step:
    def heads(t: Tensor) -> Tensor:
        h = b.ln(b.down(t))
        return merge(attend(split(b.q(h)), split(b.k(h)), split(b.v(t))))

    return Step(lambda t: t + b.o(heads(t)), lambda t: b.o(heads(t)), heads)


def simple(name: str, kind: Callable[[], nn.Module], of: Callable[[Any], Step], *specs: str, **others: Any) -> list[Question]:
    """Questions about a block of any kind, two of them in a list."""
    build = lambda: seeded(Stack(kind(), kind(), norm=False))  # noqa: E731
    return asks(name, build, one, lambda m, x: Formula(x, [of(b) for b in m.blocks]), *specs, **others)


QUESTIONS: list[Question] = [
    *asks(
        "residuals in place, no copy", lambda: seeded(NoCopy()), one, no_copy, "attention, attention 1, block, block 1, model"
    ),
    *simple("projections outside", Outside, outside, "attention, heads, normed 1, block"),
    *simple(
        "three norms", ThreeNorms, lambda b: step(three_norms_formula, first_norm)(b), "attention, heads 1, normed, block 1"
    ),
    *simple("values from another tensor", Narrow, narrow, "attention, heads 1, block 1"),
    *simple("experts", lambda: Block(Pre.forward, mlp=Experts()), experts, MOST),
    *simple("experts, all run", lambda: Block(Pre.forward, mlp=DenseExperts()), experts, "attention 1, block 1, update, model"),
    *simple("one forward for all", OneForward, one_forward, "attention, heads, normed 1, block, block 1"),
    *simple("one matrix for attention and network", FusedParallel, fused_parallel, "heads 1, block, block 1, update"),
    *simple("the residual added by addmm", Added, added, "attention, heads, block 1, update 1", hidden="attention"),
    *simple("residual and norm in attention's module", ResidualInside, residual_inside, "attention, heads, block 1, update"),
]
