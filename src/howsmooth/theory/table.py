"""All bounds of a layer in one table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

from howsmooth.errors import BadInputError
from howsmooth.theory.bound import Bound


@final
@dataclass(frozen=True)
class Bounds(Sequence[Bound]):
    """Bounds beside what was measured, if anything was.

    measured: an `L` that is attained: at the point, or somewhere in the ball. No upper bound lies below it.
    """

    rows: tuple[Bound, ...]
    where: str
    measured: float | None = None

    @overload
    def __getitem__(self, index: int) -> Bound: ...
    @overload
    def __getitem__(self, index: slice) -> "Bounds": ...
    def __getitem__(self, index: int | slice) -> "Bound | Bounds":
        return Bounds(self.rows[index], self.where, self.measured) if isinstance(index, slice) else self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Bound]:
        return iter(self.rows)

    def by_id(self, id: str) -> Bound:
        """The row of that name."""
        for row in self.rows:
            if row.id == id:
                return row
        raise BadInputError(f"expected one of {', '.join(r.id for r in self.rows)}, got {id!r}; pick a row of this table")

    @property
    def upper(self) -> Bound | None:
        """The smallest upper bound that applies."""
        rows = [r for r in self.rows if r.side == "upper" and r.log_value is not None]
        return min(rows, key=lambda r: r.log_value if r.log_value is not None else math.inf, default=None)

    @property
    def lower(self) -> Bound | None:
        """The largest lower bound that applies to this number of tokens."""
        rows = [r for r in self.rows if r.side == "lower" and r.log_value is not None and not r.mean_field]
        return max(rows, key=lambda r: r.log_value if r.log_value is not None else -math.inf, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; infinite values are None, their logarithm is there."""
        rows = []
        for r in self.rows:
            row = r.to_dict()
            row["value"] = row["value"] if row["value"] is None or math.isfinite(row["value"]) else None
            row["ratio"] = None if self.measured is None else _finite(r.ratio(self.measured))
            rows.append(row)
        return {"where": self.where, "measured": self.measured, "bounds": rows}

    def __str__(self) -> str:
        head = f"bounds {self.where}" + ("" if self.measured is None else f"; measured L = {self.measured:.6g}")
        width = max((len(r.id) for r in self.rows), default=2)
        side = max((len(r.name) for r in self.rows), default=4)
        lines = [head]
        for r in self.rows:
            if r.log_value is None:
                lines.append(f"  {r.id:<{width}}  {r.side}  {r.name:<{side}}  does not apply: {r.reason}")
                continue
            ratio = r.ratio(self.measured) if self.measured else None
            far = "" if ratio is None else f"  {_number(ratio)} × L"
            lines.append(f"  {r.id:<{width}}  {r.side}  {r.name:<{side}}  {number(r):>10}{far}  [{r.source}]")
        return "\n".join(lines)

    __repr__ = __str__


def number(bound: Bound) -> str:
    """A bound's value for a table, as a power of ten where it is large."""
    if bound.log_value is None:
        return "–"
    return (
        _number(bound.value)
        if abs(bound.log_value) < 600 and bound.value is not None
        else f"10^{bound.log_value / math.log(10):.1f}"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
