"""The gradient of the constant itself: how `σ(X) = ‖D_X f‖₂` changes when the tokens move.

With the top pair `(u, v)` held fixed, `∇σ = ∂_X ⟨J(X)ᵀu, v⟩`: a backward pass through a backward pass. Where several singular
values are equal, `σ` is the largest of smooth functions and the steepest of them is followed
(docs/explanation/worst-inputs.md §2).
"""

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import NoConvergenceError
from howsmooth.maps import AutodiffJacobian, Map, Operator
from howsmooth.maps.operator import Around
from howsmooth.solve import Function
from howsmooth.spectral import GolubKahan

DENSE_SIZE = 256  # rows and columns up to which a batch of Jacobians is decomposed outright
_CLUSTER = 3  # top pairs that a cluster is looked for among
_NEAR = 1e-3  # singular values this close to the top belong to its cluster
_TOL = 1e-3  # of the solver, where Jacobians are not decomposed


class Pairs(NamedTuple):
    """The top singular pairs of a batch of Jacobians, the largest first; `near` where one belongs to the top's cluster."""

    value: Float[Tensor, " batch"]
    left: Float[Tensor, "pairs batch *out"]
    right: Float[Tensor, "pairs batch *in"]
    near: Bool[Tensor, "pairs batch"]

    def put(self, items: Tensor, other: "Pairs") -> "Pairs":
        """These pairs, with those of `items` replaced."""
        pairs = Pairs(*(t.clone() for t in self))
        pairs.value[items] = other.value
        for mine, theirs in zip(pairs[1:], other[1:], strict=True):
            mine[:, items] = theirs
        return pairs

    def select(self, items: Tensor) -> "Pairs":
        return Pairs(self.value[items], *(t[:, items] for t in self[1:]))


@torch.no_grad()
def top_pairs(f: Function, x: Float[Tensor, "batch n d"], guess: Float[Tensor, "batch n d"] | None, seed: int) -> Pairs:
    """The top pairs at every input of a batch; `value` is attained by the first.

    guess: directions to start the solver from where the Jacobian is too large to be decomposed.
    """
    operator = f.linearize(x)[1] if isinstance(f, Map) else AutodiffJacobian(f, x, batched=True)
    if max(operator.in_size, operator.out_size) <= DENSE_SIZE:
        matrices = operator.dense()
        if not bool(matrices.isfinite().all()):
            raise NoConvergenceError("expected a finite Jacobian, got NaN or infinity; search a smaller set")
        u, sigma, vh = torch.linalg.svd(matrices, full_matrices=False)
        left = u[..., :_CLUSTER].permute(2, 0, 1).unflatten(-1, operator.out_shape)
        right = vh[:, :_CLUSTER].transpose(0, 1).unflatten(-1, operator.in_shape)
        return Pairs(sigma[:, 0], left, right, (sigma[:, :_CLUSTER] >= (1 - _NEAR) * sigma[:, :1]).T)
    solutions = GolubKahan().solve(operator if guess is None else _Warm(operator, guess), _TOL, None, [seed] * operator.batch)
    right = torch.stack([s.direction for s in solutions]).to(x)
    right = right / right.flatten(1).norm(dim=-1)[:, None, None]
    image = operator.jvp(right[None])[0]
    value = image.flatten(1).norm(dim=-1)
    left = image / value.clamp_min(torch.finfo(value.dtype).tiny).reshape(-1, *[1] * (image.ndim - 1))
    return Pairs(value, left[None], right[None], torch.ones(1, len(x), dtype=torch.bool, device=x.device))


def steepest(
    f: Function, embed: Callable[[Tensor], Tensor], z: Float[Tensor, "batch n d"], pairs: Pairs
) -> Float[Tensor, "batch n d"]:
    """`∂_z ⟨u, J v⟩` of the pair in each cluster whose gradient is longest.

    embed: tokens at the coordinates `z`. In a cluster the gradients of `⟨U a, J V a⟩` are `Σ a_i a_j G_ij`, and
    `max_a |Σ a_i a_j G_ij| = max_{|H|=1} λ_max(⟨H, G_ij⟩)`: each side fixes the other in turn, from every pair of the cluster,
    and the length never falls.
    """
    whole = _gradient(f, embed, z, pairs.left[0], pairs.right[0])
    items = torch.nonzero(pairs.near.sum(0) > 1)[:, 0]
    if len(items) == 0:
        return whole
    count, near = len(pairs.near), pairs.near[:, items]
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
            weights = torch.linalg.eigh(torch.einsum("ijbk,bk->bij", flat, unit))[1][..., -1]  # (items, count)
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


@final
class _Warm(Around):
    """An operator with a guess of its top direction."""

    def __init__(self, operator: Operator, direction: Float[Tensor, "batch *in_shape"]):
        super().__init__(operator)
        self._direction = direction

    def around(self, operator):
        return _Warm(operator, self._direction)

    def jvp(self, v):
        return self.operator.jvp(v)

    def vjp(self, u):
        return self.operator.vjp(u)

    def gram(self, v):
        return self.operator.gram(v)

    def guess(self, seeds):
        return self._direction

    def select(self, items):
        return _Warm(self.operator.select(items), self._direction[items])
