"""Answers that must not be wrong: precisions that differ, norms near underflow, large biases, starts known in advance."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.spectral import DenseSVD, GolubKahan, Solver
from howsmooth.spectral.operator import stream
from problems.layers import gaussian
from problems.spectra import attention, beside, norm_of, orthogonal

RIGOROUS = GolubKahan(rigorous=True)
TINY = 1e-13  # of a float64 decomposition of a few hundred rows: √N · eps, with room


def holds(est: hs.Estimate, truth: float, tol: float = 1e-3) -> None:
    """Both ends, and the value to `tol`."""
    assert est.lower <= truth * (1 + TINY)
    assert truth <= est.upper * (1 + TINY)
    assert est.value == pytest.approx(truth, rel=tol, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("certify", [None, 0.02])
@pytest.mark.parametrize("steep", [1e4, 1e5])
def test_a_function_that_is_another_in_float32(steep: float, certify: float | None):
    """`sin(c z)/c`: rounding of `c z` turns the phase. The float64 function is meant, and its interval is given."""
    x = gaussian(600, seed=0, dtype=torch.float32)
    est = hs.lipschitz(lambda z: torch.sin(steep * z) / steep, x, certify=certify)
    holds(est, float((steep * x.double()).cos().abs().max()))
    assert est.precision == "float64"


def test_a_batch_of_functions_that_are_others_in_float32():
    x = gaussian(3, 600, seed=0, dtype=torch.float32) * torch.tensor([1e-6, 1.0, 1e-3])[:, None]
    for est, row in zip(hs.lipschitz_batch(lambda z: torch.sin(1e5 * z) / 1e5, x), x, strict=True):
        holds(est, float((1e5 * row.double()).cos().abs().max()))


def _weighted(norm: float) -> tuple[Callable[[Tensor], Tensor], Tensor, float]:
    weights = torch.linspace(0.1, 1, 300).double() * norm
    return (lambda x: x * weights.to(x)), torch.ones(300), float(weights.float().double().max())


def _single(norm: float) -> tuple[Callable[[Tensor], Tensor], Tensor, float]:
    weights = torch.linspace(0.1, 1, 300) * norm
    return (lambda x: x.float() * weights), torch.ones(300), float(weights.double().max())


def _module(norm: float) -> tuple[Callable[[Tensor], Tensor], Tensor, float]:
    torch.manual_seed(0)
    module = nn.Linear(300, 290, bias=False)
    module.weight.data *= norm
    return module, torch.ones(300), float(torch.linalg.matrix_norm(module.weight.detach().double(), 2))


def _attention(norm: float) -> tuple[Callable[[Tensor], Tensor], Tensor, float]:
    layer, x = attention(40, 12, seed=1, heads=2, gain=2.0, dtype=torch.float32)
    assert layer.w_o is not None
    layer = replace(layer, w_o=layer.w_o * norm)
    return layer, x, norm_of(layer.to(torch.float64), x)


@pytest.mark.parametrize("norm", [1e-6, 1e-9, 3e-11, 1e-13, 1e-20, 1e-30])
@pytest.mark.parametrize("build", [_weighted, _single, _module, _attention])
def test_tiny_maps(build: Callable[[float], tuple[Callable[[Tensor], Tensor], Tensor, float]], norm: float):
    """Their squares leave the range of float32."""
    f, x, truth = build(norm)
    for est in (hs.lipschitz(f, x, solver=GolubKahan()), hs.lipschitz_batch(f, x[None], solver=GolubKahan())[0]):
        assert est.value == pytest.approx(truth, rel=1e-3, abs=0)
        noise = 1e-5 if est.precision == "float32" else TINY
        assert est.lower <= truth * (1 + noise)
        assert truth <= est.upper * (1 + noise)
        assert est.upper <= 2 * truth


BIASES = [(1e7, torch.float32), (-1e7, torch.float32), (1e16, torch.float64), (-1e16, torch.float64), (1e12, torch.float64)]


@pytest.mark.parametrize("solver", [DenseSVD(), GolubKahan(), RIGOROUS], ids=str)
@pytest.mark.parametrize(("size", "dtype"), BIASES)
def test_a_constant_bias_changes_nothing_or_is_refused(size: float, dtype: torch.dtype, solver: Solver):
    """Softmax does not see it, but it takes the digits of the logits."""
    layer, x = attention(12, 6, seed=2, heads=2, gain=4.0, dtype=dtype)
    truth = norm_of(layer.to(torch.float64), x)
    lifted = replace(layer, bias=torch.full((1, 1, 12, 12), size, dtype=dtype))
    if abs(size) * torch.finfo(torch.float64).eps > 1e-3:
        with pytest.raises(BadInputError, match=r"^expected tol ≥ .*; the products of this map at this x carry no more digits"):
            hs.lipschitz(lifted, x, solver=solver)
        return
    if solver == RIGOROUS and abs(size) == 1e12:  # what rounding may have added is more than `tol`
        with pytest.raises(BadInputError, match=r"^expected tol ≥ .* for rigorous=True"):
            hs.lipschitz(lifted, x, solver=solver)
        assert lifted.bias is not None
        lifted, size = replace(lifted, bias=lifted.bias * 1e-4), size * 1e-4
    est = hs.lipschitz(lifted, x, solver=solver)
    assert est.lower <= truth * (1 + abs(size) * torch.finfo(torch.float64).eps)
    assert est.value == pytest.approx(truth, rel=1e-3)
    assert est.upper >= truth * (1 - abs(size) * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("hidden", [-1e4, -1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_mask_written_into_the_bias_costs_no_digits(hidden: float, dtype: torch.dtype):
    layer, x = attention(40, 8, seed=2, heads=2, gain=4.0, dtype=dtype)
    seen = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    written, true = (
        replace(layer, bias=torch.zeros(1, 1, 40, 40, dtype=dtype).masked_fill(~seen, low)) for low in (hidden, -math.inf)
    )
    written, true = hs.lipschitz(written, x, seed=1), hs.lipschitz(true, x, seed=1)
    assert written.to_dict() == true.to_dict()
    assert true.noise < 1e-4
    holds(written, norm_of(replace(layer, causal=True).to(torch.float64), x))


def test_one_row_far_off_is_counted():
    """Some rows lifted and others not: the row that lost its digits decides."""
    layer, x = attention(40, 8, seed=2, gain=4.0, dtype=torch.float32)
    bias = torch.zeros(1, 1, 40, 40)
    bias[0, 0, 7] = 1e6
    lifted = replace(layer, bias=bias)
    assert lifted.linearize(x[None])[1].noise > 0.05
    holds(hs.lipschitz(lifted, x), norm_of(layer.to(torch.float64), x))


def test_fused_kernels_count_a_bias_too():
    pytest.importorskip("triton")
    from howsmooth.kernels import Mask, Scores
    from howsmooth.kernels.triton.fused import Fused

    q, k, v = (gaussian(1, 1, 16, 16, seed=s, dtype=torch.float32) for s in range(3))
    for precision in ("half", "strict"):
        plain, lifted = (
            Fused(q, k, v, Scores(0.25, None, Mask(bias=bias)), precision) for bias in (None, torch.full((1, 1, 16, 16), 1e5))
        )
        assert plain.noise < 1e-3
        assert lifted.noise > 1e-3


@pytest.mark.parametrize("build", [_weighted, _module, _attention])
def test_a_run_without_a_seed_repeats(build: Callable[[float], tuple[Callable[[Tensor], Tensor], Tensor, float]]):
    f, x, _ = build(1.0)
    first, again = (hs.lipschitz(f, x, solver=GolubKahan()) for _ in range(2))
    given = hs.lipschitz(f, x, solver=GolubKahan(), seed=first.seed)
    assert first.to_dict() == again.to_dict() == given.to_dict()
    assert torch.equal(first.direction, again.direction)
    assert torch.equal(first.direction, given.direction)
    assert hs.lipschitz(f, x + 0.01, solver=GolubKahan()).seed != first.seed


def test_a_batch_without_a_seed_is_a_loop():
    layer, _ = attention(20, 6, seed=2, heads=2, gain=3.0)
    x = gaussian(4, 20, 6, seed=0) * torch.tensor([0.1, 1.0, 1.0, 3.0])[:, None, None]
    together = hs.lipschitz_batch(layer, x, solver=GolubKahan())
    assert len({e.seed for e in together}) == 4
    for est, row in zip(together, x, strict=True):
        alone = hs.lipschitz(layer, row, solver=GolubKahan())
        assert (est.seed, est.steps) == (alone.seed, alone.steps)
        assert est.value == pytest.approx(alone.value, rel=1e-9)
    w = gaussian(300, 300, seed=3)
    rows = gaussian(3, 300, seed=4)
    for est, row in zip(hs.lipschitz_batch(lambda t: torch.tanh(t @ w), rows), rows, strict=True):
        alone = hs.lipschitz(lambda t: torch.tanh(t @ w), row)
        assert est.seed == alone.seed
        assert est.value == pytest.approx(alone.value, rel=1e-9)


@pytest.mark.parametrize("certify", [None, 0.02])
def test_maps_built_against_a_start_that_is_known(certify: float | None):
    """The top input of these maps is orthogonal to the start that seed 0 draws, which then finds the second value."""
    size, wrong = 400, 0
    start = torch.randn(size, generator=stream(0, "start 0"))
    for case in range(6):
        values = torch.cat([torch.tensor([1.3 + 0.02 * case, 1.0]), torch.linspace(0.5, 0, size - 2)]).double()
        w = orthogonal(size, case + 50)[0] * values @ beside(start, case).mT
        holds(hs.lipschitz(lambda x, w=w: w @ x, gaussian(size, seed=case), certify=certify), float(values[0]))
        wrong += hs.lipschitz(lambda x, w=w: w @ x, gaussian(size, seed=case), certify=certify, seed=0).value < 1.1
    assert wrong == 6  # so the maps are what they say


def test_seeds_are_whole_numbers():
    layer, x = attention(40, 8, seed=1, dtype=torch.float32)
    assert hs.lipschitz(layer, x, seed=7).seed == 7
    assert hs.lipschitz(layer, x, seed=np.int64(7)).seed == 7  # pyright: ignore[reportArgumentType]
    for wrong in (1.5, "1", True, [1], -1, 2**70):
        with pytest.raises(BadInputError, match=r"^expected .* got "):
            hs.lipschitz(layer, x, seed=wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_rigorous_intervals_of_a_hundred_layers():
    certified = 0
    for seed in range(20):
        n, d, heads = 3 + seed, 4 + 2 * (seed % 4), 1 + seed % 2
        layer, _ = attention(n, d, seed, heads=heads, gain=0.3 * 1.4**seed, causal=seed % 3 == 0, dtype=torch.float32)
        if seed % 4 == 1:
            layer = replace(layer, b_q=gaussian(d, seed=1).float(), b_v=gaussian(d, seed=2).float())
        x = gaussian(5, n, d, seed=seed, dtype=torch.float32) * torch.tensor([0.1, 0.5, 1.0, 1.0, 2.0])[:, None, None]
        for est, row in zip(hs.lipschitz_batch(layer, x, certify=0.02, solver=RIGOROUS), x, strict=True):
            truth = norm_of(layer.to(torch.float64), row)
            assert est.lower <= truth * (1 + TINY), seed
            assert truth <= est.upper, seed
            assert (est.assumes, est.confidence, est.precision) == ("", 1 - 1e-6, "float64")
            certified += est.status == "certified"
    assert certified >= 95


def test_what_a_confidence_rests_on():
    layer, x = attention(40, 8, seed=1, dtype=torch.float32)
    assert hs.lipschitz(layer, x, solver=RIGOROUS).assumes == ""
    assert hs.lipschitz(layer, x, solver=DenseSVD()).assumes == ""
    plain = hs.lipschitz(layer, x, solver=GolubKahan())
    assert "start" in plain.assumes
    assert plain.to_dict()["assumes"] == plain.assumes
    assert hs.lipschitz(layer, x, solver=GolubKahan(delta=0.01, rigorous=True)).confidence == 0.99


def test_rigorous_answers_for_compositions_and_measures():
    layer, x = attention(16, 6, seed=3, heads=2)
    f = layer @ hs.LayerNorm(torch.ones(6).double())
    est = hs.lipschitz(f, x, certify=0.02, solver=RIGOROUS)
    holds(est, float(torch.linalg.matrix_norm(hs.jacobian(f, x).dense(), 2)), tol=0.02)
    assert est.assumes == ""
    mass = gaussian(16, seed=2).abs() + 0.1
    measure = hs.Measure(x, mass / mass.sum())
    exact, moved = (hs.lipschitz(layer, measure, certify=0.02, solver=s) for s in (DenseSVD(), RIGOROUS))
    assert moved.lower <= exact.value * (1 + TINY)
    assert exact.value <= moved.upper


@pytest.mark.parametrize("f", [torch.sin, nn.Linear(300, 300)], ids=["function", "module"])
def test_rigorous_answers_are_refused_for_functions(f: Callable[[Tensor], Tensor]):
    with pytest.raises(BadInputError, match=r"^expected a map whose rounding is bounded for rigorous=True, got .*; pass"):
        hs.lipschitz(f, torch.ones(300), solver=RIGOROUS)
