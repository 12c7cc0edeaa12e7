"""The plain reference: attention as one would write it, for autograd and for checking the kernels."""

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.kernels.arithmetic import tanh
from howsmooth.kernels.base import Keys, Outputs, Queries, Scores, Values
from howsmooth.kernels.kinds.kind import Vectors

_TIED = 16  # units in the last place within which two logits are one


def plain_attention(q: Queries, k: Keys, v: Values, scores: Scores, rows: int = 1024) -> Outputs:
    """`P v` for weights of any kind, `rows` queries at a time where a row stands for itself.

    Queries without a visible key give zero. There are only out-of-place operations, so every derivative and transform of torch
    works through it.
    """
    _, _, n, m = scores.check(q, k, v)
    kind, mask = scores.kind, scores.mask.to(q.device, q.dtype)
    entry, inner = kind.enter(q, k, v, scores.scale), kind.inner(scores)
    q, k, v, offset = by_head(Vectors(q, k, v) if entry is None else entry.vectors)
    bias = None if inner.mask.bias is None else inner.mask.bias.to(q.device, q.dtype)
    slack = logit_slack(q, k, inner.scale, bias)
    shift = kind.shift(mask, m)
    if kind.traits.balancing is not None:
        rows = n
    outputs = []
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        visible = mask.visible(slice(start, stop), slice(0, m), q.device)
        if mask.keys is not None:
            visible = visible & mask.keys[:, None, None, :]
        part = bias if bias is None or bias.shape[2] == 1 else bias[:, :, start:stop]
        s, visible = masked_logits(logits_of(q[:, :, start:stop], k, offset, inner.scale, inner.softcap), part, visible)
        if shift is not None:
            s = s + (shift.to(s)[:, None, None, None] if isinstance(shift, Tensor) else shift)
        outputs.append(kind.weigh(s, visible, slack[:, :, start:stop]) @ v)
    out = torch.cat(outputs, dim=2)
    leave = kind.leave(out)
    return out if leave is None else leave.output


def by_head(at: Vectors) -> Vectors:
    """Keys and values once for every head of the queries."""
    group = at.q.shape[1] // at.k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (at.k, at.v))
    return Vectors(at.q, k, v, None if at.offset is None else at.offset.repeat_interleave(group, dim=1))


def logits_of(q: Tensor, k: Tensor, offset: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Soft-capped, before any mask; from tensors and numbers alone, which a compiler can follow."""
    s = scale * (q @ k.mT)
    s = s if offset is None else s + offset[:, :, None]
    return s if softcap is None else softcap * tanh(s / softcap)


def masked_logits(s: Tensor, bias: Tensor | None, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Logits with a bias, which hides keys where it is −∞, finite there too; and which keys are visible."""
    if bias is None:
        return s, visible
    hidden = bias == -torch.inf
    return s + bias.masked_fill(hidden, 0.0), visible & ~hidden


def logit_slack(q: Queries, k: Keys, scale: float, bias: Tensor | None) -> Float[Tensor, "batch heads n 1"]:
    """How far rounding may move a logit of each query, an upper bound."""
    lengths = (torch.linalg.vector_norm(t.detach(), dim=-1, keepdim=True) for t in (q, k))
    q_, k_ = lengths
    logit = abs(scale) * q_ * k_.amax()
    if bias is not None:
        logit = logit + bias.masked_fill(bias == -torch.inf, 0.0).abs().amax()
    return _TIED * torch.finfo(q.dtype).eps * logit
