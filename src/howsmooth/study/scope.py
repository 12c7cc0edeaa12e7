"""What a study is asked about: a model, a text, layers, lengths and samples, checked and cut into parts for tasks."""

import functools
import inspect
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, final

from torch import nn

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Kind
from howsmooth.models import MAPS, Capture, FallbackWarning, MapName, Measurement, Model
from howsmooth.models.capture import LOCK_STEP
from howsmooth.models.model_input import Which
from howsmooth.settings import choice, items, number, seed_of, whole
from howsmooth.study.jobs import Cells, Job, task
from howsmooth.study.reader import Reader

# Powers of two, and more between them about 128: position embeddings are often tuned up to a power of two only.
LENGTHS = (8, 16, 32, 64, 96, 128, 136, 192, 256, 512)
_LAYERS = 8  # of one part; where each takes long there is one
_LENGTHS = "a list of lengths, each of at least one token"
_SAMPLES = 1_000_000  # windows of one text
F = TypeVar("F", bound=Callable[..., Any])


@final
@dataclass(frozen=True)
class Scope:
    """Which lengths, samples of text, layers and map a question is asked of.

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


class ScopeOptions(TypedDict, total=False):
    """A scope as arguments of a public function.

    lengths: by default those of 8 … 512 that the model and the text allow.  samples: windows of the text at each length, 8.
    layers: all by default.  map: as in `Model.measure`.  tol, certify: as in `howsmooth.lipschitz`.  seed: places the samples.
    """

    lengths: Sequence[int] | None
    samples: int
    layers: Sequence[int] | None
    map: MapName
    tol: float
    certify: float | None
    seed: int


def with_scope(*without: str) -> Callable[[F], F]:
    """A public function whose `**scope` is shown, to help and to tools, as the arguments that it stands for.

    without: those that it does not take.
    """

    def show(function: F) -> F:
        given = inspect.signature(function)
        own = [p for p in given.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        types = ScopeOptions.__annotations__
        defaults = {f.name: None if f.name == "lengths" else f.default for f in fields(Scope) if f.name not in without}
        more = [
            inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=v, annotation=types[k]) for k, v in defaults.items()
        ]

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            shown.bind(*args, **options)  # an argument by another name is refused, as of any function
            return function(*args, **options)

        shown = given.replace(parameters=[*own, *more])
        checked.__signature__ = shown  # pyright: ignore[reportAttributeAccessIssue]
        return checked  # pyright: ignore[reportReturnType]

    return show


def sample_count(samples: int) -> int:
    """A number of samples, checked."""
    return whole(samples, "one sample or more, a whole number", "ask for at least one", least=1, below=_SAMPLES)


def checked_factors(factors: Sequence[float]) -> list[float]:
    """What tokens are multiplied by, checked."""
    fix, expected = "1 leaves the tokens as they are", "positive factors below 1e6"
    some = [number(f, expected, fix, above=0.0, below=1e6) for f in items(factors, expected, fix)]
    if not some:
        raise BadInputError(f"expected {expected}, got none; {fix}")
    return some


@final
@dataclass(frozen=True)
class Setting:
    """A scope that a reader has: its layers are known, with the kinds of their weights, and where its samples begin.

    kinds: of `layers`; nothing where a layer's is unknown.
    """

    scope: Scope
    layers: tuple[int, ...]
    starts: tuple[int, ...]
    kinds: tuple[Kind | None, ...]

    def nearest(self, n: int) -> int:
        """The longest length up to `n`, or the shortest."""
        return max([k for k in self.scope.lengths if k <= n], default=min(self.scope.lengths))

    @property
    def longest(self) -> int:
        return max(self.scope.lengths)


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
    def of(cls, part: Cells) -> "Part":
        """From what a results file kept of it."""
        cells: Cells = {k: tuple(v) if isinstance(v, list) else v for k, v in part.items()}
        return cls(**cells)

    def job(self, function: Callable[..., list[Cells]], **more: Any) -> Job:
        """The part as a job of a function that `task_of_part` marks; more: its other arguments."""
        return Job(function, {"part": asdict(self), **more})

    def windows(self) -> "list[Part]":
        """Each window as a part of its own."""
        return [replace(self, starts=(start,), first=self.first + k) for k, start in enumerate(self.starts)]

    def split(self, layers: int) -> "list[Part]":
        """Parts with at most so many layers each, at all windows."""
        return [replace(self, layers=self.layers[k : k + layers]) for k in range(0, len(self.layers), layers)]

    def capture(self, reader: Reader) -> Capture:
        """The model at the windows."""
        return reader.capture(self.n, self.starts)

    def measure(self, reader: Reader, **options: Any) -> list[tuple[Measurement, Cells]]:
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


def task_of_part(measure: Callable[..., Any]) -> Callable[..., list[Cells]]:
    """A task whose first argument beside the reader is a part."""

    @functools.wraps(measure)
    def read(reader: Reader, part: Cells, **more: Any) -> Any:
        return measure(reader, Part.of(part), **more)

    return task(read)


def parts(
    setting: Setting, lengths: Sequence[int] | None = None, *, samples: int | None = None, layers: int = _LAYERS
) -> list[Part]:
    """A setting in parts, the longest first; windows of few tokens go together. layers: at most so many in a part."""
    q = setting.scope
    starts = setting.starts[:samples]
    cut = []
    for n in sorted(set(q.lengths if lengths is None else lengths), reverse=True):
        size = max(1, LOCK_STEP // n)
        for first in range(0, len(starts), size):
            some = Part(n, starts[first : first + size], first, setting.layers, q.map, q.tol, q.certify)
            cut += some.split(layers)
    return cut


def settle(reader: Reader, scope: Scope) -> Setting:
    """Check a scope before any work: the longest sample is run once and must fit, one layer of the shortest measured."""
    lengths = scope.lengths
    longest = max(lengths)
    starts = reader.starts(scope.samples, longest, scope.seed)
    reader.window(min(lengths), 0)  # a length below the special tokens is refused here
    captured = reader.capture(longest, starts[:1])
    layers = tuple(range(captured.num_layers)) if scope.layers is None else tuple(dict.fromkeys(scope.layers))
    if not layers:
        raise BadInputError("expected a layer or more, got none; leave the layers out for all of them")
    outside = [layer for layer in layers if layer >= captured.num_layers]
    if outside:
        raise BadInputError(
            f"expected layers from 0 to {captured.num_layers - 1}, got {outside[0]!r}; {captured.model} has no other"
        )
    captured.sample.check_room(layers[0], Which(scope.map))
    kinds = tuple(captured.sample.kind(layer) for layer in layers)
    setting = Setting(scope, layers, tuple(starts), kinds)
    first = parts(setting, [min(lengths)], samples=1)[0]
    replace(first, layers=layers[:1]).measure(reader, closed=False)  # refuses a map that the model lacks, and bad options
    return setting


def setting_of(
    model: Model | nn.Module | str | Path,
    text: str | Sequence[int] | None,
    scope: ScopeOptions,
    usual: Callable[[Reader, int], tuple[int, ...]] | None = None,
) -> tuple[Reader, Setting]:
    """A model and a text, and a scope that they have, its lengths and layers filled in.

    usual: the lengths for so many samples where none are named, `fitting_lengths` by default.
    """
    lengths = scope.get("lengths")
    options: Any = scope | {"lengths": LENGTHS if lengths is None else lengths}  # a scope makes tuples of its lists
    wanted = Scope(**options)
    reader = Reader.of(model, text)
    fits = wanted if lengths is not None else replace(wanted, lengths=(usual or fitting_lengths)(reader, wanted.samples))
    return reader, settle(reader, fits)


def fitting_lengths(reader: Reader, samples: int) -> tuple[int, ...]:
    """The usual lengths that the model has positions for and the text has tokens for; at least the shortest."""
    extra = len(reader.text.prefix) + len(reader.text.suffix)
    config = getattr(reader.model.module, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else math.inf
    most = min(limit, len(reader.text) + extra - samples + 1)
    return tuple(n for n in LENGTHS if extra < n <= most) or LENGTHS[:1]


def one_length(reader: Reader, samples: int) -> tuple[int, ...]:
    """The longest of the usual lengths up to 128."""
    usual = fitting_lengths(reader, samples)
    return (max([n for n in usual if n <= 128], default=usual[0]),)
