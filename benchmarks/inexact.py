"""How often the upper ends fail when products are inexact: the bound for exact products (Theorem 2.2) and the one for products
with any errors (Theorem 2.5), which is told how large they are.

`σ₁ = 1`, `σ₂ = 0.9`, the rest evenly in [0, 0.6]. Products with `J` and with `Jᵀ` are off by a share `η` of their length.
Random errors have a random direction. Hiding errors know the top vector and give it, as far as `η` reaches, the image of a
vector in the middle of the rest. A bound has failed if it was below `σ₁` after any number of steps; the first is widened by
`2η` before.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import WrongAnswerError
from howsmooth.spectral import certificate

TITLE = "Failed upper ends with products off by a share η: exact-product bound (2.2) and bound for inexact products (2.5)"
DELTAS = (0.3, 0.01, 1e-6)
SIZES = (2_000, 20_000, 200_000)
STEPS = 24
GROUPS = 200  # distinct values in the rest
MIDDLE = 0.4  # the value that the hidden vector is given


def run(quick: bool) -> list[dict[str, Any]]:
    hiding = [(n, "hiding", eta, 300 if quick else 2000) for n in SIZES for eta in (1e-12, 1e-7, 1e-5, 1e-4, 1e-3)]
    counts = (2, 2, 2) if quick else (400, 60, 8)  # in full, so fewer
    random = [(n, "random", eta, count) for n, count in zip(SIZES, counts, strict=True) for eta in (1e-7, 1e-3)]
    cases = [*hiding, *random]
    rows = [_case(*case) for case in cases]
    if not any(row[f"2.2 at {delta:g}"] > _allowed(delta, row["runs"]) for row in rows for delta in DELTAS):
        raise WrongAnswerError("expected errors that break the exact-product bound, got none; they hide nothing")
    return rows


def _case(n: int, errors: str, eta: float, runs: int) -> dict[str, Any]:
    exact, inexact = torch.zeros(len(DELTAS)), torch.zeros(len(DELTAS))
    ends, uppers = [], torch.ones(2, 1)
    batch = max(1, min(runs, 2**19 // (n if errors == "random" else GROUPS)))
    for first in range(0, runs, batch):
        count = min(batch, runs - first)
        krylov = _krylov(n, errors, eta, count, seed=first)
        for i, delta in enumerate(DELTAS):
            below = torch.zeros(2, count, dtype=torch.bool)
            rarity = certificate.log_rarity(torch.ones(count).double(), n, delta)
            for k in range(1, STEPS + 1):
                uppers = _uppers(krylov, k, eta, rarity)
                below |= uppers < 1.0
            exact[i], inexact[i] = exact[i] + below[0].sum(), inexact[i] + below[1].sum()
        ends.append(uppers.sqrt())
    for i, delta in enumerate(DELTAS):
        if inexact[i] > _allowed(delta, runs):
            raise WrongAnswerError(f"expected at most a share {delta:g} of failures, got {int(inexact[i])} of {runs}: unsound")
    widths = torch.cat(ends, 1).median(-1).values.tolist()
    return {
        "N": n,
        "errors": errors,
        "η": eta,
        "runs": runs,
        **{f"2.2 at {delta:g}": int(exact[i]) for i, delta in enumerate(DELTAS)},
        **{f"2.5 at {delta:g}": int(inexact[i]) for i, delta in enumerate(DELTAS)},
        f"2.2/σ₁ at {DELTAS[-1]:g}": widths[0],
        f"2.5/σ₁ at {DELTAS[-1]:g}": widths[1],
    }


def _allowed(delta: float, runs: int) -> float:
    """Four standard deviations over the mean: a sound bound goes past it once in 30 000."""
    return runs * delta + 4 * math.sqrt(runs * delta * (1 - delta))


@dataclass(frozen=True)
class _Krylov:
    """`T`, and what the steps leave over, (batch, steps)."""

    alpha: Tensor
    beta: Tensor
    rest: Tensor


def _uppers(krylov: _Krylov, k: int, eta: float, rarity: Tensor) -> Tensor:
    """Both bounds on `λ` after `k` steps, (2, batch). The first is widened by what errors make of a value that was found."""
    alpha, beta, rest = krylov.alpha[:, :k], krylov.beta[:, :k], krylov.rest[:, :k]
    T = alpha.diag_embed() + beta[:, :-1].diag_embed(1) + beta[:, :-1].diag_embed(-1)
    exact = certificate.upper_end(torch.linalg.eigvalsh(T), beta, rarity)
    return torch.stack([exact * (1 + eta) ** 4, certificate.inexact_end(alpha, beta, rest, eta, rarity, 1e-15)])


def _start(n: int, errors: str, runs: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Singular values, the top one first, and random unit vectors.

    A random start meets the space of equal values in one direction, and products stay there unless errors leave it: a group
    of `m` equal values is one coordinate whose square has a χ² law of `m` degrees. Random errors leave it, so they run in full.
    """
    values = torch.cat([torch.tensor([1.0, 0.9]), torch.linspace(0.6, 0, GROUPS)]).double()
    counts = torch.tensor([1, 1] + [(n - 2) // GROUPS] * GROUPS)
    counts[-1] += n - int(counts.sum())
    if errors == "random":
        return values.repeat_interleave(counts), _unit(torch.randn(runs, n, generator=random, dtype=torch.float64))
    seed = int(torch.randint(2**31, (), generator=random))
    squares = np.random.default_rng(seed).chisquare(counts.numpy(), size=(runs, len(counts)))
    signs = torch.randint(2, squares.shape, generator=random) * 2 - 1
    return values, _unit(torch.from_numpy(squares).sqrt() * signs)


def _unit(q: Tensor) -> Tensor:
    return q / q.norm(dim=-1, keepdim=True)


def _krylov(n: int, errors: str, eta: float, runs: int, seed: int) -> _Krylov:
    """Lanczos on `JᵀJ` with full reorthogonalisation and inexact products."""
    random = torch.Generator().manual_seed(seed)
    values, q = _start(n, errors, runs, random)

    def product(v: Tensor) -> Tensor:
        image = values * v
        reach = eta * image.norm(dim=-1)
        if errors == "random":
            wrong = torch.randn(image.shape, generator=random, dtype=torch.float64)
            return image + wrong * (reach / wrong.norm(dim=-1))[:, None]
        hidden = (1.0 - MIDDLE) * v[:, 0]
        image[:, 0] -= hidden.minimum(reach).maximum(-reach)
        return image

    basis, alphas, betas, rests = q[:, None], [], [], []
    for k in range(STEPS):
        y = product(q)
        w = product(y)
        alpha = y.square().sum(-1, keepdim=True)
        part = alpha * q + (betas[-1] * basis[:, k - 1] if k else 0.0)
        next = w - part
        for _ in range(2):
            next = next - (torch.bmm(next[:, None], basis.mT) @ basis)[:, 0]
        beta = next.norm(dim=-1, keepdim=True)
        q = next / beta
        rests.append((w - part - beta * q).norm(dim=-1, keepdim=True))
        alphas.append(alpha)
        betas.append(beta)
        basis = torch.cat([basis, q[:, None]], 1)
    return _Krylov(torch.cat(alphas, 1), torch.cat(betas, 1), torch.cat(rests, 1))
