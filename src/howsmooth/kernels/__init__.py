"""Softmax attention's three products: forward, jvp, vjp."""

from howsmooth.kernels.base import Scores, SoftmaxAttention
from howsmooth.kernels.blocked import Blocked
from howsmooth.kernels.dense import Dense
from howsmooth.kernels.dispatch import linearize
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.naive import attend
from howsmooth.kernels.tiles import TileSize

__all__ = ["Blocked", "Dense", "Mask", "Scores", "SoftmaxAttention", "TileSize", "attend", "linearize"]
