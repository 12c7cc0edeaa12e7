"""Attention of one's own with masks, biases, positions, and norms or caps between the projections and the softmax."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import D, Formula, H, N, Own, Question, Step, asks, attend, causal, merge, one, seeded, split, tokens
from problems.modules.softmax import alone, both, plain_causal, qkv

NEIGHBOURS = (torch.arange(N)[:, None] - torch.arange(N)).abs() <= 1
WINDOW = torch.zeros(N, N, dtype=torch.float64).masked_fill(~NEIGHBOURS, -torch.inf)
SLOPES = torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None]
DISTANCE = (torch.arange(N)[None] - torch.arange(N)[:, None]).double()


def is_causal(m: Any, x: Tensor) -> Tensor:
    return merge(F.scaled_dot_product_attention(*qkv(m, x), is_causal=True))


def tril_buffer(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(m.tril[:, :, : x.shape[1], : x.shape[1]] == 0, float("-inf"))
    return merge(F.softmax(scores, dim=-1) @ v)


def triu_made(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
    return merge((q @ k.mT / 2 + mask).softmax(-1) @ v)


def where(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = q @ k.mT / 2
    allowed = torch.ones(N, N, dtype=torch.bool).tril()
    return merge(torch.where(allowed, scores, torch.finfo(scores.dtype).min).softmax(-1) @ v)


def multiplied(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    allowed = torch.ones(N, N, dtype=x.dtype).tril()
    return merge((q @ k.mT / 2 * allowed - 1e9 * (1 - allowed)).softmax(-1) @ v)


def boolean(m: Any, x: Tensor) -> Tensor:
    return merge(F.scaled_dot_product_attention(*qkv(m, x), attn_mask=m.near))


def windowed(m: Any, x: Tensor) -> Tensor:
    return merge(attend(*qkv(m, x), bias=WINDOW))


def sparse_top(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = q @ k.mT / 2
    kept = scores.topk(3, dim=-1).values[..., -1:]
    return merge(scores.masked_fill(scores < kept, -torch.inf).softmax(-1) @ v)


def in_blocks(m: Any, x: Tensor) -> Tensor:
    """Local attention: two tokens each attend to one another, as one batch of blocks."""
    q, k, v = (p(x).reshape(-1, 2, D) for p in (m.q, m.k, m.v))
    return merge(F.scaled_dot_product_attention(split(q), split(k), split(v))).reshape(x.shape)


def plain_blocks(m: Any, x: Tensor) -> Tensor:
    block = torch.arange(x.shape[1]) // 2
    bias = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype).masked_fill(block[:, None] != block, -torch.inf)
    return merge(attend(*qkv(m, x), bias=bias))


def kept(m: Any, x: Tensor) -> Formula:
    """The keys that are chosen at x, fixed."""
    scores = split(m.q(x)) @ split(m.k(x)).mT
    bias = torch.zeros_like(scores).masked_fill(scores < scores.sort(-1).values[..., -3:-2], -torch.inf).detach()
    return alone(lambda m, t: merge(attend(*qkv(m, t), bias=bias)))(m, x)


def alibi(m: Any, x: Tensor) -> Tensor:
    bias = -SLOPES * torch.arange(x.shape[1]).sub(torch.arange(x.shape[1])[:, None]).abs()
    return merge(F.scaled_dot_product_attention(*qkv(m, x), attn_mask=bias))


def alibi_causal(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge((torch.einsum("bhid,bhjd->bhij", q, k) / 2 + SLOPES * DISTANCE + m.mask).softmax(-1) @ v)


def t5(m: Any, x: Tensor) -> Tensor:
    """A table by distance, and no scale."""
    q, k, v = qkv(m, x)
    steps = torch.arange(N)[None] - torch.arange(N)[:, None]
    bias = m.table(steps.clamp(-3, 3) + 3).permute(2, 0, 1).unsqueeze(0)
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    return merge(F.softmax(scores.float(), dim=-1).type_as(scores) @ v)


def plain_t5(m: Any, x: Tensor) -> Tensor:
    bias = torch.stack([torch.stack([m.table.weight[min(max(j - i, -3), 3) + 3] for j in range(N)]) for i in range(N)])
    return merge(attend(*qkv(m, x), bias=bias.permute(2, 0, 1), scale=1.0))


def shaw(m: Any, x: Tensor) -> Tensor:
    """Transformer-XL: a content and a position term, each with a bias of its own."""
    q, k, v = qkv(m, x)
    far = split(m.r(m.sines[None]))  # (1, h, 2 n - 1, d)
    content = (q + m.u[:, None]) @ k.mT
    place = (q + m.w[:, None]) @ far.mT
    shifted = F.pad(place, (1, 0)).view(1, H, 2 * N, N)[:, :, 1:].reshape(1, H, N, 2 * N - 1)[..., :N]
    return merge(((content + shifted) / 2).softmax(-1) @ v)


def plain_shaw(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    far = split(m.r(m.sines))  # (h, 2 n - 1, d)
    place = torch.stack(
        [torch.stack([((q[:, :, i] + m.w) * far[:, N - 1 - i + j]).sum(-1) for j in range(N)], -1) for i in range(N)], -2
    )
    return merge(attend(q, k, v, bias=(m.u[:, None] @ k.mT + place) / 2))


ANGLES = torch.arange(N, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)  # (n, d / 2)


def rotate_half(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    angles = torch.cat([ANGLES, ANGLES], -1)

    def turn(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return t * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    return merge(F.scaled_dot_product_attention(turn(q), turn(k), v))


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    turns = torch.polar(torch.ones_like(ANGLES), ANGLES)

    def turn(t: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)

    return merge(F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True))


def interleaved(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)

    def turn(t: Tensor) -> Tensor:
        a, b = t[..., ::2], t[..., 1::2]
        return torch.stack([a * ANGLES.cos() - b * ANGLES.sin(), a * ANGLES.sin() + b * ANGLES.cos()], -1).flatten(-2)

    return merge((turn(q) @ turn(k).mT / 2 + m.mask).softmax(-1) @ v)


def rotations(half: bool) -> Tensor:
    """One rotation matrix for each token, (n, d, d)."""
    d, turns = D // H, torch.zeros(N, D // H, D // H, dtype=torch.float64)
    for i in range(d // 2):
        a, b = (i, i + d // 2) if half else (2 * i, 2 * i + 1)
        c, s = ANGLES[:, i].cos(), ANGLES[:, i].sin()
        turns[:, a, a], turns[:, a, b], turns[:, b, a], turns[:, b, b] = c, -s, s, c
    return turns


def plain_rotary(half: bool, bias: Tensor | float) -> Any:
    turns = rotations(half)

    def heads(m: Any, x: Tensor) -> Tensor:
        q, k, v = qkv(m, x)
        return merge(attend((turns @ q[..., None])[..., 0], (turns @ k[..., None])[..., 0], v, bias))

    return heads


def capped(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge((torch.tanh(q @ k.mT / 2 / 3.0) * 3.0 + m.mask).softmax(-1) @ v)


def plain_capped(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    e = (2 * q @ k.mT / 6).exp()
    return merge(attend(q, k, v, bias=3 * (e - 1) / (e + 1) + causal(), scale=0.0))


def rms(t: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return t * (t.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def qk_norm(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(F.scaled_dot_product_attention(m.q_norm(q), m.k_norm(k), v))


def cosine(m: Any, x: Tensor) -> Tensor:
    """Swin v2: cosines, and a temperature for each head."""
    q, k, v = qkv(m, x)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return merge((scores * m.temperature.clamp(max=math.log(100.0)).exp()).softmax(-1) @ v)


def plain_cosine(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(attend(q / q.norm(dim=-1, keepdim=True) * m.temperature.exp(), k / k.norm(dim=-1, keepdim=True), v, scale=1.0))


def whole_norm(m: Any, x: Tensor) -> Tensor:
    """OLMo 2: the norm acts on all heads together."""
    return merge(
        F.scaled_dot_product_attention(split(m.q_norm(m.q(x))), split(m.k_norm(m.k(x))), split(m.v(x)), is_causal=True)
    )


def norms(d: int, rms: bool) -> dict[str, Any]:
    return {f"{name}_norm": nn.RMSNorm(d, eps=1e-6) if rms else nn.LayerNorm(d) for name in "qk"}


def plain_normed(m: Any, x: Tensor) -> Tensor:
    def normed(t: Tensor, ln: nn.LayerNorm) -> Tensor:
        t = t - t.mean(-1, keepdim=True)
        return t / (t.pow(2).mean(-1, keepdim=True) + ln.eps).sqrt() * ln.weight + ln.bias

    q, k, v = qkv(m, x)
    return merge(attend(normed(q, m.q_norm), normed(k, m.k_norm), v))


def talking(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = m.before(q @ k.mT / 2)
    return merge(m.after(scores.softmax(-1)) @ v)


def plain_talking(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    scores = q @ k.mT / 2
    before, after = m.before.weight[..., 0, 0], m.after.weight[..., 0, 0]
    weights = (sum(before[:, h, None, None] * scores[:, h, None] for h in range(H)) + m.before.bias[:, None, None]).softmax(-1)
    weights = sum(after[:, h, None, None] * weights[:, h, None] for h in range(H)) + m.after.bias[:, None, None]
    return merge(weights @ v)


def sinks(m: Any, x: Tensor) -> Tensor:
    """gpt-oss: one more column of logits, which is thrown away behind the softmax."""
    q, k, v = qkv(m, x)
    scores = torch.cat([q @ k.mT / 2 + m.mask, m.sink.reshape(1, -1, 1, 1).expand(1, -1, x.shape[1], -1)], dim=-1)
    return merge(scores.softmax(-1)[..., :-1] @ v)


def plain_sinks(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    weights = (q @ k.mT / 2 + causal()).exp()
    return merge(weights / (weights.sum(-1, keepdim=True) + m.sink[:, None, None].exp()) @ v)


def off_by_one(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    weights = torch.exp(q @ k.mT / 2)
    return merge((weights / (1 + weights.sum(-1, keepdim=True))) @ v)


def plain_off_by_one(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    zero = torch.zeros_like(k[:, :, :1])
    return merge(attend(q, torch.cat([k, zero], 2), torch.cat([v, zero], 2)))


def prefixed(m: Any, x: Tensor) -> Tensor:
    """Prefix tuning: learned keys and values before those of the tokens."""
    q, k, v = qkv(m, x)
    return merge(F.scaled_dot_product_attention(q, torch.cat([m.keys, k], 2), torch.cat([m.values, v], 2)))


def plain_prefixed(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    a, b = (q @ k.mT / 2).exp(), (q @ m.keys.mT / 2).exp()
    return merge((a @ v + b @ m.values) / (a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True)))


def differential(m: Any, x: Tensor) -> Tensor:
    """The difference of two softmaxes, of half the heads' width each."""
    (q1, q2), (k1, k2) = split(m.q(x)).chunk(2, -1), split(m.k(x)).chunk(2, -1)
    weights = (q1 @ k1.mT / math.sqrt(2)).softmax(-1) - m.part * (q2 @ k2.mT / math.sqrt(2)).softmax(-1)
    return merge(weights @ split(m.v(x)))


def plain_differential(m: Any, x: Tensor) -> Tensor:
    (q, r), (k, s), v = split(m.q(x)).chunk(2, -1), split(m.k(x)).chunk(2, -1), split(m.v(x))
    return merge(attend(q, k, v) - m.part * attend(r, s, v))


def head_gains(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(F.scaled_dot_product_attention(q * m.gains[:, None, None] * math.log(x.shape[1]), k, v))


def shifted_keys(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    k = 0.5 * k + 0.5 * F.pad(k, (0, 0, 1, 0))[:, :, :-1]
    return merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def plain_shifted(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    mix = 0.5 * torch.eye(N, dtype=x.dtype) + 0.5 * torch.diag(torch.ones(N - 1, dtype=x.dtype), -1)
    return merge(attend(q, mix @ k, v, causal()))


class Pairs(nn.Module):
    """A bias for each pair of tokens, from a second input (as in AlphaFold); it is no stream of tokens of attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.att, self.bias = Own(boolean), nn.Linear(3, H, bias=False)

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        q, k, v = qkv(self.att, x)
        bias = self.bias(pair).permute(0, 3, 1, 2)
        return x + self.att.o(merge((q @ k.mT / 2 + bias).softmax(-1) @ v))


def pairs(m: Any, x: Tensor, pair: Tensor) -> Formula:
    bias = (pair @ m.bias.weight.mT).permute(0, 3, 1, 2)

    def heads(t: Tensor) -> Tensor:
        return merge(attend(*qkv(m.att, t), bias=bias))

    return Formula(x, [Step(lambda t: t + m.att.o(heads(t)), lambda t: m.att.o(heads(t)), heads)])


def pair_inputs() -> tuple[Tensor, Tensor]:
    return tokens(), tokens(N * N, 3, seed=8).view(1, N, N, 3)


def mask() -> dict[str, Any]:
    return {"mask": causal()}


def parameter(name: str, *shape: int) -> dict[str, Any]:
    return {name: nn.Parameter(torch.zeros(shape))}


def xl() -> dict[str, Any]:
    places = torch.arange(-N + 1.0, N, dtype=torch.float64)
    sines = torch.cat([(places[:, None] * w).sin() for w in (1.0, 0.5, 0.2, 0.1)] * 2, -1)
    return {"sines": sines, "r": nn.Linear(D, D, bias=False)} | parameter("u", H, 4) | parameter("w", H, 4)


def convolutions() -> dict[str, Any]:
    return {"before": nn.Conv2d(H, H, 1), "after": nn.Conv2d(H, H, 1)}


def plain_gains(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(attend(q * m.gains[:, None, None], k, v, scale=0.5 * math.log(N)))


def plain_qk_rms(m: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return merge(attend(rms(q, m.q_norm.weight), rms(k, m.k_norm.weight), v))


def plain_whole(m: Any, x: Tensor) -> Tensor:
    q, k = rms(m.q(x), m.q_norm.weight), rms(m.k(x), m.k_norm.weight)
    return merge(attend(split(q), split(k), split(m.v(x)), causal()))


def plain_alibi(m: Any, x: Tensor) -> Tensor:
    return merge(attend(*qkv(m, x), bias=-SLOPES * DISTANCE.abs()))


def plain_alibi_causal(m: Any, x: Tensor) -> Tensor:
    return merge(attend(*qkv(m, x), bias=SLOPES * DISTANCE + causal()))


def even() -> tuple[Tensor]:
    return (tokens(6),)


QUESTIONS: list[Question] = [
    *both("is_causal", is_causal, plain_causal, "heads 1, block 1, model"),
    *both(
        "a buffer of a lower triangle",
        tril_buffer,
        plain_causal,
        "heads, block 1",
        extras=lambda: {"tril": torch.ones(1, 1, N, N).tril()},
    ),
    *both("a triangle made in forward", triu_made, plain_causal, "attention 1, block"),
    *both("where with the least number", where, plain_causal, "attention 1"),
    *both("a mask multiplied in", multiplied, plain_causal, "block"),
    *both("a boolean mask", boolean, windowed, "heads, block 1", extras=lambda: {"near": NEIGHBOURS.clone()}),
    *asks("the three largest logits", lambda: seeded(Own(sparse_top)), one, kept, "attention, heads"),
    *asks("local blocks as a batch", lambda: seeded(Own(in_blocks)), even, alone(plain_blocks), "attention, heads"),
    *both("ALiBi", alibi, plain_alibi, "heads 1, block"),
    *both("ALiBi, causal", alibi_causal, plain_alibi_causal, "block 1", extras=mask),
    *both(
        "T5's table of distances", t5, plain_t5, "heads, block", extras=lambda: {"table": nn.Embedding(7, H)}, tolerance=1e-5
    ),
    *both("Transformer-XL's positions", shaw, plain_shaw, "attention 1, block", extras=xl),
    *both("rotary, halves", rotate_half, plain_rotary(True, 0.0), "heads, block 1, model"),
    *both("rotary, complex numbers", complex_numbers, plain_rotary(False, causal()), "heads 1, block"),
    *both("rotary, neighbours", interleaved, plain_rotary(False, causal()), "attention 1", extras=mask),
    *both("capped logits", capped, plain_capped, "heads, block 1", extras=mask),
    *both("norms of queries and keys, RMS", qk_norm, plain_qk_rms, "heads, block 1", extras=lambda: norms(D // H, True)),
    *both("norms of queries and keys, LayerNorm", qk_norm, plain_normed, "block", extras=lambda: norms(D // H, False)),
    *both("norms across heads", whole_norm, plain_whole, "heads 1", extras=lambda: norms(D, True)),
    *both(
        "cosines and temperatures", cosine, plain_cosine, "attention 1, block", extras=lambda: parameter("temperature", H, 1, 1)
    ),
    *both("talking heads", talking, plain_talking, "heads, block 1", extras=convolutions),
    *both("a learned sink", sinks, plain_sinks, "heads, block 1", extras=lambda: mask() | parameter("sink", H)),
    *both("softmax off by one", off_by_one, plain_off_by_one, "heads, block 1"),
    *both(
        "learned prefixes",
        prefixed,
        plain_prefixed,
        "heads, block 1",
        extras=lambda: parameter("keys", 1, H, 2, 4) | parameter("values", 1, H, 2, 4),
    ),
    *both("a difference of softmaxes", differential, plain_differential, "heads, block 1", extras=lambda: parameter("part", 1)),
    *both("a gain for each head, log n", head_gains, plain_gains, "heads, block", extras=lambda: parameter("gains", H)),
    *both("keys mixed with those before", shifted_keys, plain_shifted, "attention 1"),
    *asks("a bias for each pair, given", lambda: seeded(Pairs()), pair_inputs, pairs, "attention, heads, block, update"),
]
