"""What attention looks like at a probe: its largest logits, how spread out it is, and who gets most of it."""

import math

import torch
from torch import Tensor

from howsmooth.kernels import AttentionKernel


@torch.no_grad()
def look(kernel: AttentionKernel, real: Tensor | None, times: int) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logits by head, mean entropy of the rows, and the largest share of all attention that one token gets.

    With `P̂ = z P`: `H = −Σ P log P = log z − Σ P̂ log P̂ / z`.  times: how often each row of the probe is there.
    """
    batch = len(kernel.output)
    tiled = (kernel if times == 1 else kernel.select(torch.arange(0, batch, times, device=kernel.output.device))).tiled()
    batch, heads, n, m = tiled.shape
    entropy = torch.zeros_like(tiled.largest)
    received = tiled.o.new_zeros(batch * heads, m, 1)
    for b in tiled.blocks():
        entropy[b.heads, b.rows] += torch.special.entr(b.weights).sum(-1)
        received[b.heads, b.cols] += torch.bmm(b.weights.mT, tiled.inverse[b.heads, b.rows])
    seen = tiled.inverse[..., 0]
    entropy = (entropy * seen - seen.clamp_min(torch.finfo(seen.dtype).tiny).log()).unflatten(0, (batch, heads))
    logits, share = tiled.largest.unflatten(0, (batch, heads)), received[..., 0].unflatten(0, (batch, heads)).mean(1)
    if real is not None and real.shape[:2] == (batch, n):
        rows = real.to(entropy.device)[:, None, :, 0].expand_as(entropy)
        entropy, logits = entropy[rows], logits.masked_fill(~rows, -math.inf)
    share = share / share.sum(-1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
    return logits.amax((0, 2)), entropy.mean(), share.amax(-1).mean()


def squares(x: Tensor, real: Tensor | None) -> Tensor:
    """Squared norms of the tokens that are not padding."""
    tokens = x.reshape(-1, x.shape[-1]).double().square().sum(-1)
    return tokens if real is None or real.numel() != len(tokens) else tokens[real.flatten().to(tokens.device)]
