"""Several streams of tokens that attention joins."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (
    D,
    Formula,
    Question,
    Step,
    asks,
    attend,
    merge,
    mlp,
    seeded,
    split,
    tokens,
)

TEXT = 3


IMAGE = 5


PARTS = (IMAGE * D, TEXT * D)


def apart(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The two streams of a flat tensor, as their order in the arguments is."""
    return flat[: IMAGE * D].reshape(1, IMAGE, D), flat[IMAGE * D :].reshape(1, TEXT, D)


def together(*streams: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in streams])


class Joint(nn.Module):
    """SD3: two streams with weights of their own, joined in attention; the last block drops the text's output."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.ln_x, self.ln_c, self.qkv_x, self.qkv_c = (
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            nn.Linear(D, 3 * D),
            nn.Linear(D, 3 * D),
        )
        self.to_out, self.to_add_out, self.last = nn.Linear(D, D), None if last else nn.Linear(D, D), last
        self.ff, self.ff_c = mlp(), None if last else mlp()

    def run(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor | None]:
        n = x.shape[1]
        parts = torch.cat([self.qkv_x(self.ln_x(x)), self.qkv_c(self.ln_c(c))], dim=1).chunk(3, -1)
        q, k, v = (split(t) for t in parts)
        out = merge(F.scaled_dot_product_attention(q, k, v))
        x = x + self.to_out(out[:, :n])
        x = x + self.ff(x)
        if self.to_add_out is None or self.ff_c is None:
            return x, None
        c = c + self.to_add_out(out[:, n:])
        return x, c + self.ff_c(c)

    def forward(self, x: Tensor, c: Tensor) -> Any:
        return self.run(x, c)


class TextFirst(Joint):
    """Called (x, c), and returns (c, x), as diffusers' does."""

    def forward(self, x: Tensor, c: Tensor) -> Any:
        return self.run(x, c)[::-1]


class TwoStreams(nn.Module):
    def __init__(self, kind: type[Joint], last: bool) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList([kind(), kind(last)]), nn.Linear(D, 4)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x, c = block(x, c)[::-1] if isinstance(block, TextFirst) else block(x, c)
        return self.out(x)


def joint(b: Any) -> Step:
    def heads(h: Tensor) -> Tensor:
        x, c = apart(h)
        q, k, v = (torch.cat(pair, 1) for pair in zip(b.qkv_x(x).chunk(3, -1), b.qkv_c(c).chunk(3, -1), strict=True))
        return merge(attend(split(q), split(k), split(v)))

    def attention(h: Tensor) -> Tensor:
        out = heads(h)
        return together(b.to_out(out[:, :IMAGE]), b.to_add_out(out[:, IMAGE:]))

    def norm(t: Tensor) -> Tensor:
        x, c = apart(t)
        return together(b.ln_x(x), b.ln_c(c))

    def block(t: Tensor) -> Tensor:
        if b.last:
            x = apart(t)[0] + b.to_out(heads(norm(t))[:, :IMAGE])
            return x + b.ff(x)
        x, c = apart(t + attention(norm(t)))
        return together(x + b.ff(x), c + b.ff_c(c))

    def one_of(f: Any, k: int) -> Any:
        """A map of one stream: the other enters as it is."""

        def point(start: Tensor) -> Any:
            fixed = apart(start)

            def run(t: Tensor) -> Tensor:
                return apart(f(together(*(t if i == k else s for i, s in enumerate(fixed)))))[k]

            return run, fixed[k]

        return point

    maps: Any = {}
    for k in range(2):
        maps[f"block stream={k}"] = one_of(block, k)
        maps[f"attention stream={k}"] = lambda t, k=k: one_of(attention, k)(norm(t))
    return Step(block, attention, heads, norm, maps)


def two_streams(m: Any, x: Tensor, c: Tensor) -> Formula:
    return Formula(together(x, c), [joint(b) for b in m.blocks])


def streams() -> tuple[Tensor, Tensor]:
    return tokens(IMAGE), tokens(TEXT, seed=8)


class Single(nn.Module):
    """Flux's single stream: text and image side by side; one matrix behind heads and network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj_mlp = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, 12)
        self.q_norm, self.k_norm = nn.RMSNorm(4, eps=1e-6), nn.RMSNorm(4, eps=1e-6)
        self.proj_out, self.gate = nn.Linear(D + 12, D), nn.Linear(D, D)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (split(t) for t in self.qkv(h).chunk(3, -1))
        out = merge(F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v))
        return x + self.gate(temb)[:, None] * self.proj_out(torch.cat([out, F.gelu(self.proj_mlp(h))], 2))


class Flux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single_blocks, self.out = nn.ModuleList([Single(), Single()]), nn.Linear(D, 4)

    def forward(self, image: Tensor, text: Tensor, temb: Tensor) -> Tensor:
        x = torch.cat([text, image], dim=1)
        for block in self.single_blocks:
            x = block(x, temb=temb)
        return self.out(x[:, text.shape[1] :])


def flux(m: Any, image: Tensor, text: Tensor, temb: Tensor) -> Formula:
    def of(b: Any) -> Step:
        def heads(h: Tensor) -> Tensor:
            q, k, v = (split(t) for t in b.qkv(h).chunk(3, -1))
            q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
            return merge(attend(q * b.q_norm.weight, k * b.k_norm.weight, v))

        def block(t: Tensor) -> Tensor:
            h, w = b.norm(t), b.proj_out.weight
            hidden = b.proj_mlp(h)
            hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
            return t + b.gate(temb) * (heads(h) @ w[:, :D].mT + hidden @ w[:, D:].mT + b.proj_out.bias)

        return Step(block, heads=heads, norm=b.norm)

    return Formula(torch.cat([text, image], 1), [of(b) for b in m.single_blocks])


BOTH = "attention, attention 1 stream=0, attention 1 stream=1, block, block 1, block 1 stream=0, block stream=1, update, 0>1"

QUESTIONS: list[Question] = [
    *asks("two streams", lambda: seeded(TwoStreams(Joint, False)), streams, two_streams, BOTH, parts=PARTS),
    *asks(
        "two streams, (text, image) returned",
        lambda: seeded(TwoStreams(TextFirst, False)),
        streams,
        two_streams,
        "attention, attention 1, block, block 1, update 1, 0>1",
        parts=PARTS,
    ),
    *asks(
        "two streams, the last drops one",
        lambda: seeded(TwoStreams(Joint, True)),
        streams,
        two_streams,
        "block, model, 0>final",
        parts=PARTS,
    ),
    *asks(
        "Flux, single stream",
        lambda: seeded(Flux()),
        lambda: (*streams(), tokens(1, seed=9)[0]),
        flux,
        "heads, heads 1, block, block 1, update, 0>1",
    ),
]
