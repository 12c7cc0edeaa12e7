"""Blocks without a list around them, tokens cut off before the final norm, and spans of blocks that run in reverse."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    Function,
    Own,
    Point,
    Pre,
    Question,
    Step,
    asks,
    fused,
    mlp,
    one,
    plain,
    pre,
    same,
    seeded,
)
from problems.modules.cross import Cross, cross
from problems.modules.numbered import Ordered, ordered
from problems.modules.torch_modules import two_sides


class Lone(nn.Module):
    """A block that is the whole model: two attentions and a network in sequence, pre-norm or post-norm."""

    def __init__(self, post: bool, second: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.ln1, self.ln2, self.ln3, self.mlp, self.post = *(nn.LayerNorm(D) for _ in range(3)), mlp(), post
        self.first = Own(fused)
        self.second = self.first if second is None else second()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        more = () if context is None else (context,)
        if self.post:
            x = self.ln1(x + self.first(x))
            x = self.ln2(x + self.second(x, *more))
            return self.ln3(x + self.mlp(x))
        x = x + self.first(self.ln1(x))
        x = x + self.second(self.ln2(x), *more)
        return x + self.mlp(self.ln3(x))


def lone(m: Any, x: Tensor, context: Tensor | None = None) -> Formula:
    b: Any = m[0] if isinstance(m, nn.Sequential) else m

    def added(norm: Function, inner: Function, t: Tensor) -> Tensor:
        return norm(t + inner(t)) if b.post else t + inner(norm(t))

    def first(t: Tensor) -> Tensor:
        return b.first.o(plain(b.first, t))

    def second(t: Tensor) -> Tensor:
        return b.second.o(plain(b.second, t)) if context is None else cross(b.second, t, context)

    def block(t: Tensor) -> Tensor:
        return added(b.ln3, b.mlp, added(b.ln2, second, added(b.ln1, first, t)))

    def start(t: Tensor) -> Tensor:
        """What enters the second attention."""
        t = added(b.ln1, first, t)
        return t if b.post else b.ln2(t)

    def heads(t: Tensor) -> Tensor:
        return plain(b.first, t)

    maps: dict[str, Callable[[Tensor], Point]]
    if context is None:
        maps = {
            "attention call=1": lambda t: (second, start(t)),
            "heads call=1": lambda t: (lambda s: plain(b.second, s), start(t)),
        }
    else:
        maps = {
            "cross": lambda t: (second, start(t)),
            "context": lambda t: (lambda c: cross(b.second, start(t), c), context),
        }
    return Formula(x, [Step(block, first, heads, same if b.post else b.ln1, maps)])


class Flat(nn.Module):
    """Two blocks whose parts are attributes of the model, numbered by name."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.ln_1a, self.ln_1b, self.ln_2a, self.ln_2b = (nn.LayerNorm(D) for _ in range(4))
        self.attn_1, self.ff_1, self.attn_2, self.ff_2 = Own(fused), mlp(), Own(fused), mlp()
        self.norm = nn.LayerNorm(D) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn_1(self.ln_1a(x))
        x = x + self.ff_1(self.ln_1b(x))
        x = x + self.attn_2(self.ln_2a(x))
        x = x + self.ff_2(self.ln_2b(x))
        return x if self.norm is None else self.norm(x)


def flat(m: Any, x: Tensor) -> Formula:
    def of(att: Any, ff: Function, before: Function, between: Function) -> Step:
        def attention(t: Tensor) -> Tensor:
            return att.o(plain(att, t))

        def block(t: Tensor) -> Tensor:
            t = t + attention(before(t))
            return t + ff(between(t))

        return Step(block, attention, lambda t: plain(att, t), before)

    steps = [of(m.attn_1, m.ff_1, m.ln_1a, m.ln_1b), of(m.attn_2, m.ff_2, m.ln_2a, m.ln_2b)]
    return Formula(x, steps) if m.norm is None else Formula(x, steps, m.norm)


class Cut(nn.Module):
    """Two learned tokens in front of the others; some of all are dropped between the last block and the final norm."""

    def __init__(self, kept: slice) -> None:
        super().__init__()
        self.registers, self.kept = nn.Parameter(torch.zeros(1, 2, D)), kept
        self.blocks, self.norm = nn.ModuleList([Pre(Own(fused)), Pre(Own(fused))]), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.registers, x], 1)
        for b in self.blocks:
            x = b(x)
        return self.norm(x[:, self.kept])


def cut(m: Any, x: Tensor) -> Formula:
    kept = torch.arange(x.shape[1] + 2)[m.kept]
    enter = torch.cat([m.registers, x], 1)
    return Formula(enter, [pre(b) for b in m.blocks], lambda t: m.norm(t.index_select(1, kept)))


def spans(m: Any, x: Tensor) -> Formula:
    """`ordered`, and the spans from each block to those that run behind it, by their numbers in the list."""
    found = ordered(m, x)

    def over(numbers: tuple[int, ...]) -> Callable[[Tensor], Point]:
        def run(t: Tensor) -> Tensor:
            for i in numbers:
                t = found.steps[i].block(t)
            return t

        return lambda t: (run, found.steps[numbers[0]].maps["block"](t)[1])

    steps = list(found.steps)
    for at, i in enumerate(m.order):
        behind = range(at, len(m.order))
        maps = {f"to {m.order[end]}": over(m.order[at : end + 1]) for end in behind}
        maps["to final"] = over(m.order[at:])
        steps[i] = replace(steps[i], maps=steps[i].maps | maps)
    return replace(found, steps=steps)


TWO_SELF = "block, update, model, 0>final, attention, attention call=1, heads, heads call=1"
SELF_AND_CROSS = "block, update, model, 0>final, attention, heads, cross, context"
ONE_LAYER = "block 1 refused, attention 1 refused"
FLAT = (
    "attention, attention 1, heads 1, normed, normed 1, block, block 1, update, update 1, 0>1, 0>final, model, block 2 refused"
)

QUESTIONS: list[Question] = [
    *(
        question
        for post in (False, True)
        for question in (
            *asks(
                f"alone, two self-attentions, {'post' if post else 'pre'}-norm",
                lambda post=post: seeded(Lone(post, partial(Own, fused))),
                one,
                lone,
                TWO_SELF if post else TWO_SELF + ", normed",
                ONE_LAYER + ", attention call=2 refused",
            ),
            *asks(
                f"alone, one self-attention twice, {'post' if post else 'pre'}-norm",
                lambda post=post: seeded(Lone(post)),
                one,
                lone,
                TWO_SELF,
                ONE_LAYER,
            ),
            *asks(
                f"alone, self- and cross-attention, {'post' if post else 'pre'}-norm",
                lambda post=post: seeded(Lone(post, Cross)),
                two_sides,
                lone,
                SELF_AND_CROSS if post else SELF_AND_CROSS + ", normed",
                ONE_LAYER + ", attention call=1 refused, cross call=1 refused",
            ),
            *asks(
                f"alone in a row, two self-attentions, {'post' if post else 'pre'}-norm",
                lambda post=post: seeded(nn.Sequential(Lone(post, partial(Own, fused)))),
                one,
                lone,
                "block, update, model, attention, attention call=1",
                ONE_LAYER,
            ),
        )
    ),
    *(
        question
        for norm in (False, True)
        for question in asks(
            f"blocks of plain attributes, {'a' if norm else 'no'} norm behind",
            lambda norm=norm: seeded(Flat(norm)),
            one,
            flat,
            FLAT,
        )
    ),
    *(
        question
        for name, kept in {"[2:]": slice(2, None), "[:-1]": slice(-1), "[1:-1]": slice(1, -1)}.items()
        for question in asks(
            f"tokens {name} before the final norm",
            lambda kept=kept: seeded(Cut(kept)),
            one,
            cut,
            "model, 0>final, 0>1, block, block 1, attention 1",
        )
    ),
    *asks(
        "spans in reversed order",
        lambda: seeded(Ordered((3, 2, 1, 0))),
        one,
        spans,
        "0>1 refused, 0>3 refused, 1>2 refused, 2>3 refused, 1>0, 3>1, 3>0, 0>0, 2>2, 3>final, 1>final",
    ),
    *asks(
        "spans in odd order",
        lambda: seeded(Ordered((2, 0, 1, 3))),
        one,
        spans,
        "0>2 refused, 1>2 refused, 0>1, 0>3, 1>3, 2>3, 2>0, 2>final",
    ),
]
