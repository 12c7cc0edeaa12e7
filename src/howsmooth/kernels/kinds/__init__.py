"""Kinds of attention: how weights come from queries and keys. `Attention(..., kind=Sigmoid())` takes any of them."""

from howsmooth.kernels.kinds.balanced import Sinkhorn
from howsmooth.kernels.kinds.kind import Kind, Pointwise
from howsmooth.kernels.kinds.mapped import L2, Cosine, Differential
from howsmooth.kernels.kinds.pointwise import Hard, Linear, Sigmoid, Softmax

__all__ = ["L2", "Cosine", "Differential", "Hard", "Kind", "Linear", "Pointwise", "Sigmoid", "Sinkhorn", "Softmax"]


def __dir__() -> list[str]:
    """The kinds themselves."""
    return [name for name in __all__ if name not in ("Kind", "Pointwise")]
