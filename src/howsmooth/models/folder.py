"""What may be read of a model's folder: plain files in plain formats, and nothing that they point to.

The library that builds a model looks for weights in many places, pickles among them, and follows what config.json, an index
or an adapter names: other folders, code, kernels to download. So it never sees the folder itself but a room made for it:
config.json without the entries that lead elsewhere, and links to files of the folder. The library reads it quietly and offline.
"""

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from howsmooth.errors import BadInputError, reason

_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GGUF = "model.gguf"  # what the only file of a room is called
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")
_TOKENIZER_FILES = (".json", ".txt", ".model", ".tiktoken", ".spm", ".bpe", ".codes", ".jinja")

# Entries of config.json that name other files, code or kernels. What a model computes does not depend on them: without a saved
# implementation of attention the library takes its own sdpa, or eager where the architecture has no other.
_LEAD_ELSEWHERE = frozenset(
    {"auto_map", "custom_pipelines", "configuration_files", "transformers_weights", "gguf_file", "fusion_config"}
    | {"use_kernels", "kernel_config", "allow_all_kernels", "distributed_config", "adapter_kwargs"}
    | {f"{a}{b}_implementation{c}" for a in ("", "_") for b in ("attn", "experts") for c in ("", "_internal", "_autoset")}
)
_NOT_A_TOKENIZERS = _LEAD_ELSEWHERE | {"init_inputs", "name_or_path", "fast_tokenizer_files", "quantization_config"}
_NAMES = ("backbone", "architecture")  # of a part that is looked up by name: on the hub, or in a folder
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_WIDENED = ("fp8", "mxfp8", "mxfp4", "bitsandbytes", "compressed-tensors")  # ways to quantise that the library can undo
_DEPTH = 32  # levels of nesting; the deepest configurations of the library have about six
LARGEST_COUNT = 10_000  # layers or heads, more than any model has; each layer is a module to build


@contextmanager
def model_room(folder: Path) -> Iterator[Path]:
    """A folder with what a model is made of, for as long as it is read; refused before any weight is opened.

    Only safetensors with plain names are let in: `model.safetensors`, or what the index lists.
    """
    config = _config(read_json(folder / "config.json"), folder / "config.json")
    files: dict[str, Mapping[str, Any] | Path] = {"config.json": config}
    if (folder / SINGLE).is_file():
        files[SINGLE] = folder / SINGLE
    elif (folder / INDEX).is_file():
        names = shards(folder / INDEX)
        files |= {name: folder / name for name in names.values()} | {INDEX: {"metadata": {}, "weight_map": names}}
    else:
        raise BadInputError(_no_weights(folder))
    for name, file in files.items():
        if isinstance(file, Path) and not file.is_file():
            raise BadInputError(f"expected every file that {INDEX} lists, got no {name[:200]!r} in {folder}; copy it all")
    with _room(folder, files) as room:
        yield room


@contextmanager
def tokenizer_room(folder: Path) -> Iterator[Path]:
    """A folder with what a tokenizer is made of: its tables, and its settings without those that name files or code."""
    files: dict[str, Mapping[str, Any] | Path] = {
        path.name: path for path in folder.iterdir() if path.suffix in _TOKENIZER_FILES and path.is_file()
    }
    for name in {"config.json", "tokenizer_config.json"} & files.keys():
        content = read_json(folder / name).items()
        files[name] = {key: value for key, value in content if key not in _NOT_A_TOKENIZERS and not key.endswith("_file")}
    with _room(folder, files) as room:
        yield room


@contextmanager
def gguf_room(file: Path) -> Iterator[Path]:
    """A folder with nothing but a GGUF file, which is its own configuration and tokenizer."""
    with _room(file.with_suffix(""), {GGUF: file}) as room:
        yield room


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        content = json.loads(path.read_text("utf-8"), parse_constant=_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"expected {path.name} to be JSON, got {path} ({error}); save the model again") from None
    if not isinstance(content, dict):
        raise BadInputError(f"expected {path.name} to hold a JSON object, got another value in {path}; save the model again")
    return content


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)


def shards(index: Path) -> dict[str, str]:
    """Which file holds which weight, from an index; only safetensors with plain names are let through."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise BadInputError(f"expected a weight_map that lists files, got none in {index}; save the model again")
    for name in names.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & set("/\\\0"):
            raise BadInputError(
                f"expected plain names of safetensors files in {index}, got {str(name)[:200]!r}; put the files into the folder"
            )
    return names


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if not pickles:
        return f"expected weights in safetensors, got none named {SINGLE} or {INDEX} in {folder}; save_pretrained writes them"
    return (
        f"expected weights in safetensors, got only {pickles[0]} in {folder}, which may run code when read; "
        "convert them where you trust them: AutoModel.from_pretrained(folder).save_pretrained(other_folder)"
    )


@contextmanager
def _room(folder: Path, files: Mapping[str, Mapping[str, Any] | Path]) -> Iterator[Path]:
    """A new folder of the same name with these files: a path is linked, a mapping is written as JSON."""
    with tempfile.TemporaryDirectory(prefix="howsmooth-") as parent:
        room = Path(parent, folder.resolve().name or "model")
        room.mkdir()
        for name, content in files.items():
            if isinstance(content, Path):
                (room / name).symlink_to(content.resolve())
            else:
                (room / name).write_text(json.dumps(content), "utf-8")
        yield room


def _config(content: Mapping[str, Any], path: Path, depth: int = 0) -> dict[str, Any]:
    """A configuration without the entries that lead elsewhere, at every level; refused where it depends on one."""
    return {key: _entry(key, value, path, depth) for key, value in content.items() if key not in _LEAD_ELSEWHERE}


def _entry(key: str, value: Any, path: Path, depth: int) -> Any:
    if depth > _DEPTH:
        raise BadInputError(f"expected at most {_DEPTH} levels of nesting, got more in {path}; save the model again")
    if key in ("dtype", "torch_dtype") and value is not None and str(value).removeprefix("torch.") not in _DTYPES:
        raise BadInputError(f"expected {key} {', '.join(_DTYPES)}, got {str(value)[:200]!r} in {path}; save the model again")
    if key in _NAMES and isinstance(value, str) and set(value) & set("/\\:"):
        raise BadInputError(
            f"expected a {key} that the folder describes, got the name {value[:200]!r} in {path}; "
            "build the model yourself and pass it to load"
        )
    if (
        key.endswith(("layer", "layers", "depth", "head", "heads"))
        and isinstance(value, int)
        and not 0 <= value <= LARGEST_COUNT
    ):
        raise BadInputError(f"expected {key} from 0 to {LARGEST_COUNT}, got {str(value)[:40]} in {path}; save the model again")
    if key == "quantization_config" and value:
        return _quantization(value, path)
    if isinstance(value, dict):
        return _config(value, path, depth + 1)
    if isinstance(value, list):
        return [_entry("", item, path, depth + 1) for item in value]
    return value


def _quantization(value: Any, path: Path) -> dict[str, Any]:
    """How the weights were quantised, asked to be undone; refused where that is not known how."""
    named = value if isinstance(value, dict) else {}
    method = "bitsandbytes" if named.get("load_in_4bit") or named.get("load_in_8bit") else named.get("quant_method")
    if method not in _WIDENED:
        raise BadInputError(
            f"expected weights that can be widened, got a model quantised by {str(method)[:200]!r} in {path}; "
            "save a dequantised copy"
        )
    kept = {key: item for key, item in named.items() if key not in ("tokenizer", "dataset")}
    return kept if method in ("bitsandbytes", "compressed-tensors") else kept | {"dequantize": True}


@contextmanager
def quiet() -> Iterator[None]:
    """The library's progress bars and remarks on loading kept back, and its settings as they were afterwards."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


@contextmanager
def offline() -> Iterator[None]:
    """No network, whatever a folder asks for."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def tokenizer_of(where: str) -> Any:
    """The tokenizer beside a model's weights."""
    folder = Path(where)
    if not folder.is_dir():
        return tokenizer_in(where, where)
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):  # the library would make an empty one
        raise BadInputError(f"expected a tokenizer beside the model, got none in {where!r}; save it there or pass ids")
    try:
        with tokenizer_room(folder) as room, offline():
            return tokenizer_in(str(room), where)
    except OSError as error:
        raise BadInputError(f"expected a tokenizer that can be read, got {where!r} ({error.strerror}); pass ids") from None


def tokenizer_in(where: str, name: str, **more: Any) -> Any:
    """The tokenizer that the library finds. name: what to call it.  more: what else the library takes."""
    from transformers import AutoTokenizer

    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **more)
        except Exception as error:  # its files may make the library raise anything
            raise BadInputError(
                f"expected a tokenizer beside the model, got none in {name!r} ({reason(error)}); pass ids"
            ) from None
    tokenizer.name_or_path = name
    return tokenizer
