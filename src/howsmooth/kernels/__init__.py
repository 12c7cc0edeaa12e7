"""Softmax attention's three products: forward, jvp, vjp.

`linearize` gives them at one place, `attention` and `attention_and_kernel` as functions torch differentiates;
`plain_attention` is the reference, in torch operations alone.
"""

from howsmooth.kernels.autograd import attention, attention_and_kernel
from howsmooth.kernels.base import Scores, SoftmaxAttention
from howsmooth.kernels.dispatch import linearize
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
    "attention",
    "attention_and_kernel",
    "linearize",
    "plain_attention",
]
