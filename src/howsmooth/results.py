"""How results show themselves: as the one number that they are, as a table in a notebook, as a figure."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, Self, SupportsFloat, SupportsIndex, TypeGuard, TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_VALUE: Callable[[Any], float | None] = attrgetter("value")


class OneNumber:
    """A result that is one number, its `value`: `float(r)`, `f"{r:.2f}"` and `r > 3` speak of it.

    Equality stays that of results, which have more to them than a number.
    """

    def __float__(self) -> float:
        value = _VALUE(self)
        if value is None:
            raise BadInputError(f"expected a {type(self).__name__} with a number, got one without; {self}")
        return float(value)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __lt__(self, other: object) -> bool:
        return float(self) < float(other) if _is_number(other) else NotImplemented

    def __le__(self, other: object) -> bool:
        return float(self) <= float(other) if _is_number(other) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return float(self) > float(other) if _is_number(other) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return float(self) >= float(other) if _is_number(other) else NotImplemented


def _is_number(other: object) -> TypeGuard[SupportsFloat]:
    """Whether a result can be compared with it: a number, a tensor of one entry, another result."""
    return isinstance(other, Real | OneNumber) or (isinstance(other, Tensor) and other.numel() == 1)


class TwoSided(Protocol):
    """A result with a value between two ends."""

    @property
    def value(self) -> float: ...
    @property
    def lower(self) -> float: ...
    @property
    def upper(self) -> float: ...
    @property
    def confidence(self) -> float: ...
    def to_dict(self) -> dict[str, Any]: ...


_Result = TypeVar("_Result", bound=TwoSided)


class Results(tuple[_Result, ...]):
    """Results in order, with their numbers also as tensors; a slice of them is of their kind."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> _Result: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice) -> "_Result | Self":
        return type(self)(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    @property
    def value(self) -> Float[Tensor, " results"]:
        return torch.tensor([r.value for r in self], dtype=torch.float64)

    @property
    def lower(self) -> Float[Tensor, " results"]:
        return torch.tensor([r.lower for r in self], dtype=torch.float64)

    @property
    def upper(self) -> Float[Tensor, " results"]:
        return torch.tensor([r.upper for r in self], dtype=torch.float64)

    @property
    def confidence(self) -> Float[Tensor, " results"]:
        return torch.tensor([r.confidence for r in self], dtype=torch.float64)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, one list entry for each result."""
        return {"items": [r.to_dict() for r in self]}


def html_table(title: str, rows: Sequence[Mapping[str, object]]) -> str:
    """A table for a notebook: numbers to five digits, all text escaped.

    >>> html_table("L", [{"layer": 0, "word": "<s>"}]).splitlines()[-2]
    '<tr><td>0</td><td>&lt;s&gt;</td></tr>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in (rows[0] if rows else ()))
    lines = ["".join(f"<td>{escape(_cell(value))}</td>" for value in row.values()) for row in rows]
    body = "\n".join(f"<tr>{cells}</tr>" for cells in lines)
    return f"<table>\n<caption>{escape(title)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def axes_for(ax: "Axes | None", **settings: Any) -> "Axes":
    """The axes to draw on, those of a new figure where none are given, with titles, labels and scales set."""
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.figure(layout="constrained").add_subplot()
    ax.set(**settings)
    return ax


def draw_intervals(ax: "Axes", places: Sequence[float], results: Sequence[Any], label: str | None = None) -> None:
    """Values as points, and from the lower to the upper end a line; an upper end that is infinite is left out."""
    drawn = ax.plot(places, [r.value for r in results], "o", label=label)
    uppers = [r.upper if math.isfinite(r.upper) else r.value for r in results]
    ax.vlines(list(places), [r.lower for r in results], uppers, colors=drawn[0].get_color())


def plain_text(text: str) -> str:
    """Text for a figure as it is: a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def shares(v: Tensor) -> tuple[float, ...]:
    """How much of a vector's square falls on each entry of its first axis; they sum to one."""
    energy = v.double().square().reshape(v.shape[0] if v.ndim else 1, -1).sum(-1)
    total = energy.sum()
    return tuple((energy / total if total > 0 else energy).tolist())
