"""GGUF, the format of llama.cpp: settings, tokens and weights in one file, most weights in a few bits.

Its header is read here before a library sees it: a count, a list or a weight that does not fit into the file is refused, so
that no memory is taken for it. transformers then reads the file offline, in a room where nothing else lies, and unpacks every
weight.
"""

import importlib.util
import io
import mmap
import re
import struct
from collections import Counter
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import nn

from howsmooth.errors import BadInputError, reason
from howsmooth.models.folder import GGUF, LARGEST_COUNT, gguf_room, offline, quiet, tokenizer_in

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_MOST_ENTRIES = 2**22  # settings, entries of lists and weights; the largest vocabularies have 2¹⁸ tokens
_MOST_DIMENSIONS, _MOST_ALIGNMENT = 4, 2**16
_ROTARY = "rope_freqs.weight"  # what the frequencies of rotary positions are divided by, as Llama 3 scales them
_OTHER_READERS = "read it with a model of your own and pass that to load"


class Stored(NamedTuple):
    """A weight as the file has it. kind: how its numbers are written, as in Q4_1.  start, size: its bytes."""

    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


@final
@dataclass
class Header:
    """What a GGUF file says of itself, walked through from its first byte; whatever does not fit into it raises.

    settings: numbers and words by name, and of lists their lengths.  weights: by name.
    """

    data: bytes | mmap.mmap
    at: int = 4
    entries: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Stored] = field(default_factory=dict)

    def __post_init__(self) -> None:
        version, weights, settings = self._unpack("IQQ") if self.data[:4] == _MAGIC else (None, 0, 0)
        if version not in _VERSIONS:
            raise ValueError("it does not begin as GGUF of version 2 or 3 does")
        self._count(weights + settings)
        for _ in range(settings):
            name, (kind,) = self._string(), self._unpack("I")
            self.settings[_new(name, self.settings)] = value = self._value(kind)
            if name.rpartition(".")[2].endswith("_count") and isinstance(value, int) and not 0 <= value <= LARGEST_COUNT:
                raise ValueError(f"{name} {value}, expected 0 to {LARGEST_COUNT}")
        self._weights(weights)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def _count(self, entries: int) -> None:
        self.entries += entries
        if self.entries > _MOST_ENTRIES:
            raise ValueError(f"more than {_MOST_ENTRIES} entries")

    def _skip(self, size: int) -> bytes:
        """The next bytes."""
        if size > len(self.data) - self.at:
            raise ValueError("its end is missing")
        self.at += size
        return self.data[self.at - size : self.at]

    def _string(self) -> str:
        return self._skip(self._unpack("Q")[0]).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _LIST:
            return self._unpack(_scalar(kind))[0]
        inner, length = self._unpack("IQ")
        self._count(length)
        if inner != _STRING:
            self._skip(length * struct.calcsize(_scalar(inner)))
        else:
            for _ in range(length):
                self._string()
        return length

    def _weights(self, count: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        for _ in range(count):
            name, (dimensions,) = self._string(), self._unpack("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"{name} of {dimensions} dimensions")
            *sizes, number, start = self._unpack(f"{dimensions}QIQ")
            kind = GGMLQuantizationType(number)
            block, packed = GGML_QUANT_SIZES[kind]
            if sizes and sizes[0] % block:
                raise ValueError(f"rows of {name} that are no whole blocks of {kind.name}")
            size = prod(sizes) // block * packed
            self.weights[_new(name, self.weights)] = Stored(kind.name, tuple(reversed(sizes)), start, size)
        step = self.settings.get("general.alignment", 32)
        if not isinstance(step, int) or not 0 < step <= _MOST_ALIGNMENT:
            raise ValueError(f"general.alignment {step!r}")
        begin = -(-self.at // step) * step
        self.weights = {name: w._replace(start=begin + w.start) for name, w in self.weights.items()}
        ends = [w.start + w.size for w in self.weights.values()]
        if begin + sum(w.size for w in self.weights.values()) > len(self.data) or max(ends, default=0) > len(self.data):
            raise ValueError("its end is missing, or weights overlap")

    def of_model(self, name: str, default: Any) -> Any:
        """A setting of the architecture, of the same type as its default."""
        value = self.settings.get(f"{self.settings.get('general.architecture')}.{name}", default)
        if not isinstance(value, type(default)):
            raise ValueError(f"{name} {str(value)[:200]!r}")
        return value

    @property
    def note(self) -> str:
        """How the weights were stored, most of them first."""
        sizes = Counter[str]()
        for kept in self.weights.values():
            sizes[kept.kind] += prod(kept.shape)
        kinds = ", ".join(kind for kind, _ in sizes.most_common())
        return f"weights stored in {kinds} (GGUF), dequantised when they were read"


def header_of(path: Path, name: str) -> Header:
    """The header of a file, refused in one sentence where it is none. name: what to call the file."""
    lacking = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if lacking:
        raise BadInputError(
            f"expected the packages gguf and accelerate, which read GGUF files, got no {' and no '.join(lacking)}; "
            f"run `pip install {' '.join(lacking)}`"
        )
    try:
        with path.open("rb") as file:
            return Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, struct.error, ValueError, KeyError, OverflowError) as error:
        raise BadInputError(f"expected a whole GGUF file, got {name!r} ({reason(error)}); copy it again") from None


def read_gguf(path: Path, dtype: torch.dtype | None, name: str, head: bool) -> tuple[nn.Module, str]:
    """The model in a GGUF file, its weights in float32 unless `dtype` is another, and how they were stored."""
    header = header_of(path, name)
    try:
        with gguf_room(path) as room, offline(), quiet(), redirect_stderr(io.StringIO()):  # a bar that no setting hides
            module = _read(str(room), header, dtype or torch.float32)
        _scale_rotary(module, header)
    except BadInputError as error:
        raise BadInputError(f"{error} in {name!r}; {_OTHER_READERS}") from None
    except Exception as error:  # what a header says may make the library raise anything
        raise BadInputError(
            f"expected a GGUF file that transformers can read, got {name!r} ({reason(error)}); {_OTHER_READERS}"
        ) from None
    module.config.name_or_path = name
    window = header.of_model("attention.sliding_window", 0)
    read = not window or getattr(module.config, "sliding_window", None) == window
    said = header.note if read else f"{header.note}; transformers does not read their sliding window of {window} tokens"
    return (module if head else module.base_model).eval(), said


def gguf_tokenizer(path: Path, name: str) -> Any:
    """The tokenizer that a GGUF file carries."""
    header_of(path, name)
    with gguf_room(path) as room, offline():
        return tokenizer_in(str(room), name, gguf_file=GGUF)


def is_unpacked(module: nn.Module) -> bool:
    """Whether a model that the library marks as quantised came from GGUF and has plain weights."""
    settings: Any = getattr(getattr(module, "config", None), "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return method == "gguf" and all(p.is_floating_point() for p in module.parameters())


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a setting of type {kind}")
    return _SCALARS[kind]


def _new(name: str, known: dict[str, Any]) -> str:
    if name in known:
        raise ValueError(f"{name[:200]} twice")
    return name


def _read(room: str, header: Header, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GgufConfig

    parts = header.settings.get("split.count", 1)
    if parts != 1:
        raise BadInputError(f"expected all weights in one file, which llama-gguf-split --merge makes, got one of {parts} parts")
    if header.of_model("block_count", 0) > len(header.weights):
        raise BadInputError("expected weights for every layer, got fewer weights than layers")
    config = AutoConfig.from_pretrained(room, gguf_file=GGUF, local_files_only=True, trust_remote_code=False)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        described = kind.from_config(config, trust_remote_code=False)
    _check_complete(described, header)
    module, info = kind.from_pretrained(
        room,
        config=config,
        gguf_file=GGUF,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
        trust_remote_code=False,
        dtype=dtype,
        output_loading_info=True,
    )
    holes = sorted(info["missing_keys"])
    if holes:
        raise BadInputError(f"expected every weight of {type(module).__name__}, got none for {holes[0]}")
    shapes = [[tuple(p.shape) for p in model.parameters()] for model in (described, module)]
    if shapes[0] != shapes[1]:
        raise BadInputError(f"expected weights of {type(module).__name__} in the shapes that its settings describe, got others")
    return module


def _check_complete(described: Any, header: Header) -> None:
    """Refuse a file of which the library would not read all: a scaling of rotary positions, more weights or fewer."""
    scaled = [name for name in header.weights if name.startswith("rope_factors")]
    scaling = scaled[0] if scaled else header.of_model("rope.scaling.type", "none")
    if header.settings["general.architecture"] != "gpt-oss" and scaling != "none":
        raise BadInputError(f"expected rotary positions that transformers reads from GGUF, got the scaling {scaling!r}")
    layers, extra = described.config.num_hidden_layers, header.of_model("nextn_predict_layers", 0)
    kept = {id(t): t.numel() for t in described.state_dict(keep_vars=True).values()}  # shared ones count once

    def read(name: str) -> bool:
        block = re.match(r"blk\.(\d+)\.", name)
        tied = name == "output.weight" and described.config.tie_word_embeddings
        ahead = block is not None and layers <= int(block[1]) < layers + extra  # it predicts tokens behind the next one
        return name != _ROTARY and not tied and not ahead

    stored = sum(prod(weight.shape) for name, weight in header.weights.items() if read(name))
    if stored != sum(kept.values()):
        raise BadInputError(
            f"expected the {sum(kept.values())} weights of the {type(described).__name__} that its settings describe, "
            f"got {stored}"
        )


def _scale_rotary(module: nn.Module, header: Header) -> None:
    """Divide the frequencies of rotary positions as Llama 3 does, which the library does not read."""
    if _ROTARY not in header.weights:
        return
    kind, _, start, size = header.weights[_ROTARY]
    by = torch.frombuffer(bytearray(header.data[start : start + size]), dtype=torch.float32)
    found = [part.get_buffer("inv_freq") for part in module.modules() if hasattr(part, "inv_freq")]
    if kind != "F32" or not found or any(own.shape != by.shape for own in found) or not bool((by > 0).all()):
        raise BadInputError(f"expected {_ROTARY} to be factors of rotary frequencies, got {len(by)} others")
    for own in found:
        own.div_(by)
