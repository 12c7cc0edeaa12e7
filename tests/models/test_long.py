"""Long inputs: compared with the model's own code at some queries and on a short part, and losing something is noticed."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

import howsmooth as hs
from howsmooth.kernels import Mask
from howsmooth.models import FallbackWarning, Model, cut, intercept, sample
from howsmooth.models.rows import sample_rows
from howsmooth.program import masks
from problems.zoo import GROUPED, PLAIN, TOKENS, ids, randomize

N, WINDOW = 400, 300  # a window longer than the part that is seen whole
OPTIONS: dict[str, Any] = {**GROUPED, **TOKENS, "max_position_embeddings": N, "attn_implementation": "eager"}


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_MOST_LOGITS", 2**18)


def gemma() -> Model:
    config = t.Gemma2Config(sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=6, **OPTIONS)
    return hs.load(randomize(t.Gemma2Model(config)))


def llama() -> Model:
    return hs.load(randomize(t.LlamaModel(t.LlamaConfig(**OPTIONS))))


def own(model: Model, map: Any = "attention", layer: int = 0, mask: list[bool] | None = None) -> bool:
    """Whether a layer is found to be the model's own, at a long input."""
    capture = model.capture(ids=ids(n=N), mask=mask)
    assert capture.sample._long
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return capture.map(layer, map).kernels


@pytest.mark.parametrize("build", [gemma, llama])
@pytest.mark.parametrize("map", ["attention", "heads", "normed", "block", "model"])
def test_a_right_layer_is_found_right(build, map):
    model = build()
    capture = model.capture(ids=ids(n=N))
    assert capture.map(0, map).kernels
    assert "_plain" not in vars(capture.sample)  # the model's own code never saw all logits


WRITTEN = {
    "bloom": lambda: t.BloomModel(t.BloomConfig(hidden_size=24, n_layer=2, n_head=3, vocab_size=40, **TOKENS)),
    "mpnet": lambda: t.MPNetModel(t.MPNetConfig(**{**PLAIN, "max_position_embeddings": N + 2})),
    "gptj": lambda: t.GPTJModel(
        t.GPTJConfig(n_embd=24, n_layer=2, n_head=2, n_inner=24, vocab_size=40, n_positions=N, rotary_dim=6, **TOKENS)
    ),
    "mpt": lambda: t.MptModel(t.MptConfig(d_model=24, n_heads=3, n_layers=2, vocab_size=40, max_seq_len=N)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_that_is_written_out_is_compared_in_rows(name, monkeypatch):
    model = hs.load(randomize(WRITTEN[name]()))
    capture = model.capture(ids=ids(n=N))
    assert capture.sample._long
    assert capture.map(0, "block").kernels
    assert capture.map(0).kernels
    assert "_plain" not in vars(capture.sample)
    real = masks.of_tensor

    def late(term, dtype):  # a mask that is lost at the long input alone
        mask = real(term, dtype)
        return mask if term.shape[3] < N else replace(mask, causal=False, bias=None, window=None)

    if name != "mpnet":
        monkeypatch.setattr(masks, "of_tensor", late)
        assert not own(model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_seen(side, monkeypatch):
    mask = [True] * N
    mask[slice(0, 300) if side == "left" else slice(350, N)] = [False] * (300 if side == "left" else 50)
    assert own(gemma(), mask=mask)
    read = masks.of_rule
    monkeypatch.setattr(masks, "of_rule", lambda *a: Mask(read(*a).causal, read(*a).window))
    assert own(gemma(), mask=mask) == (side == "right")  # behind a causal mask, padding on the right is hidden anyway


LOSSES = {
    "window": lambda call: replace(call, scores=replace(call.scores, mask=Mask(causal=True))),
    "a window that is one too long": lambda call: replace(
        call, scores=replace(call.scores, mask=Mask(causal=True, window=WINDOW + 1))
    ),
    "causal mask": lambda call: replace(call, scores=replace(call.scores, mask=Mask())),
    "soft-cap": lambda call: replace(call, scores=replace(call.scores, softcap=None)),
    "scale": lambda call: replace(call, scores=replace(call.scores, scale=1.001 * call.scores.scale)),
    "a position": lambda call: replace(call, k=call.k.roll(1, 2), v=call.v.roll(1, 2)),
    "a key": lambda call: replace(call, v=call.v.index_fill(2, torch.tensor([N // 3]), 0.0)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_at_long_inputs_alone_is_noticed(loss, monkeypatch):
    """What is lost past the part that is seen whole shows in the rows."""
    real, lose = cut.attention_and_kernel, LOSSES[loss]

    def changed(q, k, v, scores, precision):
        call = intercept.Call(q, k, v, scores)
        call = lose(call) if q.shape[2] == N else call
        return real(call.q, call.k, call.v, call.scores, precision)

    assert own(gemma())
    monkeypatch.setattr(cut, "attention_and_kernel", changed)
    assert not own(gemma())


@pytest.mark.slow
def test_what_is_not_the_models_own_goes_through_its_code(monkeypatch):
    truth = gemma().measure(ids=ids(n=N), layer=0, tol=1e-4)
    assert truth.cut
    read = masks.of_rule
    monkeypatch.setattr(masks, "of_rule", lambda *a: Mask(read(*a).causal, None, read(*a).keys))
    with pytest.warns(FallbackWarning):
        got = gemma().capture(ids=ids(n=N)).measure(0, tol=1e-4)
    assert not got.cut
    assert got.value == pytest.approx(truth.value, rel=1e-4)
    with pytest.warns(FallbackWarning):  # nor where the solver's value says nothing of it
        got = gemma().capture(ids=ids(n=N)).measure(0, factor=2.0)
    assert not got.cut


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_attention(causal, monkeypatch):
    torch.manual_seed(0)
    model, x = hs.load(nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()), torch.randn(1, N, 16)
    monkeypatch.setattr(sample, "_MOST_LOGITS", 2**10)
    mask = {"src_mask": nn.Transformer.generate_square_subsequent_mask(N), "is_causal": True} if causal else {}
    captured = model.capture(inputs={"src": x, **mask})
    assert captured.map(0).kernels
    assert "_plain" not in vars(captured.sample)
    real = cut.attention_and_kernel
    monkeypatch.setattr(cut, "attention_and_kernel", lambda q, k, v, scores, p: real(q, k, 1.001 * v, scores, p))
    with pytest.warns(FallbackWarning):
        assert not model.capture(inputs={"src": x, **mask}).map(0).kernels


def test_rows_reach_both_ends():
    rows = sample_rows(1000, 20)
    assert len(rows) == 20
    assert {0, 1, 2, 3, 996, 997, 998, 999} <= set(rows.tolist())
    assert sample_rows(3, 20).tolist() == [0, 1, 2]
