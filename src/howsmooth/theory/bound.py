"""Bounds on a Lipschitz constant: one row, a table of them, and numbers rounded outward.

A row says a number, which side it is on, where it comes from, and when it may be used.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, final, overload

from howsmooth.results import OneNumber, axes_for, html_table, plain_text
from howsmooth.settings import choice

if TYPE_CHECKING:
    from howsmooth.results import Axes

Side = Literal["upper", "lower"]

# Relative slack that covers the rounding of the few dozen float64 operations behind a bound.
_OUTWARD = 1e-12


@final
@dataclass(frozen=True, repr=False)
class Bound(OneNumber):
    """A bound, or the reason why it does not apply.

    Attributes:
        id: As in the proofs: B7, D5.
        name: In words.
        side: "upper" or "lower".
        statement: The formula.
        source: The paper or proof.
        assumptions: What it needs of the layer.
        reason: Why it does not apply, where it does not.
        log_value: Natural logarithm of the bound, rounded outward: up for an upper bound, down for a lower one; None where
            the bound does not apply.
        value: Its exponential, possibly infinite (upper) or zero (lower).
        mean_field: It speaks of measures, so of every number of tokens (upper) or of some number of them (lower).
    """

    id: str
    name: str
    side: Side
    log_value: float | None
    statement: str
    source: str
    assumptions: str
    reason: str | None = None
    mean_field: bool = False

    @property
    def applies(self) -> bool:
        return self.log_value is not None

    @property
    def value(self) -> float | None:
        if self.log_value is None or self.log_value == -math.inf:
            return None if self.log_value is None else 0.0
        if self.side == "lower":
            return _exp(self.log_value) * (1 - _OUTWARD)
        return math.nextafter(_exp(self.log_value) * (1 + _OUTWARD), math.inf)  # not zero where the exponential underflows

    def ratio(self, measured: float | None) -> float | None:
        """bound / measured, possibly infinite; nothing where either is missing."""
        if self.log_value is None or measured is None or not measured > 0:
            return None
        return _exp(self.log_value - math.log(measured))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self) | {"applies": self.applies, "value": self.value}

    def __repr__(self) -> str:
        said = f"does not apply: {self.reason}" if self.value is None else f"{self.value:.6g}"
        return f"{self.id}, {self.side} bound, {self.name}: {said}"


def _row(
    side: Side,
    id: str,
    name: str,
    statement: str,
    source: str,
    assumptions: str,
    answer: float | str,
    *,
    mean_field: bool = False,
) -> Bound:
    """The bound with the logarithm `answer`, moved outward; or, where `answer` is a sentence, why it does not apply.

    A number that overflowed, or is none, says nothing: it becomes an upper bound of infinity, a lower one of zero.
    """
    if isinstance(answer, str):
        return Bound(id, name, side, None, statement, source, assumptions, answer, mean_field)
    if math.isnan(answer) or (side == "lower" and answer == math.inf):
        answer = math.inf if side == "upper" else -math.inf
    slack = 0.0 if math.isinf(answer) else _OUTWARD * (1 + abs(answer))
    log_value = answer + (slack if side == "upper" else -slack)
    return Bound(id, name, side, log_value, statement, source, assumptions, None, mean_field)


at_most, at_least = partial(_row, "upper"), partial(_row, "lower")


def first_reason(*cases: tuple[bool, str]) -> str | None:
    """The sentence of the first case that is so."""
    return next((why for so, why in cases if so), None)


@final
@dataclass(frozen=True)
class Bounds(Sequence[Bound]):
    """All bounds of a layer beside what was measured, if anything was.

    Attributes:
        measured: An `L` that is attained: at the point, or somewhere in the ball. No upper bound lies below it.
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

    def by_id(self, id: str) -> Bound:
        """The row of that name."""
        rows = {row.id: row for row in self.rows}
        return rows[choice(id, "a row of this table", tuple(rows))]

    @property
    def upper(self) -> Bound | None:
        """The smallest upper bound that applies."""
        return min((r for r in self.rows if r.side == "upper" and r.applies), key=attrgetter("log_value"), default=None)

    @property
    def lower(self) -> Bound | None:
        """The largest lower bound that applies to this number of tokens."""
        rows = (r for r in self.rows if r.side == "lower" and r.applies and not r.mean_field)
        return max(rows, key=attrgetter("log_value"), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; infinite numbers are None, and the logarithm of a value past float64 is there."""
        rows = [
            r.to_dict()
            | {"value": _finite(r.value), "log_value": _finite(r.log_value), "ratio": _finite(r.ratio(self.measured))}
            for r in self.rows
        ]
        return {"where": self.where, "measured": self.measured, "bounds": rows}

    def __str__(self) -> str:
        head = f"bounds {self.where}" + ("" if self.measured is None else f"; measured L = {self.measured:.6g}")
        width = max((len(r.id) for r in self.rows), default=2)
        side = max((len(r.name) for r in self.rows), default=4)
        lines = [head]
        for r in sorted(self.rows, key=lambda r: (not r.applies, r.side, r.log_value or 0.0)):
            row = f"  {r.id:<{width}}  {r.side}  {r.name:<{side}}"
            ratio = r.ratio(self.measured)
            far = "" if ratio is None else f"  {ratio:.4g} × L"
            lines.append(f"{row}  {_told(r):>10}{far}  [{r.source}]" if r.applies else f"{row}  does not apply: {r.reason}")
        ends = [f"{word} {_told(r)} ({r.id})" for word, r in (("at least", self.lower), ("at most", self.upper)) if r]
        return "\n".join([*lines, " and ".join(ends)] if ends else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows: list[dict[str, object]] = []
        for r in self.rows:
            told = {"id": r.id, "side": r.side, "bound": r.name, "value": r.value, "× L": r.ratio(self.measured)}
            rows.append(told | {"source": r.source, "why not": r.reason})
        return html_table(f"bounds {self.where}", rows)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The bounds that apply and are finite, as marks in powers of ten, beside what was measured."""
        rows = [r for r in self.rows if r.log_value is not None and math.isfinite(r.log_value)]
        ax = axes_for(ax, title=plain_text(f"bounds {self.where}"), xlabel="log10 L")
        for side, mark in (("upper", "<"), ("lower", ">")):
            some = [i for i, r in enumerate(rows) if r.side == side]
            ax.plot([(rows[i].log_value or 0.0) / math.log(10) for i in some], some, mark, label=f"{side} bounds")
        ax.set_yticks(range(len(rows)), [plain_text(f"{r.id} {r.name}") for r in rows])
        if self.measured is not None and self.measured > 0:
            ax.axvline(math.log10(self.measured), color="black", label=f"measured {self.measured:.4g}")
        ax.legend()
        return ax


def _exp(log: float) -> float:
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def log_add(*logs: float) -> float:
    """log Σ exp(logs), without overflow; −inf stands for zero, NaN stays NaN."""
    if any(math.isnan(v) for v in logs):
        return math.nan
    top = max(logs)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(v - top) for v in logs))


def log_of(value: float) -> float:
    """log value, −inf for zero; NaN stays NaN."""
    return -math.inf if value <= 0 else math.log(value)


def least_of(*bounds: float) -> float:
    """The least of several upper bounds; NaN says nothing, so it counts as infinity."""
    return min(math.inf if math.isnan(b) else b for b in bounds)


def _told(bound: Bound) -> str:
    """The value of a bound that applies; near the ends of float64 as a power of ten."""
    assert bound.log_value is not None
    near = abs(bound.log_value) < 600 or math.isinf(bound.log_value)
    return f"{bound.value:.4g}" if near else f"10^{bound.log_value / math.log(10):.1f}"
