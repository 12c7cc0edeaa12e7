"""Linear operators: Jacobians as products."""

from howsmooth.operators.algebra import Composed, Weighted
from howsmooth.operators.autodiff import AutodiffJacobian
from howsmooth.operators.base import Matrix, Operator, inner

__all__ = ["AutodiffJacobian", "Composed", "Matrix", "Operator", "Weighted", "inner"]
