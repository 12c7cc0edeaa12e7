"""What attention looks like at a probe: its largest logits, how spread out it is, and who gets most of it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels import AttentionKernel


@torch.no_grad()
def look(kernel: AttentionKernel, real: Tensor | None, layers: int = 1) -> Tensor:
    """What attention looks like in each of the layers that a kernel's rows belong to, (layers, 2 + heads).

    First the mean entropy of the rows, then the largest share of all attention that one token gets, then the largest logits
    by head. With `P̂ = z P`: `H = −Σ P log P = Σ P log z − Σ P̂ log P̂ / z`; a sink has no part in it.
    real: (rows, n), which tokens are not padding.
    """
    if not kernel.scores.kind.traits.softmax:
        raise BadInputError(f"expected softmax attention to look at, got {kernel.scores.kind!r}; its rows have no entropy here")
    tiled = kernel.tiled()
    batch, heads, n, m = tiled.shape
    if batch % layers:  # heads and rows lie along one axis
        batch, heads = batch * heads, 1
    entropy, mass = torch.zeros_like(tiled.largest), torch.zeros_like(tiled.largest)
    top = torch.zeros_like(mass)
    received = tiled.o.new_zeros(batch * heads, m, 1)
    for b in tiled.blocks():
        entropy[b.heads, b.rows] += torch.special.entr(b.weights).sum(-1)
        mass[b.heads, b.rows] += b.weights.sum(-1)
        top[b.heads, b.rows] = torch.maximum(top[b.heads, b.rows], b.weights.amax(-1))
        received[b.heads, b.cols] += torch.bmm(b.weights.mT, tiled.inverse[b.heads, b.rows])
    inverse = tiled.inverse[..., 0]
    tiny = torch.finfo(inverse.dtype).tiny
    entropy = (entropy - mass * inverse.clamp_min(tiny).log()) * inverse
    # the largest number of a row may be its sink: what is left of the largest weight says by how much
    largest = torch.where(top > 0, tiled.largest + top.log(), tiled.largest)
    by_layer = layers, batch // layers, heads
    entropy, logits = (t.unflatten(0, by_layer) for t in (entropy, largest))  # (layers, rows, heads, n)
    share = received[..., 0].unflatten(0, by_layer).mean(2)
    mean = entropy.mean((1, 2, 3))
    if real is not None and (layers * len(real), real.shape[1]) == (batch, n):
        rows = real.to(entropy.device)[None, :, None].expand_as(entropy)
        mean = entropy.where(rows, 0.0).sum((1, 2, 3)) / rows.sum((1, 2, 3))
        logits = logits.masked_fill(~rows, -math.inf)
    share = share / share.sum(-1, keepdim=True).clamp_min(tiny)
    return torch.cat([torch.stack([mean, share.amax(-1).mean(-1)], -1), logits.amax((1, 3))], -1)


def looks(tokens: Sequence[Tensor], kernels: Sequence[AttentionKernel], real: Tensor | None) -> list[Tensor]:
    """By layer, the root mean square norm of the tokens that enter; where there are kernels, what `look` gives of all of them.

    Of several attention calls that is the mean entropy, the mean share, the largest logit, and then the largest logit by head,
    where all calls have as many. NaN where one of them is.
    """
    found: list[Tensor] = []
    for x in tokens:
        squares = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square().flatten()
        own = squares if real is None or real.numel() != len(squares) else squares[real.flatten().to(squares.device)]
        found.append(own.mean(0, keepdim=True).sqrt())
    if not kernels:
        return found
    calls = [look(kernel, real, len(tokens)).double() for kernel in kernels]
    logits = [own[:, 2:] for own in calls]
    by_head = [torch.stack(logits).amax(0)] if len({t.shape for t in logits}) == 1 else []
    mean, top = torch.stack([own[:, :2] for own in calls]).mean(0), torch.cat(logits, 1).amax(1, keepdim=True)
    return [torch.cat(both) for both in zip(found, torch.cat([mean, top, *by_head], 1), strict=True)]
