"""Operators made of operators."""

from typing import final

from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.operators.base import Operator


@final
class Composed(Operator):
    """`outer ∘ inner`: the chain rule."""

    def __init__(self, outer: Operator, inner: Operator):
        if outer.in_shape != inner.out_shape or outer.batch != inner.batch:
            raise BadInputError(
                f"expected an outer map that takes {inner.batch} × {inner.out_shape}, got one that takes "
                f"{outer.batch} × {outer.in_shape}; compose maps whose widths agree"
            )
        self.outer, self.inner = outer, inner
        self.batch, self.in_shape, self.out_shape = inner.batch, inner.in_shape, outer.out_shape
        self.dtype, self.device = inner.dtype, inner.device

    @property
    def noise(self) -> float:
        return max(self.outer.noise, self.inner.noise)

    @property
    def heavy(self) -> bool:
        return self.outer.heavy or self.inner.heavy

    def refined(self):
        outer, inner = self.outer.refined(), self.inner.refined()
        return None if outer is None and inner is None else Composed(outer or self.outer, inner or self.inner)

    def jvp(self, v):
        return self.outer.jvp(self.inner.jvp(v))

    def vjp(self, u):
        return self.inner.vjp(self.outer.vjp(u))

    def gram(self, v):
        w, energy = self.outer.gram(self.inner.jvp(v))
        return self.inner.vjp(w), energy

    def guess(self):
        outer = self.outer.guess()
        return None if outer is None else self.inner.vjp(outer[None])[0]

    def select(self, items):
        return Composed(self.outer.select(items), self.inner.select(items))


@final
class Weighted(Operator):
    """`diag(rows) · J · diag(cols)`: weights on the output and on the input, broadcast over (batch, …).

    A measure `Σ a_i δ_{x_i}` sees the Jacobian as `D^{½} J D^{−½}` with `D = diag(a)`.
    """

    def __init__(self, operator: Operator, rows: Float[Tensor, "..."], cols: Float[Tensor, "..."]):
        self.operator = operator
        self.batch, self.in_shape, self.out_shape = operator.batch, operator.in_shape, operator.out_shape
        self.dtype, self.device = operator.dtype, operator.device
        try:
            self._rows = rows.expand(self.batch, *self.out_shape)
            self._cols = cols.expand(self.batch, *self.in_shape)
        except RuntimeError:
            raise BadInputError(
                f"expected row weights that broadcast to {(self.batch, *self.out_shape)} and column weights to "
                f"{(self.batch, *self.in_shape)}, got {tuple(rows.shape)} and {tuple(cols.shape)}; "
                "give one weight per token or per entry"
            ) from None

    @property
    def noise(self) -> float:
        return self.operator.noise

    @property
    def heavy(self) -> bool:
        return self.operator.heavy

    def refined(self):
        operator = self.operator.refined()
        return None if operator is None else Weighted(operator, self._rows, self._cols)

    def jvp(self, v):
        return self._rows * self.operator.jvp(self._cols * v)

    def vjp(self, u):
        return self._cols * self.operator.vjp(self._rows * u)

    def guess(self):
        """The operator's own, weighted: exact too where the operator has rank one."""
        guess = self.operator.guess()
        return None if guess is None else self._cols * guess

    def select(self, items):
        return Weighted(self.operator.select(items), self._rows[items], self._cols[items])
