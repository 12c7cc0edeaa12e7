"""The gradient of `L` against finite differences, on every kind of map, and in clusters of equal singular values."""

import pytest
import torch

import howsmooth as hs
from howsmooth.search.ascent import pairs_at, steepest
from howsmooth.search.sets import Ball, Ellipsoid
from howsmooth.spectral import TopPairs
from problems.layers import gaussian


def head(**options) -> hs.Attention:
    return hs.Attention.from_matrices(gaussian(3, 3, seed=1), gaussian(2, 3, seed=2), **options)


def layer() -> hs.Attention:
    w_q, w_k, w_v = (gaussian(4, 3, seed=s) for s in (3, 4, 5))
    return hs.Attention(w_q, w_k, w_v, gaussian(3, 4, seed=6), heads=2, b_q=gaussian(4, seed=7), softcap=2.0, causal=True)


MAPS = {
    "head": head(),
    "causal": head(causal=True),
    "layer": layer(),
    "composition": layer() @ hs.LayerNorm(gaussian(3, seed=8), gaussian(3, seed=9)),
    "function": lambda x: torch.tanh(x @ gaussian(3, 4, seed=1)) * x.sum(-1, keepdim=True),
}


def sigma(f, x) -> float:
    return float(pairs_at(f, x[None], None, 0).value[0])


def clustered(pairs: TopPairs) -> int:
    return int((pairs.value >= (1 - 1e-3) * pairs.value[0]).sum())


@pytest.mark.parametrize("name", MAPS)
def test_gradient_equals_finite_differences(name):
    f, x, h = MAPS[name], gaussian(1, 4, 3, seed=0), gaussian(4, 3, seed=11)
    g = steepest(f, lambda z: z, x, pairs_at(f, x, None, 0))[0]
    t = 1e-5
    slope = (sigma(f, x[0] + t * h) - sigma(f, x[0] - t * h)) / (2 * t)
    assert abs(slope - float((g * h).sum())) <= 1e-6 * float(g.norm() * h.norm())
    assert abs(slope - float((1.01 * g * h).sum())) > 1e-6 * float(g.norm() * h.norm())  # the check can fail


def test_gradient_in_coordinates_of_a_set():
    f, space = head(), Ellipsoid(hs.RMSNorm(torch.tensor([1.0, 2.0, 0.5])))
    z, h = space.sample(2, 4, 3, torch.Generator().manual_seed(0)), gaussian(2, 4, 3, seed=12)
    g = steepest(f, space.tokens, z, pairs_at(f, space.tokens(z), None, 0))
    for i in range(2):
        ends = [sigma(f, space.tokens(z + t * h)[i]) for t in (1e-5, -1e-5)]
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float((g[i] * h[i]).sum()), rel=1e-5)


def test_a_cluster_is_climbed_along_its_steepest_pair():
    """At tokens that coincide `J = P ⊗ V`: with V = I the top value has multiplicity d; one pair need not be the steepest."""
    f = hs.Attention.from_matrices(gaussian(3, 3, seed=1), torch.eye(3, dtype=torch.float64))
    x = gaussian(1, 1, 3, seed=3).expand(1, 5, 3).contiguous()
    x[0, 0] += 0.3 * gaussian(3, seed=4)
    pairs = pairs_at(hs.Attention.from_matrices(torch.zeros(3, 3).double(), torch.eye(3).double()), x, None, 0)
    assert clustered(pairs) == 3
    zero = x.new_zeros(3, 3)
    uniform = hs.Attention.from_matrices(zero, torch.eye(3).double())
    assert float(steepest(uniform, lambda z: z, x, pairs).norm()) < 1e-12  # L is constant there
    same = x[:, 1:].contiguous()
    pairs = pairs_at(f, same, None, 0)
    assert clustered(pairs) == 3
    g = steepest(f, lambda z: z, same, pairs)
    alone = TopPairs(pairs.value[:1], pairs.left[:1], pairs.right[:1])
    single = steepest(f, lambda z: z, same, alone)
    assert float(g.norm()) >= float(single.norm()) * (1 - 1e-9)
    for direction in (g, single):
        length = float(direction.norm())
        if length > 1e-9:
            rise = sigma(f, (same + 1e-6 * direction / length)[0]) - sigma(f, same[0])
            assert rise >= 1e-6 * length * (1 - 1e-3)


def test_a_crossing_of_two_singular_values():
    """A diagonal map with equal entries: `σ = max |g_i|`, whose steepest ascent raises one of them, not their mean."""

    def f(x):
        return torch.stack([x[..., 0] ** 2 / 2, 3 * x[..., 1] ** 2 / 2], -1)  # J = diag(x_0, 3 x_1)

    x = torch.tensor([[[3.0, 1.0]]], dtype=torch.float64)
    pairs = pairs_at(f, x, None, 0)
    assert clustered(pairs) == 2
    g = steepest(f, lambda z: z, x, pairs)
    assert float(g.norm()) == pytest.approx(3.0, rel=1e-6)


def test_large_jacobians_go_through_the_solver():
    f = hs.Attention.from_matrices(gaussian(20, 20, seed=1) / 4, gaussian(20, 20, seed=2) / 4)
    x = Ball(4.0).sample(2, 20, 20, torch.Generator().manual_seed(0))
    pairs = pairs_at(f, x, None, 0)
    exact = hs.lipschitz_batch(f, x, solver=hs.DenseSVD())
    assert torch.allclose(pairs.value[0], exact.value, rtol=5e-3)
    warm = pairs_at(f, x, pairs.right[0], 0)
    assert bool((warm.value >= pairs.value * (1 - 1e-3)).all())
    assert bool((warm.value[0] <= exact.value * (1 + 1e-12)).all())
