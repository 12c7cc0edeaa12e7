"""What a report is made of: rows, whoever measured them. Sentences, figures and sections read nothing else."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

from howsmooth.errors import BadInputError
from howsmooth.study.charts import ranges
from howsmooth.study.fit import Break, GrowthFit
from howsmooth.study.jobs import EstimateRow, Row, SomeRow, grouped, row_of
from howsmooth.study.layers import LayerRow
from howsmooth.study.lengths import Growth
from howsmooth.study.question import mean, questions

Token = tuple[str, str, bool]  # what stands before it, the token itself, whether the tokenizer added it


def _is_number(row: Row) -> bool:
    """Whether a row's value, where it has one, is finite."""
    return not isinstance(row, EstimateRow) or (isinstance(row.value, int | float) and math.isfinite(row.value))


@final
@dataclass(frozen=True)
class Methods:
    """What a reader needs to make the report again."""

    model: str
    text: str
    map: str
    command: str
    versions: Mapping[str, str]
    seed: int = 0
    tol: float = 1e-3
    date: str = ""
    seconds: float | None = None


@final
@dataclass(frozen=True)
class Level:
    """A layer at one length over its samples: geometric mean, extremes, largest upper end, mean radius of the tokens."""

    layer: int
    n: int
    mean: float
    low: float
    high: float
    upper: float
    radius: float
    samples: int

    @classmethod
    def of(cls, layer: int, n: int, rows: Sequence[LayerRow]) -> "Level":
        """From the rows of a layer at one length."""
        values, radii = [row.value for row in rows], [row.radius for row in rows]
        upper, radius = max(row.upper for row in rows), math.fsum(radii) / len(rows)
        return cls(layer, n, mean(values), min(values), max(values), upper, radius, len(rows))


@final
@dataclass(frozen=True)
class ReportData:
    """A whole report. Only rows of layers and methods are needed; a part that is empty is left out.

    rows: as the studies measure them, or dictionaries of their columns with a `kind`; `Question.row` says for every question
    of `howsmooth.study.questions()` what its rows hold. Rows of other kinds are left out.
    texts: by length, the tokens that the shares of layers belong to.  notes: findings in words, shown under the answer.
    """

    rows: Sequence[Row | Mapping[str, Any]]
    methods: Methods
    texts: Mapping[int, Sequence[Token]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    title: str = "How smooth is attention?"

    def __post_init__(self):
        questions()  # so that their rows are known
        read = [row if isinstance(row, Row) else row_of(row) for row in self.rows]
        object.__setattr__(self, "rows", [row for row in read if row is not None])
        if not self.of(LayerRow):
            count = f"none of {len(self.left_out)} that is finite" if self.left_out else "none"
            raise BadInputError(f"expected at least one measurement, got {count}; measure a layer first")
        for row in self.of(LayerRow):
            if row.value < 0:
                raise BadInputError(f"expected constants of at least 0, got {row.value} for layer {row.layer}; leave it out")
            words = self.texts.get(row.n, ())
            if words and row.shares is not None and len(row.shares) != len(words):
                raise BadInputError(
                    f"expected a share for each of {len(words)} tokens, got {len(row.shares)} for layer {row.layer}; match them"
                )

    def of(self, kind: type[SomeRow]) -> list[SomeRow]:
        """The rows of one type, in the order of layer, length and sample."""
        return self._kinds.get(kind, [])  # pyright: ignore[reportReturnType]

    @cached_property
    def _kinds(self) -> dict[type[Row], list[Row]]:
        there = [row for row in self.rows if isinstance(row, Row) and _is_number(row)]
        return grouped(sorted(there, key=lambda row: row.place), type)

    @property
    def left_out(self) -> list[Row]:
        """Rows whose value is not finite, or was not measured."""
        return [row for row in self.rows if isinstance(row, Row) and not _is_number(row)]

    @property
    def remarks(self) -> list[str]:
        """The notes, and what was left out."""
        layers = sorted({row.layer for row in self.left_out})
        count = f"{len(self.left_out)} value{'s' * (len(self.left_out) > 1)}"
        named = f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"
        return [*self.notes, *([f"{count} in {named} could not be measured or left the range of numbers."] if layers else [])]

    @cached_property
    def layers(self) -> list[int]:
        """The layers that were measured."""
        return self.growth.layers

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths that were measured."""
        return sorted({row.n for row in self.of(LayerRow)})

    @cached_property
    def summary(self) -> list[Level]:
        """One entry per layer and length."""
        groups = grouped(self.of(LayerRow), lambda row: (row.layer, row.n))
        return [Level.of(layer, n, rows) for (layer, n), rows in groups.items()]

    def last_level(self, layer: int) -> Level:
        """The entry of a layer at its longest length."""
        return max((level for level in self.summary if level.layer == layer), key=lambda level: level.n)

    def worst(self, layers: Collection[int] | None = None) -> Level:
        """The entry with the largest mean at the longest length, among these layers or all."""
        return max((self.last_level(k) for k in self.layers if layers is None or k in layers), key=lambda level: level.mean)

    @cached_property
    def growth(self) -> Growth:
        """The rows of layers as a study of growth: the fits, and a table to print."""
        return Growth(tuple(self.of(LayerRow)))

    @property
    def fits(self) -> dict[int, GrowthFit]:
        """By layer, where two lengths or more have a positive constant."""
        return self.growth.fits

    @cached_property
    def jumps(self) -> list[tuple[int, Break]]:
        """Every jump with its layer, the largest first."""
        jumps = [(layer, b) for layer, fit in self.fits.items() for b in fit.breaks if b.kind == "jump"]
        return sorted(jumps, key=lambda jump: -abs(math.log(jump[1].change.value)))

    @property
    def focus(self) -> int:
        """The layer that the headline names, and that every chart opens on."""
        return self.worst().layer

    @cached_property
    def shares(self) -> dict[int, dict[int, Sequence[float]]]:
        """By length, then by layer: each token's share of the direction stretched most, on the first sample."""
        shares: dict[int, dict[int, Sequence[float]]] = defaultdict(dict)
        for row in self.of(LayerRow):
            if row.shares is not None:
                shares[row.n].setdefault(row.layer, row.shares)
        return dict(sorted(shares.items()))
