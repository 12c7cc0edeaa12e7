"""A model that has changed in what its recording keeps as it was is recorded again, and never taken for the old one."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import howsmooth as hs


def gpt() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=12, bos_token_id=0, eos_token_id=0)
    return GPT2Model(config)


class Moving(nn.Module):
    """A model whose positions are others after a while, as no sensible one's are."""

    def __init__(self):
        super().__init__()
        self.inner, self.packed = gpt(), False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.tensor([[0, 1, 0, 1]]) if self.packed else torch.arange(4)[None]
        return self.inner(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state


@pytest.mark.slow
def test_positions_that_have_moved_are_not_taken_for_the_old_ones():
    probe = {"input_ids": torch.tensor([[1, 5, 2, 7]])}
    moved, still = Moving(), Moving()
    tracker = hs.Tracker(moved, probe, check_every=0)
    before = tracker.update()
    moved.packed = still.packed = True
    after, fresh = [tracker.update() for _ in range(6)][-1], hs.Tracker(still, probe, check_every=0)
    wanted = [fresh.update() for _ in range(7)][-1]
    for name in ("smoothness/layer_00", "smoothness/layer_01", "smoothness/entropy/layer_00"):
        assert after[name] == pytest.approx(wanted[name], rel=1e-2)
    assert before["smoothness/entropy/layer_00"] != pytest.approx(wanted["smoothness/entropy/layer_00"], rel=1e-2)


class Scaled(nn.Module):
    """A block whose temperature is a number, which a schedule changes while it trains."""

    def __init__(self):
        super().__init__()
        self.attention, self.temperature = nn.MultiheadAttention(8, 2, batch_first=True), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x / self.temperature, x, x, need_weights=False)[0]


@pytest.mark.slow
def test_a_temperature_that_has_changed_counts():
    torch.manual_seed(0)
    model: Any = nn.Sequential(Scaled())
    x = 3 * torch.randn(2, 5, 8)
    tracker, penalty = hs.Tracker(model, x, check_every=0), hs.SmoothnessPenalty(model, target=1e-3, rows=1)
    before = [(tracker.update()["smoothness/layer_00"], penalty(x), penalty.values[0])[::2] for _ in range(20)][-1]
    model[0].temperature = 0.1
    after = [(tracker.update()["smoothness/layer_00"], penalty(x), penalty.values[0])[::2] for _ in range(20)][-1]
    fresh, other = hs.Tracker(model, x, check_every=0), hs.SmoothnessPenalty(model, target=1e-3, rows=1)
    wanted = [(fresh.update()["smoothness/layer_00"], other(x), other.values[0])[::2] for _ in range(20)][-1]
    assert after == pytest.approx(wanted, rel=1e-2)
    assert before[0] != pytest.approx(wanted[0], rel=0.05)
