"""What a worker of a study holds: a model and a text, loaded once, and the last inputs it ran through the model."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.models import Capture, FallbackWarning, Model, load
from howsmooth.models.cut import Cut, MapName
from howsmooth.models.tokens import Text, Window

ALICE = "Alice in Wonderland"
_WIDEST = 1024  # of the tokens; reading off the weights of a wider layer costs more than it saves
_MOST_CLOSED = 64  # layers kept in closed form
_SAME = 1e-4  # float32 agrees far better, another mask far worse


@final
@dataclass(frozen=True)
class Source:
    """A model and a text by name, for any worker to load.

    model: `demo`, a folder or a hub name.  text: a file, Alice in Wonderland by default.  side: of a model with two.
    weights, digest: marks of the model's parameters and of the text when the study was planned; a worker that finds others
    refuses to work.
    """

    model: str
    text: str | None
    side: str | None
    weights: str
    digest: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@final
class Reader:
    """A model reading a text. `Reader.of` builds one; studies hand it to their tasks."""

    def __init__(self, model: Model, text: Text, source: Source | None = None):
        self.model, self.text, self.source = model, text, source
        self._held: dict[tuple[int, int], Capture] = {}
        self._closed: dict[int, tuple[int, Attention | None]] = {}  # by layer, with the length it was read off at

    @classmethod
    def of(cls, model: Model | str | Path, text: str | Sequence[int] | None = None) -> "Reader":
        """model: loaded, or what `load` takes.  text: the text itself, or token ids; Alice in Wonderland by default."""
        loaded = model if isinstance(model, Model) else load(model)
        if text is None:
            text = alice()
        return cls(loaded, loaded.text(text) if isinstance(text, str) else text_of_ids(text))

    @classmethod
    def by_name(cls, model: str, text: str | None = None, side: str | None = None) -> "Reader":
        """The same from a model's name and a text file, with its `source`, so that other processes can load it too."""
        words, loaded = read_text(text), load(model, side=side)
        source = Source(model, text, side, fingerprint(loaded), _digest(words))
        return cls(loaded, loaded.text(words), source)

    def starts(self, samples: int, longest: int, seed: int) -> list[int]:
        """Where samples begin: the first at the text's opening, the others at random. All lengths begin there, so that lengths
        of one sample differ by what follows alone."""
        extra = len(self.text.prefix) + len(self.text.suffix)
        places = len(self.text) - (longest - extra) + 1
        if samples < 1:
            raise BadInputError(f"expected one sample or more, got {samples}; ask for at least one")
        if places < samples:
            raise BadInputError(
                f"expected a text with {samples} windows of {longest} tokens, got {len(self.text) + extra} tokens; "
                "give a longer text, fewer samples or shorter lengths"
            )
        order = torch.randperm(places, generator=torch.Generator().manual_seed(seed)).tolist()
        return [0, *(i for i in order if i)][:samples]

    def window(self, n: int, start: int) -> Window:
        return self.text.window(n, start)

    def captures(self, n: int, starts: Sequence[int]) -> list[Capture]:
        """The model run once for every window; kept until other windows are asked for."""
        wanted = [(n, start) for start in starts]
        kept = {key: self._held[key] for key in wanted if key in self._held}
        self._held = {key: kept.get(key) or self.model.capture(ids=self.window(*key)) for key in wanted}
        return [self._held[key] for key in wanted]

    def map(self, captured: Capture, layer: int, map: MapName = "attention") -> Cut:
        """A map of a layer, on the kernels or through the model's own code."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            return captured.map(layer, map)

    def closed(self, captured: Capture, layer: int) -> Attention | None:
        """A layer as `Attention` in the model's precision, or nothing where it is not of that form.

        It is read off at the first input, compared with the model's own output in float64, and kept: a shorter input finds
        the same function, unless its output here says otherwise. A longer one is read off anew, since masks may begin to bite.
        """
        x = entering(captured, layer)
        if x.shape[-1] > _WIDEST:
            return None
        n, kept = self._closed.get(layer, (0, None))
        if n < len(x) or (kept is not None and n > len(x) and not _agrees(kept, captured, layer)):
            n, kept = len(x), self._read_off(captured, layer)
            if len(self._closed) >= _MOST_CLOSED:
                self._closed.clear()
            self._closed[layer] = n, kept
        return kept

    def _read_off(self, captured: Capture, layer: int) -> Attention | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            try:
                return captured.attention(layer).to(self.model.dtype)
            except BadInputError:
                return None


@torch.no_grad()
def _agrees(attn: Attention, captured: Capture, layer: int) -> bool:
    """Whether a layer in closed form gives what the layer gives at this input."""
    cut = captured._candidate(layer, "attention")
    if cut is None or attn.bias is not None:  # a bias belongs to one length
        return False
    theirs = cut.value(cut.start[None].to(attn.dtype))[0]
    return float((attn(cut.start) - theirs).abs().max()) <= _SAME * float(theirs.abs().max())


def prepare(**source: Any) -> Reader:
    """The reader of a source, in a worker; refused where the model or the text is not what the study was planned with."""
    planned = Source(**source)
    found = Reader.by_name(planned.model, planned.text, planned.side)
    for what, now, then in (
        ("model", found.source and found.source.weights, planned.weights),
        ("text", found.source and found.source.digest, planned.digest),
    ):
        if now != then:
            raise BadInputError(f"expected the {what} that the study was planned with, got another; start it anew")
    return found


def entering(captured: Capture, layer: int) -> Tensor:
    """What enters a layer's attention, (n, d)."""
    return captured.trace.layers[layer].x


def alice() -> str:
    """The text that comes with the package."""
    return resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8")


def read_text(path: str | None) -> str:
    """A text file; Alice in Wonderland by default."""
    if path is None:
        return alice()
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadInputError(f"expected a text file, got {path} ({said}); check the path") from None


def text_of_ids(ids: Sequence[int]) -> Text:
    """Token ids as a text to cut windows from; nothing is put around them."""
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise BadInputError("expected a text or a list of whole token ids, got neither; pass a string or ids")
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
