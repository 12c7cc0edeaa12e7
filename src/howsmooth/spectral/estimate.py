"""What a solver hands back, and the answer made of it: a two-sided estimate of a Jacobian's norm."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.results import OneNumber, Results, axes_for, draw_intervals, html_table, plain_text, shares
from howsmooth.spectral.operator import Operator

if TYPE_CHECKING:
    from howsmooth.results import Axes

Status = Literal["dense", "certified", "converged", "step limit"]


@dataclass(frozen=True)
class Solution:
    """The largest singular values of one map, in order: as the run saw them, their upper ends, and orthonormal directions.

    energy: `|J q|²` of the start, which tells whether squares stayed in the range of the working precision.
    """

    values: tuple[float, ...]
    uppers: tuple[float, ...]
    directions: Float[Tensor, "k *in"]
    steps: int
    converged: bool
    energy: float = 1.0

    @property
    def value(self) -> float:
        """The largest one, `|J direction|`."""
        return self.values[0]

    @property
    def upper(self) -> float:
        return self.uppers[0]

    @property
    def direction(self) -> Tensor:
        """A unit vector."""
        return self.directions[0]

    def scaled(self, size: float) -> "Solution":
        """The solution of the map times a number."""
        values, uppers = (tuple(size * s for s in side) for side in (self.values, self.uppers))
        return replace(self, values=values, uppers=uppers)


class Solver(Protocol):
    """Anything that finds the `k` largest singular values of a batch of operators."""

    def solve(
        self, operator: Operator, tol: float, certify: float | None, seeds: Sequence[int], *, k: int = 1
    ) -> list[Solution]:
        """seeds: one per item."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Estimate(OneNumber):
    """A local Lipschitz constant, with a lower and an upper bound: `lower ≤ ‖J‖₂ ≤ upper`.

    Attributes:
        value: `|J direction| / |direction|`, evaluated in `precision`: attained, up to the rounding of one product.
        lower: What is proved of it, whatever that rounding did; `value` itself where nothing is proved of rounding
            (`assumes`).
        upper: Holds with probability `confidence` over the random start (1.0 from a dense decomposition or a theorem).
        confidence: The probability with which `upper` holds.
        assumes: What both ends rest on beside the start (docs/explanation/theory.md §2): `upper` on rounding errors that do
            not know the start, unless it is dense, rigorous or a theorem's; `lower` on nothing for softmax attention and
            norms, else on rounding errors that are small beside the product.
        status: `dense` (decomposed), `certified` (`upper/lower` is as narrow as asked), `converged` (the run has converged
            to `tol`: a larger value was looked for and not seen, the interval may be wide), `step limit` (neither; `lower`
            and `upper` still hold).
        direction: The input direction that is stretched most, the shape of one input.
        steps: Products with `J` and with `Jᵀ`.
        precision: In which `value` was evaluated.
        tol: The accuracy of `value` that was wanted.
        certify: The width of the interval that was wanted, if any.
        seed: Of the random start.
        noise: Relative error of the products that were iterated on; `upper` is widened by it.
        point: Where `value` is attained, for the largest constant over a neighbourhood; nothing at an input.
        around: What the upper end over a neighbourhood is made of.
        split: Of a measure, whether the largest stretch takes splitting an atom: half of it moves along its row of
            `direction`, half against it, and all other rows are zero.
    """

    value: float
    lower: float
    upper: float
    confidence: float
    status: Status
    direction: Float[Tensor, "..."]
    steps: int
    precision: str
    tol: float
    seed: int
    certify: float | None = None
    noise: float = 0.0
    split: bool = False
    assumes: str = ""
    point: Float[Tensor, "..."] | None = None
    around: str = ""

    @property
    def width(self) -> float:
        """Relative width of the interval, `upper/lower − 1`."""
        if self.lower == 0:
            return 0.0 if self.upper == 0 else float("inf")
        return self.upper / self.lower - 1

    @property
    def note(self) -> str:
        """What happened, and which argument changes it."""
        if self.point is not None:
            upper = self.around or "that at the input"
            return f"The value is attained at point; the upper end is made of {upper}. {self._search_note}"
        if self.status == "dense":
            return "The Jacobian was formed and decomposed, so both ends are exact to rounding."
        wanted = "tol" if self.certify is None else "certify"
        if self.status == "certified":
            return f"The interval is {self.width:.2g} wide relative to its lower end, as narrow as {wanted} asks."
        if self.status == "converged":
            return (
                f"The value has converged to tol={self.tol:g}; the interval is {self.width:.2g} wide relative to its lower "
                "end, and certify=0.02 would narrow it to 2 %."
            )
        if self.value - self.lower > 0.5 * (self.tol if self.certify is None else self.certify) * self.value:
            return (
                f"Rounding alone leaves the interval wider than {wanted} asks; both ends hold all the same. Terms of this map "
                f"cancel here, or its logits are large: raise {wanted}."
            )
        return (
            f"{self.steps} steps were not enough for {wanted}={self.tol if self.certify is None else self.certify:g}; both "
            f"ends hold all the same. Raise max_steps in solver=GolubKahan(max_steps=…), or raise {wanted}."
        )

    @property
    def _search_note(self) -> str:
        """What became of the search for the value."""
        if self.status == "certified":
            return f"The interval is {self.width:.2g} wide relative to its lower end, as narrow as was asked."
        if self.status == "converged":
            return "The search for the value has converged."
        return "The search for the value stopped while it still gained; raise steps."

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON; the direction and the point are left out."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("direction", "point")}
        return {**plain, "note": self.note}

    def __str__(self) -> str:
        sure = "certain" if self.confidence == 1 else f"probability {self.confidence:.9g}"
        return f"{self.value:.6g} in [{self.lower:.6g}, {self.upper:.6g}] ({self.status}, {sure}, {self.steps} steps)"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        said = {name: getattr(self, name) for name in ("value", "lower", "upper", "confidence", "status", "steps", "precision")}
        return html_table("local Lipschitz constant", [said | {"note": self.note}])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """How much of the worst direction falls on each token, as bars."""
        ax = axes_for(ax, title=plain_text(str(self)), xlabel="token", ylabel="share of the worst direction")
        each = shares(self.direction)
        ax.bar(range(len(each)), each)
        return ax


@final
class Estimates(Results[Estimate]):
    """One `Estimate` per input of a batch, in order, with the numbers also as tensors."""

    @property
    def status(self) -> tuple[Status, ...]:
        return tuple(e.status for e in self)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(e.steps for e in self)

    @property
    def direction(self) -> Float[Tensor, "batch ..."]:
        return torch.stack([e.direction for e in self])

    def __str__(self) -> str:
        return "\n".join(str(e) for e in self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        names = ("value", "lower", "upper", "status", "steps")
        rows = [{"input": i} | {name: getattr(e, name) for name in names} for i, e in enumerate(self)]
        return html_table("local Lipschitz constants", rows)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The constants of all inputs, with their intervals."""
        ax = axes_for(ax, xlabel="input", ylabel="local Lipschitz constant")
        draw_intervals(ax, range(len(self)), self)
        return ax
