"""Which kernel serves a problem."""

import functools
import warnings
from typing import Literal

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import Keys, Precision, Queries, Scores, SoftmaxAttention, Values
from howsmooth.kernels.tiled import Blocked, Dense, TileSize, cut

KEPT_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}

Kernel = Literal["auto", "dense", "blocked", "triton"]


def linearize(
    q: Queries, k: Keys, v: Values, scores: Scores, kernel: Kernel = "auto", precision: Precision = "half"
) -> SoftmaxAttention:
    """Softmax attention at `q, k, v`.

    By default fused kernels on a GPU below float64; elsewhere weights are kept while they are small, and made again for each
    product when they are not. A `kernel` asked for by name serves or raises. `precision` is that of the fused kernels.

    >>> import torch
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> type(linearize(x, x, x, Scores(1.0))).__name__
    'Dense'
    """
    if kernel == "triton" or (kernel == "auto" and q.is_cuda and q.dtype != torch.float64):
        reason = "a mask by positions" if scores.mask.ends is not None else unfit(q, v)
        if reason is None:
            from howsmooth.kernels.triton import Fused

            return Fused(q, k, v, scores, precision)
        if kernel == "triton":
            raise BadInputError(f"expected a problem for the fused kernels, got {reason}; use kernel='blocked'")
        _warn_once(reason)
    if kernel == "dense" or (kernel == "auto" and _kept_bytes(q, k, scores) <= KEPT_BYTES.get(q.device.type, 0)):
        return Dense(q, k, v, scores)
    return Blocked(q, k, v, scores)


def _kept_bytes(q: Tensor, k: Tensor, scores: Scores) -> int:
    area = sum(tile.area for tile in cut(q.shape[2], k.shape[2], scores.mask, TileSize.on(q.device)))
    return q.shape[0] * q.shape[1] * area * q.element_size() * (1 if scores.softcap is None else 2)


def unfit(q: Tensor, v: Tensor) -> str | None:
    """Why the fused kernels cannot serve a problem, or nothing."""
    missing = _no_triton()
    if missing is not None:
        return missing
    from howsmooth.kernels.triton import WIDEST, interpreted

    if not q.is_cuda and not interpreted():
        return f"tensors on {q.device.type}, not on a CUDA device"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"tensors of {q.dtype}, not float32, float16 or bfloat16"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"heads of width {max(q.shape[-1], v.shape[-1])}, over {WIDEST}"
    if q.is_cuda and _capability(q.device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    return None


_capability = functools.cache(torch.cuda.get_device_capability)


@functools.cache
def _no_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return "no installation of triton"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 2):
        return f"triton {triton.__version__}, older than 3.2"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"the fused kernels cannot serve {reason}; using torch operations, which are slower", stacklevel=4)
