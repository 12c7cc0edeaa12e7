"""The plain reference: softmax attention as one would write it, for autograd and for checking the kernels."""

import torch

from howsmooth.kernels.base import Keys, Outputs, Queries, Scores, Values


def plain_attention(q: Queries, k: Keys, v: Values, scores: Scores, rows: int = 1024) -> Outputs:
    """`softmax(s) v`, `rows` queries at a time; queries that see no key give zero.

    Only out-of-place operations, so every derivative and transform of torch works through it.
    """
    batch, heads, n, _ = q.shape
    scores.mask.check(batch, heads, n, k.shape[2])
    mask = scores.mask.to(q.device, q.dtype)
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    outputs = []
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        s = scores.scale * (q[:, :, start:stop] @ k.mT)
        if scores.softcap is not None:
            s = scores.softcap * torch.tanh(s / scores.softcap)
        seen = mask.visible(slice(start, stop), slice(0, k.shape[2]), q.device)
        if mask.keys is not None:
            seen = seen & mask.keys[:, None, None, :]
        if mask.bias is not None:
            bias = mask.bias[:, :, start:stop] if mask.bias.shape[2] > 1 else mask.bias
            seen = seen & (bias != -torch.inf)
            s = s + bias.masked_fill(bias == -torch.inf, 0.0)
        lost = ~seen.any(-1, keepdim=True)
        weights = torch.softmax(s.masked_fill(~seen, -torch.inf).masked_fill(lost, 0.0), -1).masked_fill(lost, 0.0)
        outputs.append(weights @ v)
    return torch.cat(outputs, dim=2)
