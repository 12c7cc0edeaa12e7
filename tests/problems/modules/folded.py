"""Single heads, of torch's own attention and of attention whose heads are folded into the batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems.modules.base import (  # fmt: skip
    D,
    Formula,
    H,
    N,
    Point,
    Pre,
    Question,
    asks,
    attend,
    merge,
    one,
    pre,
    seeded,
    split,
    tokens,
)
from problems.modules.refused import nothing
from problems.modules.softmax import HeadsInAList, heads_in_a_list
from problems.modules.torch_modules import Called, called

Formulas = Callable[..., Formula]


def one_by_one(formula: Formulas, projection: Callable[[Any], Any], count: int = H) -> Formulas:
    """The same formula, and its single heads: what the layer is without the other heads' columns of the projection."""

    def more(m: Any, x: Tensor) -> Formula:
        found = formula(m, x)
        (step,) = found.steps
        assert step.heads is not None
        heads, columns = step.heads, projection(m).weight.unflatten(1, (count, -1))

        def of(h: int, projected: bool) -> Callable[[Tensor], Point]:
            def run(t: Tensor) -> Tensor:
                alone = heads(t).unflatten(-1, (count, -1))[..., h, :]
                return alone @ columns[:, h].mT if projected else alone

            return lambda t: (run, step.norm(t))

        maps = {f"attention head={h}": of(h, True) for h in range(count)}
        maps |= {f"heads head={h}": of(h, False) for h in range(count)}
        return replace(found, steps=[replace(step, maps=step.maps | maps)])

    return more


SINGLE = "attention head=0, attention head=1, heads head=0, heads head=1"
OR_REFUSED = ", ".join(f"{spec} or refused" for spec in SINGLE.split(", "))  # attention that no kernel computes


def single(
    name: str, build: Callable[[], nn.Module], formula: Formulas, *specs: str, out: str = "att.o", inputs: Any = one
) -> list[Question]:
    """Questions about a layer's single heads, and then others about it; `out` is the path of the projection behind them."""

    def projection(m: Any) -> Any:
        return m.get_submodule(out)

    return asks(name, build, inputs, one_by_one(formula, projection), SINGLE, *specs, hidden=SINGLE)


def weights_too(m: Any, x: Tensor) -> Tensor:
    h = m.ln(x)
    return m.mha(h, h, h)[0]


def weights_of_every_head(m: Any, x: Tensor) -> Tensor:
    h = m.ln(x)
    return m.mha(h, h, h, average_attn_weights=False)[0]


def no_weights(m: Any, x: Tensor) -> Tensor:
    h = m.ln(x)
    return m.mha(h, h, h, need_weights=False)[0]


WAYS = {"weights returned": weights_too, "weights head by head": weights_of_every_head, "no weights returned": no_weights}


class Folded(nn.Module):
    """Heads beside one another in the batch, as SAM, fairseq, OPT and the Set Transformer have them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.o, self.way = nn.Linear(D, 3 * D), nn.Linear(D, D), way
        if way == "a bias made of the queries":
            self.rel = nn.Parameter(torch.zeros(N, N, D // H))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        if self.way == "cat over the batch":
            q, k, v = (torch.cat(t.split(D // H, -1), 0) for t in self.qkv(x).chunk(3, -1))
            out = torch.softmax(q @ k.transpose(1, 2) / (D // H) ** 0.5, 2) @ v
            return self.o(torch.cat(out.split(b, 0), 2))
        qkv = self.qkv(x).reshape(b, n, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * H, n, -1).unbind(0)
        if self.way == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v)
        elif self.way == "baddbmm":
            out = torch.bmm(torch.baddbmm(x.new_zeros(b * H, n, n), q, k.transpose(1, 2), alpha=0.5).softmax(-1), v)
        else:
            scores = torch.bmm(q * 0.5, k.transpose(1, 2))
            if self.way == "a bias made of the queries":
                scores = scores + torch.einsum("bic,ijc->bij", q, self.rel)
            out = torch.bmm(torch.softmax(scores, -1), v)
        return self.o(out.view(b, H, n, -1).permute(0, 2, 1, 3).reshape(b, n, -1))


def folded(m: Any, x: Tensor) -> Tensor:
    """The heads' outputs, side by side."""
    q, k, v = (split(t) for t in m.qkv(x).chunk(3, -1))
    bias = (q[..., :, None, :] * m.rel).sum(-1) if hasattr(m, "rel") else 0.0
    return merge(attend(q, k, v, bias))


class Unbatched(nn.Module):
    """Tokens without a batch, heads on the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[0]).view(N, 3, H, -1).permute(1, 2, 0, 3)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))[None]


def in_a_block(m: Any, x: Tensor) -> Formula:
    return Formula(x, [pre(m, folded)])


class Differential(nn.Module):
    """Two heads, each the difference of two softmaxes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (t.view(1, N, 2 * H, -1).transpose(1, 2) for t in (self.q(x), self.k(x)))
        weights = (q @ k.mT / 2**0.5).softmax(-1).view(1, H, 2, N, N)
        return self.o(merge((weights[:, :, 0] - self.gate * weights[:, :, 1]) @ split(self.v(x))))


ALL = "attention, heads, normed, block, update"

QUESTIONS: list[Question] = [
    *(
        question
        for name, way in WAYS.items()
        for question in single(
            f"nn.MultiheadAttention, {name}",
            lambda way=way: seeded(Called(way)),
            called(norm=True),
            ALL,
            out="mha.out_proj",
        )
    ),
    *single(
        "nn.MultiheadAttention, weights returned, tokens first",
        lambda: seeded(Called(weights_too, batch_first=False)),
        called(norm=True),
        ALL,
        out="mha.out_proj",
        inputs=lambda: (tokens().transpose(0, 1),),
    ),
    *(
        question
        for way in ("sdpa", "bmm", "baddbmm", "cat over the batch")
        for question in single(
            f"heads in the batch, {way}",
            lambda way=way: seeded(Pre(Folded(way))),
            in_a_block,
            ALL + ", attention head=2 refused",
        )
    ),
    *asks(
        "heads in the batch, a bias made of the queries",
        lambda: seeded(Pre(Folded("a bias made of the queries"))),
        one,
        one_by_one(in_a_block, lambda m: m.att.o),
        OR_REFUSED,
        ALL + ", attention head=2 refused",
        hidden=OR_REFUSED,
    ),
    *single("heads on the first axis", lambda: seeded(Pre(Unbatched())), in_a_block, ALL),
    *asks(
        "a head for each module",
        lambda: seeded(HeadsInAList(False)),
        one,
        one_by_one(heads_in_a_list, lambda m: m.proj),
        "attention head=0 or refused, attention head=1 or refused, attention head=2 refused",
        hidden="attention head=0 or refused, attention head=1 or refused",
    ),
    *asks(
        "differential heads",
        lambda: seeded(Pre(Differential())),
        one,
        nothing,
        "attention head=4 refused, heads head=7 refused",
    ),
]
