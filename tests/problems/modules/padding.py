"""Windows of packed documents, and padding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    N,
    Own,
    Pre,
    Question,
    Step,
    asks,
    attend,
    fused,
    merge,
    plain,
    seeded,
    tokens,
)
from problems.modules.softmax import qkv


class Documents(nn.Module):
    """Documents that end at id 0, packed into one window: tokens of one do not attend to those of another."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.att = nn.Embedding(16, D), Own(fused)

    def forward(self, input_ids: Tensor) -> Tensor:
        ends = (input_ids == 0).cumsum(-1)
        mask = (ends[:, :, None] == ends[:, None])[:, None]
        x = self.e(input_ids)
        return self.att.o(merge(F.scaled_dot_product_attention(*qkv(self.att, x), attn_mask=mask)))


def documents(m: Any, ids: Tensor) -> Formula:
    ends = [sum(1 for token in ids[0, : i + 1].tolist() if token == 0) for i in range(ids.shape[1])]
    bias = torch.tensor([[0.0 if a == b else -torch.inf for b in ends] for a in ends], dtype=torch.float64)

    def heads(t: Tensor) -> Tensor:
        return merge(attend(*qkv(m.att, t), bias=bias))

    return Formula(m.e.weight[ids[0]][None], [Step(attention=lambda t: m.att.o(heads(t)), heads=heads)])


class Padded(nn.Module):
    """Ids or embeddings, and a mask of 0 where a token is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.layers = nn.Embedding(16, D), nn.ModuleList([Pre(Own(fused))])

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        x: Tensor = self.e(input_ids) if inputs_embeds is None else inputs_embeds
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        b: Any = self.layers[0]
        x = x + b.att.o(merge(F.scaled_dot_product_attention(*qkv(b.att, b.ln1(x)), attn_mask=mask)))
        return x + b.mlp(b.ln2(x))


def padded(m: Any, attention_mask: Tensor, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Formula:
    """All tokens are moved, or only those that are no padding."""
    x: Any = m.e(input_ids) if inputs_embeds is None else inputs_embeds
    b, real = m.layers[0], int(attention_mask.sum())
    bias = torch.zeros(N + 1, dtype=torch.float64).masked_fill(attention_mask[0] == 0, -torch.inf)

    def attention(t: Tensor) -> Tensor:
        return b.att.o(merge(attend(*qkv(b.att, t), bias=bias)))

    start = b.ln1(x)
    maps: Any = {
        "attention": lambda t: (attention, start),
        "attention real": lambda t: (lambda h: b.att.o(plain(b.att, h)), start[:, :real]),
    }
    return Formula(x, [Step(maps=maps)])


MASK = torch.tensor([[1, 1, 1, 1, 0, 0]])


WINDOWS = [[1, 2, 3, 4, 5, 6], [1, 0, 3, 0, 5, 6], [0, 2, 0, 4, 0, 6]]


QUESTIONS: list[Question] = [
    *(
        question
        for i, window in enumerate(WINDOWS)
        for question in asks(
            f"packed documents {i}",
            lambda: seeded(Documents()),
            lambda window=window: (torch.tensor([window]),),
            documents,
            "attention, heads",
        )
    ),
    *asks(
        "padding, embeddings",
        lambda: seeded(Padded()),
        lambda: {"inputs_embeds": tokens(6), "attention_mask": MASK},
        padded,
        "attention or real",
        hidden="attention or real",
    ),
    *asks(
        "padding, ids",
        lambda: seeded(Padded()),
        lambda: {"input_ids": torch.tensor([[3, 1, 4, 9, 5, 2]]), "attention_mask": MASK},
        padded,
        "attention or real",
        hidden="attention or real",
    ),
]
