"""Which kernel serves a problem."""

from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.blocked import Blocked
from howsmooth.kernels.dense import Dense
from howsmooth.kernels.softmax import Scores, SoftmaxAttention
from howsmooth.kernels.tiles import TileSize, cut

KEPT_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}


def linearize(
    q: Float[Tensor, "batch heads n d"],
    k: Float[Tensor, "batch kv_heads m d"],
    v: Float[Tensor, "batch kv_heads m d_v"],
    scores: Scores,
) -> SoftmaxAttention:
    """Softmax attention at `q, k, v`: weights kept while they are small, made again for each product when they are not.

    >>> import torch
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> type(linearize(x, x, x, Scores(1.0))).__name__
    'Dense'
    """
    tiles = cut(q.shape[2], k.shape[2], scores.mask, TileSize.on(q.device))
    area = sum((t.rows.stop - t.rows.start) * (t.cols.stop - t.cols.start) for t in tiles)
    kept = q.shape[0] * q.shape[1] * area * q.element_size() * (1 if scores.softcap is None else 2)
    kernel = Dense if kept <= KEPT_BYTES.get(q.device.type, KEPT_BYTES["cpu"]) else Blocked
    return kernel(q, k, v, scores)
