"""What is proved of softmax attention alone: the one place that says so of every other kind."""

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Kind, Softmax
from howsmooth.theory.bound import first_reason


def not_softmax(kind: Kind, *, sink: bool = False) -> str | None:
    """Why theorems on softmax say nothing of a kind; None where they do. sink: whether they allow a learned sink."""
    return first_reason(
        (not isinstance(kind, Softmax), f"proved for softmax attention, this layer's is {kind!r}"),
        (not sink and kind != Softmax(), "not proved beside a learned sink"),
    )


def check_softmax(kind: Kind, what: str) -> None:
    """Refuse another kind where only softmax is known."""
    if kind != Softmax():
        raise BadInputError(f"expected softmax attention for {what}, got {kind!r}; it is not derived for that kind")
