"""Attention whose heads share keys and values, whose projections are latent or shared, or with more behind the heads."""

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
    causal,
    fused,
    merge,
    one,
    seeded,
    split,
)
from problems.modules.positions import plain_rotary, rms, rotations
from problems.modules.softmax import both, qkv


class Grouped(nn.Module):
    """Four query heads of width 2 that share `kv` heads of keys and values."""

    def __init__(self, kv: int, way: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(D, D),
            nn.Linear(D, 2 * kv),
            nn.Linear(D, 2 * kv),
            nn.Linear(D, D, bias=False),
        )
        self.kv, self.way = kv, way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x), 4), split(self.k(x), self.kv), split(self.v(x), self.kv)
        if self.way == "enable_gqa":
            return self.o(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))
        if self.way == "repeat_interleave":
            k, v = (t.repeat_interleave(4 // self.kv, dim=1) for t in (k, v))
        elif self.way == "expand":
            k, v = (t[:, :, None].expand(-1, -1, 4 // self.kv, -1, -1).reshape(q.shape) for t in (k, v))
        elif self.way == "groups":
            q = q.unflatten(1, (self.kv, -1))
            scores = torch.einsum("bghid,bgjd->bghij", q, k) * 2**-0.5 + causal()
            return self.o(merge(torch.einsum("bghij,bgjd->bghid", scores.softmax(-1), v).flatten(1, 2)))
        return self.o(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))  # "broadcast": one head of keys


def grouped(m: Any, x: Tensor) -> Formula:
    def heads(t: Tensor) -> Tensor:
        q, k, v = split(m.q(t), 4), split(m.k(t), m.kv), split(m.v(t), m.kv)
        outs = [attend(q[:, h], k[:, h * m.kv // 4], v[:, h * m.kv // 4], causal()) for h in range(4)]
        return torch.cat(outs, -1)

    return Formula(x, [Step(attention=lambda t: m.o(heads(t)), heads=heads)])


class Latent(nn.Module):
    """DeepSeek's MLA: queries, keys and values from low-rank latents with norms, and a rotary part beside them."""

    def __init__(self, low_rank_queries: bool) -> None:
        super().__init__()
        self.q_a = nn.Linear(D, 4, bias=False) if low_rank_queries else nn.Identity()
        self.q_norm = nn.RMSNorm(4, eps=1e-6) if low_rank_queries else nn.Identity()
        self.q_b = nn.Linear(4 if low_rank_queries else D, H * 8, bias=False)
        self.kv_a, self.kv_norm = nn.Linear(D, 3 + 4, bias=False), nn.RMSNorm(3, eps=1e-6)
        self.kv_b, self.o = nn.Linear(3, H * (4 + 4), bias=False), nn.Linear(H * 4, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        turns = rotations(half=True)
        q, q_turned = split(self.q_b(self.q_norm(self.q_a(x)))).split([4, 4], -1)
        latent, k_turned = self.kv_a(x).split([3, 4], dim=-1)
        k, v = split(self.kv_b(self.kv_norm(latent))).split([4, 4], dim=-1)
        q_turned = torch.einsum("nij,bhnj->bhni", turns, q_turned)
        k_turned = torch.einsum("nij,bnj->bni", turns, k_turned)[:, None].expand(-1, H, -1, -1)
        out = F.scaled_dot_product_attention(torch.cat([q, q_turned], -1), torch.cat([k, k_turned], -1), v, is_causal=True)
        return self.o(merge(out))


def latent(m: Any, x: Tensor) -> Formula:
    turns = rotations(half=True)

    def heads(t: Tensor) -> Tensor:
        low = rms(t @ m.q_a.weight.mT, m.q_norm.weight) if isinstance(m.q_a, nn.Linear) else t
        q, both = split(low @ m.q_b.weight.mT), t @ m.kv_a.weight.mT
        pairs = split(rms(both[..., :3], m.kv_norm.weight) @ m.kv_b.weight.mT)
        outs = []
        for h in range(H):
            turned = (turns @ q[0, h, :, 4:, None])[..., 0] @ (turns @ both[0, :, 3:, None])[..., 0].mT
            outs.append(
                attend(q[:, h, :, :4], pairs[:, h, :, :4], pairs[:, h, :, 4:], turned * 8**-0.5 + causal(), scale=8**-0.5)
            )
        return torch.cat(outs, -1)

    return Formula(x, [Step(attention=lambda t: m.o(heads(t)), heads=heads)])


def one_for_two(m: Any, x: Tensor) -> Tensor:
    """Reformer: queries are keys."""
    qk = split(m.q(x))
    return merge(F.scaled_dot_product_attention(qk, qk, split(m.v(x))))


def values_are_tokens(m: Any, x: Tensor) -> Tensor:
    return merge(F.scaled_dot_product_attention(split(m.q(x)), split(m.k(x)), split(x)))


def keys_are_tokens(m: Any, x: Tensor) -> Tensor:
    return merge(F.scaled_dot_product_attention(split(m.q(x)), split(x), split(m.v(x))))


class NoOutput(nn.Module):
    """One head without an output matrix: attention ends with the values' average."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / D**0.5, -1) @ self.v(x)


def no_output(m: Any, x: Tensor) -> Formula:
    return Formula(x, [Step(attention=lambda t: attend(m.q(t), m.k(t), m.v(t)))])


class NoWeights(nn.Module):
    """softmax(x xᵀ) x, with nothing learned."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Adapted(nn.Module):
    """A linear layer with a low-rank one beside it, `base` first or last."""

    def __init__(self, base_last: bool = False) -> None:
        super().__init__()
        self.base_layer, self.base_last = nn.Linear(D, D), base_last
        self.lora_a, self.lora_b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.base_last:
            return 2 * self.lora_b(self.lora_a(x)) + self.base_layer(x)
        return self.base_layer(x) + 2 * self.lora_b(self.lora_a(x))


def adapt(*names: str, base_last: bool = False) -> Any:
    return lambda: {name: Adapted(base_last) for name in names}


def dense_adapted(p: Any, t: Tensor) -> Tensor:
    return t @ (p.base_layer.weight + 2 * p.lora_b.weight @ p.lora_a.weight).mT + p.base_layer.bias


def adapted(*names: str) -> Any:
    def formula(m: Any, x: Tensor) -> Formula:
        def through(name: str, t: Tensor) -> Tensor:
            return dense_adapted(getattr(m, name), t) if name in names else getattr(m, name)(t)

        def heads(t: Tensor) -> Tensor:
            return merge(attend(*(split(through(name, t)) for name in "qkv")))

        return Formula(x, [Step(attention=lambda t: through("o", heads(t)), heads=heads)])

    return formula


def rotary_matrices(m: Any, x: Tensor) -> Tensor:
    """One rotation matrix for each token."""
    turns = rotations(half=True)
    q, k, v = qkv(m, x)
    q, k = (torch.einsum("nij,bhnj->bhni", turns, t) for t in (q, k))
    return merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


GROUPED = [(2, "repeat_interleave"), (2, "expand"), (2, "enable_gqa"), (2, "groups"), (1, "expand"), (1, "broadcast")]

QUESTIONS: list[Question] = [
    *(
        question
        for kv, way in GROUPED
        for question in asks(
            f"{kv} heads of keys for 4, {way}",
            lambda kv=kv, way=way: seeded(Grouped(kv, way)),
            one,
            grouped,
            "attention, heads",
        )
    ),
    *asks("MLA", lambda: seeded(Latent(False)), one, latent, "attention, heads"),
    *asks("MLA, queries of low rank", lambda: seeded(Latent(True)), one, latent, "attention, heads"),
    *both(
        "queries are keys",
        one_for_two,
        lambda m, x: merge(attend(split(m.q(x)), split(m.q(x)), split(m.v(x)))),
        "heads, block 1",
    ),
    *both(
        "values are the tokens",
        values_are_tokens,
        lambda m, x: merge(attend(split(m.q(x)), split(m.k(x)), split(x))),
        "heads, block",
    ),
    *both("keys are the tokens", keys_are_tokens, lambda m, x: merge(attend(split(m.q(x)), split(x), split(m.v(x)))), "heads"),
    *both("rotary, one matrix a token", rotary_matrices, plain_rotary(True, causal()), "heads, block 1"),
    *asks("no output matrix", lambda: seeded(NoOutput()), one, no_output, "attention"),
    *asks(
        "no weights",
        lambda: seeded(NoWeights()),
        one,
        lambda m, x: Formula(x, [Step(attention=lambda t: attend(t, t, t))]),
        "attention",
    ),
    *asks("LoRA on o", lambda: seeded(Own(fused, **adapt("o")())), one, adapted("o"), "attention, heads"),
    *asks(
        "LoRA on o, base last",
        lambda: seeded(Own(fused, **adapt("o", base_last=True)())),
        one,
        adapted("o"),
        "attention, heads",
    ),
    *asks("LoRA on q and v", lambda: seeded(Own(fused, **adapt("q", "v")())), one, adapted("q", "v"), "attention, heads"),
    *asks(
        "LoRA on all",
        lambda: seeded(Own(fused, **adapt("q", "k", "v", "o")())),
        one,
        adapted("q", "k", "v", "o"),
        "attention, heads",
    ),
]
