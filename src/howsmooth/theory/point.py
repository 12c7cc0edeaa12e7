"""Upper bounds on `‖D_x f‖₂` of an attention layer at one input, read off its attention weights.

The sizes of each head (`trace`) are put together through the directions that their weights leave in common (`heads`). Proofs:
docs/point-bounds.md, whose numbers the functions cite.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention, AttentionJacobian, Composed, NormJacobian, Operator
from howsmooth.maps.base import check_finite, check_tokens
from howsmooth.theory.bound import ROUNDINGS, Bound, at_most, log_of
from howsmooth.theory.heads import Geometry, Tokens
from howsmooth.theory.trace import trace_sizes
from howsmooth.theory.yudin2025 import yudin_bound

_SOURCE = "howsmooth, docs/point-bounds.md"
_ASSUMES = "any attention layer: heads, groups, biases, masks, soft-cap, rotary phases, norms on queries and keys"


@torch.no_grad()
def point_bounds(attn: Attention, x: Float[Tensor, "n d"]) -> list[Bound]:
    """Every bound on `‖D_x f‖₂` at the tokens `x`, the smallest of ours last.

    Work is done in the precision of `x` and the layer, and its rounding is covered as `operator_bound` says.

    >>> attn = Attention.from_matrices(torch.zeros(2, 2), torch.eye(2))
    >>> [b.id for b in point_bounds(attn, torch.zeros(3, 2))]
    ['D2', 'D3', 'D5', 'D6', 'D']
    >>> round(point_bounds(attn, torch.zeros(3, 2))[-1].value, 4)
    1.0
    """
    x = one_sequence(x)
    operator = attn.linearize(attn.prepare(x)[None])[1]
    assert isinstance(operator, AttentionJacobian)
    forms = trace_forms(operator)
    rows = [
        ("D3", "three parts", forms.parts, "Σ_h ‖W_oW_v‖‖P‖ + max_i ‖W_oB_iW_q‖ + ‖key part‖"),
        ("D5", "block norms", forms.blocks, "(‖Σ_h b_h O_hO_hᵀ‖ Σ_h b_h)^½, b_h = ‖(‖J_ij‖)_ij‖₂ of head h"),
        ("D6", "coupled heads", forms.coupled, "the parts of D3, heads through the input and output directions they share"),
        ("D", "best at a point", forms.best, "min(D3, D5, D6)"),
    ]
    return [yudin_bound(attn, x)] + [
        at_most(id, name, statement, _SOURCE, _ASSUMES, log_of(float(value))) for id, name, value, statement in rows
    ]


def one_sequence(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Tokens of one input, checked, without a graph."""
    check_tokens(x)
    check_finite(x, "tokens")
    if x.ndim != 2:
        raise BadInputError(f"expected one input of shape (n, d), got {tuple(x.shape)}; pass one at a time")
    return x.detach()


@torch.no_grad()
def operator_bound(operator: Operator) -> Float[Tensor, " batch"] | None:
    """Upper bounds on the norms of a linearised map, (batch,) float64; nothing for operators that theory says nothing of.

    For attention the smallest of D3, D5, D6, at the cost of about two products with `JᵀJ`. Work is done in the precision of the
    operator on the tiles its kernel makes, in O(n · d) memory beyond the kernel's own, and the result covers the rounding of
    that precision (docs/point-bounds.md 4.9). For a norm Proposition 4.8, for a composition the product.
    """
    if isinstance(operator, AttentionJacobian):
        return trace_forms(operator, every=False).best
    if isinstance(operator, NormJacobian):
        smallest = operator.scale.double().flatten(1).amin(-1)
        slack = 1 + ROUNDINGS * torch.finfo(operator.dtype).eps * math.sqrt(operator.in_shape[-1])
        return operator.norm.weight.double().abs().max() / smallest * slack
    if isinstance(operator, Composed):
        outer = operator_bound(operator.outer)
        inner = None if outer is None else operator_bound(operator.inner)
        return None if outer is None or inner is None else outer * inner
    return None


class TraceForms(NamedTuple):
    """The bounds D3, D5, D6 of every item, (batch,) float64."""

    parts: Tensor
    blocks: Tensor
    coupled: Tensor

    @property
    def best(self) -> Tensor:
        return torch.stack(self).amin(0)


def trace_forms(operator: AttentionJacobian, *, every: bool = True) -> TraceForms:
    """Heads put together: plainly, through output directions, through input and output directions.

    every: all three of them; else one that cannot be the smallest may be left at a larger one.
    """
    operator = operator.tiled()
    batch, heads, dtype = operator.batch, operator.layer.heads, operator.dtype
    geometry = Geometry.of(operator.layer)
    tokens = Tokens.of(operator, geometry)
    slack = tokens.slack.unflatten(0, (batch, heads))
    p, beta, key, block = (t.double().unflatten(0, (batch, heads)) for t in trace_sizes(operator, geometry, tokens))
    parts = geometry.nu * p + beta + key
    p, beta, key, parts, block = (t * slack for t in (p, beta, key, parts, torch.minimum(parts, block)))
    plain = parts.sum(-1)
    if heads == 1:
        return TraceForms(plain, block[:, 0], plain)
    coupled = geometry.coupled(p, beta, key, dtype)
    # ‖Σ b_h O_hO_hᵀ‖ is at least max b_h: often D5 cannot win
    if not every and bool((coupled.square() <= block.amax(-1) * block.sum(-1)).all()):
        return TraceForms(plain, plain, coupled)
    return TraceForms(plain, geometry.blocks(block, dtype), coupled)
