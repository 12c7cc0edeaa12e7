"""What a report is made of: plain numbers, whoever measured them. The page and the figures read nothing else."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final

from howsmooth.errors import BadInputError
from howsmooth.study.fit import GrowthFit, fit_growth


@final
@dataclass(frozen=True)
class Measurement:
    """One layer on one sample of text of n tokens: the estimate, and `radius`, the root mean square norm of the tokens."""

    layer: int
    n: int
    sample: int
    value: float
    upper: float
    confidence: float
    status: str
    radius: float
    seconds: float = 0.0
    seed: int = 0


@final
@dataclass(frozen=True)
class HeadMeasurement:
    """One head of a layer alone, through its share of the output projection."""

    layer: int
    head: int
    n: int
    value: float


@final
@dataclass(frozen=True)
class Token:
    """A piece of the text; `gap` is what stands between the previous piece and this one."""

    text: str
    gap: str = ""
    special: bool = False


@final
@dataclass(frozen=True)
class Passage:
    """A sample of text and, for each layer, every token's share `|v_i|²` of the unit direction it stretches most."""

    tokens: tuple[Token, ...]
    shares: Mapping[int, Sequence[float]]

    def __post_init__(self):
        for layer, shares in self.shares.items():
            if len(shares) != len(self.tokens):
                raise BadInputError(
                    f"expected a share for each of {len(self.tokens)} tokens, got {len(shares)} for layer {layer}; match them"
                )

    @property
    def n(self) -> int:
        return len(self.tokens)


@final
@dataclass(frozen=True)
class BoundRow:
    """One bound for one layer at one length, beside what was measured there. `log_value` is None where it does not apply."""

    layer: int
    n: int
    where: Literal["point", "ball"]
    id: str
    name: str
    side: Literal["upper", "lower"]
    log_value: float | None
    measured: float
    statement: str = ""
    source: str = ""
    reason: str | None = None


@final
@dataclass(frozen=True)
class SplitRow:
    """Mass splitting at one input: the constant when atoms move whole, and what splitting one adds (docs/theory.md, M1)."""

    layer: int
    n: int
    whole: float
    split: float


@final
@dataclass(frozen=True)
class WorstRow:
    """The worst input found for a layer beside the text: tokens of the same radius, and the smallest upper bound there."""

    layer: int
    n: int
    radius: float
    text: float
    worst: float
    log_ceiling: float | None = None
    how: str = ""


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
class Cell:
    """One layer at one length over its samples: geometric mean, extremes, largest upper end, mean radius."""

    layer: int
    n: int
    mean: float
    low: float
    high: float
    upper: float
    radius: float
    samples: int


@final
@dataclass(frozen=True)
class ReportData:
    """A whole report. Only measurements and methods are needed; a part that is empty is left out.

    notes: findings in words, shown under the answer.
    """

    measurements: tuple[Measurement, ...]
    methods: Methods
    heads: tuple[HeadMeasurement, ...] = ()
    passages: tuple[Passage, ...] = ()
    bounds: tuple[BoundRow, ...] = ()
    splits: tuple[SplitRow, ...] = ()
    worst: tuple[WorstRow, ...] = ()
    notes: tuple[str, ...] = ()
    title: str = "How smooth is attention?"

    def __post_init__(self):
        if not self.measurements:
            raise BadInputError("expected at least one measurement, got none; measure a layer first")
        bad = [m for m in self.measurements if not (math.isfinite(m.value) and m.value >= 0)]
        if bad:
            raise BadInputError(f"expected finite constants, got {bad[0].value} for layer {bad[0].layer}; leave that row out")

    @property
    def layers(self) -> list[int]:
        return sorted({m.layer for m in self.measurements})

    @property
    def lengths(self) -> list[int]:
        return sorted({m.n for m in self.measurements})

    @cached_property
    def cells(self) -> list[Cell]:
        """By layer, then by length."""
        groups: dict[tuple[int, int], list[Measurement]] = defaultdict(list)
        for m in self.measurements:
            groups[m.layer, m.n].append(m)
        return [_cell(layer, n, rows) for (layer, n), rows in sorted(groups.items())]

    @cached_property
    def fits(self) -> dict[int, GrowthFit]:
        """By layer, where two lengths or more have a positive constant."""
        found = {}
        for layer in self.layers:
            rows = [m for m in self.measurements if m.layer == layer and m.value > 0]
            if len({m.n for m in rows}) >= 2:
                found[layer] = fit_growth([m.n for m in rows], [m.value for m in rows], [m.sample for m in rows])
        return found


def _cell(layer: int, n: int, rows: list[Measurement]) -> Cell:
    values = [m.value for m in rows]
    mean = math.exp(math.fsum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0
    return Cell(
        layer=layer,
        n=n,
        mean=mean,
        low=min(values),
        high=max(values),
        upper=max(m.upper for m in rows),
        radius=math.fsum(m.radius for m in rows) / len(rows),
        samples=len(rows),
    )
