"""What a map of a model does to values, read off its graph, for a guess of what it stretches most."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_PASSES = 4  # backward passes, each way, that a guess may take: part of a product with `JᵀJ` each


def paths(
    values: Float[Tensor, "1 kv_heads m d_v"],
    output: Float[Tensor, "1 heads n d_v"],
    x: Float[Tensor, "1 n d"],
    y: Float[Tensor, "1 n d_out"],
    places: Int[Tensor, " n"] | None,
) -> tuple[Float[Tensor, "heads d_out d_v"], Float[Tensor, "heads d_v d"]] | None:
    """`y ← output` and `values ← x` of a call of attention, head by head: Wₒ and W_v, and what is around them.

    Before and behind attention every token is on its own, so a backward pass asks for as many rows as there are tokens.
    Nothing where that takes many passes, or where values are not made of `x`.

    places: of the tokens, where some are padding.
    """
    n = x.shape[1]
    if not (values.requires_grad and output.requires_grad) or y.shape[1] != n or values.shape[2] != output.shape[2]:
        return None
    if max(y.shape[2], values.shape[1] * values.shape[3]) > _PASSES * n or (places is None and values.shape[2] != n):
        return None
    tokens = torch.arange(n, device=x.device) if places is None else places.to(x.device)
    behind, before = [], []
    for first in range(0, y.shape[2], n):
        some = torch.arange(min(n, y.shape[2] - first), device=x.device)
        u = torch.zeros_like(y)
        u[0, some, first + some] = 1.0
        (g,) = torch.autograd.grad(y, output, u, retain_graph=True, materialize_grads=True)
        behind.append(g[0, :, tokens[some]])  # (heads, some, d_v)
    _, shared, _, d_v = values.shape
    for first in range(0, shared * d_v, n):
        some = torch.arange(min(n, shared * d_v - first), device=x.device)
        head, entry = (first + some) // d_v, (first + some) % d_v
        u = torch.zeros_like(values)
        u[0, head, tokens[some], entry] = 1.0
        (g,) = torch.autograd.grad(values, x, u, retain_graph=True, materialize_grads=True)
        before.append(g[0, some])
    outward, inward = torch.cat(behind, 1), torch.cat(before).unflatten(0, (shared, d_v))
    if not all(bool(t.isfinite().all()) and bool(t.any()) for t in (outward, inward)):
        return None
    return outward, inward.repeat_interleave(output.shape[1] // shared, 0)
