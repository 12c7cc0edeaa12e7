"""Following a model that is changed between steps, or that keeps numbers of its own while it trains."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from problems.changes import CHANGES, blocks
from problems.modules.base import D, Own, Pre, Stack, fused, largest, seeded, tokens

pytestmark = pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")

X = tokens()
SAME_BLOCKS = [name for name in CHANGES if name != "the last block dropped"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_BLOCKS)
def test_a_model_that_changed_is_followed(name: str):
    first, then = CHANGES[name]
    net = blocks()
    first(net)
    tracker, penalty = hs.Tracker(net, probe=X), hs.SmoothnessPenalty(net, target=0.5, products=60)
    for change in (lambda net: None, then):
        change(net)
        inputs = [X, net.blocks[0](X).detach()]
        truths = [largest(b.att, b.ln1(x)) for b, x in zip(net.blocks, inputs, strict=True)]
        assert tracker.update()["smoothness/layer_00"] == pytest.approx(truths[0], rel=2e-2)
        assert penalty(X).item() == pytest.approx(sum(t / 0.5 - 1 for t in truths) / 2, rel=2e-2)


class Counting(Own):
    """How often it ran in training, as a plain number, is a factor."""

    def __init__(self) -> None:
        super().__init__(fused)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return super().forward(x) * (1 + 0.1 * self.count)


class Averaging(Own):
    """A running mean in a tensor that is no buffer, which every run moves and training alone uses."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(fused)
        self.__dict__["mean"] = torch.zeros(D, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().forward(x - self.mean if self.training else x)


def weights(kind: Callable[[], Own], tracked: bool) -> Tensor:
    """What four steps of training make of the weights."""
    torch.manual_seed(3)
    net: Any = seeded(Stack(Pre(kind()), Pre(Own(fused)), norm=False)).train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    tracker = hs.Tracker(net, probe=X) if tracked else None
    for _ in range(4):
        optimiser.zero_grad()
        net(torch.randn(2, 5, D, dtype=torch.float64)).square().mean().backward()
        optimiser.step()
        if tracker is not None:
            tracker.update()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [lambda: Own(fused), Counting, Averaging], ids=["none", "a count", "a running mean"])
def test_training_goes_the_same_way_or_is_not_followed(kind: Callable[[], Own]):
    alone = weights(kind, False)
    with contextlib.suppress(hs.HowSmoothError):
        assert torch.equal(weights(kind, True), alone)
