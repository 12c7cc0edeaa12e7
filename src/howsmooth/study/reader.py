"""What a worker of a study holds: a model and a text, loaded once, and the last inputs it ran through the model."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from howsmooth.errors import BadInputError
from howsmooth.models import Capture, Model, Text, Window, load
from howsmooth.settings import items, whole

ALICE = "Alice in Wonderland"


@final
@dataclass(frozen=True)
class Source:
    """A model and a text by name, for any worker to load.

    model: `demo`, a folder or a hub name.  text: a file, Alice in Wonderland by default.  side: of a model with two.
    weights, digest: marks of the model's parameters and of the text when the study was planned; a worker that finds others
    refuses to work.  device: where every worker puts the model, as for `load`.
    """

    model: str
    text: str | None
    side: str | None
    weights: str
    digest: str
    device: str = "auto"

    def to_dict(self) -> dict[str, Any]:
        """Without the device where it is a worker's own choice, so that a study goes on under the same names elsewhere."""
        return {name: value for name, value in asdict(self).items() if name != "device" or value != "auto"}


@final
class Reader:
    """A model reading a text. `Reader.of` builds one; studies hand it to their tasks."""

    def __init__(self, model: Model, text: Text, source: Source | None = None):
        self.model, self.text, self.source = model, text, source
        self._kept: tuple[tuple[int, tuple[int, ...]], Capture] | None = None

    @classmethod
    def of(cls, model: Model | nn.Module | str | Path, text: str | Sequence[int] | None = None) -> "Reader":
        """model: loaded, or what `load` takes.  text: the text itself, or token ids; Alice in Wonderland by default."""
        loaded = model if isinstance(model, Model) else load(model)
        if text is None:
            text = alice()
        return cls(loaded, loaded.text(text) if isinstance(text, str) else text_of_ids(text))

    @classmethod
    def by_name(cls, model: str, text: str | None = None, side: str | None = None, device: str = "auto") -> "Reader":
        """From a model's name and a text file, with its `source`, so that other processes can load it too."""
        words, loaded = read_text(text), load(model, device, side=side)
        source = Source(model, text, side, fingerprint(loaded), _digest(words), device)
        return cls(loaded, loaded.text(words), source)

    def starts(self, samples: int, longest: int, seed: int) -> list[int]:
        """Where samples begin: the first at the text's opening, the others at random. All lengths begin there, so that lengths
        of one sample differ by what follows alone."""
        extra = len(self.text.prefix) + len(self.text.suffix)
        places = len(self.text) - (longest - extra) + 1
        if places < samples:
            raise BadInputError(
                f"expected a text with {samples} windows of {longest} tokens, got {len(self.text) + extra} tokens; "
                "give a longer text, fewer samples or shorter lengths"
            )
        order = torch.randperm(places, generator=torch.Generator().manual_seed(seed)).tolist()
        return [0, *(i for i in order if i)][:samples]

    def window(self, n: int, start: int) -> Window:
        return self.text.window(n, start)

    def capture(self, n: int, starts: Sequence[int]) -> Capture:
        """The model at these windows, kept until others are asked for."""
        wanted = (n, tuple(starts))
        if self._kept is None or self._kept[0] != wanted:
            self._kept = None  # the old ones go before the new ones come
            self._kept = wanted, self.model.capture([self.window(n, start) for start in starts])
        return self._kept[1]


def prepare(**source: Any) -> Reader:
    """The reader of a source, in a worker; refused where the model or the text is not what the study was planned with."""
    planned = Source(**source)
    reader = Reader.by_name(planned.model, planned.text, planned.side, planned.device)
    for mark, what in (("weights", "model"), ("digest", "text")):
        if getattr(reader.source, mark) != getattr(planned, mark):
            raise BadInputError(
                f"expected the {what} that the study was planned with, got another; start again with force=True (--force)"
            )
    return reader


def alice() -> str:
    """The text that comes with the package.

    Returns:
        *Alice's Adventures in Wonderland*, whole.
    """
    return resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8")


def read_text(path: str | None) -> str:
    """A text file; Alice in Wonderland by default."""
    if path is None:
        return alice()
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:  # of a name that no file has, or of what is in it
        said = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadInputError(f"expected a text file, got {path} ({said}); check the path") from None


def text_of_ids(ids: Sequence[int]) -> Text:
    """Token ids as a text to cut windows from; nothing is put around them."""
    expected, fix = "a text or a list of whole token ids", "pass a string or ids"
    ids = [whole(i, expected, fix) for i in items(ids, expected, fix)]
    if not ids:
        raise BadInputError(f"expected {expected}, got an empty list; {fix}")
    words, offsets, at = [str(i) for i in ids], [], 0
    for word in words:
        offsets.append((at, at + len(word)))
        at += len(word) + 1
    return Text(" ".join(words), tuple(ids), tuple(offsets), (), ())


def fingerprint(model: Model) -> str:
    """A mark of a model's parameters: names, shapes and 64 entries of each."""
    mark = hashlib.sha256()
    for name, p in model.module.named_parameters():
        flat = p.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)].to("cpu", torch.float64)
        mark.update(f"{name} {tuple(p.shape)} {some.tolist()}".encode())
    return mark.hexdigest()[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
