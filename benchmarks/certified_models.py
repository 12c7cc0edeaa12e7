"""The functions of `benchmarks.certified`, in torch alone and in operations that auto_LiRPA 0.3 knows, for two interpreters.

It knows no square root, no erf and no GELU: norms divide by `exp(½ log ·)`, GELU is in its tanh form, written out.
"""

import math

import torch
from torch import Tensor, nn


def normalised(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm."""
    u = x - x.mean(-1, keepdim=True)
    return u * torch.exp(-0.5 * torch.log((u * u).mean(-1, keepdim=True) + norm.eps)) * norm.weight + norm.bias


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


class Attention(nn.Module):
    """Multi-head self-attention with its output projection, (1, n, d) → (1, n, d)."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, n, d = x.shape
        q, k, v = (p(x).reshape(batch, n, self.heads, d // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = torch.softmax(q.matmul(k.transpose(2, 3)) / math.sqrt(d // self.heads), -1)
        return self.o(weights.matmul(v).transpose(1, 2).reshape(batch, n, d))


class Behind(nn.Module):
    """A block that normalises behind its sums, as BERT's."""

    def __init__(self, d: int, heads: int, hidden: int):
        super().__init__()
        self.attention, self.first, self.second = Attention(d, heads), nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        x = normalised(x + self.attention(x), self.first)
        return normalised(x + self.down(gelu(self.up(x))), self.second)


class Digits(nn.Module):
    """An encoder of one block that normalises first, over the eight rows of a digit, (1, 8, 8) → (1, 10)."""

    def __init__(self, d: int = 32, heads: int = 4, hidden: int = 64):
        super().__init__()
        self.enter, self.place = nn.Linear(8, d), nn.Parameter(0.1 * torch.randn(8, d))
        self.first, self.second, self.attention = nn.LayerNorm(d), nn.LayerNorm(d), Attention(d, heads)
        self.up, self.down, self.leave = nn.Linear(d, hidden), nn.Linear(hidden, d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.place
        x = x + self.attention(normalised(x, self.first))
        x = x + self.down(torch.relu(self.up(normalised(x, self.second))))
        return self.leave(x.mean(1))


def build(name: str, sizes: list[int]) -> nn.Module:
    """One of them, its weights random."""
    return {"attention": Attention, "block": Behind, "digits": Digits}[name](*sizes).eval()
