"""Gaussian measures: the Wasserstein-2 distance in closed form (Dowson & Landau 1982; Bures)."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import check_tensor


@final
@dataclass(frozen=True, eq=False, repr=False)
class Gaussian:
    """The normal law of this mean and covariance, kept in float64. The covariance may be singular."""

    mean: Float[Tensor, " d"]
    cov: Float[Tensor, "d d"]

    def __post_init__(self):
        mean, cov = self.mean, self.cov
        check_tensor(mean, "mean", ("d",), "give one number per dimension")
        check_tensor(cov, "covariance", (len(mean), len(mean)), "match it to the mean")
        mean, cov = mean.detach().double(), cov.detach().double()
        size = float(cov.abs().max())
        if float((cov - cov.mT).abs().max()) > 1e-6 * size or float(torch.linalg.eigvalsh(cov)[0]) < -1e-6 * size:
            raise BadInputError("expected a symmetric positive semi-definite covariance, got one that is not; symmetrise it")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "cov", (cov + cov.mT) / 2)

    def __repr__(self) -> str:
        return f"Gaussian(in R^{len(self.mean)})"

    def sample(self, n: int, seed: int = 0) -> Float[Tensor, "n d"]:
        """`n` independent points."""
        noise = torch.randn(n, len(self.mean), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return self.mean + noise.to(self.mean.device) @ _root(self.cov)


def bures(mu: Gaussian, nu: Gaussian) -> float:
    """`W₂² = |m − m'|² + tr(S + S' − 2(S^½ S' S^½)^½)`.

    The trace is `min_U ‖S^½ − S'^½ U‖_F²` over orthogonal `U` (Procrustes): written so, nothing cancels for measures close by.

    >>> one = torch.eye(1)
    >>> bures(Gaussian(torch.zeros(1), one), Gaussian(torch.full((1,), 3.0), 25 * one))
    5.0
    """
    if mu.mean.shape != nu.mean.shape:
        raise BadInputError(
            f"expected measures of one dimension, got {len(mu.mean)} and {len(nu.mean)}; compare like with like"
        )
    first, second = _root(mu.cov), _root(nu.cov)
    u, _, vh = torch.linalg.svd(second @ first)  # tr(first second U) is largest at U = u vh
    shape = first - second @ (u @ vh)
    return float((shape.square().sum() + (mu.mean - nu.mean).square().sum()).sqrt())


def _root(cov: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    values, vectors = torch.linalg.eigh(cov)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
