"""LayerNorm and RMSNorm with closed-form derivatives."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.maps import Map, check_finite
from howsmooth.errors import BadInputError
from howsmooth.measures.measure import Measure
from howsmooth.operators import Operator


@dataclass(frozen=True)
class _Norm(Map):
    """`α ⊙ (x − c)/√(mean (x − c)² + eps) + β`, where `c` is the mean of `x` or zero."""

    weight: Float[Tensor, " d"]
    bias: Float[Tensor, " d"] | None = None
    eps: float = 1e-5

    def __post_init__(self):
        for name in ("weight", "bias"):
            t = getattr(self, name)
            if t is None and name == "bias":
                continue
            if not isinstance(t, Tensor) or t.ndim != 1 or not t.is_floating_point():
                got = f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
                raise BadInputError(f"expected the norm's {name} as a floating-point vector, got {got}; pass the module's own")
        check_finite(self.weight, "norm weights")
        if self.bias is not None:
            if self.bias.shape != self.weight.shape:
                raise BadInputError(
                    f"expected a bias of shape {tuple(self.weight.shape)}, got {tuple(self.bias.shape)}; match the weight"
                )
            check_finite(self.bias, "norm biases")
        if not 0 <= self.eps < math.inf:
            raise BadInputError(f"expected a finite eps ≥ 0, got {self.eps}; the usual value is 1e-5")

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    @property
    def out_width(self) -> int:
        return self.width

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def to(self, dtype: torch.dtype, device: torch.device | None = None):
        weight = self.weight.to(device, dtype)
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return self if weight is self.weight and bias is self.bias else replace(self, weight=weight, bias=bias)

    def on(self, measure: Measure):
        return self  # token by token, so masses play no part

    def _center(self, x: Tensor) -> Tensor:
        return x

    def value(self, x):
        centered = self._center(x)
        value = self.weight * centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return value if self.bias is None else value + self.bias

    @torch.no_grad()
    def linearize(self, x):
        norm = self.to(x.dtype, x.device)
        centered = norm._center(x)
        scale = (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        if bool((scale == 0).any()):
            raise BadInputError("expected tokens the norm can divide by, got a token of zero spread with eps = 0; set eps")
        unit = centered / scale
        return norm.value(x), _NormJacobian(norm, unit, scale)


@final
@dataclass(frozen=True)
class LayerNorm(_Norm):
    """LayerNorm over the last axis, `α ⊙ (x − mean x)/√(var x + eps) + β`.

    >>> LayerNorm(torch.ones(2), eps=0.0)(torch.tensor([[1.0, 3.0]])).tolist()
    [[-1.0, 1.0]]
    """

    def _center(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


@final
@dataclass(frozen=True)
class RMSNorm(_Norm):
    """RMSNorm over the last axis, `α ⊙ x/√(mean x² + eps)`.

    >>> RMSNorm(torch.ones(2), eps=0.0)(torch.tensor([[2.0, 2.0]])).tolist()
    [[1.0, 1.0]]
    """


@final
class _NormJacobian(Operator):
    """`diag(α) (I − u uᵀ/d) C / s` token by token, `u` the normalised token, `C` the centring.

    `u` is centred, so `C` may come last in the product and first in its transpose.
    """

    def __init__(self, norm: _Norm, unit: Float[Tensor, "batch n d"], scale: Float[Tensor, "batch n 1"]):
        self._norm, self._unit, self._scale = norm, unit, scale
        self.batch = unit.shape[0]
        self.in_shape = self.out_shape = tuple(unit.shape[1:])
        self.dtype, self.device = unit.dtype, unit.device

    def jvp(self, v):
        return self._norm.weight * self._project(v)

    def vjp(self, u):
        return self._project(self._norm.weight * u)

    def select(self, items):
        return _NormJacobian(self._norm, self._unit[items], self._scale[items])

    def _project(self, v: Tensor) -> Tensor:
        along = (self._unit * v).mean(-1, keepdim=True)
        return (self._norm._center(v) - self._unit * along) / self._scale
