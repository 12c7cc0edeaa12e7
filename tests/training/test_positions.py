"""Positions that are asked about again are remembered, and never taken for others."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, masking_utils

import howsmooth as hs
from howsmooth.training.positions import Positions


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the library's own function was asked."""
    find, calls = masking_utils.find_packed_sequence_indices, []

    def counted(positions: torch.Tensor) -> torch.Tensor | None:
        calls.append(positions)
        return find(positions)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", counted)
    return calls


def test_only_what_is_new_is_asked(asked: list[torch.Tensor]):
    plain, packed, positions = torch.arange(4)[None], torch.tensor([[0, 1, 0, 1]]), Positions()
    for given, count, held in ((plain, 1, True), (plain, 1, True), (packed, 1, False), (packed, 2, True), (packed, 2, True)):
        with positions.remembered():
            answer = masking_utils.find_packed_sequence_indices(given)
        assert (len(asked), positions.held()) == (count, held)
        if held:
            assert (answer is None) == (given is plain)
    with positions.remembered():  # of another shape
        assert masking_utils.find_packed_sequence_indices(packed[:, :3]) is not None
    assert (len(asked), positions.held()) == (3, True)


def test_other_threads_are_answered_for_themselves():
    plain, packed, positions = torch.arange(4)[None], torch.tensor([[0, 1, 0, 1]]), Positions()
    with positions.remembered():
        masking_utils.find_packed_sequence_indices(plain)
    with positions.remembered(), ThreadPoolExecutor(1) as other:
        assert other.submit(masking_utils.find_packed_sequence_indices, packed).result() is not None
        assert masking_utils.find_packed_sequence_indices(plain) is None
    assert positions.held()


def gpt() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=12, bos_token_id=0, eos_token_id=0)
    return GPT2Model(config)


def test_a_tracker_asks_once(asked: list[torch.Tensor]):
    tracker = hs.Tracker(gpt(), {"input_ids": torch.tensor([[1, 5, 2, 7]])}, check_every=0)
    tracker.update()
    count = len(asked)
    assert count > 0
    for _ in range(3):
        tracker.update()
    assert len(asked) == count


class Moving(nn.Module):
    """A model whose positions are others after a while, as no sensible one's are."""

    def __init__(self):
        super().__init__()
        self.inner, self.packed = gpt(), False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.tensor([[0, 1, 0, 1]]) if self.packed else torch.arange(4)[None]
        return self.inner(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state


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
