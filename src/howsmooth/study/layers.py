"""Every layer and head, at every length and size: the measurements that all studies of a model are made of."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.kernels.kinds import Kind
from howsmooth.models import MAPS, Capture, FallbackWarning, MapName, Measurement
from howsmooth.models.capture import LOCK_STEP
from howsmooth.models.model_input import Which
from howsmooth.settings import choice, items, number, seed_of, whole
from howsmooth.study.bound_rows import bounds_row
from howsmooth.study.jobs import Job, Row
from howsmooth.study.reader import Reader

FACTORS = (0.125, 0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0, 8.0)
_LAYERS = 8  # of one part; where each takes long there is one
_LENGTHS = "a list of lengths, each of at least one token"
_SAMPLES = 1_000_000  # windows of one text
_BESIDE = 1e-2  # least relative accuracy of what is only set beside a measurement
SIDE_BY_SIDE: tuple[MapName, ...] = ("attention", "normed", "block")


@final
@dataclass(frozen=True)
class Question:
    """What is asked of a model: lengths, samples of text, layers, and the map.

    layers: all where None.  tol, certify: as in `howsmooth.lipschitz`.  seed: places the samples; every
    measurement has a random start of its own, made from its input.
    """

    lengths: tuple[int, ...]
    samples: int = 8
    layers: tuple[int, ...] | None = None
    map: MapName = "attention"
    tol: float = 1e-3
    certify: float | None = None
    seed: int = 0

    def __post_init__(self):
        fix = "give whole numbers"
        lengths = tuple(whole(n, "lengths of at least one token", fix, least=1) for n in items(self.lengths, _LENGTHS, fix))
        if not lengths:
            raise BadInputError(f"expected {_LENGTHS}, got none; {fix}")
        layers = None if self.layers is None else items(self.layers, "a list of layers", "leave it out for all of them")
        checked = {
            "lengths": lengths,
            "samples": sample_count(self.samples),
            "layers": None if layers is None else tuple(whole(k, "layers counted from 0", fix) for k in layers),
            "map": choice(self.map, "a map", MAPS),
            "seed": seed_of(self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def sample_count(samples: int) -> int:
    """A number of samples, checked."""
    return whole(samples, "one sample or more, a whole number", "ask for at least one", least=1, below=_SAMPLES)


@final
@dataclass(frozen=True)
class Setting:
    """A question that a reader can answer: its layers are known, with the kinds of their weights, and where its samples begin.

    kinds: of `layers`; nothing where a layer's is unknown.
    """

    question: Question
    layers: tuple[int, ...]
    starts: tuple[int, ...]
    kinds: tuple[Kind | None, ...]


@final
@dataclass(frozen=True)
class Part:
    """What one task measures: windows of one length, and layers. `first` is the number of the first window's sample."""

    n: int
    starts: tuple[int, ...]
    first: int
    layers: tuple[int, ...]
    map: MapName
    tol: float
    certify: float | None

    @classmethod
    def of(cls, part: dict[str, Any]) -> "Part":
        """From what a results file kept of it."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in part.items()}
        return cls(**fields)

    def windows(self) -> "list[Part]":
        """Each window as a part of its own."""
        return [replace(self, starts=(start,), first=self.first + k) for k, start in enumerate(self.starts)]

    def split(self, layers: int) -> "list[Part]":
        """The same windows, at most so many layers in each part."""
        return [replace(self, layers=self.layers[k : k + layers]) for k in range(0, len(self.layers), layers)]

    def capture(self, reader: Reader) -> Capture:
        return reader.capture(self.n, self.starts)

    def measure(self, reader: Reader, **options: Any) -> list[tuple[Measurement, Row]]:
        """Every layer at every window, each with the columns that say which window, and how long it took."""
        captured = self.capture(reader)
        began = time.perf_counter()
        options = {"closed": True, "tol": self.tol, "certify": self.certify} | options
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            measured = captured.measure(self.layers, self.map, **options)
        seconds = (time.perf_counter() - began) / len(measured)
        windows = [{"sample": self.first + k, "start": start, "seconds": seconds} for k, start in enumerate(self.starts)]
        return list(zip(measured, windows * len(self.layers), strict=True))


def parts(
    setting: Setting, lengths: Sequence[int] | None = None, *, samples: int | None = None, layers: int = _LAYERS
) -> list[Part]:
    """A question in parts, the longest first; windows of few tokens go together. layers: at most so many in a part."""
    q = setting.question
    starts = setting.starts[:samples]
    cut = []
    for n in sorted(set(q.lengths if lengths is None else lengths), reverse=True):
        size = max(1, LOCK_STEP // n)
        for first in range(0, len(starts), size):
            whole = Part(n, starts[first : first + size], first, setting.layers, q.map, q.tol, q.certify)
            cut += whole.split(layers)
    return cut


def settle(reader: Reader, question: Question) -> Setting:
    """Check a question before any work: the longest sample is run once and must fit, one layer of the shortest measured."""
    lengths = question.lengths
    longest = max(lengths)
    starts = reader.starts(question.samples, longest, question.seed)
    reader.window(min(lengths), 0)  # a length below the special tokens is refused here
    captured = reader.capture(longest, starts[:1])
    layers = tuple(range(captured.num_layers)) if question.layers is None else tuple(dict.fromkeys(question.layers))
    if not layers:
        raise BadInputError("expected a layer or more, got none; leave the layers out for all of them")
    outside = [layer for layer in layers if layer >= captured.num_layers]
    if outside:
        raise BadInputError(
            f"expected layers from 0 to {captured.num_layers - 1}, got {outside[0]!r}; {captured.model} has no other"
        )
    captured.sample.check_room(layers[0], Which(question.map))
    kinds = tuple(captured.sample.kind(layer) for layer in layers)
    setting = Setting(question, layers, tuple(starts), kinds)
    first = parts(setting, [min(lengths)], samples=1)[0]
    replace(first, layers=layers[:1]).measure(reader, closed=False)  # refuses a map that the model lacks, and bad options
    return setting


def layer_jobs(setting: Setting, shares: bool = False, held: bool = False, bounds: Sequence[int] = ()) -> list[Job]:
    """Every layer at every length on every sample.

    shares: also how much of the worst direction falls on each token, for the first sample.
    held: also the constant at the longest length, for the first sample, while the token that carries most is held fixed.
    bounds: lengths at which the first sample's constants are set beside every bound, of layers in closed form.
    """
    longest = max(setting.question.lengths)

    def jobs(part: Part) -> list[Job]:
        wanted = {"shares": shares, "held": held and part.n == longest, "bounds": part.n in bounds}
        also = ",".join(name for name, asked in wanted.items() if asked and part.first == 0)
        split = part.split(1) if "bounds" in also else [part]
        return [Job(measure_layers, {"part": asdict(one), "also": also}) for one in split]

    return [job for part in parts(setting) for job in jobs(part)]


def bound_jobs(setting: Setting) -> list[Job]:
    """Every layer at every length on the first sample, beside every bound; for attention."""
    first = replace(setting, starts=setting.starts[:1])
    return layer_jobs(first, bounds=setting.question.lengths) if setting.question.map == "attention" else []


def measure_layers(reader: Reader, part: dict[str, Any], also: str) -> list[Row]:
    """A row for every layer and window. also: what else there is of the first sample, of `shares`, `held` and `bounds`."""
    rows, whole, asked = [], Part.of(part), also.split(",")
    for m, window in whole.measure(reader):
        row = m.row("layer", **window, **m.about())
        first = row["sample"] == 0
        if "shares" in asked and first:
            row["shares"] = [round(s, 7) for s in m.input_share]
        rows.append(row)
        if "held" in asked and first and m.n > 1:
            rows.append(_held(whole.capture(reader)[0], m, whole, window))
        if "bounds" in asked and first:
            rows += _bounds(whole.capture(reader)[0], m, window)
    return rows


def _bounds(captured: Capture, m: Measurement, window: Row) -> list[Row]:
    """A row with every bound; none for a layer that has no closed form. What fails there keeps nobody from the measurement."""
    began, attn = time.perf_counter(), captured.closed(m.layer)
    if attn is None:
        return []
    try:
        row = bounds_row(m, attn, captured.tokens(m.layer))
    except (HowSmoothError, RuntimeError) as error:  # weights out of range, too little memory, no decomposition
        row = m.row("bounds", bounds=[], reason=" ".join(str(error).split())[:500])
    return [row | window | {"seconds": time.perf_counter() - began}]


def _held(captured: Capture, m: Measurement, part: Part, window: Row) -> Row:
    """A row for a layer whose leading token is held fixed: `value` there, `whole` where it may move too."""
    began, ((token, word, share), *_) = time.perf_counter(), m.top_tokens(1)
    others = [i for i in range(m.n) if i != token]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        rest = captured.measure(m.layer, part.map, tokens=others, closed=True, tol=max(part.tol, _BESIDE), certify=part.certify)
    received = None if m.received is None else m.received[token]
    top = {"token": token, "word": word, "share": share, "received": received, "whole": m.value}
    return rest.row("held", **top, **(window | {"seconds": time.perf_counter() - began}))


def map_jobs(setting: Setting) -> list[Job]:
    """Attention, normed and block of every layer, but for the map that is asked for: the longest length, the first sample."""
    q = setting.question
    rough = replace(setting, question=replace(q, tol=max(q.tol, _BESIDE), certify=None))
    return [
        Job(measure_maps, {"part": asdict(replace(part, map=name))})
        for name in SIDE_BY_SIDE
        if name != q.map
        for part in parts(rough, [max(q.lengths)], samples=1, layers=1)
    ]


def measure_maps(reader: Reader, part: dict[str, Any]) -> list[Row]:
    """A row for every layer that has the map."""
    whole, rows = Part.of(part), []
    for layer in whole.layers:
        try:
            measured = replace(whole, layers=(layer,)).measure(reader)
        except BadInputError:  # a block that normalises after it attends has no normed attention
            continue
        rows += [m.row("map", **window, **m.about()) for m, window in measured]
    return rows


def head_jobs(setting: Setting, lengths: Sequence[int] | None = None) -> list[Job]:
    """Every head alone, on the first sample, at these lengths."""
    if setting.question.map not in ("attention", "normed"):
        return []
    return [Job(measure_heads, {"part": asdict(part)}) for part in parts(setting, lengths, samples=1, layers=1)]


def measure_heads(reader: Reader, part: dict[str, Any]) -> list[Row]:
    """A row for every head alone, through its own part of the output projection; none where heads cannot be told apart."""
    whole = Part.of(part)
    captured, rows = whole.capture(reader), []
    for layer in whole.layers:
        one = replace(whole, layers=(layer,))
        for head in range(captured.heads(layer)):
            try:
                rows += [m.row("head", **window) for m, window in one.measure(reader, head=head)]
            except BadInputError:  # a layer that is not cut has no heads to speak of
                break
    return rows


def radius_jobs(setting: Setting, factors: Sequence[float] = FACTORS) -> list[Job]:
    """`L` against the size of the tokens: the text's own tokens, all multiplied by one factor after the other."""
    fix = "1 leaves the tokens as they are"
    expected = "positive factors below 1e6"
    factors = [number(f, expected, fix, above=0.0, below=1e6) for f in items(factors, expected, fix)]
    if not factors:
        raise BadInputError(f"expected {expected}, got none; {fix}")
    return [Job(measure_radius, {"part": asdict(part), "factors": factors}) for part in parts(setting)]


def measure_radius(reader: Reader, part: dict[str, Any], factors: list[float]) -> list[Row]:
    """A row for every factor, layer and window."""
    whole = Part.of(part)
    return [m.row("radius", factor=f, **window) for f in factors for m, window in whole.measure(reader, factor=f)]
