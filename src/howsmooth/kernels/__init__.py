"""Attention's products: forward, jvp, vjp, and their second order.

`kinds` says how weights come from queries and keys. `sdpa`, `varlen` and `attend` are functions torch differentiates in every
mode; `linearize` gives the products at one place, `attention_and_kernel` as a node of a graph; `plain_attention` is the
reference, in torch operations alone.
"""

from howsmooth.kernels.autograd import attention_and_kernel
from howsmooth.kernels.base import AttentionKernel, Scores, TileSize, plain_attention
from howsmooth.kernels.dispatch import linearize
from howsmooth.kernels.dot_product import attend, sdpa, varlen
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.tiled import Blocked, Dense

__all__ = [
    "AttentionKernel",
    "Blocked",
    "Dense",
    "Mask",
    "Scores",
    "TileSize",
    "attend",
    "attention_and_kernel",
    "linearize",
    "plain_attention",
    "sdpa",
    "varlen",
]
