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
        empty = [~seen.any(axis, keepdim=True) for axis in (-1, -2)]
        s = s.masked_fill(~seen, -torch.inf)

        def normalised(potentials: list[Tensor], axis: int) -> list[Tensor]:
            other, lost = potentials[1 - axis], empty[axis]
            sums = torch.logsumexp((s + other).masked_fill(lost, 0.0), -1 - axis, keepdim=True).masked_fill(lost, 0.0)
            return [-sums, other] if axis == 0 else [other, -sums]

        f = [s.new_zeros(*s.shape[:-1], 1), s.new_zeros(*s.shape[:-2], 1, s.shape[-1])]
        if self.iterations is not None:
            for step in range(self.iterations):
                f = normalised(f, step % 2)
            return torch.where(seen, s + f[0] + f[1], -torch.inf).exp()
        return self._limit(s, seen, f, normalised)

    def _limit(self, s: Logits, seen: Seen, f: list[Tensor], normalised) -> Tensor:
        """Potentials of the limit without a graph, then chord steps on `rows and columns sum to one` with one."""
        raw, s_ = s, s.detach()
        for _ in range(ROUNDS):
            before, f = f, normalised(normalised(f, 0), 1)
            f = [t.detach() for t in f]
            if all(bool(((a - b).abs() <= 1e-14 * (1 + a.abs().max())).all()) for a, b in zip(before, f, strict=True)):
                break
        else:
            raise NoConvergenceError(unbalanced())
        p = torch.where(seen, s_ + f[0] + f[1], -torch.inf).exp()
        rows, columns = p.sum(-1), p.sum(-2)
        system = torch.cat([torch.cat([rows.diag_embed(), p], -1), torch.cat([p.mT, columns.diag_embed()], -1)], -2)
        inverse = torch.linalg.pinv(system, hermitian=True)
        n = s.shape[-2]
        for _ in range(_CHORDS):
            p = torch.where(seen, raw + f[0] + f[1], -torch.inf).exp()
            off = torch.cat([p.sum(-1) - rows.round(), p.sum(-2) - columns.round()], -1)
            step = (inverse @ off[..., None])[..., 0]
            f = [f[0] - step[..., :n, None], f[1] - step[..., None, n:]]
        return torch.where(seen, raw + f[0] + f[1], -torch.inf).exp()


def unbalanced() -> str:
    """What to say where the limit is too far."""
    return (
        f"expected logits whose rows and columns balance within {2 * ROUNDS} normalisations, got larger ones; "
        "use Sinkhorn(iterations=k) or a smaller scale"
    )
