"""What is proved of the rounding of products: no product is further off, on vectors made to add up errors.

Products in float32, whose bound is in units of float32, against the same layer's in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.maps import Map
from howsmooth.maps.rounding import _gamma
from howsmooth.spectral import Composed, Operator
from howsmooth.spectral.operator import Weighted
from problems.layers import gaussian, turned
from problems.spectra import attention

Case = tuple[Map, Tensor]


def _layer(**options) -> tuple[hs.Attention, Tensor]:
    return attention(24, 8, seed=3, heads=2, dtype=torch.float32, **options)


def _biased() -> tuple[hs.Attention, Tensor]:
    layer, x = _layer()
    return replace(layer, b_q=gaussian(8, seed=1).float(), b_k=gaussian(8, seed=2).float(), b_v=gaussian(8, seed=3).float()), x


def _grouped() -> Case:
    weights = [gaussian(*shape, seed=i).float() for i, shape in enumerate([(12, 8), (6, 8), (6, 8), (8, 12)])]
    return hs.Attention(*weights, heads=4, kv_heads=2), gaussian(20, 8, seed=9).float()


def _lifted() -> Case:
    layer, x = _layer()
    return replace(layer, bias=10 * gaussian(1, 2, 24, 24, seed=4).float()), x


def _turned(q: int, k: int, phases: int) -> Case:
    layer, x = _layer()
    layer = turned(layer.to(torch.float64), 24, q=q, k=k, phases=phases, seed=2)
    return layer.to(torch.float32), x


def _normed(norm: type[hs.LayerNorm] | type[hs.RMSNorm], shift: float = 0.0) -> Case:
    layer, x = _layer()
    return layer @ norm(1 + 0.3 * gaussian(8, seed=5).float(), gaussian(8, seed=6).float()), x + shift


CASES: dict[str, Callable[[], Case]] = {
    "plain": _layer,
    "causal": lambda: _layer(causal=True),
    "sink": lambda: (replace(_layer()[0], kind=hs.kinds.Softmax(torch.tensor([30.0, -2.0]))), _layer()[1]),
    "window": lambda: _layer(window=5),
    "soft-cap": lambda: _layer(softcap=2.0, gain=4.0),
    "no output": lambda: (replace(_layer()[0], w_o=None), _layer()[1]),
    "biases": _biased,
    "groups": _grouped,
    "logit bias": _lifted,
    "query norm": lambda: _turned(1, 0, 0),
    "norms": lambda: _turned(2, 1, 0),
    "phases": lambda: _turned(0, 0, 1),
    "norms and phases": lambda: _turned(1, 1, 2),
    "large logits": lambda: _layer(gain=50.0),
    "larger logits": lambda: _layer(gain=1000.0),
    "LayerNorm alone": lambda: (hs.LayerNorm(torch.ones(8)), 3 + _layer()[1]),
    "after LayerNorm": lambda: _normed(hs.LayerNorm),
    "after LayerNorm, far off": lambda: _normed(hs.LayerNorm, 30.0),
    "after RMSNorm": lambda: _normed(hs.RMSNorm),
    "two layers": lambda: (_layer()[0] @ _biased()[0], _layer()[1]),
}


def unit(v: Tensor) -> Tensor:
    """Probes of length one, (probes, 1, …)."""
    return v / v.flatten(2).norm(dim=-1).reshape(-1, *[1] * (v.ndim - 1))


def vectors(shape: tuple[int, ...], matrix: Tensor, seed: int) -> Tensor:
    """Random ones, one sign throughout, single entries and tokens, and the singular vectors of `matrix`, (…, size)."""
    size = matrix.shape[-1]
    alone = torch.zeros(2, *shape).double()
    alone[0].view(-1)[size // 2] = 1.0
    alone[1, -1] = 1.0
    _, _, right = torch.linalg.svd(matrix, full_matrices=False)
    aligned = right[[0, 1, len(right) // 2, -1]].reshape(-1, *shape)
    random = gaussian(6, *shape, seed=seed)
    return unit(torch.cat([random, random.sign(), torch.ones(1, *shape).double(), alone, aligned])[:, None])


def largest_error(coarse: Operator, fine: Operator) -> float:
    """`|computed − exact|` over unit vectors, both ways."""
    errors, (matrix,) = [], fine.dense()
    for name, shape, m in (("jvp", fine.in_shape, matrix), ("vjp", fine.out_shape, matrix.mT)):
        v = vectors(shape, m, seed=len(name)).float()
        length = v.double().flatten(1).norm(dim=-1)
        got, truth = getattr(coarse, name)(v), getattr(fine, name)(v.double())
        errors.append(float(((got.double() - truth).flatten(1).norm(dim=-1) / length).max()))
    return max(errors)


def apart_from_one_map(J: Operator) -> float:
    """How far products, both ways, must be from those of any one linear map, as a share of the lengths that go in."""
    short = [(gaussian(1, 1, *shape, seed=s) * 2**10).round() / 2**10 for s in (1, 2) for shape in (J.in_shape, J.out_shape)]
    a, u, b, _ = (t.to(J.dtype) for t in short)  # so that a + b is exact
    whole, parts = J.jvp(a + b).double(), J.jvp(a).double() + J.jvp(b).double()
    lengths = sum(float(t.double().norm()) for t in (a + b, a, b))
    adjoint = abs(float((J.jvp(a).double() * u.double()).sum() - (a.double() * J.vjp(u).double()).sum()))
    return max(float((whole - parts).norm()) / lengths, adjoint / (2 * float(a.double().norm() * u.double().norm())))


@pytest.mark.parametrize("name", CASES)
def test_products_are_within_their_bound(name: str):
    f, x = CASES[name]()
    coarse, fine = f.linearize(x[None])[1], f.to(torch.float64).linearize(x[None].double())[1]
    known, finer = coarse.rounding(), fine.rounding()
    assert known is not None
    assert finer is not None
    norm = float(torch.linalg.matrix_norm(fine.dense()[0], 2))
    assert norm <= finer.size
    assert finer.error + finer.fixed < 1e-5 * finer.size  # it says something
    assert norm <= known.size
    assert 0 < largest_error(coarse, fine) <= known.error + known.fixed
    assert finer.error + finer.fixed < known.error + known.fixed
    assert 0 < apart_from_one_map(coarse) <= known.error


@pytest.mark.parametrize("rows", [1.0, 1e-3, 30.0])
def test_weighted_products_are_within_their_bound(rows: float):
    layer, x = _layer()
    mass = gaussian(24, 1, seed=8).abs().float()[None] + 0.1

    def weighted(x: Tensor, f: Map) -> Weighted:
        return Weighted(f.linearize(x[None])[1], rows * mass.sqrt().to(x), (1 / mass.sqrt()).to(x))

    coarse, fine = weighted(x, layer), weighted(x.double(), layer.to(torch.float64))
    known = coarse.rounding()
    assert known is not None
    assert float(torch.linalg.matrix_norm(fine.dense()[0], 2)) <= known.size
    # the weights of the two are rounded apart, by a unit each
    assert 0 < largest_error(coarse, fine) <= known.error + known.fixed + 4 * torch.finfo(torch.float32).eps * known.size


@pytest.mark.parametrize("causal", [False, True])
def test_measures(causal: bool):
    layer, x = _layer(causal=causal)
    mass = gaussian(24, seed=8).abs() + 0.1
    measure = hs.Measure(x.double(), mass / mass.sum(), positions=torch.arange(24).double() / 24 if causal else None)
    f = layer.on(measure)
    coarse, fine = f.linearize(x[None])[1], f.to(torch.float64).linearize(x[None].double())[1]
    known = coarse.rounding()
    assert known is not None
    assert 0 < largest_error(coarse, fine) <= known.error + known.fixed


@pytest.mark.slow
def test_random_layers():
    """Shapes and scales at random."""
    said = 0
    for seed in range(20):
        n, d = 3 + 4 * seed, 4 + 2 * (seed % 4)
        layer, x = attention(n, d, seed, heads=1 + seed % 2, gain=0.3 * 1.5**seed, causal=seed % 3 == 0, dtype=torch.float32)
        coarse, fine = layer.linearize(x[None])[1], layer.to(torch.float64).linearize(x[None].double())[1]
        known, finer = coarse.rounding(), fine.rounding()
        assert finer is not None
        assert float(torch.linalg.matrix_norm(fine.dense()[0], 2)) <= finer.size
        if known is not None:
            said += 1
            assert largest_error(coarse, fine) <= known.error + known.fixed, seed
    assert said >= 10


def test_float64_products_against_longer_ones():
    """Products with 40 digits by mpmath: `do = P (dv − …)`, written out."""
    mpmath: Any = pytest.importorskip("mpmath")
    layer, x = attention(6, 4, seed=1, gain=3.0)
    v = unit(gaussian(4, 1, 6, 4, seed=2))
    known = layer.linearize(x[None])[1].rounding()
    assert known is not None
    products = layer.linearize(x[None])[1].jvp(v)[:, 0]
    with mpmath.workdps(40):

        def mp(t: Tensor) -> Any:
            return mpmath.matrix(t.tolist())

        assert layer.w_k is not None
        assert layer.w_o is not None
        q, k, w = (mp(x) * mp(w).T for w in (layer.w_q, layer.w_k, layer.w_v))
        tau = mpmath.mpf(layer.scale)
        for probe, product in zip(v[:, 0], products, strict=True):
            t = mp(probe)
            dq, dk, dv = (t * mp(w).T for w in (layer.w_q, layer.w_k, layer.w_v))
            s, ds = tau * (q * k.T), tau * (dq * k.T + q * dk.T)
            out = mpmath.matrix(6, 4)
            for i in range(6):
                e = [mpmath.exp(s[i, j]) for j in range(6)]
                p = [a / sum(e) for a in e]
                mean = sum(p[j] * ds[i, j] for j in range(6))
                for c in range(4):
                    out[i, c] = sum(p[j] * ((ds[i, j] - mean) * w[j, c] + dv[j, c]) for j in range(6))
            out = out * mp(layer.w_o).T
            error = mpmath.mnorm(out - mp(product), "f")
            assert 0 < error <= known.error + known.fixed


def test_a_composition_adds_its_parts():
    layer, x = _layer()
    J = layer.to(torch.float64).linearize(x[None].double())[1]
    one, both = J.rounding(), Composed(J, J).rounding()
    assert one is not None
    assert both is not None
    assert both.size >= one.size**2
    assert both.error > 2 * one.size * one.error
    assert both.fixed > 2 * one.size * one.fixed  # the outer one is linearised at what the inner one gives, which is rounded
    assert both.moved > one.moved > 0


def test_a_bound_that_is_too_small_is_caught():
    """The bound takes everything at its worst, but a bound of a millionth would not pass."""
    f, x = CASES["plain"]()
    coarse, fine = f.linearize(x[None])[1], f.to(torch.float64).linearize(x[None].double())[1]
    known = coarse.rounding()
    assert known is not None
    assert largest_error(coarse, fine) > 1e-6 * (known.error + known.fixed)
    assert apart_from_one_map(coarse) > 1e-6 * known.error


def test_nothing_is_claimed_beyond_the_reach_of_the_precision():
    assert _gamma(2**30, 2.0**-24) == float("inf")
    assert hs.jacobian(torch.sin, _layer()[1]).operator.rounding() is None
