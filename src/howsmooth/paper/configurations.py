"""How the constant of bad configurations grows with the number of tokens and with the radius."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.search.families import Configuration, Configured, eigenvector_configuration, worst_configuration
from howsmooth.search.sets import Ball
from howsmooth.theory.constants import constants
from howsmooth.theory.ours import tokens as sqrt_bound
from howsmooth.verbs import lipschitz

LENGTHS = (8, 16, 32, 64, 128, 256, 512)


@final
@dataclass(frozen=True, eq=False)
class Growth:
    """One configuration at growing lengths.

    rows: measured, one per length.  log_bounds: logarithms of the upper bound B7 beside them.  exponent: the slope of `log L`
    in `log n`.
    """

    configuration: Configuration
    rows: tuple[Configured, ...]
    log_bounds: tuple[float, ...]
    exponent: float

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() | {"log_B7": log} for row, log in zip(self.rows, self.log_bounds, strict=True)]
        return {"configuration": str(self.configuration), "exponent": self.exponent, "rows": rows}


def grow(attn: Attention, radius: float, lengths: Sequence[int] = LENGTHS, *, head: int | None = None, seed: int = 0) -> Growth:
    """The paper's eigenvector tokens of one head at every length, the whole layer measured.

    head: whose matrix builds the tokens; by default the head that gives the largest `L` at the longest length. √n is expected
    while every head's logits keep the two places apart, `2R²|⟨A_h u, u⟩| > log n` (docs/worst-inputs.md §1).

    >>> growth = grow(Attention.from_matrices(-torch.eye(1), torch.eye(1)), 3.0)
    >>> abs(growth.exponent - 0.5) < 0.02
    True
    """
    space, lengths = Ball(radius), _lengths(lengths)
    heads = range(attn.heads) if head is None else [head]
    found = [c for c in (eigenvector_configuration(attn, space, head=h) for h in heads) if c is not None]
    if not found:
        raise BadInputError("expected a head with a real eigenvalue, got none; use worst_configuration, which needs none")
    dtype = torch.promote_types(attn.dtype, torch.float32)
    longest = torch.stack([c.place(lengths[-1]) for c in found]).to(dtype)
    last = [lipschitz(attn, x, seed=seed) for x in longest]
    best = max(range(len(found)), key=lambda i: last[i].value)
    chosen, rows = found[best], []
    for n in lengths:
        x = chosen.place(n).to(dtype)
        estimate = last[best] if n == lengths[-1] else lipschitz(attn, x, seed=seed)
        rows.append(Configured(n, space.reach, chosen, x, estimate))
    layer = constants(attn)
    logs = [sqrt_bound(layer, n, radius).log_value or math.inf for n in lengths]
    return Growth(chosen, tuple(rows), tuple(logs), exponent(lengths, [row.estimate.value for row in rows]))


def scan(attn: Attention, radii: Sequence[float], lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[Configured]:
    """The worst configuration of any family and head, at every radius and length."""
    return [worst_configuration(attn, n, radius, seed=seed) for radius in radii for n in _lengths(lengths)]


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The least-squares slope of `log values` in `log lengths`.

    >>> round(exponent([1, 4, 16], [3.0, 6.0, 12.0]), 12)
    0.5
    """
    if len(lengths) < 2 or any(v <= 0 for v in values):
        raise BadInputError(f"expected two lengths or more and values above zero, got {list(values)}; add lengths")
    x = torch.tensor(lengths, dtype=torch.float64).log()
    y = torch.tensor(values, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def _lengths(lengths: Sequence[int]) -> list[int]:
    whole = [n for n in lengths if isinstance(n, int) and not isinstance(n, bool) and n >= 2]
    if not whole or len(whole) != len(lengths) or sorted(set(whole)) != whole:
        raise BadInputError(f"expected growing whole lengths of at least 2, got {list(lengths)}; as in 8, 16, 32")
    return whole
