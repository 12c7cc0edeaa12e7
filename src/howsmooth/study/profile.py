"""One row a layer: everything that was found of it at its longest length, and one word of advice."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

from howsmooth.study.answers import Level, ReportData
from howsmooth.study.ceilings import BesideBound, bounds_of
from howsmooth.study.charts import quoted
from howsmooth.study.fit import Break, GrowthFit
from howsmooth.study.heads import HeadRow
from howsmooth.study.jobs import grouped
from howsmooth.study.layers import LayerRow
from howsmooth.study.question import mean
from howsmooth.study.token import CARRIES, FrozenRow
from howsmooth.study.yardsticks import YardstickRow

_LEADS = 1.5  # times the next head, where one head leads its layer
_PART = 0.7  # of a layer's constant that a head alone has, where it carries the layer


@final
@dataclass(frozen=True)
class LeadingHead:
    """The head with the largest constant of its own, beside the next one and the whole layer at the same input."""

    head: int
    n: int
    value: float
    following: float
    whole: float | None

    @property
    def carries(self) -> bool:
        """Whether it stands out, and has most of its layer's constant alone."""
        return self.value > _LEADS * self.following and (self.whole is None or self.value > _PART * self.whole)


@final
@dataclass(frozen=True)
class Profile:
    """A layer at its longest length. `level` and `relative` are means over samples, all else is of the first sample.

    first: that sample's row.  bound: the least upper bound on `L` at this input.
    """

    level: Level
    relative: float | None
    first: LayerRow
    yardstick: YardstickRow | None
    frozen: FrozenRow | None
    head: LeadingHead | None
    fit: GrowthFit | None
    bound: BesideBound | None

    @property
    def layer(self) -> int:
        return self.level.layer

    @property
    def averaging(self) -> float | None:
        """What the layer's constant would be if it averaged its tokens."""
        return None if self.yardstick is None else _finite(self.yardstick.averaging)

    @property
    def times(self) -> float | None:
        """The constant over that of averaging."""
        return self.level.mean / self.averaging if self.averaging else None

    @property
    def gain(self) -> float | None:
        return None if self.yardstick is None else _finite(self.yardstick.gain)

    @property
    def relative_gain(self) -> float | None:
        """The share of the output that a random change of the same share of the input becomes, over that share."""
        value = self.first.value
        return self.relative * self.gain / value if self.relative and self.gain and value > 0 else None

    @cached_property
    def jump(self) -> Break | None:
        """The largest jump."""
        jumps = [b for b in self.fit.breaks if b.kind == "jump"] if self.fit else []
        return max(jumps, key=lambda b: abs(math.log(b.change.value)), default=None)

    @property
    def one_token(self) -> bool:
        """Whether one token carries more than half of the worst direction."""
        return self.level.n > 1 and (self.first.top_share or 0.0) > CARRIES

    @property
    def carrier(self) -> str:
        """The token and the head that lead, in a few words."""
        row = self.first
        token = None if row.top_token is None or row.top_share is None else f"token {row.top_token}"
        if token and row.top_word and row.top_share is not None:
            token = f"{token} {quoted(row.top_word)}"
        parts = [] if token is None or row.top_share is None else [f"{token} {100 * row.top_share:.0f} %"]
        return ", ".join([*parts, *([f"head {self.head.head}"] if self.head and self.head.carries else [])])


def _finite(value: float | None) -> float | None:
    """A number, or nothing where it is none."""
    return value if value is not None and math.isfinite(value) else None


def profiles(data: ReportData) -> dict[int, Profile]:
    """The profile of every layer."""
    return {profile.layer: profile for profile in _each(data)}


def _each(data: ReportData) -> Iterator[Profile]:
    yardsticks, frozen = {row.layer: row for row in data.of(YardstickRow)}, {row.layer: row for row in data.of(FrozenRow)}
    heads = grouped(data.of(HeadRow), lambda row: row.layer)
    rows = grouped(data.of(LayerRow), lambda row: (row.layer, row.n))
    uppers = [b for b in bounds_of(data) if b.bound.side == "upper" and b.bound.where == "point" and math.isfinite(b.log)]
    for layer in data.layers:
        level = data.last_level(layer)
        own = rows[layer, level.n]
        relative = [value for row in own if (value := _finite(row.relative)) is not None]
        bounds = [b for b in uppers if (b.row.layer, b.row.n) == (layer, level.n)]
        yield Profile(
            level,
            mean(relative) if len(relative) == len(own) else None,
            min(own, key=lambda row: row.sample),
            yardsticks.get(layer),
            frozen.get(layer),
            _leading(heads.get(layer, []), rows),
            data.fits.get(layer),
            min(bounds, key=lambda b: b.log, default=None),
        )


def _leading(heads: list[HeadRow], rows: dict[tuple[int, int], list[LayerRow]]) -> LeadingHead | None:
    n = max((row.n for row in heads), default=0)
    first, *others = sorted((row for row in heads if row.n == n), key=lambda row: -row.value) or [None]
    if first is None or not others or others[0] is None:
        return None
    whole = next((row.value for row in rows.get((first.layer, n), []) if row.sample == first.sample), None)
    return LeadingHead(first.head, n, first.value, others[0].value, whole)
