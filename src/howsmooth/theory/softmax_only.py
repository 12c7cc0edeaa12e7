"""What is proved of softmax attention alone: the one place that says so of every other kind."""

from dataclasses import replace

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Kind, Softmax
from howsmooth.theory.bound import Bound


def not_softmax(kind: Kind) -> str | None:
    """Why theorems on softmax say nothing of a kind; None where they do."""
    return None if kind == Softmax() else f"proved for softmax attention, this layer's is {kind!r}"


def check_softmax(kind: Kind, what: str) -> None:
    """Refuse another kind where only softmax is known."""
    if kind != Softmax():
        raise BadInputError(f"expected softmax attention for {what}, got {kind!r}; it is not derived for that kind")


def without(rows: list[Bound], reason: str | None) -> list[Bound]:
    """Rows that do not apply, for that reason; as they are where there is none."""
    return rows if reason is None else [replace(row, log_value=None, reason=reason) for row in rows]
