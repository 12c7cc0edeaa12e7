"""Long inputs: the recorded run is the model's own function there too, and a mask that is misread is noticed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

import howsmooth as hs
from howsmooth.models import FallbackWarning, Model
from howsmooth.program import masks
from problems.zoo import GROUPED, PLAIN, TOKENS, ids, randomize

N, WINDOW = 400, 300
OPTIONS: dict[str, Any] = {**GROUPED, **TOKENS, "max_position_embeddings": N, "attn_implementation": "eager"}


def gemma() -> Model:
    config = t.Gemma2Config(sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=6, **OPTIONS)
    return hs.load(randomize(t.Gemma2Model(config)))


def llama() -> Model:
    return hs.load(randomize(t.LlamaModel(t.LlamaConfig(**OPTIONS))))


@pytest.mark.parametrize("build", [gemma, llama])
def test_all_maps_are_on_the_kernels(build):
    capture = build().capture(ids=ids(n=N))
    for map in ("attention", "heads", "normed", "block", "update", "model"):
        assert capture.map(0, map).on_kernels, map


WRITTEN = {
    "bloom": lambda: t.BloomModel(t.BloomConfig(hidden_size=24, n_layer=2, n_head=3, vocab_size=40, **TOKENS)),
    "mpnet": lambda: t.MPNetModel(t.MPNetConfig(**{**PLAIN, "max_position_embeddings": N + 2})),
    "gptj": lambda: t.GPTJModel(
        t.GPTJConfig(n_embd=24, n_layer=2, n_head=2, n_inner=24, vocab_size=40, n_positions=N, rotary_dim=6, **TOKENS)
    ),
    "mpt": lambda: t.MptModel(t.MptConfig(d_model=24, n_heads=3, n_layers=2, vocab_size=40, max_seq_len=N)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_attention_that_is_written_out(name, monkeypatch):
    capture = hs.load(randomize(WRITTEN[name]())).capture(ids=ids(n=N))
    assert capture.map(0).on_kernels
    assert capture.map(0, "block").on_kernels
    real = masks.of_tensor

    def late(term, dtype):  # a mask that is misread at the long input
        mask = real(term, dtype)
        return mask if term.shape[3] < N else replace(mask, causal=False, bias=None, window=None)

    if name != "mpnet":
        monkeypatch.setattr(masks, "of_tensor", late)
        with pytest.warns(FallbackWarning):
            hs.load(randomize(WRITTEN[name]())).capture(ids=ids(n=N)).map(0)


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_attention(causal):
    torch.manual_seed(0)
    model, x = hs.load(nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()), torch.randn(1, N, 16)
    mask = {"src_mask": nn.Transformer.generate_square_subsequent_mask(N), "is_causal": True} if causal else {}
    captured = model.capture(inputs={"src": x, **mask})
    assert captured.map(0).on_kernels


@pytest.mark.slow
def test_a_model_that_changes_is_recorded_again():
    """What is shown is the model of the moment, also where that is no weight."""
    model = llama()
    before = model.measure(ids=ids(n=9), layer=0).value
    model.module.layers[0].self_attn.scaling *= 3.0  # pyright: ignore
    fresh = llama()
    fresh.module.layers[0].self_attn.scaling *= 3.0  # pyright: ignore
    after = model.measure(ids=ids(n=9), layer=0).value
    assert after == pytest.approx(fresh.measure(ids=ids(n=9), layer=0).value, rel=1e-9)
    assert abs(after / before - 1) > 1e-3
