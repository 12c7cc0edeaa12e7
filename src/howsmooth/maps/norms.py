"""LayerNorm and RMSNorm with closed-form derivatives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import check_tensor
from howsmooth.maps.base import Map
from howsmooth.maps.rounding import norm_errors, norm_rounding
from howsmooth.measures.measure import Measure
from howsmooth.settings import number
from howsmooth.spectral.operator import Operator, Rounded


@dataclass(frozen=True, eq=False, repr=False)
class _Norm(Map):
    """`α ⊙ (x − c)/√(mean (x − c)² + eps) + β`, where `c` is the mean of `x` or zero."""

    weight: Float[Tensor, " d"]
    bias: Float[Tensor, " d"] | None = None
    eps: float = 1e-5

    def __post_init__(self):
        check_tensor(self.weight, "norm weight", ("d",), "pass the module's own")
        if self.bias is not None:
            check_tensor(self.bias, "norm bias", (self.width,), "match the weight")
        object.__setattr__(self, "eps", number(self.eps, "a finite eps ≥ 0", "the usual value is 1e-5", least=0.0))

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    @property
    def out_width(self) -> int:
        return self.width

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def moved(self, device, dtype):
        weight = self.weight.to(device, dtype)
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return self if weight is self.weight and bias is self.bias else replace(self, weight=weight, bias=bias)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.width}, eps={self.eps:g}, {str(self.dtype).removeprefix('torch.')})"

    def on(self, measure: Measure):
        return self  # token by token, so masses play no part

    def center(self, x: Tensor) -> Tensor:
        """`x − c`."""
        return x

    def value(self, x):
        centered = self.center(x)
        value = self.weight * centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return value if self.bias is None else value + self.bias

    @torch.no_grad()
    def linearize(self, x: Float[Tensor, "batch *axes d"]) -> tuple[Tensor, "NormJacobian"]:
        norm = self.to(x.device, x.dtype)
        centered = norm.center(x)
        scale = (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        if bool((scale == 0).any()):
            raise BadInputError("expected tokens the norm can divide by, got a token of zero spread with eps = 0; set eps")
        if not bool(scale.isfinite().all()):
            raise BadInputError(f"expected tokens whose squares stay in the range of {x.dtype}, got larger ones; use float64")
        unit = centered / scale
        offset = ((x - centered).abs().amax(-1, keepdim=True) / scale).flatten(1).amax(-1)
        jacobian = NormJacobian(norm, unit, scale, offset)  # pyright: ignore[reportArgumentType]  a LayerNorm or an RMSNorm
        return norm.value(x), jacobian


@final
@dataclass(frozen=True, eq=False, repr=False)
class LayerNorm(_Norm):
    """LayerNorm over the last axis, `α ⊙ (x − mean x)/√(var x + eps) + β`.

    Attributes:
        weight: `α`, (d,).
        bias: `β`, (d,), or nothing.
        eps: Added to the variance.

    >>> LayerNorm(torch.ones(2), eps=0.0)(torch.tensor([[1.0, 3.0]])).tolist()
    [[-1.0, 1.0]]
    """

    def center(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


@final
@dataclass(frozen=True, eq=False, repr=False)
class RMSNorm(_Norm):
    """RMSNorm over the last axis, `α ⊙ x/√(mean x² + eps) + β`.

    Attributes:
        weight: `α`, (d,).
        bias: `β`, (d,), or nothing.
        eps: Added to the mean square.

    >>> RMSNorm(torch.ones(2), eps=0.0)(torch.tensor([[2.0, 2.0]])).tolist()
    [[1.0, 1.0]]
    """


@final
class NormJacobian(Operator):
    """`diag(α) (I − u uᵀ/d) C / s` token by token, `u` the normalised token, `C` the centring.

    `u` is centred, so `C` may come last in the product and first in its transpose. `offset` is the largest `|mean x|/s` of
    every item.
    """

    def __init__(
        self,
        norm: "_Norm",
        unit: Float[Tensor, "batch *axes d"],
        scale: Float[Tensor, "batch *axes 1"],
        offset: Float[Tensor, " batch"],
    ):
        self.norm, self.unit, self.scale, self.offset = norm, unit, scale, offset
        self.batch = unit.shape[0]
        self.in_shape = self.out_shape = tuple(unit.shape[1:])
        self.dtype, self.device = unit.dtype, unit.device

    def jvp(self, v):
        return self.norm.weight * self._project(v)

    def vjp(self, u):
        return self._project(self.norm.weight * u)

    def rounding(self, moved=0.0):
        return norm_rounding(self, moved)

    def rounded(self, v):
        return Rounded(self.jvp(v.vector), *norm_errors(self, v))

    def select(self, items):
        return NormJacobian(self.norm, self.unit[items], self.scale[items], self.offset[items])

    def _project(self, v: Tensor) -> Tensor:
        along = (self.unit * v).mean(-1, keepdim=True)
        return (self.norm.center(v) - self.unit * along) / self.scale


def over_heads(f: Callable[[Tensor], Tensor], t: Float[Tensor, "*axes heads n d_h"], width: int) -> Tensor:
    """`f` of what a norm of that width takes: every head by itself, or all heads of a token side by side."""
    if width == t.shape[-1]:
        return f(t)
    return f(t.transpose(-3, -2).flatten(-2)).unflatten(-1, (t.shape[-3], -1)).transpose(-3, -2)
