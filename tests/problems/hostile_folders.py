"""Hostile folders: what may lie in one, configurations that make no model, and a watch on what is done with them."""

import importlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Mark:
    """Pickled, a program that leaves a mark."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


_opened: list[str] = []  # the weights are opened by a library that Python does not see
_watches: list["Watch"] = []  # the one that is set, if any


def _look(event: str, args: tuple[Any, ...]) -> None:
    if _watches and event == "open" and isinstance(args[0], str):
        _opened.append(os.path.realpath(args[0]))


sys.addaudithook(_look)


class Watch:
    """What was done that must not be: pickles, kernels, the network, and files opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        modeling_utils: Any = importlib.import_module("transformers.modeling_utils")
        hub_kernels = importlib.import_module("transformers.integrations.hub_kernels")
        self.reached: list[str] = []
        safe_open = modeling_utils.safe_open

        def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
            _opened.append(os.path.realpath(path))
            return safe_open(path, *args, **kwargs)

        monkeypatch.setattr(modeling_utils, "safe_open", opened)
        monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", self.trap("flash attention"))
        monkeypatch.setattr(torch, "load", self.trap("torch.load"))
        monkeypatch.setattr(pickle, "load", self.trap("pickle.load"))
        monkeypatch.setattr("socket.socket.connect", self.trap("the network"))
        for name in ("get_kernel", "load_and_register_attn_kernel", "lazy_load_kernel"):
            monkeypatch.setattr(hub_kernels, name, self.trap(name))
        self.forget()
        _watches.append(self)

    def end(self) -> None:
        _watches.remove(self)

    def trap(self, name: str) -> Callable[..., Any]:
        def reach(*args: Any, **kwargs: Any) -> Any:
            self.reached.append(name)
            raise AssertionError(name)

        return reach

    def forget(self) -> None:
        _opened.clear()
        self.reached.clear()

    def seen(self, folder: Path) -> list[str]:
        """Names of the files of a folder that were opened, also through links."""
        return [path.name for path in map(Path, _opened) if path.is_relative_to(folder.resolve())]


def edit(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | entries))


def point_to(folder: Path, name: Any, decoy: bool = True) -> None:
    """Weights by an index that names something else, beside a file that looks right."""
    keys = load_file(folder / SINGLE)
    (folder / SINGLE).rename(folder / "decoy.safetensors") if decoy else (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, name)}))


CODE = "import os\nos.mkdir({!r})\n"


def pickles(folder: Path) -> None:
    for name in ("pytorch_model.bin", "adapter_model.bin", "model.pt", "model.ckpt", "adapter.eng.bin", "spk_dict.pt"):
        (folder / name).write_bytes(pickle.dumps(Mark(folder.parent / "mark")))


def code(folder: Path) -> None:
    for name in ("modeling.py", "configuration.py", "tokenization.py", "__init__.py", "setup.py"):
        (folder / name).write_text(CODE.format(str(folder.parent / "mark")))
    maps = {"AutoModel": "modeling.Mine", "AutoConfig": "configuration.Mine", "AutoTokenizer": ["tokenization.Mine", None]}
    edit(folder / "config.json", auto_map=maps)
    edit(folder / "tokenizer_config.json", auto_map=maps)
    edit(folder / "processor_config.json", auto_map=maps)


def adapters(folder: Path) -> None:
    pickles(folder)
    edit(folder / "adapter_config.json", base_model_name_or_path="../secret", peft_type="LORA", auto_mapping={"x": "y"})


def another_file(folder: Path) -> None:
    pickles(folder)
    edit(folder / "config.json", transformers_weights="adapter_model.bin")


def another_configuration(folder: Path) -> None:
    edit(folder / "config.json", configuration_files=["config.4.0.0.json"])
    shutil.copy(folder.parent / "secret" / "config.json", folder / "config.4.0.0.json")
    edit(folder / "config.4.0.0.json", num_attention_heads=1)


def another_index(folder: Path) -> None:
    keys = load_file(folder / SINGLE)
    for name in (INDEX, "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json"):
        (folder / name).write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, "../secret/model.safetensors")})
        )


def parts_of_a_cluster(folder: Path) -> None:
    shutil.copy(folder.parent / "secret" / SINGLE, folder / "shard-00000-model-00001-of-00001.safetensors")


def names_elsewhere(folder: Path) -> None:
    edit(folder / "config.json", _name_or_path="../secret", name_or_path="../secret", gguf_file="../secret/x", use_kernels=True)
    edit(folder / "config.json", kernel_config={"kernel_mapping": {"RMSNorm": "org/kernel:Layer"}}, fusion_config={"a": True})
    edit(folder / "generation_config.json", auto_map={"x": "y"}, custom_generate="../secret")


TRAPS = [pickles, code, adapters, another_file, another_configuration, another_index, parts_of_a_cluster, names_elsewhere]

LONG = {"a": 0}
for _ in range(100):
    LONG = {"a": LONG}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "no heads": {"num_attention_heads": 0},
    "fewer than no heads": {"num_attention_heads": -2},
    "heads that do not fit": {"num_attention_heads": 3},
    "text for a number": {"hidden_size": "16"},
    "a list for a number": {"num_hidden_layers": [2]},
    "nothing for a number": {"num_attention_heads": None},
    "too many layers": {"num_hidden_layers": 10**9},
    "too wide": {"hidden_size": 10**12},
    "another width": {"hidden_size": 32},
    "more words than numbers": {"vocab_size": 2**70},
    "an unknown function": {"hidden_act": "no-such"},
    "an unknown precision": {"dtype": "float7"},
    "a function for a precision": {"torch_dtype": "load"},
    "whole numbers": {"dtype": "int8"},
    "a list for a precision": {"dtype": ["float32"]},
    "deep": {"more": LONG},
    "no number": {"hidden_dropout_prob": float("nan")},
    "an unknown type": {"model_type": "no-such"},
    "no type": {"model_type": None},
    "a list for a type": {"model_type": ["bert"]},
    "a name of the library": {"to_dict": 1, "get_text_config": 2},
    "a map of names": {"attribute_map": {"hidden_size": "vocab_size"}},
    "weights quantised with a script": {"quantization_config": {"quant_method": "gptq", "dataset": "../secret"}},
    "an unknown quantisation": {"quantization_config": {"quant_method": "no-such"}},
    "text for a quantisation": {"quantization_config": "fp8"},
    "a quantised part": {"text_config": {"quantization_config": {"quant_method": "vptq"}}},
    "a part by name": {"backbone": "org/model"},
    "a part in another folder": {"backbone_config": {"architecture": "local-dir:../secret"}},
}
