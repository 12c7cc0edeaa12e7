"""What a solver hands back for one input."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Solution:
    """`value` is `|J direction|` as the run saw it, `upper` bounds the norm, `direction` is a unit vector."""

    value: float
    upper: float
    direction: Tensor
    steps: int
    converged: bool
