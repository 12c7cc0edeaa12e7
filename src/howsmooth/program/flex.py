"""torch's flex_attention by its dense formula: in a recording it is an operation that knows no derivative on every device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from howsmooth.program.nodes import name

FLEX = "flex_attention"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def replace_flex(code: GraphModule) -> None:
    """Give every call of flex_attention the dense formula as its target."""
    found = [n for n in code.graph.nodes if n.op == "call_function" and name(n) == FLEX]
    for n in found:
        n.target = flex_attention
    for n in code.graph.nodes if found else ():
        if n.target in _VIEWS:  # its outputs have another layout in memory
            n.target = torch.ops.aten.reshape.default
    code.recompile()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    options: dict[str, Any] | None = None,
    score_buffers: tuple[Tensor, ...] = (),
    mask_buffers: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `softmax(score_mod(scale Q Kᵀ, b, h, i, j)) V`, the logarithms of the sums, and the largest logits.

    block_mask: its last entry is a function of (b, h, i, j) that says which keys a query sees.

    >>> x = torch.eye(2).expand(1, 1, 2, 2)
    >>> causal = lambda b, h, i, j: i >= j
    >>> flex_attention(x, x, x, lambda score, b, h, i, j: score - (i - j), (causal,), 1.0)[0][0, 0, 0]
    tensor([1., 0.])
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    logits = query @ key.transpose(-2, -1) * scale  # (b, h, i, j)
    places = [torch.arange(size, device=query.device) for size in logits.shape]
    logits = _everywhere(score_mod, True, len(score_buffers))(logits, *places, *score_buffers)
    visible = _everywhere(block_mask[-1], False, len(mask_buffers))(*places, *mask_buffers)
    logits = logits.masked_fill(~visible, -torch.inf)
    hidden = logits.amax(-1, keepdim=True) == -torch.inf
    weights = logits.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return weights @ value, logits.logsumexp(-1), logits.amax(-1)


def _everywhere(f: Callable[..., Tensor], scored: bool, buffers: int) -> Callable[..., Tensor]:
    """A function of (score, b, h, i, j), or of (b, h, i, j), at all places at once."""
    for place in (3, 2, 1, 0):
        dims = [0] * scored + [0 if p == place else None for p in range(4)]
        f = torch.vmap(f, (*dims, *[None] * buffers))
    return f
