"""Attention of one's own, its softmax and its products written in the ways that people write them."""

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
    one,
    plain,
    pre,
    seeded,
    split,
)

Heads = Callable[[Any, Tensor], Tensor]


def qkv(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return split(m.q(x)), split(m.k(x)), split(m.v(x))


def einsum(m: Any, x: Tensor) -> Tensor:
    q, k, v = (p(x).unflatten(-1, (H, -1)) for p in (m.q, m.k, m.v))
    weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D // H), dim=-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


def matmul(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = torch.matmul(q, k.transpose(-1, -2)) / (q.size(-1) ** 0.5)
    return torch.matmul(F.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous().view(x.shape)


def bmm(m: Any, x: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in qkv(m, x))
    weights = torch.bmm(q, k.transpose(1, 2)).mul((D // H) ** -0.5).softmax(-1)
    return merge(torch.bmm(weights, v).unflatten(0, (-1, H)))


def baddbmm(m: Any, x: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in qkv(m, x))
    scores = torch.baddbmm(m.mask.expand(H, N, N), q, k.transpose(1, 2), beta=1.0, alpha=(D // H) ** -0.5)
    return merge(torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, H)))


def keys_by_columns(m: Any, x: Tensor) -> Tensor:
    q, v = split(m.q(x)), split(m.v(x))
    k = m.k(x).view(1, N, H, D // H).permute(0, 2, 3, 1)
    return merge(((q @ k) * (D // H) ** -0.5).softmax(-1) @ v)


def products_transposed(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = (k @ q.mT / 2.0).mT
    return merge((v.mT @ scores.softmax(dim=3).mT).mT)


def scaled_queries(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(((q * (D // H) ** -0.5) @ k.mT).softmax(-1) @ v)


def scaled_keys(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge((q @ (k / math.sqrt(D // H)).mT).softmax(-1) @ v)


def scaled_both(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    root = 1 / math.sqrt(math.sqrt(D // H))
    return merge(((q * root) @ (k * root).mT).softmax(-1) @ v)


def scale_given(m: Any, x: Tensor) -> Tensor:
    return merge(F.scaled_dot_product_attention(*qkv(m, x), scale=0.7))


def exponentials(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = q @ k.mT / 2
    weights = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0])
    return merge(weights / weights.sum(-1, keepdim=True) @ v)


def divided_last(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    weights = torch.exp(q @ k.mT / 2)
    return merge((weights @ v) / weights.sum(-1, keepdim=True))


def logsumexp(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = q @ k.mT / 2
    return merge(torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v)


def log_softmax(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(F.log_softmax(q @ k.mT / 2, -1).exp() @ v)


def in_float32(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(torch.softmax((q @ k.mT / 2).float(), -1).to(v.dtype) @ v)


def softmax_dtype(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(F.softmax(q @ k.mT / 2, dim=-1, dtype=torch.float32).type_as(q) @ v)


def chunked_queries(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(torch.cat([((part @ k.mT) / 2).softmax(-1) @ v for part in q.split(2, dim=2)], dim=2))


def online(m: Any, x: Tensor) -> Tensor:
    """Keys in chunks, with the running maximum and the running sum of flash attention."""
    q, k, v = qkv(m, x)
    top = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=q.dtype)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values in zip(k.split(2, dim=2), v.split(2, dim=2), strict=True):
        scores = q @ keys.mT / 2
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, old = torch.exp(scores - new), torch.exp(top - new)
        total, out, top = total * old + weights.sum(-1, keepdim=True), out * old + weights @ values, new
    return merge(out / total)


def in_place(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = q @ k.mT
    scores.mul_(0.5).masked_fill_(m.mask.isinf(), float("-inf"))
    return merge(scores.softmax(-1) @ v)


def into_views(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    out = torch.zeros_like(x)
    for i in range(H):
        out[..., i * 4 : i * 4 + 4] = (q[:, i] @ k[:, i].mT / 2).softmax(-1) @ v[:, i]
    return out


def stacked(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    outs = []
    for i in range(H):
        outs.append(torch.softmax(q[:, i] @ k[:, i].transpose(1, 2) * 0.5, -1) @ v[:, i])
    return torch.stack(outs, dim=2).reshape(x.shape)


def with_modules(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(torch.matmul(m.dropout(m.softmax(torch.matmul(q, k.mT) * 0.5)), v))


def token_by_token(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    rows = [F.scaled_dot_product_attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(x.shape[1])]
    return merge(torch.cat(rows, dim=2))


def plain_causal(m: Any, x: Tensor) -> Tensor:
    return merge(attend(*qkv(m, x), bias=causal(x.shape[1])))


def stack_of(heads: Heads) -> Callable[..., Formula]:
    return lambda m, x: Formula(x, [pre(b, heads) for b in m.blocks], m.norm)


def alone(heads: Heads) -> Callable[..., Formula]:
    return lambda m, x: Formula(x, [Step(attention=lambda t: m.o(heads(m, t)), heads=lambda t: heads(m, t))])


def both(name: str, way: Heads, heads: Heads, *specs: str, extras: Callable[[], dict[str, Any]] = dict, **others: Any) -> list:
    """Attention alone, map `attention`, and in a stack of two pre-norm blocks, where the maps are those named."""
    first = asks(name, lambda: seeded(Own(way, **extras())), one, alone(heads), "attention", **others)

    def build() -> nn.Module:
        return seeded(Stack(*(Pre(Own(way, **extras())) for _ in range(2))))

    return first + asks(f"{name}, two blocks", build, one, stack_of(heads), *specs, **others)


def masked() -> dict[str, Any]:
    return {"mask": causal()}


class Packed(nn.Module):
    """One projection for queries, keys and values, taken apart by `way`."""

    def __init__(self, way: Callable[[Tensor], tuple[Tensor, ...]], bias: bool = True) -> None:
        super().__init__()
        self.qkv, self.proj, self.way = nn.Linear(D, 3 * D, bias=bias), nn.Linear(D, D), way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.way(self.qkv(x))
        return self.proj(merge(F.scaled_dot_product_attention(q, k, v)))


def packed(rows: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[..., Formula]:
    """The same with the weight's rows taken apart instead; `rows` gives those of queries, keys and values, by head."""

    def formula(m: Any, x: Tensor) -> Formula:
        w = rows(torch.cat([m.qkv.weight, m.qkv.bias[:, None]], 1) if m.qkv.bias is not None else m.qkv.weight)

        def project(t: Tensor, w: Tensor) -> Tensor:  # (heads, d / heads, d or d + 1)
            t = t[:, None]
            return t @ w[..., :D].mT + (w[:, None, :, D] if w.shape[-1] > D else 0.0)

        def heads(t: Tensor) -> Tensor:
            return merge(attend(*(project(t, part) for part in w)))

        return Formula(x, [Step(attention=lambda t: m.proj(heads(t)), heads=heads)])

    return formula


def thirds(w: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(0, (H, -1)) for part in w.chunk(3))


def by_head(w: Tensor) -> tuple[Tensor, ...]:
    """GPT-NeoX: the queries, keys and values of one head are neighbours."""
    return w.unflatten(0, (H, 3, -1)).unbind(1)


TAKEN_APART: dict[str, tuple[Any, Any]] = {
    "fused qkv, chunk": (lambda t: tuple(split(part) for part in t.chunk(3, dim=-1)), thirds),
    "fused qkv, split": (lambda t: tuple(split(part) for part in torch.split(t, D, dim=2)), thirds),
    "fused qkv, reshape and permute": (lambda t: t.reshape(1, N, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0), thirds),
    "fused qkv, slices": (lambda t: tuple(split(t[..., i * D : (i + 1) * D]) for i in range(3)), thirds),
    "fused qkv, head by head": (lambda t: t.view(1, N, H, -1).transpose(1, 2).chunk(3, dim=-1), by_head),
}


class OneHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(D, width, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(N, N)))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * self.key.out_features**-0.5
        tril: Any = self.tril
        scores = scores.masked_fill(tril[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ self.value(x)


class HeadsInAList(nn.Module):
    def __init__(self, stack: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList([OneHead(D // H) for _ in range(H)])
        self.proj, self.stack = nn.Linear(D, D), stack

    def forward(self, x: Tensor) -> Tensor:
        outs = [head(x) for head in self.heads]
        return self.proj(torch.stack(outs, -2).flatten(-2) if self.stack else torch.cat(outs, dim=-1))


def heads_in_a_list(m: Any, x: Tensor) -> Formula:
    def heads(t: Tensor) -> Tensor:
        return torch.cat([attend(h.query(t), h.key(t), h.value(t), causal()) for h in m.heads], -1)

    return Formula(x, [Step(attention=lambda t: m.proj(heads(t)), heads=heads)])


class Summed(nn.Module):
    """Every head has an output matrix of its own, and the heads are added."""

    def __init__(self) -> None:
        super().__init__()
        self.qs, self.ks, self.vs = (nn.ModuleList([nn.Linear(D, 4) for _ in range(H)]) for _ in range(3))
        self.os = nn.ModuleList([nn.Linear(4, D) for _ in range(H)])

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for q, k, v, o in zip(self.qs, self.ks, self.vs, self.os, strict=True):
            out = out + o(F.scaled_dot_product_attention(q(x), k(x), v(x)))
        return out


def summed(m: Any, x: Tensor) -> Formula:
    def attention(t: Tensor) -> Tensor:
        return sum((o(attend(q(t), k(t), v(t))) for q, k, v, o in zip(m.qs, m.ks, m.vs, m.os, strict=True)), torch.zeros(1))

    return Formula(x, [Step(attention=attention)])


class Channels(nn.Module):
    """Channels first, (1, C, N): the projections are 1×1 convolutions, those of queries, keys and values in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv1d(D, 3 * D, 1, groups=2), nn.Conv1d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(1, H, D // H, -1) for t in self.qkv(x).chunk(3, dim=1))
        weights = torch.einsum("bhdi,bhdj->bhij", q * 0.5, k).softmax(-1)
        return self.out(torch.einsum("bhij,bhdj->bhdi", weights, v).reshape(x.shape))


def channels(m: Any, x: Tensor) -> Formula:
    weight = torch.zeros(3 * D, D, dtype=torch.float64)
    for g in range(2):
        weight[g * 12 : g * 12 + 12, g * 4 : g * 4 + 4] = m.qkv.weight[g * 12 : g * 12 + 12, :, 0].detach()

    def heads(t: Tensor) -> Tensor:
        rows = t.mT @ weight.mT + m.qkv.bias
        return merge(attend(*(split(part) for part in rows.chunk(3, -1))))

    return Formula(x, [Step(attention=lambda t: heads(t) @ m.out.weight[..., 0].mT + m.out.bias, heads=heads)])


class ChannelsBlock(nn.Module):
    """The same with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.att = Channels()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.att(x)


def channels_block(m: Any, x: Tensor) -> Formula:
    attention = channels(m.att, x).steps[0].attention
    assert attention is not None
    return Formula(x, [Step(lambda t: t + attention(t).mT, attention)])


def channels_first() -> tuple[Tensor]:
    return (one()[0].mT.contiguous(),)


def formula_bare(m: Any, x: Tensor) -> Formula:
    """softmax(x Wq Wkᵀ xᵀ) x Wv Wo from parameters alone."""

    def heads(t: Tensor) -> Tensor:
        return merge(attend(split(t @ m.wq), split(t @ m.wk), split(t @ m.wv)))

    def block(t: Tensor) -> Tensor:
        t = t + heads(t) @ m.wo
        return t + F.relu(t @ m.w1 + m.b1) @ m.w2 + m.b2

    return Formula(x, [Step(block, lambda t: heads(t) @ m.wo, heads)])


class Bare(nn.Module):
    """A block without submodules: parameters and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(torch.zeros(D, D)) for _ in range(4))
        self.w1, self.b1 = nn.Parameter(torch.zeros(D, 2 * D)), nn.Parameter(torch.zeros(2 * D))
        self.w2, self.b2 = nn.Parameter(torch.zeros(2 * D, D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(x @ self.wq), split(x @ self.wk), split(x @ self.wv)
        x = x + merge((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v) @ self.wo
        return x + torch.addmm(self.b2, F.relu(x[0] @ self.w1 + self.b1), self.w2)


QUESTIONS: list[Question] = [
    *both("sdpa", fused, plain, "heads 1, normed 1, block 0, block 1, update 1, model, 0>1, 1>final"),
    *both("einsum", einsum, plain, "heads 1, block 1"),
    *both("matmul", matmul, plain, "normed, model"),
    *both("bmm", bmm, plain, "heads, block"),
    *both("baddbmm with a mask", baddbmm, plain_causal, "heads, attention 1, block", extras=masked),
    *both("keys by columns", keys_by_columns, plain, "attention 1"),
    *both("products transposed", products_transposed, plain, "attention 1, heads 1"),
    *both("scale on the queries", scaled_queries, plain, "normed 1"),
    *both("scale on the keys", scaled_keys, plain, "block 1"),
    *both("the root of the scale on both", scaled_both, plain, "attention 1, heads"),
    *both("scale as an argument", scale_given, lambda m, x: merge(attend(*qkv(m, x), scale=0.7)), "block"),
    *both("exp over its sum", exponentials, plain, "attention 1, block"),
    *both("exp, divided behind the values", divided_last, plain, "heads 1"),
    *both("logsumexp", logsumexp, plain, "attention 1"),
    *both("exp of log_softmax", log_softmax, plain, "attention 1"),
    *both("softmax in float32", in_float32, plain, "heads, block", tolerance=1e-5),
    *both("softmax with a dtype", softmax_dtype, plain, "attention 1, model", tolerance=1e-5),
    *both("queries in chunks", chunked_queries, plain, "attention 1, heads, block"),
    *both("keys in chunks, online softmax", online, plain, "attention 1, block"),
    *both("scores in place", in_place, plain_causal, "heads, block 1", extras=masked),
    *both("heads into views", into_views, plain, "heads, block 1"),
    *both("heads in a loop, stacked", stacked, plain, "heads 1, model"),
    *both(
        "softmax and dropout as modules",
        with_modules,
        plain,
        "heads 1, block",
        extras=lambda: {"softmax": nn.Softmax(dim=-1), "dropout": nn.Dropout(0.3)},
    ),
    *both("one query at a time, causal", token_by_token, plain_causal, "attention 1, block"),
    *(
        question
        for name, (way, rows) in TAKEN_APART.items()
        for question in asks(name, lambda way=way: seeded(Packed(way)), one, packed(rows), "attention, heads")
    ),
    *asks("a module for each head, cat", lambda: seeded(HeadsInAList(False)), one, heads_in_a_list, "attention, heads"),
    *asks("a module for each head, stack", lambda: seeded(HeadsInAList(True)), one, heads_in_a_list, "attention"),
    *asks("heads with an output matrix each", lambda: seeded(Summed()), one, summed, "attention"),
    *asks("channels first, grouped convolutions", lambda: seeded(Channels()), channels_first, channels, "attention, heads"),
    *asks(
        "channels first, a residual",
        lambda: seeded(ChannelsBlock()),
        channels_first,
        channels_block,
        "attention, block, update",
    ),
    *asks("no submodules", lambda: seeded(Bare()), one, formula_bare, "attention, heads, block, update"),
]
