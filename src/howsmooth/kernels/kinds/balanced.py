"""Weights whose rows and columns are normalised in turn."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.kernels.kinds.kind import Kind, Logits, Seen
from howsmooth.settings import whole

ROUNDS = 2000  # normalisations of rows and columns within which the limit must be reached
_CHORDS = 3  # steps of the reference around the limit: exact up to its third derivatives


@final
@dataclass(frozen=True, repr=False)
class Sinkhorn(Kind):
    """`iterations` normalisations of `exp(s)`, of rows first, then of columns, and so on (Sander et al. 2022).

    iterations: one is softmax; odd numbers end with rows that sum to one, even ones with columns that do; None takes the limit,
    where both do, and is differentiated as the limit.
    A key mask hides its tokens as queries too: they take part in no column.

    >>> Sinkhorn(), Sinkhorn(iterations=None)
    (Sinkhorn(), Sinkhorn(iterations=None))
    """

    lacks: ClassVar[dict[str, str]] = {
        "causal": "a column is normalised over all queries, later ones among them",
        "ends": "a column is normalised over all queries, later ones among them",
    }
    iterations: int | None = 3

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

    def weigh(self, s, seen, slack):
        seen = seen.expand(s.shape)
        seen = seen & seen.any(-2).unsqueeze(-1)  # a token that is no key is no query
        s = s.masked_fill(~seen, -torch.inf)
        f, g = s.new_zeros(*s.shape[:-1], 1), s.new_zeros(*s.shape[:-2], 1, s.shape[-1])
        if self.iterations is None:
            f, g = _limit(s, seen, f, g)
        for step in range(self.iterations or 0):
            f, g = _normalised(s, seen, f, g, step % 2)
        return _weights(s, seen, f, g)


def _weights(s: Logits, seen: Seen, f: Tensor, g: Tensor) -> Logits:
    return torch.where(seen, s + f + g, -torch.inf).exp()


def _normalised(s: Logits, seen: Seen, f: Tensor, g: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Potentials of rows and columns after rows (0) or columns (1) were divided by their sums; 0 where there is nothing."""
    axis, other = (-1, g) if side == 0 else (-2, f)
    lost = ~seen.any(axis, keepdim=True)
    sums = torch.logsumexp((s + other).masked_fill(lost, 0.0), axis, keepdim=True).masked_fill(lost, 0.0)
    return (-sums, g) if side == 0 else (f, -sums)


def _limit(s: Logits, seen: Seen, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Potentials of the limit without a graph, then chord steps on `rows and columns sum to one` with one."""
    still, enough = s.detach(), 64 * torch.finfo(s.dtype).eps
    for _ in range(ROUNDS):
        before = g
        f, g = _normalised(still, seen, f, g, 0)
        f, g = _normalised(still, seen, f, g, 1)
        if bool((g - before).abs().max() <= enough * (1 + g.abs().max())):
            break
    else:
        raise NoConvergenceError(unbalanced())
    p = _weights(still, seen, f, g)
    rows, columns = p.sum(-1), p.sum(-2)
    across, down = torch.cat([rows.diag_embed(), p], -1), torch.cat([p.mT, columns.diag_embed()], -1)
    inverse = torch.linalg.pinv(torch.cat([across, down], -2), hermitian=True)
    n = s.shape[-2]
    for _ in range(_CHORDS):
        p = _weights(s, seen, f, g)
        off = torch.cat([p.sum(-1) - rows.round(), p.sum(-2) - columns.round()], -1)
        step = (inverse @ off[..., None])[..., 0]
        f, g = f - step[..., :n, None], g - step[..., None, n:]
    return f, g


def unbalanced() -> str:
    """What to say where the limit is too far."""
    return (
        f"expected logits whose rows and columns balance within {2 * ROUNDS} normalisations, got larger ones; "
        "use Sinkhorn(iterations=k) or a smaller scale"
    )
