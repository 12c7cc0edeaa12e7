"""The largest singular values of a Jacobian with an interval and two directions each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.results import OneNumber, axes_for, html_table, plain_text
from howsmooth.spectral.estimate import Estimate, Solution, Status
from howsmooth.spectral.operator import Operator, Rounded
from howsmooth.spectral.spaces import LOOSE, SMALLEST

if TYPE_CHECKING:
    from howsmooth.results import Axes

_TOLD = 0.05  # share of the width asked for from which on rounding is told as the cause of a wider one
_MOST_ROUNDING = 0.75  # share of the width asked for that may be rounding's, so that the run has the rest
_FLAT = 0.02  # share of the largest value within which others are as good as it


@final
@dataclass(frozen=True, eq=False)
class Spectrum(OneNumber):
    """The `k` largest singular values `σ_1 ≥ … ≥ σ_k` of a Jacobian; `Estimate` is the case `k = 1`.

    Attributes:
        values: Attained, so none is above the singular value of its number; evaluated in float64 where the map can be.
        lower: What is proved of `values`, whatever rounding did.
        upper: The singular values are at most these, all at once with probability `confidence` (docs/explanation/theory.md,
            Theorem 2.10).
        left: Orthonormal directions of the output, in the shape of `f(x)` with `k` leading: `J right = values · left`.
        right: Orthonormal directions of the input, in the shape of `x` with `k` leading.
        status: As of an `Estimate`, of all intervals: `certified` where each is as narrow as wanted, relative to its value or
            to a thousandth of the largest one.
        estimate: The largest one alone, with `confidence`, `steps`, `precision`, `assumes` and all else that both have.
    """

    values: Float[Tensor, " k"]
    lower: Float[Tensor, " k"]
    upper: Float[Tensor, " k"]
    left: Float[Tensor, "k *out"]
    right: Float[Tensor, "k *in"]
    status: Status
    estimate: Estimate

    def __len__(self) -> int:
        return len(self.values)

    @property
    def value(self) -> float:
        """The largest one, which is the local Lipschitz constant."""
        return self.estimate.value

    @property
    def confidence(self) -> float:
        return self.estimate.confidence

    @property
    def steps(self) -> int:
        """Products with `J` and with `Jᵀ`."""
        return self.estimate.steps

    @property
    def gap(self) -> float:
        """How far the second value is below the first one, relatively; 1 where there is none."""
        top = float(self.values[0])
        return 1 - float(self.values[1]) / top if len(self) > 1 and top > 0 else float(len(self) == 1)

    @property
    def rank(self) -> int:
        """How many of the values are not 0."""
        return int((self.values > 0).sum())

    @property
    def widths(self) -> Float[Tensor, " k"]:
        """Widths of the intervals, relative to their values or to a thousandth of the largest one."""
        return relative_widths(self.values, self.lower, self.upper)

    @property
    def _rounding(self) -> float:
        """How much of the width of the last interval is rounding, relative to its value or a thousandth of the largest."""
        proved = 2 * float((self.values - self.lower).max())
        return (proved + self.estimate.noise**0.5 * self.value) / max(float(self.values[-1]), SMALLEST * self.value)

    @property
    def note(self) -> str:
        """What happened, how many directions are as good as the worst one, and which values are 0."""
        widest = float(self.widths.max())
        if self.status == "dense":
            said = "The Jacobian was formed and decomposed, so all ends are exact to rounding."
        elif self.status == "certified":
            said = f"The widest interval is {widest:.2g} wide relative to its value, as narrow as was asked."
        elif self.status == "converged":
            said = (
                f"The values have converged; the widest interval is {widest:.2g} wide, and certify=0.02 would narrow it to 2 %."
            )
        elif self._rounding > _TOLD * (self.estimate.certify or LOOSE):
            said = (
                "Rounding leaves the interval of a small value wider than certify asks; all ends hold all the same. Pass x "
                "and f in float64, or raise certify."
            )
        else:
            said = (
                f"{self.steps} steps were not enough; all ends hold all the same. Raise max_steps in "
                "solver=GolubKahan(max_steps=…), or raise certify."
            )
        near = int((self.values >= (1 - _FLAT) * self.values[0]).sum())
        if self.rank > 1 and near > 1:
            more = " or more" if near == len(self) else ""
            said += f" The worst direction is one of {near}{more}: so many values are within 2 % of the largest one."
        if self.rank < len(self):
            said += f" The last {len(self) - self.rank} values are 0 to rounding: the Jacobian has rank {self.rank}."
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON; the directions are left out."""
        plain = {name: getattr(self, name).tolist() for name in ("values", "lower", "upper")}
        own = {name: getattr(self, name) for name in ("status", "gap", "rank", "note")}
        shared = {k: v for k, v in self.estimate.to_dict().items() if k not in ("value", "split", "around")}
        return shared | plain | own

    def __str__(self) -> str:
        sure = "certain" if self.confidence == 1 else f"probability {self.confidence:.9g}"
        values = ", ".join(f"{v:.6g}" for v in self.values.tolist())
        return f"{values} ({self.status}, {sure}, {self.steps} steps)"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns = zip(self.values.tolist(), self.lower.tolist(), self.upper.tolist(), strict=True)
        rows = [{"number": i + 1, "value": v, "lower": a, "upper": b} for i, (v, a, b) in enumerate(columns)]
        return html_table(f"largest singular values. {self.note}", rows)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The values in order, with their intervals."""
        ax = axes_for(ax, title=plain_text(self.note.split(". ")[0]), xlabel="number", ylabel="singular value")
        numbers = range(1, len(self) + 1)
        points = ax.plot(numbers, self.values.tolist(), "o")
        finite = torch.where(self.upper.isfinite(), self.upper, self.values)
        ax.vlines(numbers, self.lower.tolist(), finite.tolist(), colors=points[0].get_color())
        return ax


def relative_widths(values: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Of intervals, relative to values in order, the small ones to a thousandth of the largest; 0 where all is 0."""
    sizes = values.clamp_min(SMALLEST * float(values[0]))
    return torch.where(upper > lower, (upper - lower) / sizes, 0.0)


def narrow(values: Tensor, lower: Tensor, upper: Tensor, certify: float | None) -> bool:
    """Whether intervals are as narrow as wanted, or as they are by default."""
    return bool((relative_widths(values, lower, upper) <= (LOOSE if certify is None else certify)).all())


def width_of_run(
    solutions: Sequence[Solution], found: "AttainedValues", uppers: Float[Tensor, "batch k"], certify: float
) -> float | None:
    """How narrow a run has to be for intervals that rounding leaves wider than wanted; nothing where they are not.

    solutions: of a run whose own intervals are as narrow as wanted.  found, uppers: with all rounding.
    """
    rounding = 0.0
    for s, values, lower, upper in zip(solutions, found.values, found.lowers, uppers, strict=True):
        own = torch.tensor([s.values, s.uppers], dtype=torch.float64)
        beside = relative_widths(values, lower, upper) - relative_widths(own[0], own[0], own[1])
        if s.converged and not narrow(values, lower, upper, certify):
            rounding = max(rounding, float(beside.max()))
    return certify - rounding if 0 < rounding <= _MOST_ROUNDING * certify else None


class AttainedValues(NamedTuple):
    """Singular values of `J` on the span of a few directions, and what is proved of them whatever rounding did.

    errors: how much of that is rounding, by item; nothing where nothing is proved.  images: of the first direction of each.
    """

    values: Float[Tensor, "batch k"]
    lowers: Float[Tensor, "batch k"]
    errors: list[float] | None
    images: Float[Tensor, "batch *out"]
    left: Float[Tensor, "k batch *out"]
    right: Float[Tensor, "k batch *in"]


@torch.no_grad()
def attained_values(operator: Operator, solutions: Sequence[Solution]) -> AttainedValues:
    """The singular values of `J V` for orthonormal `V` in the span of each item's directions, which are below those of `J`."""
    v = torch.stack([s.directions.flatten(1) for s in solutions]).to(operator.device, operator.dtype)  # (batch, k, N)
    v = torch.linalg.qr(v.double().mT)[0].mT.to(operator.dtype)  # a GPU's float32 sums millions of squares to four digits
    product = operator.rounded(Rounded.exact(v.transpose(0, 1).unflatten(2, operator.in_shape).contiguous()))
    image = product.vector.flatten(2).transpose(0, 1)  # (batch, k, M)
    size = image.abs().amax((1, 2), keepdim=True)  # taken out, so that squares stay in range
    size = torch.where(size > 0, size, 1.0)
    u, small = torch.linalg.qr((image.double() / size).mT)  # a GPU decomposes no matrix of millions of rows
    inner, sigma, turn = torch.linalg.svd(small, full_matrices=False)
    u, turn = (u @ inner).to(image), turn.to(v)
    sigma = (sigma.double() * size[:, :, 0].double()).cpu()
    eps = torch.finfo(torch.float64).eps
    values = (1 - operator.noise) * sigma
    values = torch.where(sigma > (operator.noise + v.shape[1] * eps) * sigma[:, :1], values, 0.0)
    right = (turn @ v).transpose(0, 1).unflatten(2, operator.in_shape)
    left = u.permute(2, 0, 1).unflatten(2, operator.out_shape)
    images = left[0] * sigma[:, 0].to(left).reshape(-1, *[1] * len(operator.out_shape))
    if product.off is None:
        return AttainedValues(values, values, None, images, left, right)
    sums = 4 * (sum(operator.in_shape) + sum(operator.out_shape) + 4 * v.shape[1] ** 2) * eps
    off = product.off.flatten(2).norm(dim=-1).norm(dim=0).double().cpu()
    errors = (1 + sums) * (off + torch.finfo(torch.float64).tiny)
    lowers = ((1 - sums) * sigma - errors[:, None]).clamp_min(0.0).minimum(values)
    errors = torch.where(errors.isfinite(), errors, torch.inf)
    return AttainedValues(values, torch.where(lowers.isfinite(), lowers, 0.0), errors.tolist(), images, left, right)
