"""How blocks follow one another: other mixers between them, shared weights, skips, several copies of the stream."""

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
    pre,
    seeded,
    split,
    tokens,
)
from problems.modules.positions import is_causal
from problems.modules.softmax import plain_causal


def linear_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.elu(split(m.q(x))) + 1, F.elu(split(m.k(x))) + 1, split(m.v(x))
    total = torch.einsum("bhnd,bhne->bhde", k, v)
    return merge(torch.einsum("bhnd,bhde->bhne", q, total) / torch.einsum("bhnd,bhd->bhn", q, k.sum(2))[..., None])


def plain_linear(m: Any, x: Tensor) -> Tensor:
    q, k, v = split(m.q(x)), split(m.k(x)), split(m.v(x))
    q, k = (torch.where(t > 0, t + 1, t.clamp(max=0).exp()) for t in (q, k))
    weights = q @ k.mT
    return merge(weights / weights.sum(-1, keepdim=True) @ v)


class GatedDelta(nn.Module):
    """Qwen3-Next's other mixer: a matrix of memory for each head, decayed and corrected token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.decay, self.rate = nn.Linear(D, H), nn.Linear(D, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), F.normalize(split(self.k(x)), dim=-1), split(self.v(x))
        decay, rate = torch.sigmoid(self.decay(x)).mT, torch.sigmoid(self.rate(x)).mT  # (1, heads, n)
        memory, outs = x.new_zeros(1, H, 4, 4), []
        for i in range(x.shape[1]):
            memory = memory * decay[:, :, i, None, None]
            wrong = v[:, :, i] - (memory * k[:, :, i, :, None]).sum(-2)
            memory = memory + k[:, :, i, :, None] * (rate[:, :, i, None] * wrong)[:, :, None]
            outs.append((memory * q[:, :, i, :, None]).sum(-2))
        return self.o(torch.stack(outs, dim=1).flatten(2))


def gated_delta(m: Any, x: Tensor) -> Tensor:
    q, k, v = split(m.q(x)), split(m.k(x)), split(m.v(x))
    k = k / k.norm(dim=-1, keepdim=True)
    decay, rate = (1 / (1 + (-p(x)).exp()) for p in (m.decay, m.rate))
    memory, outs = torch.zeros(H, 4, 4, dtype=x.dtype), []
    for i in range(N):
        a, b, key = decay[0, i, :, None, None], rate[0, i, :, None, None], k[0, :, i, :, None]
        memory = a * (torch.eye(4, dtype=x.dtype) - b * key @ key.mT) @ memory + b * key @ v[0, :, i, None]
        outs.append((q[0, :, i, None] @ memory).reshape(-1))
    return m.o(torch.stack(outs)[None])


class Scan(nn.Module):
    """A selective state space, as in Mamba: step sizes, inputs and outputs depend on the token."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.step, self.b, self.c, self.o = (
            nn.Linear(D, 2 * D),
            nn.Linear(D, D),
            nn.Linear(D, 3),
            nn.Linear(D, 3),
            nn.Linear(D, D),
        )

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(x).chunk(2, -1)
        step, b, c = F.softplus(self.step(u)), self.b(u), self.c(u)
        rates = torch.arange(1, 4, dtype=x.dtype)
        state, outs = x.new_zeros(1, D, 3), []
        for i in range(x.shape[1]):
            state = torch.exp(-step[:, i, :, None] * rates) * state + (step[:, i] * u[:, i])[..., None] * b[:, i, None]
            outs.append((state * c[:, i, None]).sum(-1))
        return self.o(torch.stack(outs, 1) * F.silu(gate))


def scan(m: Any, x: Tensor) -> Tensor:
    u, gate = m.into(x).chunk(2, -1)
    step = (1 + m.step(u).exp()).log()
    past = step.cumsum(1)[0]  # (n, d)
    gaps = past[:, None] - past[None]  # (to, from, d)
    rates = torch.arange(1, 4, dtype=x.dtype)
    kept = torch.exp(-gaps[..., None] * rates) * torch.ones(N, N, dtype=x.dtype).tril()[..., None, None]
    y = torch.einsum("ijds,jd,js,is->id", kept, (step * u)[0], m.b(u)[0], m.c(u)[0])
    return m.o(y[None] * gate / (1 + (-gate).exp()))


class Mixing(nn.Module):
    """MLP-Mixer: a small network across the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(N)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.transpose(1, 2)).transpose(1, 2)


def mixer(b: Any, run: Any) -> Step:
    def block(t: Tensor) -> Tensor:
        t = t + run(b.att, b.ln1(t))
        return t + b.mlp(b.ln2(t))

    return Step(block)


MIXERS: dict[str, tuple[Any, Any]] = {
    "linear attention": (lambda: Own(linear_attention), lambda m, t: m.o(plain_linear(m, t))),
    "gated delta": (GatedDelta, gated_delta),
    "a scan": (Scan, scan),
    "MLP-Mixer": (Mixing, lambda m, t: m.net(t.mT).mT),
}


def hybrid(run: Any) -> Any:
    return lambda m, x: Formula(x, [pre(m.blocks[0]), mixer(m.blocks[1], run), pre(m.blocks[2])], m.norm)


def no_attention(run: Any) -> Any:
    return lambda m, x: Formula(x, [mixer(b, run) for b in m.blocks], m.norm)


class Again(nn.Module):
    """One block, three times; `steps`: with an embedding of the step before each (a universal transformer)."""

    def __init__(self, steps: bool) -> None:
        super().__init__()
        self.layer = Pre(Own(fused))
        self.steps = nn.Embedding(3, D) if steps else None

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            if self.steps is not None:
                x = x + self.steps(torch.tensor(i))
            x = self.layer(x)
        return x


def again(m: Any, x: Tensor) -> Formula:
    def of(i: int) -> Step:
        first = pre(m.layer)
        if i == 0 or m.steps is None:
            return first
        return Step(lambda t: first.block(t + m.steps.weight[i]))

    return Formula(x if m.steps is None else x + m.steps.weight[0], [of(i) for i in range(3)])


def tied() -> nn.Module:
    b = Pre(Own(fused))
    return seeded(Stack(b, b, b))


class SharedAttention(nn.Module):
    """Zamba: one attention module in two blocks, each with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        shared = Own(fused)
        self.layers = nn.ModuleList([Pre(shared), Pre(shared)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Skips(nn.Module):
    """Four blocks; what leaves the first two is added before the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.weights = nn.ModuleList([Pre(Own(fused)) for _ in range(4)]), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.blocks):
            if i >= 2:
                x = x + self.weights[i - 2] * kept.pop()
            x = block(x)
            if i < 2:
                kept.append(x)
        return x


def skipping(m: Any, x: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """What enters the block of that number, and what leaves it."""
    into, out, before = x, x, [x]
    for i in range(last + 1):
        into = out if i < 2 else out + m.weights[i - 2] * before[4 - i]
        out = pre(m.blocks[i]).block(into)
        before.append(out)
    return into, out


def skips_at(k: int) -> Any:
    return lambda m, x: Formula(skipping(m, x, k)[0], [*(Step() for _ in range(k)), pre(m.blocks[k])])


def skips_whole(m: Any, x: Tensor) -> Formula:
    return Formula(x, [Step(lambda t: skipping(m, t, 3)[1]), Step(), Step(), Step()])


class Averaged(nn.Module):
    """DenseFormer: behind each block an average of all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.alpha = nn.ModuleList([Pre(Own(fused)) for _ in range(3)]), nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        past = [x]
        for i, block in enumerate(self.blocks):
            past.append(block(x))
            x = torch.stack(past, 0).mul(self.alpha[i, : i + 2, None, None, None]).sum(0)
        return x


def averaged(m: Any, x: Tensor, last: int) -> Tensor:
    past = [x]
    for i in range(last):
        past.append(pre(m.blocks[i]).block(x))
        x = sum((m.alpha[i, j] * p for j, p in enumerate(past)), torch.zeros(1))
    return x


def averaged_at(k: int) -> Any:
    return lambda m, x: Formula(averaged(m, x, k), [*(Step() for _ in range(k)), pre(m.blocks[k])])


class FirstTokens(nn.Module):
    """modded-nanogpt: every block mixes the stream with what entered the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.layers = nn.Linear(4, D), nn.ModuleList([Mixed(), Mixed()])

    def forward(self, x: Tensor) -> Tensor:
        x = x0 = self.wte(x)
        for layer in self.layers:
            x = layer(x, x0)
        return x


class Mixed(Pre):
    def __init__(self) -> None:
        super().__init__(Own(is_causal))
        self.mix = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward((1 + self.mix[0]) * x + self.mix[1] * x0)


def first_tokens(m: Any, x: Tensor) -> Formula:
    def whole(t: Tensor) -> Tensor:
        first = t
        for b in m.layers:
            t = pre(b, plain_causal).block((1 + b.mix[0]) * t + b.mix[1] * first)
        return t

    return Formula(m.wte(x), [Step(whole), Step()])


class ValueResidual(nn.Module):
    """ResFormer: later blocks mix their values with those of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.part = nn.ModuleList([Pre(Own(fused)) for _ in range(2)]), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        first = None
        for b in self.blocks:
            att, h = b.att, b.ln1(x)  # pyright: ignore
            v = att.v(h)  # pyright: ignore
            first = v if first is None else first
            v = v + self.part * (first - v)
            out = F.scaled_dot_product_attention(split(att.q(h)), split(att.k(h)), split(v))  # pyright: ignore
            x = x + att.o(merge(out))  # pyright: ignore
            x = x + b.mlp(b.ln2(x))  # pyright: ignore
        return x


def value_residual(m: Any, x: Tensor) -> Formula:
    def second(t: Tensor, values: Tensor) -> Tensor:
        a = m.blocks[1].att
        return a.o(merge(attend(split(a.q(t)), split(a.k(t)), split((1 - m.part) * a.v(t) + m.part * values))))

    def rest(t: Tensor, values: Tensor) -> Tensor:
        b = m.blocks[1]
        t = t + second(b.ln1(t), values)
        return t + b.mlp(b.ln2(t))

    a, first = m.blocks[0].att, pre(m.blocks[0])
    given = a.v(m.blocks[0].ln1(x))
    whole: Any = lambda t: (lambda s: rest(first.block(s), a.v(m.blocks[0].ln1(s))), t)  # noqa: E731
    zeroth = Step(first.block, first.attention, first.heads, first.norm, {"model": whole, "to 1": whole})
    return Formula(x, [zeroth, Step(lambda t: rest(t, given), lambda t: second(t, given), norm=m.blocks[1].ln1)])


class SharedKeys(nn.Module):
    """YOCO: the second half of the blocks looks at keys and values that the first half leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pre(Own(is_causal)), Pre(Own(is_causal)), Pre(Own(is_causal)), Pre(Own(is_causal))])
        self.ln, self.k, self.v = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        k = v = x
        for i, b in enumerate(self.layers):
            if i < 2:
                x = b(x)
                continue
            if i == 2:
                k, v = split(self.k(self.ln(x))), split(self.v(self.ln(x)))
            q = split(b.att.q(b.ln1(x)))  # pyright: ignore
            x = x + b.att.o(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))  # pyright: ignore
            x = x + b.mlp(b.ln2(x))  # pyright: ignore
        return x


def shared_keys(m: Any, x: Tensor) -> Formula:
    def second_half(t: Tensor) -> Tensor:
        k, v = split(m.k(m.ln(t))), split(m.v(m.ln(t)))
        for b in m.layers[2:]:
            t = t + b.att.o(merge(attend(split(b.att.q(b.ln1(t))), k, v, causal())))
            t = t + b.mlp(b.ln2(t))
        return t

    return Formula(x, [*(pre(b, plain_causal) for b in m.layers[:2]), Step(), Step(second_half)])


QUESTIONS: list[Question] = [
    *(
        question
        for name, (kind, run) in MIXERS.items()
        for question in [
            *asks(
                f"{name} between attention",
                lambda kind=kind: seeded(Stack(Pre(Own(fused)), Pre(kind()), Pre(Own(fused)))),
                one,
                hybrid(run),
                "attention 2, block 1, update 1, 0>2, model, attention 1 refused",
            ),
            *asks(
                f"{name} alone",
                lambda kind=kind: seeded(Stack(Pre(kind()), Pre(kind()))),
                one,
                no_attention(run),
                "block, block 1, attention refused",
            ),
        ]
    ),
    *asks("one block again and again", lambda: seeded(Again(False)), one, again, "attention, heads, block, model, 0>final"),
    *asks("a universal transformer", lambda: seeded(Again(True)), one, again, "attention, block, model"),
    *asks(
        "one block three times in a list",
        tied,
        one,
        lambda m, x: Formula(x, [pre(b) for b in m.blocks], m.norm),
        "attention 1, block 2, model",
    ),
    *asks(
        "one attention in two blocks",
        lambda: seeded(SharedAttention()),
        one,
        lambda m, x: Formula(x, [pre(b) for b in m.layers]),
        "attention, attention 1, block 1, model",
    ),
    *asks("skips", lambda: seeded(Skips()), one, skips_whole, "model, 0>3"),
    *asks("skips, the third block", lambda: seeded(Skips()), one, skips_at(2), "attention 2, block 2"),
    *asks("skips, the fourth block", lambda: seeded(Skips()), one, skips_at(3), "attention 3, normed 3, block 3"),
    *asks("averages of what came before", lambda: seeded(Averaged()), one, averaged_at(2), "attention 2, block 2"),
    *asks(
        "averages of what came before, whole",
        lambda: seeded(Averaged()),
        one,
        lambda m, x: Formula(x, [Step(lambda t: averaged(m, t, 3))]),
        "model",
    ),
    *asks("first tokens in every block", lambda: seeded(FirstTokens()), lambda: (tokens(N, 4),), first_tokens, "model, 0>1"),
    *asks(
        "values of the first block",
        lambda: seeded(ValueResidual()),
        one,
        value_residual,
        "attention, block, attention 1 or refused, 0>1, model",
    ),
    *asks(
        "keys and values shared by the second half",
        lambda: seeded(SharedKeys()),
        one,
        shared_keys,
        "attention 1, block, 0>1, 0>final, model",
    ),
]
