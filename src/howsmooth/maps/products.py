"""A Jacobian as a user holds it: a linear operator of products, in the shapes of the input and the output."""

from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import REAL, check_dense, described
from howsmooth.maps.jacobian import AutodiffJacobian
from howsmooth.spectral.operator import Operator


@final
class Jacobian:
    """`D_x f` of one input as a linear operator: products only, nothing is formed before `dense()`.

    shape: `(f(x).numel(), x.numel())`.  `J @ v` takes `v` in the shape of `x`, flat, or with probes leading, and answers in
    kind: the shape of `f(x)`, flat, or probes of that shape.
    """

    def __init__(self, operator: Operator, in_shape: tuple[int, ...], *, transposed: bool = False):
        self.operator, self._transposed = operator, transposed
        # of the map, whichever way this goes; an operator writes a single number as a vector
        out = operator.output.shape if isinstance(operator, AutodiffJacobian) else operator.out_shape
        self._in, self._out = tuple(in_shape), tuple(out)

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.operator.out_size, self.operator.in_size
        return (cols, rows) if self._transposed else (rows, cols)

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype

    @property
    def device(self) -> torch.device:
        return self.operator.device

    @property
    def T(self) -> "Jacobian":
        """The transpose: `J.T @ u` is the vector–Jacobian product."""
        return Jacobian(self.operator, self._in, transposed=not self._transposed)

    def __matmul__(self, v: Tensor | Any) -> Tensor:  # what comes is checked here, not by types
        takes, gives = (self._out, self._in) if self._transposed else (self._in, self._out)
        size = self.shape[1]
        check_dense(v, "the vector")
        if not isinstance(v, Tensor) or v.dtype not in REAL:
            raise BadInputError(f"expected a floating-point tensor to multiply, got {described(v)}; convert it")
        fits = (takes, (size,))
        leading = 0 if tuple(v.shape) in fits else 1  # axes of probes
        item = tuple(v.shape[leading:])
        if item not in fits:
            raise BadInputError(
                f"expected a vector of shape {takes} or ({size},), or probes of such vectors along a first axis, got "
                f"{tuple(v.shape)}; reshape it"
            )
        answer = (*v.shape[:leading], *(gives if item == takes else self.shape[:1]))
        J = self.operator
        product, shape = (J.vjp, J.out_shape) if self._transposed else (J.jvp, J.in_shape)
        return product(v.to(self.device, self.dtype).reshape(-1, 1, *shape)).reshape(answer)

    def dense(self) -> Float[Tensor, "rows cols"]:
        """The matrix itself."""
        matrix = self.operator.dense()[0]
        return matrix.mT if self._transposed else matrix

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` of the same products, on float64 arrays."""
        import scipy.sparse.linalg

        def product(operator: "Jacobian") -> Callable[[Any], Any]:
            return lambda v: (operator @ torch.as_tensor(v.ravel())).double().cpu().numpy()

        make: Any = scipy.sparse.linalg.LinearOperator
        return make(self.shape, matvec=product(self), rmatvec=product(self.T), dtype="float64")

    def __repr__(self) -> str:
        rows, cols = self.shape
        return f"Jacobian({rows} × {cols}, {str(self.dtype).removeprefix('torch.')})"
