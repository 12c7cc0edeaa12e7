"""Matrices at hand: their decompositions, their norms, and where a sum of products of them leads."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from howsmooth.errors import NoConvergenceError
from howsmooth.spectral.operator import stream, unit_rows
from howsmooth.spectral.ritz import krylov

_STEPS = 40  # products with `Wₒ W_v` that a guess may take: little beside one product with the Jacobian

Matrices = Float[Tensor, "*batch r c"]
Squares = Float[Tensor, "*batch n n"]


def svd(m: Matrices) -> tuple[Matrices, Float[Tensor, "*batch k"], Matrices]:
    """Singular value decompositions `U diag(s) Vh`, thin, the largest value first.

    >>> [t.shape for t in svd(torch.eye(2, 3))]
    [torch.Size([2, 2]), torch.Size([2]), torch.Size([2, 3])]
    """
    return _decomposed(lambda: torch.linalg.svd(m, full_matrices=False), m)


def eigh(m: Squares) -> tuple[Float[Tensor, "*batch n"], Squares]:
    """Eigenvalues of symmetric matrices, the least first, and orthonormal eigenvectors as columns."""
    return _decomposed(lambda: torch.linalg.eigh(m), m)


def eig(m: Squares) -> tuple[Complex[Tensor, "*batch n"], Complex[Tensor, "*batch n n"]]:
    """Eigenvalues and eigenvectors of any square matrices."""
    return _decomposed(lambda: torch.linalg.eig(m), m)


def _decomposed(decompose: Callable[[], Any], m: Tensor) -> Any:
    """What a decomposition gives, or one sentence in place of what LAPACK says."""
    if bool(m.isfinite().all()):
        try:
            return decompose()
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            pass
    raise NoConvergenceError("expected matrices that can be decomposed, got NaN, infinity or no convergence; rescale them")


def spectral_norm(m: Matrices) -> Float[Tensor, "*batch"]:
    """The largest singular value; infinity for a matrix with entries that are not finite."""
    finite = m.isfinite().all(-1).all(-1)
    norm = torch.linalg.matrix_norm(torch.where(finite[..., None, None], m, 0.0), ord=2)
    return torch.where(finite, norm, torch.inf)


def top_eigenvalue(m: Squares) -> Float[Tensor, "*batch"]:
    """An upper bound on the largest eigenvalue of a symmetric matrix: what is computed, and the error of the solver.

    The solver is backward stable, with an error of a few units of rounding for each row, relative to the norm, which the
    Frobenius norm is no smaller than. Infinity for a matrix with entries that are not finite.

    >>> 0 <= float(top_eigenvalue(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))) - 3 < 1e-12
    True
    """
    finite = m.isfinite().all(-1).all(-1)
    m = torch.where(finite[..., None, None], m, 0.0)
    error = 16 * m.shape[-1] * torch.finfo(m.dtype).eps * m.flatten(-2).norm(dim=-1)
    return torch.where(finite, torch.linalg.eigvalsh(m)[..., -1] + error, torch.inf)


def largest_eigenvalue(m: Squares, noise: float, step: float = 0.01) -> float:
    """An upper bound on the largest eigenvalue of a positive semi-definite `m`: `s − m` has a Cholesky factor (Lemma 4.6).

    noise: error of `m`, as a share of its trace.  step: by how much the Ritz value is raised first.
    """
    if not bool(m.isfinite().all()):
        return math.inf
    trace, d = float(m.diagonal().sum()), len(m)
    bound = _ritz_value(m / trace) * trace if trace > 0 else 0.0
    while bound < trace:
        bound *= 1 + step
        if int(torch.linalg.cholesky_ex((-m).diagonal_scatter(bound - m.diagonal())).info) == 0:
            break
        step *= 2
    return min(bound, trace) * (1 + 2 * d * (d + 1) * torch.finfo(m.dtype).eps) + noise * trace


def _ritz_value(m: Squares, steps: int = 16) -> float:
    """A lower bound on the largest eigenvalue of a positive semi-definite `m` of trace 1, by Rayleigh–Ritz.

    It is no smaller than the diagonal. The start `m(z ± e_k)`, `z` any vector and `m_kk` the largest diagonal entry, is no
    vector of the kernel: with the sign of `⟨m z, m e_k⟩` its length is at least `|m e_k| ≥ m_kk`. `z` has the row sums of
    `|m|`, with random signs.
    """
    column = m[:, int(m.diagonal().argmax())]
    signs = torch.randn(len(m), generator=torch.Generator().manual_seed(0)).sign().to(m)
    image = m @ (signs * m.abs().sum(0))
    image = image * (column.norm() / image.norm().clamp_min(torch.finfo(m.dtype).tiny))  # neither drowns the other
    start = image + torch.copysign(torch.ones_like(image[0]), image @ column) * column
    found = krylov(lambda block: block @ m, start[None, None], steps)
    return max(float(m.diagonal().max()), float(found.values[0, 0]))


def led_to(
    outward: Float[Tensor, "heads d_out d_v"], inward: Float[Tensor, "heads d_v d"], seeds: Sequence[int]
) -> Float[Tensor, "batch d_out"]:
    """Unit output directions that values reach most, one for each seed: the top output of `Σ_h Wₒ^h W_v^h`, by Lanczos."""
    a, b = (_moderate(w) for w in (outward.transpose(0, 1).flatten(1), inward.flatten(0, 1)))
    own = {seed: i for i, seed in enumerate(dict.fromkeys(seeds))}  # items of one seed share a start
    u = torch.stack([torch.randn(b.shape[1], generator=stream(seed, "guess")) for seed in own]).to(b)[:, None]
    basis = u[:, :0]
    for _ in range(min(_STEPS, b.shape[1])):
        for _ in range(2):
            u = u - (u @ basis.mT) @ basis
        u = unit_rows(u)
        basis = torch.cat([basis, u], 1)
        u = ((u @ b.mT) @ a.mT) @ a @ b
    images = (basis @ b.mT) @ a.mT
    _, vectors = torch.linalg.eigh(images @ images.mT)
    return unit_rows((vectors[:, :, -1:].mT @ images)[:, 0])[[own[seed] for seed in seeds]]


def _moderate(w: Tensor) -> Tensor:
    """A matrix scaled so that products of its numbers stay in range."""
    size = float(w.abs().max())
    return w / size if size and not 1e-6 < size < 1e6 else w
