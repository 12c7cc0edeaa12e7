"""The upper end when products are inexact: no errors, however chosen, make a rigorous one fail more often than it says.

All sizes of errors and lengths to 200 000: `python -m benchmarks inexact`.
"""

import math
from typing import final

import pytest
import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.spectral import GolubKahan, Operator, certificate
from howsmooth.spectral.operator import Rounding
from problems.spectra import rotated, spectrum

SIGMA = torch.tensor([1.0, 0.9])


@final
class Inexact(Operator):
    """Diagonal matrices, the top value first, whose products are off by a share `eta` of their length.

    hiding: the errors give the top vector, as far as they reach, the image of one in the middle; else they are random.
    """

    def __init__(self, values: Tensor, batch: int, eta: float, hiding: bool):
        self.values, self.eta, self.hiding, self.batch = values, eta, hiding, batch
        self.in_shape = self.out_shape = tuple(values.shape)
        self.dtype, self.device = values.dtype, values.device
        self._random = torch.Generator().manual_seed(0)

    def jvp(self, v):
        image = self.values * v
        reach = self.eta * image.norm(dim=-1)
        if self.hiding:
            image[..., 0] -= (0.6 * v[..., 0]).minimum(reach).maximum(-reach)
            return image
        wrong = torch.randn(image.shape, generator=self._random, dtype=torch.float64)
        return image + wrong * (reach / wrong.norm(dim=-1))[..., None]

    def vjp(self, u):
        return self.jvp(u)

    def rounding(self, moved=0.0):
        return Rounding(1.0, self.eta, 0.0)

    def select(self, items):
        return Inexact(self.values, len(items), self.eta, self.hiding)


def failures(operator: Operator, delta: float, rigorous: bool, seed: int, steps: int = 16) -> int:
    """Upper ends below the norm, 1, of runs that stop early; those that are not rigorous widened by what errors explain."""
    solver = GolubKahan(max_steps=steps, delta=delta, rigorous=rigorous)
    solutions = solver.solve(operator, 1e-3, 0.02, [seed * 1000 + i for i in range(operator.batch)])
    widened = 1.0 if rigorous or not isinstance(operator, Inexact) else (1 + operator.eta) ** 2
    return sum(s.upper * widened < 1.0 for s in solutions)


def allowed(trials: int, delta: float) -> float:
    return trials * delta + 4 * math.sqrt(trials * delta * (1 - delta))


@pytest.mark.slow
def test_hiding_errors_break_the_bound_for_exact_products_and_not_the_other():
    n, batch, runs = 20_000, 40, 2
    values = torch.cat([SIGMA, torch.linspace(0.6, 0, n - 2)]).double()
    operator = Inexact(values, batch, 3e-3, hiding=True)
    assert sum(failures(operator, 0.01, False, seed) for seed in range(runs)) > allowed(batch * runs, 0.01)
    for delta in (0.3, 0.01):
        assert sum(failures(operator, delta, True, seed) for seed in range(runs)) <= allowed(batch * runs, delta)


@pytest.mark.slow
@pytest.mark.parametrize("hiding", [False, True])
@pytest.mark.parametrize("eta", [1e-12, 1e-7, 1e-5, 1e-3])
def test_rigorous_ends_fail_no_more_often_than_they_say(eta: float, hiding: bool):
    values = torch.cat([SIGMA, torch.linspace(0.6, 0, 298)]).double()
    operator = Inexact(values, 100, eta, hiding)
    assert failures(operator, 0.3, True, seed=1) <= allowed(100, 0.3)
    assert failures(operator, 1e-6, True, seed=2) == 0


def test_errors_of_float64_cost_nothing():
    values = torch.cat([SIGMA, torch.linspace(0.6, 0, 1998)]).double()
    plain, rigorous = (
        GolubKahan(rigorous=kind).solve(Inexact(values, 5, 1e-14, hiding=True), 1e-3, 0.02, range(5)) for kind in (False, True)
    )
    assert [s.steps for s in rigorous] == [s.steps for s in plain]
    assert [s.upper for s in rigorous] == pytest.approx([s.upper for s in plain], rel=1e-3)


def test_products_whose_rounding_nobody_knows_are_refused():
    with pytest.raises(BadInputError, match=r"^expected a map whose rounding is bounded .* got Matrix"):
        GolubKahan(rigorous=True).solve(rotated(spectrum("flat", 300), 300, 300, seed=0), 1e-3, None, [0])


def _krylov(k: int = 6, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """`α`, `β`, and the rarity of their starts."""
    random = torch.Generator().manual_seed(0)
    alpha, beta = 1 + torch.rand(2, batch, k, generator=random, dtype=torch.float64)
    return alpha, beta * torch.logspace(0, -2, k).double(), certificate.log_rarity(torch.ones(batch).double(), 1000, 1e-6)


def test_without_errors_both_bounds_are_one():
    alpha, beta, rarity = _krylov()
    beside = beta[:, :-1]
    ritz = torch.linalg.eigvalsh(alpha.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1))
    exact = certificate.upper_end(ritz, beta, rarity)
    inexact = certificate.inexact_end(alpha, beta, torch.zeros_like(beta), 0.0, rarity, 0.0)
    assert bool((inexact >= exact).all())
    torch.testing.assert_close(inexact, exact, rtol=1e-3, atol=0)


def test_larger_errors_reach_higher_until_nothing_is_known():
    alpha, beta, rarity = _krylov()
    rest = torch.full_like(beta, 1e-12)
    ends = torch.stack([certificate.inexact_end(alpha, beta, rest, e, rarity, 1e-15) for e in (0.0, 1e-9, 1e-8, 1e-6, 1e-3)])
    assert bool((ends.diff(dim=0) > 0).all())
    assert bool((certificate.inexact_end(alpha, beta, rest, 0.0, rarity, 1.0) == torch.inf).all())  # no start is that lucky


@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1e8, 1e120])
def test_a_bound_scales_with_the_map(scale: float):
    alpha, beta, rarity = _krylov()
    rest = torch.full_like(beta, 1e-12)
    base = certificate.inexact_end(alpha, beta, rest, 1e-12, rarity, 1e-15)
    scaled = certificate.inexact_end(alpha * scale, beta * scale, rest * scale, 1e-12 * scale**0.5, rarity, 1e-15)
    torch.testing.assert_close(scaled / scale, base, rtol=1e-9, atol=0)


def test_a_root_is_a_root():
    """At the bound, `β_k x_k + Σ ε_j x_j` with `x = (λ − T)⁻¹ e_1` is what a likely start has, solved by LAPACK."""
    alpha, beta, rarity = _krylov()
    rest, error = torch.full_like(beta, 1e-9), 1e-10
    end = certificate.inexact_end(alpha, beta, rest, error, rarity, 0.0)
    beside = beta[:, :-1]
    T = alpha.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1)
    first = torch.zeros_like(alpha)
    first[:, 0] = 1.0
    x = torch.linalg.solve(end[:, None, None] * torch.eye(alpha.shape[1]).double() - T, first)
    sizes = rest + error * (2 * end.sqrt() + error)[:, None]
    seen = beta[:, -1] * x[:, -1] + (sizes * x).sum(-1)
    assert bool((x > 0).all())
    torch.testing.assert_close(seen, (-rarity).exp(), rtol=1e-3, atol=0)
    assert bool((seen <= (-rarity).exp()).all())
