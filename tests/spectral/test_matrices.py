"""Norms of matrices: upper bounds, whatever enters."""

import torch

from howsmooth.spectral import spectral_norm, top_eigenvalue


def test_a_top_eigenvalue_is_an_upper_bound():
    g = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(200, 12, 12, generator=g, dtype=torch.float64))[0]
    spectrum = torch.logspace(0, -16, 12, dtype=torch.float64)
    m = u @ (spectrum[:, None] * u.mT)
    top = top_eigenvalue((m + m.mT) / 2)
    assert bool((top >= 1).all())
    assert bool((top < 1 + 1e-12).all())


def test_what_is_not_finite_is_infinite():
    m = torch.eye(2, dtype=torch.float64).repeat(3, 1, 1)
    m[1, 0, 1], m[2, 0, 0] = torch.nan, torch.inf
    for norm in (spectral_norm(m), top_eigenvalue(m)):
        assert norm.isinf().tolist() == [False, True, True]
