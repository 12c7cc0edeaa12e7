"""Softmax attention's products: forward, jvp, vjp, and their second order.

`sdpa` and `attend` are functions torch differentiates in every mode; `linearize` gives the products at one place,
`attention_and_kernel` as a node of a graph; `plain_attention` is the reference, in torch operations alone.
"""

from howsmooth.kernels.base import Scores, SoftmaxAttention
from howsmooth.kernels.dispatch import linearize
from howsmooth.kernels.dot_product import attend, sdpa
from howsmooth.kernels.linearized import attention_and_kernel
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.naive import plain_attention
from howsmooth.kernels.tiled import Blocked, Dense, TileSize

__all__ = [
    "Blocked",
    "Dense",
    "Mask",
    "Scores",
    "SoftmaxAttention",
    "TileSize",
    "attend",
    "attention_and_kernel",
    "linearize",
    "plain_attention",
    "sdpa",
]
