"""Attention with more behind its heads, or with convolutions in it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (
    D,
    Formula,
    H,
    N,
    Question,
    Step,
    asks,
    attend,
    fused,
    merge,
    one,
    plain,
    seeded,
    split,
)


class Behind(nn.Module):
    """Attention with `tail` behind its heads, of the heads' outputs and of attention's input."""

    def __init__(self, tail: Any, **extras: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.tail = tail
        for name, extra in extras.items():
            self.add_module(name, extra)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self, fused(self, x), x)


def behind(tail: Any, heads: Any = None) -> Any:
    """The formula of `Behind`: attention is `tail` of the plain heads, and `heads` what enters the output matrix."""

    def formula(m: Any, x: Tensor) -> Formula:
        inner = (lambda t: plain(m, t)) if heads is None else lambda t: heads(m, plain(m, t), t)
        return Formula(x, [Step(attention=lambda t: tail(m, plain(m, t), t), heads=inner)])

    return formula


def gate_behind(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return m.o(a) * torch.sigmoid(m.g(x))


def gate_before(m: Any, a: Tensor, x: Tensor) -> Tensor:
    """Qwen3-Next: a sigmoid of the input times the heads' outputs."""
    return m.o(a * torch.sigmoid(m.g(x)))


def gate_by_head(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return m.o((a.unflatten(-1, (H, -1)) * m.g(x).sigmoid()[..., None]).flatten(-2))


def bottleneck(m: Any, a: Tensor, x: Tensor) -> Tensor:
    a = m.o(a)
    return a + m.up(F.relu(m.down(a)))


def unused_last(m: Any, a: Tensor, x: Tensor) -> Tensor:
    out = m.o(a)
    m.unused(x)
    return out


def two_matrices(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return m.o2(F.gelu(m.o(a)))


def squeeze(m: Any, a: Tensor, x: Tensor) -> Tensor:
    a = m.o(a)
    return a * m.g(a.mean(1, keepdim=True)).sigmoid()


def normed_heads(m: Any, a: Tensor, x: Tensor) -> Tensor:
    """Sub-LN: a norm between the heads and the output matrix."""
    return m.o(m.ln(a))


def sigmoid(t: Tensor) -> Tensor:
    return 1 / (1 + (-t).exp())


class Gau(nn.Module):
    """A gated attention unit: one small matrix for queries and keys, gates on the values' average."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.uv, self.z, self.o = nn.LayerNorm(D), nn.Linear(D, 24), nn.Linear(D, 4), nn.Linear(12, D)
        self.gain, self.shift = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln(x)
        u, v = F.silu(self.uv(h)).chunk(2, dim=-1)
        q, k = (F.silu(self.z(h))[..., None, :] * self.gain + self.shift).unbind(-2)
        return x + self.o(u * ((q @ k.mT / 2).softmax(-1) @ v))


def gau(m: Any, x: Tensor) -> Formula:
    def heads(h: Tensor) -> Tensor:
        both, z = m.uv(h), m.z(h)
        both, z = both * sigmoid(both), z * sigmoid(z)
        q, k = z * m.gain[0] + m.shift[0], z * m.gain[1] + m.shift[1]
        return both[..., :12] * attend(q, k, both[..., 12:])

    return Formula(x, [Step(lambda t: t + m.o(heads(m.ln(t))), lambda t: m.o(heads(t)), heads, m.ln)])


class Chosen(nn.Module):
    """A mixture of attention heads: of four value heads two are chosen by a router for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(D, 16), nn.Linear(D, 16), nn.Linear(D, 16), nn.Linear(16, D)
        self.router = nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(p(x), 4) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v)
        top, chosen = self.router(x).topk(2, dim=-1)
        gates = torch.zeros(*x.shape[:2], 4, dtype=x.dtype).scatter(-1, chosen, top.softmax(-1))
        return self.o((a.transpose(1, 2) * gates[..., None]).flatten(2))


def chosen(m: Any, x: Tensor) -> Formula:
    logits = m.router(x)
    closed = torch.zeros_like(logits).masked_fill(logits < logits.sort(-1).values[..., -2:-1], -torch.inf).detach()

    def heads(t: Tensor) -> Tensor:
        gates = (m.router(t) + closed).exp()
        a = attend(*(split(p(t), 4) for p in (m.q, m.k, m.v)))
        return merge(a * (gates / gates.sum(-1, keepdim=True)).mT[..., None])

    return Formula(x, [Step(attention=lambda t: m.o(heads(t)), heads=heads)])


class Local(nn.Module):
    """CSWin: a depthwise convolution of the values is added to the heads, before the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.local = nn.Conv1d(D, D, 3, padding=1, groups=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(fused(self, x) + self.local(self.v(x).mT).mT)


def local(m: Any, x: Tensor) -> Formula:
    w = m.local.weight[:, 0]

    def attention(t: Tensor) -> Tensor:
        v = F.pad(m.v(t), (0, 0, 1, 1))
        return m.o(plain(m, t) + sum(v[:, i : i + N] * w[:, i] for i in range(3)) + m.local.bias)

    return Formula(x, [Step(attention=attention)])


class ConvolutionalProjections(nn.Module):
    """CvT: queries, keys and values through a depthwise convolution and a linear layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(D, D, 3, padding=1, groups=D) for _ in range(3)])
        self.linears, self.o = nn.ModuleList([nn.Linear(D, D) for _ in range(3)]), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(f(c(x.transpose(1, 2)).transpose(1, 2))) for c, f in zip(self.convs, self.linears, strict=True))
        return self.o(merge(F.scaled_dot_product_attention(q, k, v)))


def convolutional(m: Any, x: Tensor) -> Formula:
    def project(i: int, t: Tensor) -> Tensor:
        t, w = F.pad(t, (0, 0, 1, 1)), m.convs[i].weight[:, 0]
        return split(m.linears[i](sum(t[:, j : j + N] * w[:, j] for j in range(3)) + m.convs[i].bias))

    def heads(t: Tensor) -> Tensor:
        return merge(attend(project(0, t), project(1, t), project(2, t)))

    return Formula(x, [Step(attention=lambda t: m.o(heads(t)), heads=heads)])


class OutputConvolution(nn.Module):
    """The output projection is a 1×1 convolution, and the residual stands in the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), nn.Conv1d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(fused(self, x).transpose(1, 2)).transpose(1, 2)


def output_convolution(m: Any, x: Tensor) -> Formula:
    def attention(t: Tensor) -> Tensor:
        return plain(m, t) @ m.o.weight[..., 0].mT + m.o.bias

    return Formula(x, [Step(lambda t: t + attention(t), attention, lambda t: plain(m, t))])


QUESTIONS: list[Question] = [
    *asks(
        "a gate behind o",
        lambda: seeded(Behind(gate_behind, g=nn.Linear(D, D))),
        one,
        behind(lambda m, a, x: m.o(a) * sigmoid(m.g(x))),
        "attention, heads",
    ),
    *asks(
        "a gate on the heads",
        lambda: seeded(Behind(gate_before, g=nn.Linear(D, D))),
        one,
        behind(lambda m, a, x: m.o(a * sigmoid(m.g(x))), lambda m, a, x: a * sigmoid(m.g(x))),
        "attention, heads",
    ),
    *asks(
        "a gate for each head",
        lambda: seeded(Behind(gate_by_head, g=nn.Linear(D, H))),
        one,
        behind(lambda m, a, x: m.o(a * sigmoid(m.g(x)).repeat_interleave(4, -1))),
        "attention",
    ),
    *asks(
        "a bottleneck inside",
        lambda: seeded(Behind(bottleneck, down=nn.Linear(D, 3), up=nn.Linear(3, D))),
        one,
        behind(lambda m, a, x: m.o(a) + m.up(m.down(m.o(a)).clamp(min=0))),
        "attention, heads",
    ),
    *asks(
        "a layer called last and not used",
        lambda: seeded(Behind(unused_last, unused=nn.Linear(D, D))),
        one,
        behind(lambda m, a, x: m.o(a)),
        "attention, heads",
    ),
    *asks(
        "two output matrices",
        lambda: seeded(Behind(two_matrices, o2=nn.Linear(D, D))),
        one,
        behind(lambda m, a, x: m.o2(0.5 * m.o(a) * (1 + torch.erf(m.o(a) * 0.5**0.5)))),
        "attention",
    ),
    *asks(
        "squeeze and excite inside",
        lambda: seeded(Behind(squeeze, g=nn.Linear(D, D))),
        one,
        behind(lambda m, a, x: m.o(a) * sigmoid(m.g(m.o(a).mean(-2, keepdim=True)))),
        "attention",
    ),
    *asks(
        "a norm before o",
        lambda: seeded(Behind(normed_heads, ln=nn.LayerNorm(D))),
        one,
        behind(lambda m, a, x: m.o(m.ln(a))),
        "attention",
    ),
    *asks("a gated attention unit", lambda: seeded(Gau()), one, gau, "attention, normed, block, update"),
    *asks("a mixture of heads", lambda: seeded(Chosen()), one, chosen, "attention"),
    *asks("a convolution of the values", lambda: seeded(Local()), one, local, "attention"),
    *asks("convolutional projections", lambda: seeded(ConvolutionalProjections()), one, convolutional, "attention, heads"),
    *asks(
        "a convolution as o, residual inside",
        lambda: seeded(OutputConvolution()),
        one,
        output_convolution,
        "attention, heads, block",
    ),
]
