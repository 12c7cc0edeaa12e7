"""What the package measures: maps on token sequences that know their own derivative."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self, final, overload

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import REAL, Place, check_dense, place
from howsmooth.kernels.tensors import check_finite as check_finite  # with check_tokens, what other rooms ask of their input
from howsmooth.measures.measure import Measure
from howsmooth.spectral.operator import Composed, Operator


class Map(ABC):
    """A map of token sequences, (…, n, d) → (…, n, d_out), with a closed-form Jacobian.

    Maps compose from right to left like matrices: `(attention @ norm)(x) = attention(norm(x))`.
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """The width d of the tokens it takes."""

    @property
    @abstractmethod
    def out_width(self) -> int:
        """The width of the tokens it gives."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""

    @property
    def device(self) -> torch.device:
        """Where its weights are; the CPU where it has none."""
        return torch.device("cpu")

    @abstractmethod
    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Self:
        """A copy on another device, in another precision; `None` leaves either as it is."""

    def to(self, device: Place = None, dtype: torch.dtype | None = None) -> Self:
        """A copy in another precision or on another device, named as for a tensor: `to("cuda")`, `to(torch.float64)`."""
        return self.moved(*place(device, dtype))

    @abstractmethod
    def linearize(self, x: Float[Tensor, "batch n d"]) -> tuple[Float[Tensor, "batch n d_out"], Operator]:
        """The value at `x` and the Jacobian there, without a graph."""

    @overload
    def __call__(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d_out"]: ...
    @overload
    def __call__(self, x: Measure) -> Measure: ...
    def __call__(self, x: Tensor | Measure) -> Tensor | Measure:
        """The value at `x`, in plain torch operations: differentiable, and fit for torch.func.

        Of a measure, the push-forward `F(μ)`: every atom goes where it is sent by attention to the whole measure.
        """
        if isinstance(x, Measure):
            return self.push(x)
        x = self.prepare(x)
        items = x.reshape(-1, *x.shape[-2:])
        return self.to(x.device, x.dtype).value(items).reshape(*x.shape[:-1], -1)

    @abstractmethod
    def value(self, x: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d_out"]:
        """The value at tokens of the map's own precision."""

    def on(self, measure: Measure) -> "Map":
        """The map of points that acts on the atoms of `measure` as this one acts on measures; its masses stay."""
        raise BadInputError(
            f"expected a map that acts on measures, got {type(self).__name__}; pass its tokens as a tensor, or use Attention"
        )

    def push(self, measure: Measure) -> Measure:
        """`F(μ)`, in O(atoms) memory where no gradient is asked for."""
        f, x = self.on(measure), self.prepare(measure.points)
        if torch.is_grad_enabled() and x.requires_grad:
            return measure.moved(f(x))
        return measure.moved(f.linearize(x.detach()[None])[0][0])

    def __matmul__(self, inner: "Map") -> "Composition":
        return Composition(self, inner)

    def prepare(self, x: Tensor) -> Tensor:
        """Tokens checked and brought to the working precision: the wider of the map's and the tokens', float32 at least."""
        check_tokens(x)
        if x.shape[-1] != self.width:
            raise BadInputError(
                f"expected tokens of width {self.width}, got {x.shape[-1]} (shape {tuple(x.shape)}); tokens are rows"
            )
        return x.to(torch.promote_types(torch.promote_types(x.dtype, self.dtype), torch.float32))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Composition(Map):
    """`outer ∘ inner`."""

    outer: Map
    inner: Map

    def __post_init__(self):
        for part in (self.outer, self.inner):
            if not isinstance(part, Map):
                raise BadInputError(
                    f"expected two maps of this package to compose, got {type(part).__name__}; write a function for others"
                )
        if self.inner.out_width != self.outer.width:
            raise BadInputError(
                f"expected an inner map that gives tokens of width {self.outer.width}, got {self.inner.out_width}; "
                "compose maps whose widths agree"
            )

    @property
    def width(self) -> int:
        return self.inner.width

    @property
    def out_width(self) -> int:
        return self.outer.out_width

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.outer.dtype, self.inner.dtype)

    @property
    def device(self) -> torch.device:
        return self.outer.device if self.outer.device.type != "cpu" else self.inner.device

    def moved(self, device, dtype):
        return Composition(self.outer.to(device, dtype), self.inner.to(device, dtype))

    def __repr__(self) -> str:
        return f"{self.outer!r} @ {self.inner!r}"

    def on(self, measure: Measure) -> "Composition":
        return Composition(self.outer.on(measure), self.inner.on(measure))

    def value(self, x):
        return self.outer.value(self.inner.value(x))

    def linearize(self, x):
        middle, inner = self.inner.linearize(x)
        value, outer = self.outer.linearize(middle)
        return value, Composed(outer, inner)


def check_input(x: Tensor) -> None:
    """Refuse what is not a dense tensor of real numbers."""
    if not isinstance(x, Tensor):
        raise BadInputError(f"expected a torch tensor, got {type(x).__name__}; use torch.as_tensor(x)")
    check_dense(x, "the input")
    if x.dtype not in REAL:
        fix = "pass x.float()" if x.is_floating_point() else "pass embeddings, not token ids"
        raise BadInputError(f"expected a floating-point tensor of 16 bits or more, got {x.dtype}; {fix}")
    if x.numel() == 0:
        raise BadInputError(f"expected at least one token, got shape {tuple(x.shape)}; pass a longer input")


def check_tokens(x: Tensor) -> None:
    """Refuse what is not a sequence of real, floating-point tokens."""
    check_input(x)
    if x.ndim < 2:
        raise BadInputError(f"expected tokens of shape (n, d) or (batch, n, d), got {tuple(x.shape)}; tokens are rows")


def one_sequence(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Tokens of one input, checked, without a graph."""
    check_tokens(x)
    check_finite(x, "tokens")
    if x.ndim != 2:
        raise BadInputError(f"expected one input of shape (n, d), got {tuple(x.shape)}; pass one at a time")
    return x.detach()
