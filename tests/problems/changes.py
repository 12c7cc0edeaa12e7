"""Two blocks, and what people do to a model between two looks at it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from problems.modules.base import D, Own, Pre, Stack, fused, seeded

Change = Callable[[Any], object]


def blocks(*kinds: nn.Module, seed: int = 0) -> Any:
    return seeded(Stack(*(kinds or (Pre(Own(fused)), Pre(Own(fused)))), norm=False), seed)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Parameter(drawn(2, D)), nn.Parameter(drawn(D, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def replaced(net: Any) -> None:
    net.blocks[0].att = blocks(Pre(Own(fused)), seed=5).blocks[0].att


def adapted(net: Any) -> None:
    net.blocks[0].att.v = Adapter(net.blocks[0].att.v)


def merged(net: Any) -> None:
    adapter = net.blocks[0].att.v
    adapter.base.weight.data.add_(adapter.b @ adapter.a)
    net.blocks[0].att.v = adapter.base


def unbiased(net: Any) -> None:
    net.blocks[0].att.v.bias = None


def tied(net: Any) -> None:
    net.blocks[0].att.k.weight = net.blocks[0].att.q.weight


def scaled(net: Any) -> None:
    with torch.no_grad():
        net.blocks[0].att.v.weight.mul_(3)


def scaled_data(net: Any) -> None:
    net.blocks[0].att.v.weight.data.mul_(3)


def normed(net: Any) -> None:
    weight_norm(net.blocks[0].att.v)


CHANGES: dict[str, tuple[Change, Change]] = {
    "attention replaced": (lambda net: None, replaced),
    "an adapter added": (lambda net: None, adapted),
    "an adapter merged": (adapted, merged),
    "a bias removed": (lambda net: None, unbiased),
    "weights tied": (lambda net: None, tied),
    "weights scaled": (lambda net: None, scaled),
    "data scaled": (lambda net: None, scaled_data),
    "a weight norm": (lambda net: None, normed),
    "the last block dropped": (lambda net: None, lambda net: net.blocks.__delitem__(1)),
}
