"""The one verb, against dense Jacobians, and what it hands back."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import BadFunctionError, BadInputError, NoConvergenceError
from howsmooth.spectral import DenseSVD, Estimates, GolubKahan, Solver
from problems.spectra import attention, norm_of

SOLVERS = [DenseSVD(), GolubKahan()]
TINY = 1e-13  # of a float64 decomposition of a few hundred rows: √N · eps, with room


def dense_norm(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    jacobian = torch.autograd.functional.jacobian(f, x)
    assert isinstance(jacobian, Tensor)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def stretch(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> float:
    """`|J v|/|v|` by forward mode, in float64."""
    return float(torch.func.jvp(f, (x.double(),), (v.double(),))[1].norm() / v.double().norm())


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.3, batch_first=True).eval()


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lower_is_attained(solver: Solver, dtype: torch.dtype):
    for seed in range(4):
        layer, x = attention(12, 6, seed, heads=2, gain=4.0, causal=seed % 2 == 1, dtype=dtype)
        est = hs.lipschitz(layer, x, solver=solver)
        assert est.direction.shape == x.shape
        assert stretch(layer.to(torch.float64), x, est.direction) == pytest.approx(est.lower, rel=1e-9)
        assert est.precision == "float64"
        assert est.lower <= est.upper
        truth = norm_of(layer.to(torch.float64), x)
        assert est.lower <= truth * (1 + TINY)
        assert truth <= est.upper * (1 + TINY)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("build", [mlp, encoder])
def test_modules(build: Callable[[], nn.Module], solver: Solver):
    module = build()
    x = randn(4, 6 if build is mlp else 8, dtype=torch.float32)
    est = hs.lipschitz(module, x, tol=1e-5, solver=solver)
    truth = dense_norm(build().double(), x.double())
    assert est.precision == "float64"
    assert est.value == pytest.approx(truth, rel=2e-5)
    assert est.lower <= truth * (1 + TINY)
    assert truth <= est.upper * (1 + TINY)
    assert next(module.parameters()).dtype == torch.float32


@pytest.mark.parametrize("solver", [DenseSVD(), GolubKahan()], ids=str)
def test_a_closure_in_single_precision_says_so(solver: Solver):
    module, x = mlp(), randn(4, 6, dtype=torch.float32)
    est = hs.lipschitz(lambda x: module(x), x, solver=solver)
    assert est.precision == "float32"
    assert est.value == pytest.approx(dense_norm(mlp().double(), x.double()), rel=2e-3)
    cast = hs.lipschitz(lambda x: torch.sin(x.float()), x, solver=solver)
    assert cast.precision == "float32"


def no_gradients(t: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.sin(t)


class Lying(torch.autograd.Function):
    """`2 x` with another backward pass."""

    @staticmethod
    def forward(ctx, t: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * t

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 1e-3 * g


# each beside the same function with nothing hidden from automatic differentiation
HIDDEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "detach": (lambda t: t.detach() * t, lambda t: t * t),
    "all detached": (lambda t: 2 * t.detach(), lambda t: 2 * t),
    "data": (lambda t: t.data.sin() + t, lambda t: t.sin() + t),
    "no_grad": (lambda t: no_gradients(t) + t, lambda t: t.sin() + t),
    "straight through": (lambda t: t + (t.tanh() - t).detach(), lambda t: t.tanh()),
    "a backward pass of its own": (lambda t: Lying.apply(t) + t.square(), lambda t: 2 * t + t.square()),  # pyright: ignore
    "a derivative": (lambda t: torch.func.grad(lambda s: s.sin().sum())(t), lambda t: t.cos()),
    "written in place": (lambda t: t.mul_(2).sin(), lambda t: (2 * t).sin()),
    "a branch": (lambda t: t.sin() if t.sum() < 1e3 else t, lambda t: t.sin()),
}


@pytest.mark.parametrize("hiding", HIDDEN)
@pytest.mark.parametrize("solver", [DenseSVD(), GolubKahan()], ids=str)
def test_what_is_measured_is_how_values_move(hiding: str, solver: Solver):
    (f, plain), x = HIDDEN[hiding], randn(4, 5)
    assert hs.lipschitz(f, x, solver=solver, tol=1e-8).value == pytest.approx(dense_norm(plain, x), rel=1e-7)
    batch = hs.lipschitz_batch(f, x, solver=solver, tol=1e-8)
    assert batch.value.tolist() == pytest.approx([dense_norm(plain, row) for row in x], rel=1e-7)
    truth = torch.autograd.functional.jacobian(plain, x)
    assert isinstance(truth, Tensor)
    torch.testing.assert_close(hs.jacobian(f, x).dense(), truth.reshape(20, 20), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "f",
    [
        lambda t: t + torch.from_numpy(t.detach().numpy()),
        lambda t: t * t.sum().item(),
        lambda t: t + torch.tensor(t.tolist()),
        lambda t: t * 2 if float(t.detach().sum()) == float(randn(4, 5).sum()) else t * 3,
        lambda t: t + torch.round(t),
        lambda t: t + t.half(),
        lambda t: t + torch.rand_like(t),
    ],
    ids=["numpy", "item", "a list", "a branch", "rounding", "half", "random"],
)
def test_what_a_recording_cannot_know_is_refused(f: Callable[[Tensor], Tensor]):
    with pytest.raises(BadFunctionError, match=r"^expected .* got .*"):
        hs.lipschitz(f, randn(4, 5))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4, 5), (1,), (2, 3, 4)])
@pytest.mark.parametrize("solver", [None, *SOLVERS], ids=str)
def test_inputs_of_any_shape(shape: tuple[int, ...], solver: Solver | None):
    x = randn(*shape)
    w = randn(7, x.numel(), seed=1)

    def f(x: Tensor) -> Tensor:
        return torch.tanh(w @ x.reshape(-1)) + x.square().mean()

    est = hs.lipschitz(f, x, solver=solver, tol=1e-8)
    assert est.direction.shape == x.shape
    assert est.value == pytest.approx(dense_norm(f, x), rel=1e-7)


@pytest.mark.parametrize("solver", [None, GolubKahan()], ids=str)
def test_scalars_in_and_out(solver: Solver | None):
    x = randn(5)
    assert hs.lipschitz(lambda x: x.square().sum(), x, solver=solver).value == pytest.approx(2 * float(x.norm()))
    assert hs.lipschitz(lambda x: x**3, torch.tensor(2.0), solver=solver).value == pytest.approx(12.0)
    rows = randn(3, 4)
    norms = hs.lipschitz_batch(lambda x: x.square().sum(-1), rows, solver=solver).value
    assert norms.tolist() == pytest.approx((2 * rows.norm(dim=-1)).tolist())


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_batch_of_functions(solver: Solver):
    w, x = randn(12, 10, seed=1), randn(5, 10)
    scale = torch.tensor([1.0, 3.0, 1e-2, 2.0, 10.0]).double()[:, None]

    def f(x: Tensor) -> Tensor:
        return torch.sin(x * scale) @ w.mT

    ests = hs.lipschitz_batch(f, x, solver=solver, tol=1e-8)
    for i, est in enumerate(ests):
        assert est.value == pytest.approx(dense_norm(lambda row, i=i: torch.sin(row * scale[i]) @ w.mT, x[i]), rel=1e-7)


def test_a_batch_is_refused_and_one_input_of_any_shape_is_not():
    x = randn(3, 4, 2)
    assert len(hs.lipschitz_batch(torch.sin, x)) == 3
    for f in (torch.sin, hs.Attention.from_matrices(torch.eye(2), torch.eye(2))):
        with pytest.raises(BadInputError, match=r"^expected one input.*lipschitz_batch"):
            hs.lipschitz(f, x)
    assert hs.lipschitz(lambda t: torch.sin(t).cumsum(0), x).direction.shape == (3, 4, 2)


@pytest.mark.parametrize("solver", [DenseSVD(), GolubKahan()], ids=str)
def test_a_closure_equals_the_map(solver: Solver):
    layer, x = attention(10, 6, seed=3, heads=2, gain=3.0)
    closed = hs.lipschitz(layer, x, tol=1e-9, solver=solver)
    traced = hs.lipschitz(lambda x: layer(x), x, tol=1e-9, solver=solver)
    assert traced.value == pytest.approx(closed.value, rel=1e-8)
    single, x32 = layer.to(torch.float32), x.float()
    assert hs.lipschitz(lambda x: single(x), x32).precision == "float64"


@pytest.mark.parametrize("factor", [1e-3, 0.5, 7.0, 1e4])
@pytest.mark.parametrize("solver", [DenseSVD(), GolubKahan()], ids=str)
def test_scaling_the_output_scales_the_norm(factor: float, solver: Solver):
    layer, x = attention(10, 6, seed=3)
    assert layer.w_o is not None
    louder = hs.Attention(layer.w_q, layer.w_k, layer.w_v, factor * layer.w_o)
    base, scaled = (hs.lipschitz(f, x, solver=solver, seed=0) for f in (layer, louder))
    assert scaled.value == pytest.approx(factor * base.value, rel=1e-9)
    assert scaled.upper == pytest.approx(factor * base.upper, rel=1e-6)
    assert scaled.steps == base.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        *((s, torch.float32) for s in (1e-30, 1e-25, 1e-12, 1e-10, 1e9, 1e12, 1e18, 1e25)),
        *((s, torch.float64) for s in (1e-170, 1e-100, 1e-79, 1e79, 1e100, 1e170)),
    ],
    ids=str,
)
def test_squares_may_leave_the_range_of_the_precision(scale: float, dtype: torch.dtype):
    """`σ²` and `σ⁴` of these norms overflow or underflow: refused, or measured right."""
    x = torch.ones(300, dtype=dtype)
    weights = torch.linspace(0.1, 1, 300).double() * scale
    try:
        est = hs.lipschitz(lambda x: x * weights.to(x), x)
    except NoConvergenceError:
        return
    assert est.lower <= scale * (1 + 1e-6)
    assert scale * (1 - 1e-6) <= est.upper
    assert est.value == pytest.approx(scale, rel=1e-3, abs=0)


@pytest.mark.parametrize("norm", [hs.LayerNorm, hs.RMSNorm])
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_composition_with_a_norm(norm: type[hs.LayerNorm] | type[hs.RMSNorm], solver: Solver):
    layer, x = attention(8, 6, seed=4, heads=2)
    before = norm(1 + 0.3 * randn(6, seed=5), randn(6, seed=6))
    f = layer @ before
    est = hs.lipschitz(f, x, tol=1e-8, solver=solver)
    truth = dense_norm(f, x)
    assert est.value == pytest.approx(truth, rel=1e-7)
    assert truth <= est.upper * (1 + TINY)


def test_half_precision_tokens_are_measured_as_they_are():
    layer, x = attention(8, 6, seed=4, dtype=torch.float32)
    est = hs.lipschitz(layer, x.half())
    assert est.value == pytest.approx(norm_of(layer.to(torch.float64), x.half()), rel=1e-9)


def test_gradients_are_left_alone():
    layer, x = attention(8, 6, seed=4)
    x.requires_grad_()
    with torch.no_grad():
        quiet = hs.lipschitz(lambda x: layer(x), x)
    loud = hs.lipschitz(lambda x: layer(x), x)
    assert quiet.value == loud.value
    assert x.grad is None
    assert not loud.direction.requires_grad


@pytest.mark.parametrize("solver", [DenseSVD(), GolubKahan()], ids=str)
def test_estimate_as_data(solver: Solver):
    layer, x = attention(8, 6, seed=4)
    est = hs.lipschitz(layer, x, tol=1e-4, seed=9, solver=solver)
    data = est.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert all(isinstance(v, float | int | str) for k, v in data.items() if k != "certify")
    assert data["certify"] is None
    assert data["note"].endswith(".")
    assert (data["tol"], data["seed"], data["value"]) == (1e-4, 9, est.value)
    assert est.width == pytest.approx(est.upper / est.lower - 1)
    assert str(est).startswith(f"{est.value:.6g} in [")
    assert est.status in str(est)
    assert ("certain" in str(est)) == isinstance(solver, DenseSVD)
    assert "\n" not in str(est)


def test_width_of_nothing():
    def est(lower: float, upper: float) -> hs.Estimate:
        return hs.Estimate(lower, lower, upper, 1.0, "dense", torch.zeros(1), 1, "float64", 1e-3, 0)

    assert est(0.0, 0.0).width == 0.0
    assert est(0.0, 1.0).width == float("inf")
    assert est(1.0, 1.5).width == 0.5


def test_estimates_as_a_sequence():
    layer, _ = attention(8, 6, seed=4)
    ests = hs.lipschitz_batch(layer, randn(4, 8, 6))
    assert len(ests) == 4
    assert [e.lower for e in ests] == ests.lower.tolist()
    assert [e.value for e in ests] == ests.value.tolist()
    assert bool((ests.lower < ests.value).all())
    assert ests[-1] is ests[3]
    assert isinstance(ests[1:3], Estimates)
    assert list(ests[1:3]) == [ests[1], ests[2]]
    assert ests.upper.dtype == torch.float64
    assert ests.confidence.tolist() == [1.0] * 4
    assert ests.direction.shape == (4, 8, 6)
    assert ests.status == ("dense",) * 4
    assert ests.steps == (48,) * 4
    assert len(json.loads(json.dumps(ests.to_dict()))["items"]) == 4
    assert str(ests).count("\n") == 3
    with pytest.raises(IndexError):
        ests[4]


def test_confidence_is_one_minus_delta():
    layer, x = attention(8, 6, seed=4)
    assert hs.lipschitz(layer, x, solver=GolubKahan(delta=0.25)).confidence == 0.75


def test_the_jacobian_is_what_lipschitz_measures():
    layer, x = attention(8, 6, seed=4, heads=2)
    for f in (layer, lambda t: layer(t)):
        J, est = hs.jacobian(f, x), hs.lipschitz(f, x)
        assert J.shape == (48, 48)
        assert float((J @ est.direction).norm() / est.direction.norm()) == pytest.approx(est.value, rel=1e-12)
        assert float(torch.linalg.matrix_norm(J.dense(), 2)) == pytest.approx(est.value, rel=1e-9)


def test_one_input_for_a_jacobian():
    layer, x = attention(8, 6, seed=4)
    for wrong in (hs.Measure(x), x[None], x[0], x.long()):
        with pytest.raises(BadInputError, match=r"^expected .* got "):
            hs.jacobian(layer, wrong)  # pyright: ignore[reportArgumentType]
