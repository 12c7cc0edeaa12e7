"""Hostile folders: nothing outside is read, no pickle, no code, no kernel, no network; each refusal is one sentence."""

import contextlib
import json
import os
import pickle
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import howsmooth as hs
from howsmooth.errors import BadInputError
from problems import readers
from problems.hostile_folders import CONFIGURATIONS, INDEX, SINGLE, TRAPS, Mark, Watch, code, edit, pickles, point_to
from problems.zoo import randomize

IDS = [2, 5, 6, 7, 3]


def value(where: Path | str, **options: Any) -> float:
    return hs.load(where, **options).measure(ids=IDS, layer=1).value


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readers.save(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def truth(source: Path) -> float:
    return value(source)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readers.save(tmp_path_factory.mktemp("other") / "model", readers.bert(1))


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Watch]:
    """Fails a test that does what must not be done, or sees the folder `secret`."""
    watch = Watch(monkeypatch)
    yield watch
    watch.end()
    monkeypatch.undo()
    assert watch.reached == []
    assert watch.seen(tmp_path / "secret") == []
    assert not (tmp_path / "mark").exists()


@pytest.fixture
def folder(source: Path, other: Path, tmp_path: Path, watch: Watch) -> Path:
    """A model to be tampered with; beside it another one, with other weights, that must not be seen."""
    shutil.copytree(source, tmp_path / "model")
    shutil.copytree(other, tmp_path / "secret")
    watch.forget()
    return tmp_path / "model"


def test_the_watch_sees_what_it_looks_for(folder: Path, watch: Watch, truth: float):
    secret = folder.parent / "secret"
    assert value(secret) != truth
    assert {"config.json", SINGLE} <= set(watch.seen(secret))
    with pytest.raises(AssertionError):
        torch.load(folder / "x")
    with socket.socket() as line, pytest.raises(AssertionError):
        line.connect(("127.0.0.1", 9))
    edited = t.BertConfig.from_dict(readers.SHAPE | {"attn_implementation": "org/kernel"})
    with pytest.raises(AssertionError):
        t.BertModel(edited)
    assert watch.reached == ["torch.load", "the network", "flash attention"]
    watch.forget()


@pytest.mark.parametrize(
    "name",
    [
        "../secret/model.safetensors",
        "decoy.safetensors/../../secret/model.safetensors",
        "./decoy.safetensors",
        "sub/model.safetensors",
        "..\\secret\\model.safetensors",
        "pytorch_model.bin",
        "model.ckpt",
        "model.safetensors.bin",
        "model.safetensors\0.bin",
        "\0.safetensors",
        "",
        3,
        None,
        ["decoy.safetensors"],
    ],
)
def test_an_index_that_names_anything_but_a_plain_file_is_refused(folder: Path, name: Any):
    point_to(folder, name)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Mark(folder.parent / "mark")))
    with pytest.raises(BadInputError, match=r"^expected plain names of safetensors .*put the files into the folder$"):
        hs.load(folder)


def test_an_absolute_name_is_refused(folder: Path):
    point_to(folder, str(folder.parent / "secret" / SINGLE))
    with pytest.raises(BadInputError, match="expected plain names"):
        hs.load(folder)


def test_a_name_too_long_is_refused(folder: Path):
    point_to(folder, "x" * 5000 + ".safetensors")
    with pytest.raises(BadInputError, match="expected") as caught:
        hs.load(folder)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_a_listed_file_must_be_there_and_be_a_file(folder: Path, kind: str):
    point_to(folder, "other.safetensors")
    if kind == "folder":
        (folder / "other.safetensors").mkdir()
    if kind == "pipe":
        os.mkfifo(folder / "other.safetensors")
    with pytest.raises(BadInputError, match=r"got no 'other\.safetensors'"):
        hs.load(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 10**5, "\xff"])
def test_an_index_that_lists_nothing_is_refused(folder: Path, content: str):
    (folder / SINGLE).unlink()
    (folder / INDEX).write_bytes(content.encode("latin-1"))
    with pytest.raises(BadInputError, match=r"^expected .*save the model again$"):
        hs.load(folder)


def test_an_honest_index_and_links_into_a_cache_are_read(folder: Path, truth: float):
    weights = load_file(folder / SINGLE)
    cache = folder.parent / "cache"
    cache.mkdir()
    names = {key: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, key in enumerate(weights)}
    for name in set(names.values()):
        save_file({key: tensor for key, tensor in weights.items() if names[key] == name}, cache / name, {"format": "pt"})
        (folder / name).symlink_to(cache / name)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert value(folder) == truth


def test_a_hole_before_the_attention_is_noticed_whatever_it_is_called(tmp_path: Path):
    """The library would fill it with random numbers."""
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    randomize(t.ViTModel(t.ViTConfig(**shape, image_size=8, patch_size=4))).save_pretrained(tmp_path)
    weights = load_file(tmp_path / SINGLE)
    hole = next(key for key in weights if "projection" in key)
    save_file({key: tensor for key, tensor in weights.items() if key != hole}, tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(BadInputError, match=r"^expected every weight of ViTModel .*, got none for .*projection"):
        hs.load(tmp_path)


@pytest.mark.parametrize("trap", TRAPS, ids=[trap.__name__ for trap in TRAPS])
def test_what_lies_beside_the_weights_does_not_matter(folder: Path, truth: float, watch: Watch, trap: Callable[[Path], None]):
    trap(folder)
    watch.forget()  # what the trap itself opened
    model = hs.load(folder)
    assert model.measure(ids=IDS, layer=1).value == truth
    assert model.text("the cat").ids == (5, 6)


IMPLEMENTATIONS = ["flash_attention_2", "flash_attention_3", "flex_attention", "org/kernel", "kernels-community/flash-attn2"]
IMPLEMENTATIONS += ["org/kernel@main:f", "paged|sdpa", "no-such", "", 3, ["x"], {"": "org/kernel"}]


@pytest.mark.parametrize("name", IMPLEMENTATIONS, ids=repr)
def test_a_saved_implementation_of_attention_does_not_matter(folder: Path, truth: float, name: Any):
    before = (folder / "config.json").read_text()
    for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        (folder / "config.json").write_text(before)
        edit(folder / "config.json", **{key: name, key.replace("attn", "experts"): name})
        model = hs.load(folder)
        config: Any = model.module.config
        assert config._attn_implementation == "sdpa"
    assert model.measure(ids=IDS, layer=1).value == truth


def test_nor_does_that_of_a_part(tmp_path: Path):
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    pixels = {"image_size": 8, "patch_size": 4}
    config = t.CLIPConfig(text_config=shape | tokens, vision_config=shape | pixels, projection_dim=8)
    randomize(t.CLIPModel(config)).save_pretrained(tmp_path)
    before = value(tmp_path, side="text")
    parts = json.loads((tmp_path / "config.json").read_text())
    for name in ("org/kernel", "flash_attention_2"):
        saved = {"attn_implementation": name, "_attn_implementation": name}
        edited = {part: parts[part] | saved for part in ("text_config", "vision_config")}
        edit(tmp_path / "config.json", **edited, **saved)
        assert value(tmp_path, side="text") == before


@pytest.mark.parametrize("entries", CONFIGURATIONS.values(), ids=list(CONFIGURATIONS))
def test_a_configuration_that_makes_no_model_is_refused_in_one_sentence(folder: Path, entries: dict[str, Any]):
    edit(folder / "config.json", **entries)
    with pytest.raises(BadInputError, match=r"^expected .*, got .*; [^\n]+$") as caught:
        hs.load(folder)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5, b"1" * 5000, b"null"])
def test_a_configuration_that_is_no_json_is_refused(folder: Path, content: bytes):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(BadInputError, match=r"^expected config\.json to .*save the model again$"):
        hs.load(folder)


def test_a_configuration_that_is_no_file_is_refused(folder: Path):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # would be waited for without end
    with pytest.raises(BadInputError, match=r"a model folder with config\.json"):
        hs.load(folder)


def test_a_configuration_larger_than_its_weights_is_refused_before_memory_is_taken(folder: Path):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"hidden_size": 10**6}))
    with pytest.raises(BadInputError, match=r"weights that config\.json describes, \d.*e\+\d+ of them, got files of"):
        hs.load(folder)


@pytest.mark.slow
def test_random_configurations_are_read_or_refused(folder: Path):
    """Some of them are read, of which transformers decides: what is changed is often not a shape."""
    choose = random.Random(0)
    content = json.loads((folder / "config.json").read_text())
    values = [None, 0, -1, 3, 10**6, 10**18, 0.5, 1e308, True, "x", "", "../x", [], {}, [1, 2], {"a": {"b": 1}}]
    ended = {"read": 0, "refused": 0}
    for _ in range(250):
        changed = {choose.choice(list(content)): choose.choice(values) for _ in range(choose.randint(1, 2))}
        (folder / "config.json").write_text(json.dumps(content | changed))
        try:
            hs.load(folder)
            ended["read"] += 1
        except BadInputError as error:
            ended["refused"] += "\n" not in str(error)
    assert sum(ended.values()) == 250
    assert min(ended.values()) > 10


@pytest.mark.slow
def test_weights_that_are_cut_off_or_changed_are_refused_or_the_same(folder: Path, truth: float):
    choose = random.Random(0)
    whole = (folder / SINGLE).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    lengths = [0, 4, 8, 100, header, len(whole) - 1, *(choose.randrange(len(whole)) for _ in range(4))]
    for length in lengths:
        (folder / SINGLE).write_bytes(whole[:length])
        with pytest.raises(BadInputError, match="expected a folder that transformers can read"):
            hs.load(folder)
    (folder / SINGLE).write_bytes(whole + b"more")
    with pytest.raises(BadInputError, match="expected a folder that transformers can read"):
        hs.load(folder)
    for _ in range(40):
        changed = bytearray(whole)
        changed[choose.randrange(header)] ^= 1 << choose.randrange(8)
        (folder / SINGLE).write_bytes(changed)
        with contextlib.suppress(BadInputError):
            assert value(folder) == truth


@pytest.mark.parametrize(
    "name", ["~no-such-user/x", "x" * 5000, "a\0b", "", "\udcff", "./" + "y/" * 3000, "~", "..", "/dev/null", "a b", "org/a/b"]
)
def test_names_of_nothing_are_refused(name: str):
    with pytest.raises(BadInputError, match=r"^expected (?s:.)*, got (?s:.)*; .+$") as caught:
        hs.load(name)
    assert len(str(caught.value)) < 600


HOSTILE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "files": {"vocab_file": "../secret/config.json", "tokenizer_file": "../secret/tokenizer.json", "merges_file": "/etc/x"},
    "more files": {"gguf_file": "../secret/tokenizer.json", "spm_file": "../secret/config.json", "fast_tokenizer_files": ["x"]},
    "arguments": {"init_inputs": ["../secret/tokenizer.json"]},
    "code": {"auto_map": {"AutoTokenizer": ["tokenization.Mine", "tokenization.Mine"]}},
    "name": {"name_or_path": "../secret"},
    "template": {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for x in range(10**9) %}{% endfor %}"},
}


@pytest.mark.parametrize("entries", HOSTILE_TOKENIZERS.values(), ids=list(HOSTILE_TOKENIZERS))
def test_a_tokenizer_is_made_of_the_files_beside_it(folder: Path, entries: dict[str, Any]):
    code(folder)
    edit(folder / "tokenizer_config.json", **entries)
    model = hs.load(folder)
    assert model.text("the cat").ids == (5, 6)
    assert model.tokenizer.name_or_path == str(folder)


def test_a_tokenizer_is_read_also_where_the_model_is_not(folder: Path):
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"}, dtype="int4")
    model = hs.load(readers.bert(), tokenizer=str(folder))
    assert model.text("the cat").ids == (5, 6)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"added_tokens_decoder": 3}', '{"tokenizer_class": ["x"]}'])
def test_settings_of_a_tokenizer_that_make_none_are_refused(folder: Path, content: str):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(BadInputError, match=r"^expected .*, got .*; [^\n]+$"):
        hs.load(folder).text("the cat")


def test_a_name_on_the_hub_goes_through_the_same_gate(folder: Path, truth: float, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []

    def snapshot(name: str, *, allow_patterns: list[str], revision: str | None = None) -> str:
        asked.append(allow_patterns)
        here = folder.parent / "snapshots" / "0123"
        here.mkdir(parents=True, exist_ok=True)
        for pattern in allow_patterns:
            if (folder / pattern).is_file():
                shutil.copy(folder / pattern, here)
        return str(here)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the tokenizer is asked for too
    pickles(folder)
    assert value("org/model") == truth
    assert asked == [["config.json", INDEX], [SINGLE]]
    asked.clear()
    point_to(folder, "../secret/model.safetensors")
    with pytest.raises(BadInputError, match="expected plain names"):
        hs.load("org/model")
    assert len(asked) == 1
