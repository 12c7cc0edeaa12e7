"""Where a model keeps its blocks, and how it calls them."""

from typing import Any

from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    Own,
    Pre,
    Question,
    Stack,
    Step,
    asks,
    fused,
    one,
    pre,
    seeded,
)
from problems.modules.models import SPANS, block


class Called(nn.Module):
    """Blocks, or attention inside them, called by `.forward`."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.blocks, self.inner = nn.ModuleList([block(), block()]), inner

    def forward(self, x: Tensor) -> Tensor:
        for b in self.blocks:
            if self.inner:
                x = x + b.att.forward(b.ln1(x))  # pyright: ignore
                x = x + b.mlp(b.ln2(x))  # pyright: ignore
            else:
                x = b.forward(x)
        return x


class ForwardInside(Pre):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att.forward(self.ln1(x))
        return x + self.mlp.forward(self.ln2.forward(x))


class Attributes(nn.Module):
    """No list: the blocks are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block1, self.block2, self.head = nn.Linear(D, D), block(), block(), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block2(self.block1(self.embed(x))).mean(1))


class InADictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"first": block(), "second": block()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Stages(nn.Module):
    """A list of stages of two blocks each, a linear layer between the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([block(), block()]) for _ in range(2)])
        self.between = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            x = self.between(x) if i else x
            for b in stage:  # pyright: ignore[reportGeneralTypeIssues]
                x = b(x)
        return x


class Two(nn.Module):
    """One element of a list that holds two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Listed(nn.Module):
    """Hidden states in a list, and a dictionary returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pooler = nn.ModuleList([block(), block()]), nn.Linear(D, D)

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = [x]
        for layer in self.layer:
            states.append(layer(states[-1]))
        return {"pooler": self.pooler(states[-1][:, 0]).tanh(), "last_hidden_state": states[-1], "states": states}


def stack_formula(blocks: Any, enter: Any = None) -> Any:
    return lambda m, x: Formula(x if enter is None else enter(m, x), [pre(b) for b in blocks(m)])


def through_stages(m: Any, x: Tensor) -> Formula:
    return Formula(x, [pre(b) for b in m.stages[0]])


def later_stage(m: Any, x: Tensor) -> Formula:
    return Formula(m.between(through_stages(m, x).chain(0, 1)(x)), [Step(), Step(), *(pre(b) for b in m.stages[1])])


QUESTIONS: list[Question] = [
    *asks(
        "block.forward",
        lambda: seeded(Called(False)),
        one,
        stack_formula(lambda m: m.blocks),
        "attention, block, block 1",
        SPANS,
    ),
    *asks(
        "a list's parts called one by one",
        lambda: seeded(Called(True)),
        one,
        stack_formula(lambda m: m.blocks),
        "attention 1, heads, block 1",
    ),
    *asks(
        "att.forward",
        lambda: seeded(Stack(ForwardInside(Own(fused)), ForwardInside(Own(fused)), norm=False)),
        one,
        stack_formula(lambda m: m.blocks),
        "attention, heads, block 1",
    ),
    *asks(
        "blocks as attributes",
        lambda: seeded(Attributes()),
        one,
        stack_formula(lambda m: [m.block1, m.block2], lambda m, x: m.embed(x)),
        "attention 1, block 1, 0>1",
    ),
    *asks(
        "blocks in a dictionary",
        lambda: seeded(InADictionary()),
        one,
        stack_formula(lambda m: m.layers.values()),
        "attention 1, block 1, model",
    ),
    *asks("stages", lambda: seeded(Stages()), one, through_stages, "attention 1, block 1, 0>1"),
    *asks("stages, behind the first", lambda: seeded(Stages()), one, later_stage, "attention 2, normed 2, block 3"),
    *asks(
        "two blocks in one element",
        lambda: seeded(Stack(Two(), norm=False)),
        one,
        stack_formula(lambda m: [m.blocks[0].first, m.blocks[0].second]),
        "block, block 1, attention 1",
    ),
    *asks(
        "a dictionary returned", lambda: seeded(Listed()), one, stack_formula(lambda m: m.layer), "attention 1, block 1, model"
    ),
]
