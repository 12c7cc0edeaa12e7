"""The mean gain beside the constants while a model trains."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.training.paths import LayerJacobians

PROBES = 256


def bert() -> BertModel:
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    return BertModel(BertConfig(num_hidden_layers=2, max_position_embeddings=16, vocab_size=30, **heads)).train()


def of_rows(model: BertModel, rows: list[dict[str, Any]], layer: int) -> float:
    """The root mean square of the exact gains of single rows."""
    alone = hs.load(model)
    gains = [alone.measure(layer=layer, gain=True, **row).gain for row in rows]
    assert all(gain is not None and gain.effective_rank is not None for gain in gains)  # decomposed
    return (sum(gain.value**2 for gain in gains if gain is not None) / len(rows)) ** 0.5


def test_the_gain_of_every_layer_is_logged():
    model, ids = bert(), torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(0))
    tracker = hs.Tracker(model, {"input_ids": ids}, check_every=0, gain=PROBES)
    values = tracker.update()
    for layer in (0, 1):
        exact = of_rows(model, [{"ids": row.tolist()} for row in ids], layer)
        found = values[tracker.key(layer, "gain")]
        assert found == pytest.approx(exact, rel=0.1)
        assert found < values[tracker.key(layer)]


def test_padding_has_no_part():
    model, ids = bert(), torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    tracker = hs.Tracker(model, {"input_ids": ids, "attention_mask": mask}, check_every=0, gain=PROBES)
    values = tracker.update()
    exact = of_rows(model, [{"ids": ids[0].tolist()}, {"ids": ids[1, :5].tolist()}], 1)
    assert values[tracker.key(1, "gain")] == pytest.approx(exact, rel=0.1)


class Counts:
    """Block products with `J` and `Jᵀ` of an update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.forward = self.back = 0
        jvp, back = LayerJacobians.jvp, LayerJacobians._back

        def forward(own: LayerJacobians, v: torch.Tensor) -> torch.Tensor:
            self.forward += 1
            return jvp(own, v)

        def transposed(own: LayerJacobians, *us: Any, **how: Any) -> Any:
            self.back += 1
            return back(own, *us, **how)

        monkeypatch.setattr(LayerJacobians, "jvp", forward)
        monkeypatch.setattr(LayerJacobians, "_back", transposed)


@pytest.mark.parametrize(("probes", "more"), [(0, 0), (4, 1), (5, 2)])
def test_four_probes_cost_one_block_product(probes: int, more: int, monkeypatch: pytest.MonkeyPatch):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    tracker = hs.Tracker(model, torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)), check_every=0, gain=probes)
    first = tracker.update()
    counts = Counts(monkeypatch)
    again = tracker.update()
    assert counts.forward == counts.back + more
    assert (tracker.key(0, "gain") in again) == (probes > 0)
    if probes:
        assert again[tracker.key(0, "gain")] == pytest.approx(first[tracker.key(0, "gain")])  # the probes are the same


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "4"])
def test_what_is_no_number_of_probes_is_refused(wrong: Any):
    with pytest.raises(BadInputError, match="expected gain as a whole number of probes, 0 for none, got"):
        hs.Tracker(bert(), {"input_ids": torch.tensor([[3, 4]])}, gain=wrong)
