"""The gradient of the constant itself: how `σ(X) = ‖D_X f‖₂` changes when the tokens move.

With the top pair `(u, v)` held fixed, `∇σ = ∂_X ⟨J(X)ᵀu, v⟩`: a backward pass through a backward pass. Where several singular
values are equal, `σ` is the largest of smooth functions and the steepest of them is followed
(docs/explanation/worst-inputs.md §2).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.maps import AutodiffJacobian, Map
from howsmooth.solve import Function
from howsmooth.spectral import TopPairs, eigh, small, top_pairs

_CLUSTER = 3  # top pairs that a cluster is looked for among
_NEAR = 1e-3  # singular values this close to the top belong to its cluster
_TOL = 1e-3  # of the solver, where Jacobians are not decomposed


def pairs_at(f: Function, x: Float[Tensor, "batch n d"], start: Float[Tensor, "batch n d"] | None, seed: int) -> TopPairs:
    """The top pairs at every input of a batch. start: directions that may be near the top ones, from a call before."""
    with torch.no_grad():
        operator = f.linearize(x)[1] if isinstance(f, Map) else AutodiffJacobian(f, x, batched=True)
    count = _CLUSTER if small(operator) else 1
    return top_pairs(operator, count, None if start is None else start[None], seeds=[seed] * operator.batch, tol=_TOL)


def steepest(
    f: Function, embed: Callable[[Tensor], Tensor], z: Float[Tensor, "batch n d"], pairs: TopPairs
) -> Float[Tensor, "batch n d"]:
    """`∂_z ⟨u, J v⟩` of the pair in each cluster whose gradient is longest.

    embed: tokens at the coordinates `z`. In a cluster the gradients of `⟨U a, J V a⟩` are `Σ a_i a_j G_ij`, and
    `max_a |Σ a_i a_j G_ij| = max_{|H|=1} λ_max(⟨H, G_ij⟩)`: each side fixes the other in turn, from every pair of the cluster,
    and the length never falls.
    """
    whole = _gradient(f, embed, z, pairs.left[0], pairs.right[0])
    near = pairs.value >= (1 - _NEAR) * pairs.value[0]
    items = torch.nonzero(near.sum(0) > 1)[:, 0]
    if len(items) == 0:
        return whole
    count, near = len(near), near[:, items]
    parts = z.new_zeros(count, count, len(items), *z.shape[1:])
    for i in range(count):
        for j in range(i, count):
            ways = ((pairs.left[a, items], pairs.right[b, items]) for a, b in ((i, j), (j, i)))
            both = 0.5 * sum(_gradient(f, embed, z[items], *way) for way in ways)
            parts[i, j] = parts[j, i] = both * (near[i] & near[j])[:, None, None]
    flat = parts.flatten(3)  # (count, count, items, n·d)
    longest = flat[0, 0]
    for start in range(count):
        g = flat[start, start]
        for _ in range(4):
            unit = g / g.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
            weights = eigh(torch.einsum("ijbk,bk->bij", flat, unit))[1][..., -1]  # (items, count)
            g = torch.einsum("bi,bj,ijbk->bk", weights, weights, flat)
        longer = g.norm(dim=-1, keepdim=True) > longest.norm(dim=-1, keepdim=True)
        longest = torch.where(longer, g, longest)
    whole[items] = longest.unflatten(-1, z.shape[1:])
    return whole


def _gradient(
    f: Function, embed: Callable[[Tensor], Tensor], z: Tensor, left: Tensor, right: Tensor
) -> Float[Tensor, "batch n d"]:
    """`∂_z ⟨J(x)ᵀ left, right⟩` at `x = embed(z)`, item by item."""
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        z = z.detach().clone().requires_grad_()
        x = embed(z)
        pulled = torch.autograd.grad(f(x), x, left, create_graph=True)[0]
        if not pulled.requires_grad:  # a linear function: its constant is the same everywhere
            return torch.zeros_like(z)
        (g,) = torch.autograd.grad((pulled * right.detach()).sum(), z, materialize_grads=True)
    return g.detach()
