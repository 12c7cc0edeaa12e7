"""Weights whose rows and columns are normalised in turn."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.kernels.kinds.kind import Balancing, Counts, Kind, Logits, Traits, Visible
from howsmooth.settings import whole

ROUNDS = 2000  # normalisations of rows and columns within which the limit must be reached
_CHORDS = 3  # steps of the reference around the limit: exact up to its third derivatives


@final
@dataclass(frozen=True, repr=False)
class Sinkhorn(Kind):
    """`iterations` normalisations of `exp(s)`, of rows first, then of columns, and so on (Sander et al. 2022).

    Attributes:
        iterations: One is softmax; odd numbers end with rows that sum to one, even ones with columns that do; None takes
            the limit, where both do, and is differentiated as the limit.

    A key mask hides its tokens as queries too: they take part in no column.

    >>> Sinkhorn(), Sinkhorn(iterations=None)
    (Sinkhorn(), Sinkhorn(iterations=None))
    """

    lacks: ClassVar[dict[str, str]] = {
        "causal": "a column is normalised over all queries, later ones among them",
        "ends": "a column is normalised over all queries, later ones among them",
    }
    sloped: ClassVar[bool] = False
    iterations: int | None = 3

    @property
    def traits(self):
        return Traits(balancing=Balancing(self.iterations))

    def __post_init__(self):
        if self.iterations is not None:
            fix = "1 is softmax, None the doubly stochastic limit"
            count = whole(self.iterations, "1 or more whole iterations of Sinkhorn, or None", fix, least=1)
            object.__setattr__(self, "iterations", count)

    def check(self, softcap, mask):
        super().check(softcap, mask)
        if mask.bias is not None and bool((mask.bias == -torch.inf).any()):
            raise BadInputError(
                "expected Sinkhorn attention with a finite bias, got one that hides keys; columns need the same tokens as "
                "queries, pass attention_mask"
            )

    def check_tokens(self, n, m):
        if n != m:
            raise BadInputError(
                f"expected as many queries as keys for Sinkhorn attention, got {n} and {m}; rows and columns must balance"
            )

    def weigh(self, s, visible, slack, counts=None):
        visible = visible.expand(s.shape)
        visible = visible & visible.any(-2).unsqueeze(-1)  # a token that is no key is no query
        s = s.masked_fill(~visible, -torch.inf)
        log_count = s.new_zeros(()).expand(1, 1, 1, s.shape[-1]) if counts is None else counts.log()
        balance = balanced(Balancing(self.iterations), s, visible, log_count)
        if self.iterations is None and not bool(balance.converged.all()):
            raise NoConvergenceError(unbalanced())
        weights = _weights(s, visible, balance.f, balance.g)
        return weights if counts is None else weights * counts


class Balance(NamedTuple):
    """Potentials of rows, of columns, of columns before the last step on them; whether the limit was reached."""

    f: Tensor
    g: Tensor
    before: Tensor
    converged: Bool[Tensor, " batch"]


def balanced(balancing: Balancing, s: Logits, visible: Visible, log_count: Counts) -> Balance:
    """Potentials of logits that are `−inf` where a key is hidden: `a_j exp(s_ij + f_i + g_j)` are the weights, `a` the counts.

    Rows sum to one, and columns, every row as often as it counts, to `a_j`.
    """
    f, g = s.new_zeros(*s.shape[:-1], 1), s.new_zeros(*s.shape[:-2], 1, s.shape[-1])
    if balancing.iterations is None:
        return _limit(s, visible, f, g, log_count)
    before, empty = g, _empty(visible)
    for step in range(balancing.iterations):
        before = g if step % 2 else before
        f, g = _normalised(s, empty[step % 2], f, g, log_count, step % 2)
    return Balance(f, g, before, torch.ones(len(s), dtype=torch.bool, device=s.device))


def _weights(s: Logits, visible: Visible, f: Tensor, g: Tensor) -> Logits:
    return torch.where(visible, s + f + g, -torch.inf).exp()


def _empty(visible: Visible) -> tuple[Tensor, Tensor]:
    """Rows and columns in which there is nothing."""
    return ~visible.any(-1, keepdim=True), ~visible.any(-2, keepdim=True)


def _normalised(s: Logits, empty: Tensor, f: Tensor, g: Tensor, log_count: Counts, side: int) -> tuple[Tensor, Tensor]:
    """Potentials of rows and columns after rows (0) or columns (1) were divided by their sums; 0 where there is nothing."""
    axis, other = (-1, g + log_count) if side == 0 else (-2, f + log_count.mT)
    sums = torch.logsumexp((s + other).masked_fill(empty, 0.0), axis, keepdim=True).masked_fill(empty, 0.0)
    return (-sums, g) if side == 0 else (f, -sums)


def _limit(s: Logits, visible: Visible, f: Tensor, g: Tensor, log_count: Counts) -> Balance:
    """Potentials of the limit without a graph, then chord steps on `rows and columns sum to what they stand for` with one."""
    mass = log_count.exp().expand(*s.shape[:-2], 1, s.shape[-1])  # (batch, heads, 1, m)
    pairs, still, enough = mass.mT * mass, s.detach(), 64 * torch.finfo(s.dtype).eps
    converged, empty = torch.zeros(len(s), dtype=torch.bool, device=s.device), _empty(visible)
    for _ in range(ROUNDS):
        before = g
        for side in (0, 1):
            f, g = _normalised(still, empty[side], f, g, log_count, side)
        change, size = (t.abs().flatten(1).amax(-1) for t in (g - before, g))
        converged = change <= enough * (1 + size)
        if bool(converged.all()):
            break
    p = pairs * _weights(still, visible, f, g)
    rows, columns = p.sum(-1), p.sum(-2)
    across, down = torch.cat([rows.diag_embed(), p], -1), torch.cat([p.mT, columns.diag_embed()], -1)
    system = torch.where(converged[:, None, None, None], torch.cat([across, down], -2), 0.0)
    inverse = torch.linalg.pinv(system, hermitian=True)
    targets = torch.cat([torch.where(t > 0, mass[..., 0, :], 0.0) for t in (rows, columns)], -1)
    n = s.shape[-2]
    for _ in range(_CHORDS):
        p = pairs * _weights(s, visible, f, g)
        off = torch.cat([p.sum(-1), p.sum(-2)], -1) - targets
        step = (inverse @ off[..., None])[..., 0]
        f, g = f - step[..., :n, None], g - step[..., None, n:]
    return Balance(f, g, g, converged)


def unbalanced() -> str:
    """What to say where the limit is too far."""
    return (
        f"expected logits whose rows and columns balance within {2 * ROUNDS} normalisations, got larger ones; "
        "use Sinkhorn(iterations=k) or a smaller scale"
    )
