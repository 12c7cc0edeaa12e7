"""One bound on a Lipschitz constant: a number, which side it is on, where it comes from, and when it may be used."""

import math
from dataclasses import dataclass
from typing import Any, Literal, final

Side = Literal["upper", "lower"]

# Relative slack that covers the rounding of the few dozen float64 operations behind a bound.
_OUTWARD = 1e-12


@final
@dataclass(frozen=True)
class Bound:
    """A bound, or the reason why it does not apply.

    log_value: natural logarithm of the bound, rounded outward: up for an upper bound, down for a lower one; None where the
    bound does not apply.  value: its exponential, possibly infinite (upper) or zero (lower).
    mean_field: it speaks of measures, so of every number of tokens (upper) or of some number of them (lower).
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
        if self.log_value is None:
            return None
        try:
            exact = math.exp(self.log_value)
        except OverflowError:
            exact = math.inf
        return outward(exact, self.side)

    def ratio(self, measured: float) -> float | None:
        """bound / measured, possibly infinite."""
        if self.log_value is None or not measured > 0:
            return None
        try:
            return math.exp(self.log_value - math.log(measured))
        except OverflowError:
            return math.inf

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "side": self.side,
            "applies": self.applies,
            "value": self.value,
            "log_value": self.log_value,
            "statement": self.statement,
            "source": self.source,
            "assumptions": self.assumptions,
            "reason": self.reason,
            "mean_field": self.mean_field,
        }


def outward(value: float, side: Side) -> float:
    """A float64 result moved outward by its rounding error."""
    return value * (1 + _OUTWARD) if side == "upper" else value * (1 - _OUTWARD)


def outward_log(log_value: float, side: Side) -> float:
    """A float64 logarithm moved outward by its rounding error."""
    if math.isinf(log_value):
        return log_value
    slack = _OUTWARD * (1 + abs(log_value))
    return log_value + slack if side == "upper" else log_value - slack


def log_add(*logs: float) -> float:
    """log Σ exp(logs), without overflow; −inf stands for zero."""
    top = max(logs)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(v - top) for v in logs))


def log_of(value: float) -> float:
    """log value, −inf for zero."""
    return math.log(value) if value > 0 else -math.inf
