"""What belongs to attention behind its heads: gates inside and outside its module, a norm, a second context."""

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
    fused,
    merge,
    mlp,
    one,
    plain,
    pre,
    seeded,
    split,
    tokens,
)
from problems.modules.behind import Behind, sigmoid

Tail = Callable[[Any, Tensor, Tensor], Tensor]


def by_einsum(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bnd,bnd->bnd", m.o(a), torch.sigmoid(m.g(x)))


def by_division(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return m.o(a) / (1 + (-m.g(x)).exp())


def by_diagonal(m: Any, a: Tensor, x: Tensor) -> Tensor:
    """One diagonal matrix of channels for each token."""
    return (m.o(a)[:, :, None] @ torch.diag_embed(torch.sigmoid(m.g(x))))[:, :, 0]


def by_diagonal_of_tokens(m: Any, a: Tensor, x: Tensor) -> Tensor:
    """One diagonal matrix of tokens for all channels."""
    return torch.diag_embed(torch.sigmoid(m.g(x)[..., 0])) @ m.o(a)


def mixed(m: Any, a: Tensor, x: Tensor) -> Tensor:
    """Heads, projected one by one, are mixed as a router says for each token."""
    columns = m.o.weight.mT.unflatten(0, (H, -1))
    return torch.einsum("bhnd,hde,bnh->bne", split(a), columns, m.g(x)[..., :H].softmax(-1))


def times_gate(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return m.o(a) * sigmoid(m.g(x))


def times_gate_of_tokens(m: Any, a: Tensor, x: Tensor) -> Tensor:
    return m.o(a) * sigmoid(m.g(x)[..., :1])


def mixture(m: Any, a: Tensor, x: Tensor) -> Tensor:
    shares, columns = m.g(x)[..., :H].exp(), m.o.weight.unflatten(1, (H, -1))
    shares = shares / shares.sum(-1, keepdim=True)
    return sum((shares[..., h : h + 1] * (split(a)[..., h, :, :] @ columns[:, h].mT) for h in range(H)), torch.zeros(1))


GATES: dict[str, tuple[Tail, Tail]] = {
    "einsum": (by_einsum, times_gate),
    "division": (by_division, times_gate),
    "a diagonal matrix for each token": (by_diagonal, times_gate),
    "a diagonal matrix of tokens": (by_diagonal_of_tokens, times_gate_of_tokens),
    "a mixture of heads": (mixed, mixture),
}


def inside(tail: Tail) -> Callable[..., Formula]:
    """Pre-norm blocks whose attention is `tail` of the plain heads and of its input."""

    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return tail(b.att, plain(b.att, t), t)

        def block(t: Tensor) -> Tensor:
            t = t + attention(b.ln1(t))
            return t + b.mlp(b.ln2(t))

        return Step(block, attention, lambda t: plain(b.att, t), b.ln1)

    return lambda m, x: Formula(x, [of(b) for b in m.blocks])


# of a block, its tokens, its tokens behind the norm, and a condition
OUTSIDE: dict[str, Callable[[Any, Tensor, Tensor, Any], Tensor]] = {
    "a parameter": lambda b, x, h, c: b.gain,
    "the block's tokens": lambda b, x, h, c: torch.sigmoid(b.gate(x)),
    "attention's input": lambda b, x, h, c: torch.sigmoid(b.gate(h)),
    "the mean of attention's input": lambda b, x, h, c: b.gate(h.mean(-2, keepdim=True)).tanh(),
    "a condition": lambda b, x, h, c: torch.sigmoid(b.gate(c)),
}


class Outside(nn.Module):
    """A pre-norm block that multiplies what its attention module returns by a gate."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.ln1, self.att, self.ln2, self.mlp = nn.LayerNorm(D), Own(fused), nn.LayerNorm(D), mlp()
        self.gain, self.gate, self.way = nn.Parameter(torch.ones(D)), nn.Linear(D, D), way

    def forward(self, x: Tensor, c: Tensor | None) -> Tensor:
        h = self.ln1(x)
        x = x + OUTSIDE[self.way](self, x, h, c) * self.att(h)
        return x + self.mlp(self.ln2(x))


class Outsides(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Outside(way), Outside(way)])

    def forward(self, x: Tensor, c: Tensor | None = None) -> Tensor:
        for b in self.blocks:
            x = b(x, c)
        return x


def outside(m: Any, x: Tensor, c: Tensor | None = None) -> Formula:
    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return b.att.o(plain(b.att, t))

        def block(t: Tensor) -> Tensor:
            h = b.ln1(t)
            t = t + OUTSIDE[b.way](b, t, h, c) * attention(h)
            return t + b.mlp(b.ln2(t))

        return Step(block, attention, lambda t: plain(b.att, t), b.ln1)

    return Formula(x, [of(b) for b in m.blocks])


class NormedOutput(nn.Module):
    """A norm in front of attention and one behind its projection, in one list with it; the residual is in here or outside."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.norm, self.residual = nn.LayerNorm(D), residual
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))

    def forward(self, x: Tensor) -> Tensor:
        out = self.to_out(fused(self, self.norm(x)))
        return x + out if self.residual else out


class Pairs(nn.Module):
    """Attention and a network, pair by pair."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([NormedOutput(residual), mlp()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for att, ff in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = att(x) if att.residual else x + att(x)
            x = x + ff(x)
        return x


def pairs(m: Any, x: Tensor) -> Formula:
    def of(att: Any, ff: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return att.to_out(plain(att, t))

        def block(t: Tensor) -> Tensor:
            t = t + attention(att.norm(t))
            return t + ff(t)

        return Step(block, attention, lambda t: plain(att, t), att.norm)

    return Formula(x, [of(*pair) for pair in m.layers])


class TwoContexts(nn.Module):
    """IP-Adapter: the same queries look at text and at a picture, and one matrix projects the sum.

    Without a picture, the last two tokens of the text are one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.k_ip, self.v_ip, self.o = (nn.Linear(D, D) for _ in range(6))

    def forward(self, x: Tensor, text: Tensor, picture: Tensor | None) -> Tensor:
        if picture is None:
            text, picture = text[:, :-2], text[:, -2:]
        q = split(self.q(x))
        out = merge(F.scaled_dot_product_attention(q, split(self.k(text)), split(self.v(text))))
        more = merge(F.scaled_dot_product_attention(q, split(self.k_ip(picture)), split(self.v_ip(picture))))
        return self.o(out + 0.6 * more)


def two_contexts(m: Any, t: Tensor, text: Tensor, picture: Tensor | None) -> Tensor:
    if picture is None:
        text, picture = text.split([text.shape[1] - 2, 2], 1)
    q = split(m.q(t))
    out = attend(q, split(m.k(text)), split(m.v(text)))
    return m.o(merge(out + 0.6 * attend(q, split(m.k_ip(picture)), split(m.v_ip(picture)))))


class Adapted(nn.Module):
    """A pre-norm block with both kinds of attention and a network."""

    def __init__(self, cross_first: bool = False) -> None:
        super().__init__()
        self.ln1, self.ln2, self.ln3 = (nn.LayerNorm(D) for _ in range(3))
        self.att, self.cross, self.mlp, self.cross_first = Own(fused), TwoContexts(), mlp(), cross_first

    def forward(self, x: Tensor, text: Tensor, picture: Tensor | None = None) -> Tensor:
        if self.cross_first:
            x = x + self.cross(self.ln2(x), text, picture)
            x = x + self.att(self.ln1(x))
        else:
            x = x + self.att(self.ln1(x))
            x = x + self.cross(self.ln2(x), text, picture)
        return x + self.mlp(self.ln3(x))


class Adapter(nn.Module):
    def __init__(self, cross_first: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adapted(cross_first), Adapted(cross_first)])

    def forward(self, x: Tensor, text: Tensor, picture: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, text, picture)
        return x


def adapter(m: Any, x: Tensor, text: Tensor, picture: Tensor | None = None) -> Formula:
    def of(b: Any) -> Step:
        def attention(t: Tensor) -> Tensor:
            return b.att.o(plain(b.att, t))

        def look(t: Tensor) -> Tensor:
            return two_contexts(b.cross, t, text, picture)

        def attended(t: Tensor) -> Tensor:
            return t + attention(b.ln1(t))

        def looked(t: Tensor) -> Tensor:
            return t + look(b.ln2(t))

        def block(t: Tensor) -> Tensor:
            t = attended(looked(t)) if b.cross_first else looked(attended(t))
            return t + b.mlp(b.ln3(t))

        def queries(t: Tensor) -> Tensor:
            return b.ln2(t if b.cross_first else attended(t))

        def start(t: Tensor) -> Tensor:
            return b.ln1(looked(t) if b.cross_first else t)

        maps: Any = {
            "attention": lambda t: (attention, start(t)),
            "cross": lambda t: (look, queries(t)),
            "context": lambda t: (lambda c: two_contexts(b.cross, queries(t), c, picture), text),
        }
        return Step(block, maps=maps)

    return Formula(x, [of(b) for b in ([m] if isinstance(m, Adapted) else m.layers)])


def ignored(fill: float | None) -> Callable[[Any, Tensor], Tensor]:
    """The heads' outputs, of logits that are added to nothing: `fill`, or what the memory holds."""

    def heads(m: Any, x: Tensor) -> Tensor:
        q, k, v = (split(p(x)).flatten(0, 1) for p in (m.q, m.k, m.v))
        given = torch.empty(len(q), N, N, dtype=x.dtype)
        if fill is not None:
            given.fill_(fill)
        logits = torch.baddbmm(given, q, k.mT, beta=0, alpha=0.5)
        return merge((logits.softmax(-1) @ v).unflatten(0, (-1, H)))

    return heads


def three() -> tuple[Tensor, Tensor, Tensor]:
    return tokens(), tokens(6, seed=8), tokens(4, seed=9)


def long_text() -> tuple[Tensor, Tensor]:
    return tokens(), tokens(6, seed=8)


ALL = "attention, attention 1, heads 1, normed, block, block 1, update, 0>1"
LOOKS = "attention, attention 1, cross, cross 1, block, block 1, 0>1, cross call=1 refused, cross 1 call=1 refused"

QUESTIONS: list[Question] = [
    *(
        question
        for name, (tail, truth) in GATES.items()
        for question in asks(
            f"a gate inside the attending module, {name}",
            lambda tail=tail: seeded(Stack(*(Pre(Behind(tail, g=nn.Linear(D, D))) for _ in range(2)), norm=False)),
            one,
            inside(truth),
            "attention, attention 1, normed, block, block 1, 0>1" if tail is mixed else ALL,
        )
    ),
    *(
        question
        for way in OUTSIDE
        for question in asks(
            f"a gate outside the attending module, {way}",
            lambda way=way: seeded(Outsides(way)),
            (lambda: (tokens(), tokens(1, seed=8))) if way == "a condition" else one,
            outside,
            ALL,
        )
    ),
    *(
        question
        for residual in (False, True)
        for question in asks(
            f"a norm in one list with the projection, the residual {'inside' if residual else 'outside'}",
            lambda residual=residual: seeded(Pairs(residual)),
            one,
            pairs,
            ALL,
        )
    ),
    *(
        question
        for cross_first in (False, True)
        for question in (
            *asks(
                f"two contexts, cross-attention {'first' if cross_first else 'second'}",
                lambda cross_first=cross_first: seeded(Adapter(cross_first)),
                three,
                adapter,
                LOOKS + ", context refused, context 1 refused",
            ),
            *asks(
                f"one context in two parts, cross-attention {'first' if cross_first else 'second'}",
                lambda cross_first=cross_first: seeded(Adapter(cross_first)),
                long_text,
                adapter,
                LOOKS + ", context, context 1",
                hidden="context 1",
            ),
        )
    ),
    *asks(
        "two contexts, one block alone",
        lambda: seeded(Adapted()),
        three,
        adapter,
        "attention, cross, block, update, cross call=1 refused, context refused",
    ),
    *asks(
        "one context in two parts, one block alone",
        lambda: seeded(Adapted()),
        long_text,
        adapter,
        "attention, cross, context, block, update, cross call=1 refused",
    ),
    *(
        question
        for name, fill in {"memory": None, "nan": torch.nan, "infinity": torch.inf, "zeros": 0.0}.items()
        for question in asks(
            f"logits by baddbmm that ignores {name}",
            lambda fill=fill: seeded(Pre(Own(ignored(fill)))),
            one,
            lambda m, x: Formula(x, [pre(m)]),
            "attention, heads, normed, block, update",
        )
    ),
]
