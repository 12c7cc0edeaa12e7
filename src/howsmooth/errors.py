"""One exception family: everything the package refuses, in one sentence each."""

import sys
import warnings


class HowSmoothError(ValueError):
    """A request that cannot be answered. The message says what was expected, what came, and what to do."""


def reason(error: BaseException) -> str:
    """What an error says, in one short line: its type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the line outside of this package that led to it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "howsmooth":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def foreign(error: Exception) -> bool:
    """Whether an error is of someone else's code: neither ours nor memory that ran out."""
    return not isinstance(error, HowSmoothError) and type(error).__name__ != "OutOfMemoryError"


class BadInputError(HowSmoothError):
    """The tokens, weights or options do not fit."""


class BadFunctionError(HowSmoothError):
    """A function that has no usable derivative: it ignores its input, is random, or mixes the items of a batch."""


class NoConvergenceError(HowSmoothError):
    """The products were not finite, so no number can be trusted."""


class ResultsError(HowSmoothError):
    """A results file that cannot be opened, read or written: another program holds it, another version wrote it, no space."""


class WorkerError(HowSmoothError):
    """A sweep whose workers cannot be started or prepared, so that no task can be tried."""


class RefutedBoundError(HowSmoothError):
    """A bound of this package that is below what a measurement attains: an error of ours, which should be reported."""
