"""Operators whose singular values are known."""

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

import howsmooth as hs
from howsmooth.spectral import Operator


@final
class Matrix(Operator):
    """Given matrices as an operator on vectors."""

    def __init__(self, matrix: Float[Tensor, "batch rows cols"]):
        self.matrix = matrix
        self.batch, rows, cols = matrix.shape
        self.in_shape, self.out_shape = (cols,), (rows,)
        self.dtype, self.device = matrix.dtype, matrix.device

    def jvp(self, v):
        return torch.einsum("bij,pbj->pbi", self.matrix, v)

    def vjp(self, u):
        return torch.einsum("bij,pbi->pbj", self.matrix, u)

    def select(self, items):
        return Matrix(self.matrix[items])


def _isolated(n: int) -> Tensor:
    return torch.cat([torch.ones(1), torch.linspace(0.5, 0, n - 1)])


def _clustered(n: int) -> Tensor:
    return torch.cat([1 - torch.linspace(0, 1e-3, 5), torch.linspace(0.8, 0, n - 5)])


def _equal(n: int) -> Tensor:
    return torch.cat([torch.ones(4), torch.linspace(0.9, 0, n - 4)])


def _flat(n: int) -> Tensor:
    return torch.linspace(1, 0, n)


def _slow(n: int) -> Tensor:
    return torch.arange(1, n + 1) ** -0.25


def _fast(n: int) -> Tensor:
    return 0.5 ** torch.arange(n).clamp_max(100)


def _rank_one(n: int) -> Tensor:
    return torch.cat([torch.ones(1), torch.zeros(n - 1)])


def _zero(n: int) -> Tensor:
    return torch.zeros(n)


def _near_invariant(n: int) -> Tensor:
    """Three values, each in a group that rounding cannot tell apart: Krylov spaces close after three steps."""
    groups = torch.tensor([1.0, 0.7, 0.2], dtype=torch.float64)[torch.arange(n) * 3 // n]
    return groups + 1e-15 * torch.linspace(0, 1, n, dtype=torch.float64)


def _square_root(n: int) -> Tensor:
    """`JᵀJ` has its eigenvalues spread evenly over [0, 1]."""
    return torch.linspace(1, 0, n).sqrt()


SPECTRA = {
    "isolated": _isolated,
    "clustered": _clustered,
    "equal": _equal,
    "flat": _flat,
    "slow": _slow,
    "fast": _fast,
    "rank one": _rank_one,
    "zero": _zero,
    "near-invariant": _near_invariant,
    "square root": _square_root,
}


def spectrum(name: str, n: int) -> Tensor:
    """Singular values in float64, the largest first."""
    values = SPECTRA[name](n).double()
    return values.sort(descending=True).values


def orthogonal(n: int, seed: int, batch: int = 1) -> Tensor:
    """Random orthogonal matrices, (batch, n, n), float64."""
    random = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(batch, n, n, generator=random, dtype=torch.float64))[0]


def beside(fixed: Float[Tensor, " n"], seed: int) -> Tensor:
    """A random orthogonal matrix, (n, n), whose first column is orthogonal to a given vector."""
    columns = torch.randn(len(fixed), len(fixed), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    columns[:, 0] -= fixed.double() * (fixed.double() @ columns[:, 0]) / fixed.double().square().sum()
    return torch.linalg.qr(columns)[0]


def rotated(values: Tensor, rows: int, cols: int, seed: int, batch: int = 1, dtype: torch.dtype = torch.float64) -> Matrix:
    """Matrices with these singular values between random bases, (batch, rows, cols)."""
    count = min(rows, cols)
    left, right = orthogonal(rows, seed, batch), orthogonal(cols, seed + 1, batch)
    return Matrix(((left[:, :, :count] * values[:count]) @ right[:, :, :count].mT).to(dtype))


@final
class Diagonal(Operator):
    """Diagonal matrices, (batch, n): thousands of runs for the price of one dense one. `guesses`, (batch, n), if any."""

    def __init__(self, values: Tensor, guesses: Tensor | None = None):
        self.values, self.guesses = values, guesses
        self.batch = len(values)
        self.in_shape = self.out_shape = tuple(values.shape[1:])
        self.dtype, self.device = values.dtype, values.device

    def jvp(self, v):
        return self.values * v

    def vjp(self, u):
        return self.values * u

    def guess(self, seeds):
        return self.guesses

    def select(self, items):
        return Diagonal(self.values[items], None if self.guesses is None else self.guesses[items])


def shuffled(values: Tensor, batch: int, seed: int, dtype: torch.dtype = torch.float64) -> Diagonal:
    """One spectrum in `batch` random orders. All items start alike, so the order is what makes the trials differ."""
    random = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, len(values), generator=random).argsort(-1)
    return Diagonal(values.to(dtype)[order])


def attention(
    n: int,
    d: int,
    seed: int,
    *,
    heads: int = 1,
    width: int | None = None,
    out: int | None = None,
    gain: float = 1.0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[hs.Attention, Tensor]:
    """A random attention layer of head width `width` and `out` outputs, with tokens (n, d)."""
    random = torch.Generator().manual_seed(seed)
    rows = heads * (width or max(1, d // heads))

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=random, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype)

    layer = hs.Attention(
        gain * weight(rows, d), weight(rows, d), weight(rows, d), weight(out or d, rows), heads=heads, **options
    )
    return layer, torch.randn(n, d, generator=random, dtype=torch.float64).to(dtype)


def norm_of(f: hs.Attention, x: Tensor) -> float:
    """`‖D_x f‖₂` by reverse-mode autodiff and a dense decomposition in float64."""
    jacobian = torch.func.jacrev(f)(x.double())
    assert isinstance(jacobian, Tensor)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))
