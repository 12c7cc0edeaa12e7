"""Settings that come from outside, each kind checked in one place and handed on as Python's own: numbers, whole numbers, flags,
words, choices and lists. Tensors have their gate in `kernels/tensors.py`.

expected, fix: what the sentence of a refusal begins and ends with, `expected …, got …; fix`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from torch import Tensor

from howsmooth.errors import BadInputError

_SHOWN = 40  # characters of a value that a refusal repeats
_LIKE = 0.7  # of two names, from which on one is taken for the other misspelt
_SEEDS = 2**63  # torch's generators take these

Per = Literal["token", "sequence"]
LayerChoice = Literal["all"] | str | Sequence[int]
PER: tuple[Per, ...] = ("token", "sequence")
Positions = Iterable[int] | Iterable[bool] | Tensor

_Name = TypeVar("_Name", bound=str)


def number(
    value: Any, expected: str, fix: str, *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> float:
    """A finite real number, numpy's among them; a boolean is none.

    >>> number(2, "a radius > 0", "give a length", above=0)
    2.0
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            real = float(value)
        except OverflowError:  # a whole number that no float holds
            real = math.inf
        if math.isfinite(real) and real > above and least <= real < below:
            return real
    raise BadInputError(f"expected {expected}, got {shown(value)}; {fix}")


def whole(value: Any, expected: str, fix: str, *, least: int = 0, below: int = _SEEDS) -> int:
    """A whole number from `least` up to `below`, numpy's among them; a boolean is none, nor is 2.0."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < below:
        return int(value)
    raise BadInputError(f"expected {expected}, got {shown(value)}; {fix}")


def seed_of(value: Any) -> int:
    """A seed of torch's generators."""
    return whole(value, "a whole seed, at least 0", "0 is the usual one")


def flag(value: Any, name: str) -> bool:
    """True or False, numpy's among them; a word such as "False" is neither."""
    if type(value).__name__ == "bool":
        return bool(value)
    raise BadInputError(f"expected {name} as True or False, got {shown(value)}; pass one of them")


def words(value: Any, expected: str, fix: str) -> str:
    """A text that can be written down; a lone half of a surrogate pair cannot."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            broken = f"one with {value[error.start]!r} at character {error.start}"
            raise BadInputError(f"expected {expected}, got {broken}, half a character; {fix}") from None
        return value
    raise BadInputError(f"expected {expected}, got {shown(value)}; {fix}")


def choice(value: Any, expected: str, names: Sequence[_Name]) -> _Name:
    """One of the names."""
    for name in names:
        if isinstance(value, str) and value == name:
            return name
    fix = meant(value, names, "pick one of them") if isinstance(value, str) else "pick one of them"
    raise BadInputError(f"expected {expected} among {', '.join(names)}, got {shown(value)}; {fix}")


def meant(name: str, known: Iterable[str], otherwise: str = "check the name") -> str:
    """How a refusal of a name ends: with the one that was probably meant.

    >>> meant("layr", ["layer", "map"]), meant("unlike", ["layer", "map"])
    ('did you mean layer?', 'check the name')
    """
    near = get_close_matches(name, tuple(known), 1, _LIKE)
    return f"did you mean {near[0]}?" if near else otherwise


def items(value: Any, expected: str, fix: str) -> list[Any]:
    """What a list, tuple, array, tensor or any other iterable holds; a text or a dictionary is not taken for one."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        try:
            return value.tolist() if isinstance(value, Tensor) and value.ndim else list(value)
        except (TypeError, ValueError, RuntimeError):  # a single number in an array, a tensor that is not dense
            pass
    raise BadInputError(f"expected {expected}, got {shown(value)}; {fix}")


def moving(tokens: Positions, n: int) -> tuple[int, ...]:
    """Positions that may move among `n`, in order, from a list of them or from a mask that is true there."""
    fix = f"give positions from 0 to {n - 1}, or a mask with {n} entries"
    given = items(tokens, "tokens as a list of positions or a mask", fix)
    if given and all(type(t).__name__ in ("bool", "bool_") for t in given):  # numpy's among them
        if len(given) != n:
            raise BadInputError(f"expected a mask with one entry for each of {n} tokens, got {len(given)}; {fix}")
        given = [i for i, free in enumerate(given) if free]
    if not given:
        raise BadInputError(f"expected a token or more that may move, got none; {fix}")
    return tuple(sorted({whole(t, f"tokens that are positions from 0 to {n - 1}", fix, below=n) for t in given}))


def shown(value: Any) -> str:
    """A value as a refusal repeats it: short, in one line and in characters that any terminal has; else its type.

    >>> shown("a" * 99), shown([1, 2]), shown(None)
    ("'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…", 'list', 'None')
    """
    if value is not None and not isinstance(value, str | bool | Real):
        return type(value).__name__
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except ValueError:  # whole numbers of thousands of digits are not written out
        return f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
