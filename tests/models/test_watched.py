"""Maps of models over a neighbourhood: recognised by watching, bounded from both sides, refused in a sentence."""

import pytest
import torch

import howsmooth as hs
from howsmooth.errors import HowSmoothError
from marks import first
from problems.zoo import ZOO


def _model(name: str) -> hs.Model:
    torch.manual_seed(0)
    return hs.load(ZOO[name].build().eval())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_block_near_its_input(name: str):
    model = _model(name)
    at = model.measure(ids=[3, 5, 7, 9], layer=1, map="block")
    near = model.measure(ids=[3, 5, 7, 9], layer=1, map="block", within=1e-6, steps=2)
    assert near.within == 1e-6
    assert near.per == "token"
    assert near.estimate.point is not None
    assert near.lower >= at.lower * (1 - 1e-6)
    assert near.lower <= near.upper <= 1.05 * at.upper
    assert "within 1e-06 per token" in str(near)


@pytest.mark.slow
@pytest.mark.parametrize("name", first(["gpt2", "gpt-neox"]))
def test_a_whole_model_near_its_input(name: str):
    model = _model(name)
    near = model.measure(ids=[3, 5, 7], layer=0, map="model", within=1e-6, steps=1, per="sequence")
    at = model.measure(ids=[3, 5, 7], layer=0, map="model")
    assert at.lower * (1 - 1e-6) <= near.lower <= near.upper <= 1.1 * at.upper


@pytest.mark.slow
def test_next_token_of_a_model_with_its_head(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=30, bos_token_id=1, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = hs.load(tmp_path, device="cpu", head=True)
    radius = hs.certified_radius(model, ids=[3, 5, 7])
    assert 0 < radius.certified <= radius.attacked
    with pytest.raises(HowSmoothError, match="hidden states"):
        hs.certified_radius(hs.load(tmp_path, device="cpu"), ids=[3, 5, 7])
    alone = hs.certified_radius(model, ids=[3, 5, 7], change=0.1, map="attention")
    assert 0 < alone.certified <= alone.attacked


def test_what_is_not_made_of_known_pieces_is_refused():
    with pytest.raises(HowSmoothError, match="reads a number off"):
        _model("mixtral").measure(ids=[3, 5, 7], layer=0, map="block", within=1e-3)
    model = _model("bert")
    with pytest.raises(HowSmoothError, match="within=r beside per"):
        model.measure(ids=[3, 5], layer=0, per="sequence")
    with pytest.raises(HowSmoothError, match="none of heads, closed, gain, k beside within"):
        model.measure(ids=[3, 5], layer=0, within=0.1, heads=True)
    for bad in (-1.0, float("nan"), float("inf"), "far"):
        with pytest.raises(HowSmoothError, match="a finite distance"):
            model.measure(ids=[3, 5], layer=0, map="block", within=bad)  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(HowSmoothError, match="without padding"):
        model.measure(ids=[3, 5, 0], mask=[True, True, False], layer=0, map="block", within=0.1)
