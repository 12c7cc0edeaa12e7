"""Positions that are asked about again are remembered, and never taken for others."""

from typing import Any

import pytest
import torch
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


def test_a_tracker_asks_once(asked: list[torch.Tensor]):
    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=12, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2Model(config)
    tracker = hs.Tracker(model, {"input_ids": torch.tensor([[1, 5, 2, 7]])}, check_every=0)
    tracker.update()
    count = len(asked)
    values = [tracker.update() for _ in range(3)]
    assert len(asked) == count
    assert values[0].keys() == values[-1].keys()
