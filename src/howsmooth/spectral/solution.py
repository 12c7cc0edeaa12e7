"""What a solver is, and what it hands back for one input."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from howsmooth.maps import Operator


@dataclass(frozen=True)
class Solution:
    """`value` is `|J direction|` as the run saw it, `upper` bounds the norm, `direction` is a unit vector."""

    value: float
    upper: float
    direction: Tensor
    steps: int
    converged: bool


class Solver(Protocol):
    """Anything that finds top singular pairs of a batch of operators."""

    def solve(self, operator: Operator, tol: float, certify: float | None, seed: int) -> list[Solution]: ...
