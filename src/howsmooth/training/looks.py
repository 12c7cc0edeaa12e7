"""What attention looks like at a probe: its largest logits, how spread out it is, and who gets most of it."""

import math

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels import AttentionKernel
from howsmooth.kernels.kinds import Softmax


@torch.no_grad()
def look(kernel: AttentionKernel, real: Tensor | None, times: int) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logits by head, mean entropy of the rows, and the largest share of all attention that one token gets.

    With `P̂ = z P`: `H = −Σ P log P = Σ P log z − Σ P̂ log P̂ / z`; a sink has no part in it.  times: how often each row of the
    probe is there.
    """
    if not isinstance(kernel.scores.kind, Softmax):
        raise BadInputError(f"expected softmax attention to look at, got {kernel.scores.kind!r}; its rows have no entropy here")
    batch = len(kernel.output)
    tiled = (kernel if times == 1 else kernel.select(torch.arange(0, batch, times, device=kernel.output.device))).tiled()
    batch, heads, n, m = tiled.shape
    entropy, mass = torch.zeros_like(tiled.largest), torch.zeros_like(tiled.largest)
    top = torch.zeros_like(mass)
    received = tiled.o.new_zeros(batch * heads, m, 1)
    for b in tiled.blocks():
        entropy[b.heads, b.rows] += torch.special.entr(b.weights).sum(-1)
        mass[b.heads, b.rows] += b.weights.sum(-1)
        top[b.heads, b.rows] = torch.maximum(top[b.heads, b.rows], b.weights.amax(-1))
        received[b.heads, b.cols] += torch.bmm(b.weights.mT, tiled.inverse[b.heads, b.rows])
    seen = tiled.inverse[..., 0]
    entropy = entropy * seen - mass * seen * seen.clamp_min(torch.finfo(seen.dtype).tiny).log()
    entropy = entropy.unflatten(0, (batch, heads))
    # the largest number of a row may be its sink: what is left of the largest weight says by how much
    largest = torch.where(top > 0, tiled.largest + top.log(), tiled.largest)
    logits, share = largest.unflatten(0, (batch, heads)), received[..., 0].unflatten(0, (batch, heads)).mean(1)
    if real is not None and real.shape[:2] == (batch, n):
        rows = real.to(entropy.device)[:, None, :, 0].expand_as(entropy)
        entropy, logits = entropy[rows], logits.masked_fill(~rows, -math.inf)
    share = share / share.sum(-1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
    return logits.amax((0, 2)), entropy.mean(), share.amax(-1).mean()


def squares(x: Tensor, real: Tensor | None) -> Tensor:
    """Squared norms of the tokens that are not padding."""
    tokens = x.reshape(-1, x.shape[-1]).double().square().sum(-1)
    return tokens if real is None or real.numel() != len(tokens) else tokens[real.flatten().to(tokens.device)]
