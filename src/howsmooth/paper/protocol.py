"""How much of the paper's experiments is measured, and what an experiment is."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from howsmooth.errors import BadInputError
from howsmooth.paper.drawing import Drawn
from howsmooth.paper.subjects import Description, describe
from howsmooth.settings import whole
from howsmooth.study import Question, Row, rare, read_text


@final
@dataclass(frozen=True)
class Protocol:
    """What is measured, and how much of it.

    lengths: of windows of text, to 98 as in the paper.  long: further ones, pretrained models only.  samples: windows a length.
    module_lengths: of windows for the module that the scripts read.  adversarial: lengths of eigenvector tokens.  worst:
    lengths of the worst configuration.  radii: of the ball that measures live in.  grid: points along a side of the splitting
    map.  cases: random layers for each length and size of logits.  models: pretrained ones, by name or folder.
    layers: of these; the first, the middle one and the last by default.  text: a file, Alice in Wonderland by default.
    device: where models read it, as for `load`.
    """

    lengths: tuple[int, ...] = tuple(range(2, 99, 2))
    long: tuple[int, ...] = tuple(range(102, 503, 40))
    samples: int = 10
    random_lengths: tuple[int, ...] = tuple(range(2, 99, 2))
    module_lengths: tuple[int, ...] = tuple(range(2, 99, 4))
    adversarial: tuple[int, ...] = tuple(range(2, 98, 5))
    worst: tuple[int, ...] = (7, 12, 22, 47, 97)
    radii: tuple[float, ...] = tuple(0.5 + 0.25 * k for k in range(13))
    tokens: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512)
    seeds: int = 8
    grid: int = 121
    cases: int = 100
    models: tuple[str, ...] = ("demo",)
    layers: tuple[int, ...] | None = None
    text: str | None = None
    device: str = "auto"
    seed: int = 0

    def with_samples(self, samples: int) -> "Protocol":
        """As many windows of text a length."""
        return replace(self, samples=whole(samples, "at least one sample a length", "the paper took 10", least=1))

    def with_lengths(self, lengths: Sequence[int]) -> "Protocol":
        """Windows of text of these lengths alone."""
        some = tuple(sorted({whole(n, "lengths of at least 2", "count tokens", least=2) for n in lengths}))
        if len(some) < 2:
            raise BadInputError(f"expected two lengths or more, got {list(lengths)}; an exponent takes two")
        return replace(self, lengths=some, long=(), random_lengths=some, module_lengths=some)

    def described(self) -> list[tuple[str, Description]]:
        """Every pretrained model, looked at once to know its layers."""
        return [(name, describe(name, self.text)) for name in self.models]

    def layers_of(self, count: int, few: bool = False) -> list[int]:
        """Which layers of a model with so many: the first, the middle one and the last. few: without the last.

        >>> PAPER.layers_of(12), PAPER.layers_of(6, few=True), PAPER.layers_of(1)
        ([0, 6, 11], [0, 3], [0])
        """
        if self.layers is None:
            return sorted({0, count // 2, count - 1})[: 2 if few else None]
        fix = f"a model has {count}"
        return sorted({whole(k, f"layers from 0 to {count - 1}", fix, below=count) for k in self.layers})

    def reading(self, name: str, masking: str, *, device: bool = False) -> dict[str, Any]:
        """A subject as an argument of a task: what `subject` takes. device: with the device, unless workers choose theirs."""
        given: dict[str, Any] = {"name": name, "masking": masking, "seed": self.seed}
        if self.text is not None:
            given |= {"passage": self.text, "digest": hashlib.sha256(read_text(self.text).encode()).hexdigest()[:16]}
        return given | ({"device": self.device} if device and self.device != "auto" else {})


PAPER = Protocol()
QUICK = Protocol(
    lengths=(4, 10, 22, 46, 98),
    long=(),
    samples=1,
    random_lengths=(4, 20, 98),
    module_lengths=(10, 22, 46, 98),
    adversarial=(2, 12, 32, 97),
    worst=(22,),
    radii=(1.0, 2.0, 3.0),
    tokens=(4, 8, 16, 32),
    seeds=2,
    grid=41,
    cases=3,
)


@dataclass(frozen=True, kw_only=True)
class MeasureRow(Row):
    """An answer that is of no layer."""

    model: str | None = rare()
    layer: int = rare()
    n: int = rare()

    def cells(self) -> dict[str, Any]:
        """A line of a table."""
        return {name: value for name, value in self.to_dict().items() if name != "kind"}


@final
@dataclass(frozen=True)
class Experiment:
    """A question of the paper, whose tasks take a protocol. text: what the page says of it.

    figure: drawn of the rows of its type, and named after the question.
    """

    question: Question[Any]
    text: str
    figure: Callable[[list[Any]], Drawn]

    def drawn(self, rows: Sequence[Row]) -> Drawn:
        """The figure of the rows that are its own; nothing where there are none."""
        own = [row for row in rows if isinstance(row, self.question.row)]
        return self.figure(own) if own else None
