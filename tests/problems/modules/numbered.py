"""Which block is layer k, and which stream is stream i: lists run out of order, lists inside blocks, contexts first."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (
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
    merge,
    one,
    plain,
    pre,
    seeded,
    split,
)
from problems.modules.refused import nothing
from problems.modules.streams import PARTS, Joint, TwoStreams, joint, streams, together, two_streams


class Ordered(nn.Module):
    """Blocks of one list, run in an order of the model's own."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList([Pre(Own(fused)) for _ in range(4)]), tuple(order)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return x


def ordered(m: Any, x: Tensor) -> Formula:
    """Layer k is element k of the list, at the tokens that reach it."""
    enter, steps = {}, [pre(b) for b in m.layers]
    for i in m.order:
        enter[i], x = x, steps[i].block(x).detach()

    def fixed(function: Function, point: Tensor) -> Any:
        return lambda t: (function, point)

    def of(step: Step, at: Tensor) -> Step:
        assert step.attention is not None
        assert step.heads is not None
        maps: dict[str, tuple[Function, Tensor]] = {
            "block": (step.block, at),
            "update": (lambda t: step.block(t) - t, at),
            "attention": (step.attention, step.norm(at)),
            "heads": (step.heads, step.norm(at)),
            "normed": (lambda t: step.attention(step.norm(t)), at),  # pyright: ignore[reportOptionalCall]
        }
        return replace(step, maps={name: fixed(*point) for name, point in maps.items()})

    return Formula(enter[m.order[0]], [of(step, enter[i]) if i in enter else Step() for i, step in enumerate(steps)])


EVERY = ", ".join(f"{name} {k}" for k in range(4) for name in ("attention", "block")) + ", heads 1, normed 2, update 3"
SKIPPED = "block 1 refused, attention 1 refused, block 2 refused, attention 2 refused, block 3 refused, update 3 refused"


class Things(nn.Module):
    """timm's ParallelThingsBlock: two attentions side by side, then two networks side by side, each behind its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attns = nn.ModuleList([nn.Sequential(nn.LayerNorm(D), Own(fused)) for _ in range(2)])
        self.ffns = nn.ModuleList([nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.stack([a(x) for a in self.attns]).sum(dim=0)
        return x + torch.stack([f(x) for f in self.ffns]).sum(dim=0)


class ParallelThings(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Things() for _ in range(blocks)]), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for b in self.blocks:
            x = b(x)
        return self.norm(x)


def things(b: Any) -> Step:
    (norm, a), (other, second) = b.attns

    def attention(t: Tensor) -> Tensor:
        return a.o(plain(a, t))

    def block(t: Tensor) -> Tensor:
        t = t + attention(norm(t)) + second.o(plain(second, other(t)))
        return t + sum((f(t) for f in b.ffns), torch.zeros(1))

    def call(t: Tensor) -> Point:
        return lambda s: second.o(plain(second, s)), other(t)

    return Step(block, attention, lambda t: plain(a, t), norm, {"attention call=1": call})


def parallel_things(m: Any, x: Tensor) -> Formula:
    return Formula(x, [things(b) for b in m.blocks], m.norm)


def things_in_a_row(m: Any, x: Tensor) -> Formula:
    return Formula(x, [things(b) for b in m])


class ContextFirst(Joint):
    """Flux: called (x, c), and attention over c and x side by side, in this order."""

    def run(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor | None]:
        n = c.shape[1]
        cs, xs = self.qkv_c(self.ln_c(c)).chunk(3, -1), self.qkv_x(self.ln_x(x)).chunk(3, -1)
        q, k, v = (torch.cat([split(of_c), split(of_x)], dim=2) for of_c, of_x in zip(cs, xs, strict=True))
        out = merge(F.scaled_dot_product_attention(q, k, v))
        x = x + self.to_out(out[:, n:])
        x = x + self.ff(x)
        if self.to_add_out is None or self.ff_c is None:
            return x, None
        c = c + self.to_add_out(out[:, :n])
        return x, c + self.ff_c(c)


def one_joint(m: Any, x: Tensor, c: Tensor) -> Formula:
    return Formula(together(x, c), [joint(m)])


ONE_BLOCK = "attention, attention stream=0, attention stream=1, normed, block, block stream=0, block stream=1, update"
TWO_BLOCKS = "attention 1, attention 1 stream=0, attention 1 stream=1, block 1, block 1 stream=0, block 1 stream=1, update 1"

QUESTIONS: list[Question] = [
    *asks("blocks in reversed order", lambda: seeded(Ordered((3, 2, 1, 0))), one, ordered, EVERY, "block 4 refused"),
    *asks("blocks in odd order", lambda: seeded(Ordered((2, 0, 1, 3))), one, ordered, EVERY),
    *asks("a block left out", lambda: seeded(Ordered((0, 2, 3))), one, ordered, "attention, heads, normed, block, update"),
    *asks("a block left out", lambda: seeded(Ordered((0, 2, 3))), one, nothing, SKIPPED),
    *asks(
        "the last block left out",
        lambda: seeded(Ordered((0, 1, 2))),
        one,
        ordered,
        "attention, block 1, block 2, update 2, 0>2",
    ),
    *asks("the last block left out", lambda: seeded(Ordered((0, 1, 2))), one, nothing, "block 3 refused, attention 3 refused"),
    *asks(
        "timm's parallel things",
        lambda: seeded(ParallelThings(3)),
        one,
        parallel_things,
        "attention, attention 1, attention 2, attention 1 call=1, heads 2, normed 1, block, block 1, block 2, update 2",
        "0>1, 1>2, 0>final, model, block 3 refused, attention 3 refused",
    ),
    *asks(
        "timm's parallel things in a row",
        lambda: seeded(nn.Sequential(Things(), Things())),
        one,
        things_in_a_row,
        "attention, attention 1, block, block 1, 0>1, block 2 refused",
    ),
    *asks("one block of two streams", lambda: seeded(Joint()), streams, one_joint, ONE_BLOCK, parts=PARTS),
    *asks(
        "one block of two streams, the context first",
        lambda: seeded(ContextFirst()),
        streams,
        one_joint,
        ONE_BLOCK,
        parts=PARTS,
    ),
    *asks(
        "two streams, the context first",
        lambda: seeded(TwoStreams(ContextFirst, False)),
        streams,
        two_streams,
        ONE_BLOCK,
        TWO_BLOCKS,
        "0>1",
        parts=PARTS,
    ),
    *asks(
        "two streams, the context first, the last drops one",
        lambda: seeded(TwoStreams(ContextFirst, True)),
        streams,
        two_streams,
        "attention stream=0, attention stream=1, block, block stream=1, model, 0>final",
        parts=PARTS,
    ),
]
