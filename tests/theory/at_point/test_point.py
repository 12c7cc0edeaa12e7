"""Point bounds hold on every layer, are tight, and cost what they should."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.kernels import Blocked
from howsmooth.maps import Attention, AttentionJacobian, LayerNorm, RMSNorm
from howsmooth.spectral import largest_eigenvalue
from howsmooth.theory.at_point.heads import Geometry, Tokens, perron_bound, vector_errors
from howsmooth.theory.at_point.table import operator_bound, point_bounds, trace_forms, trace_sizes, yudin_bound
from marks import first
from problems.layers import LayerProblem, gaussian, layers
from problems.spectra import Matrix

SLACK = 1e-9  # dense SVD and products, both float64


def norms(f, x: Tensor) -> Tensor:
    """`L` of every item, from dense float64 Jacobians."""
    return torch.linalg.matrix_norm(f.linearize(x.double())[1].dense(), 2)


def assert_sound(bound: Tensor, truth: Tensor) -> None:
    """No upper bound below its truth."""
    assert bound.shape == truth.shape
    assert bool(bound.isfinite().all()), "a bound is not finite"
    assert bool((bound * (1 + SLACK) >= truth).all()), f"ratio {float((bound / truth).min())}"


def geometric_mean(ratios: Tensor) -> float:
    return float(ratios.log().mean().exp())


def single_heads(count: int, batch: int = 8) -> Iterator[tuple[Attention, Tensor]]:
    """Layers in the paper's notation, full and causal, from flat to peaked attention."""
    random = torch.Generator().manual_seed(0)
    for case in range(count):
        n, d = (int(torch.randint(low, high, (1,), generator=random)) for low, high in ((2, 17), (1, 9)))
        sharp, radius = (float(t) for t in torch.rand(2, generator=random))
        A = gaussian(d, d, seed=3 * case) / d**0.5 * 3 * sharp
        V = gaussian(d, d, seed=3 * case + 1) / d**0.5
        yield (
            Attention.from_matrices(A, V, causal=case % 2 == 1),
            gaussian(batch, n, d, seed=3 * case + 2) * (0.3 + 1.5 * radius),
        )


def real_layer(case: int, batch: int = 6) -> tuple[Attention, Tensor]:
    """A layer as models have them; the case number walks through its options."""
    heads, kv_heads = ((1, 1), (2, 2), (4, 2), (3, 1))[case % 4]
    n, d, d_h, d_v = (1, 2, 5, 9, 12)[case % 5], (1, 3, 7)[case % 3], 1 + case % 3, 1 + case % 2
    logit = (0.0, 1.0, 5.0, 40.0)[case // 4 % 4]
    bias = gaussian(1, heads, n, n, seed=case).masked_fill(gaussian(1, heads, n, n, seed=case + 1) < -0.8, -torch.inf)
    mask = (torch.arange(n) < max(1, n - case % 3)).expand(batch, n).contiguous()
    layer = Attention(
        w_q=gaussian(heads * d_h, d, seed=case) * logit,
        w_k=gaussian(kv_heads * d_h, d, seed=case + 1),
        w_v=gaussian(kv_heads * d_v, d, seed=case + 2),
        w_o=None if case % 7 == 0 else gaussian(1 + case % 6, heads * d_v, seed=case + 3),
        heads=heads,
        kv_heads=kv_heads,
        b_q=gaussian(heads * d_h, seed=case + 4) if case % 2 else None,
        b_k=gaussian(kv_heads * d_h, seed=case + 5) * 3 if case % 3 else None,
        b_v=gaussian(kv_heads * d_v, seed=case + 6) * 10 if case % 5 else None,
        scale=-0.7 if case % 6 == 0 else d_h**-0.5,
        softcap=(None, None, 0.5, 4.0)[case // 2 % 4],
        causal=case % 4 in (1, 2),
        window=2 if case % 11 == 0 else None,
        bias=bias if case % 5 == 2 else None,
        attention_mask=mask if case % 3 == 0 else None,
    )
    return layer, gaussian(batch, n, d, seed=case + 7) * (0.2, 1.0, 3.0)[case // 3 % 3]


def adversarial() -> Iterator[tuple[str, Attention, Tensor]]:
    """Inputs where a part of the Jacobian is as large as it gets, or where nothing is left of it."""
    radii = torch.tensor([0.0, 0.5, 1.5, 3.0, 6.0], dtype=torch.float64)[:, None, None]
    for d in (1, 2, 4):
        eye = torch.eye(d, dtype=torch.float64)
        for gamma in (-1.0, 1.0):
            for causal in (False, True):
                layer = Attention.from_matrices(gamma * eye, eye, causal=causal)
                u = torch.eye(d, dtype=torch.float64)[:1]
                for n in (2, 3, 20):
                    first, others = u, torch.ones(n - 1, 1, dtype=torch.float64) * u
                    yield "opposed", layer, radii * torch.cat([-first, others])
                    yield "one far", layer, radii * torch.cat([first, others / 2])
                    yield "equal", layer, radii * torch.cat([first, others])
        yield "no values", Attention.from_matrices(eye, 0 * eye), gaussian(1, 5, d, seed=d)
        yield "copies of a head", Attention.from_matrices(eye.repeat(3, 1, 1), eye.repeat(3, 1, 1)), gaussian(1, 6, d, seed=d)
        opposite = torch.stack([eye, -eye])
        yield "heads that cancel", Attention.from_matrices(eye.repeat(2, 1, 1), opposite), gaussian(1, 6, d, seed=d)


def test_soundness_check_catches_a_wrong_bound():
    layer, x = next(single_heads(1))
    truth = norms(layer, x)
    assert_sound(truth, truth)
    with pytest.raises(AssertionError):
        assert_sound(truth * (1 - 1e-6), truth)
    with pytest.raises(AssertionError):
        assert_sound(truth.new_full(truth.shape, torch.nan), truth)


def test_d3_without_its_key_part_would_be_caught():
    """The suite is sharp enough to notice a missing part."""
    caught = 0
    for layer, x in single_heads(60):
        operator = layer.linearize(x)[1]
        geometry = Geometry.of(operator.layer)
        sizes = trace_sizes(operator, Tokens.of(operator, geometry, vector_errors(operator)))
        caught += int((geometry.nu[0] * sizes.p + sizes.beta < norms(layer, x)).sum())
    assert caught > 0


@pytest.mark.slow
@pytest.mark.parametrize("cases", first([range(110), range(110, 330)]), ids=["first", "more"])
def test_sound_on_real_layers(cases: range):
    for case in cases:
        layer, x = real_layer(case)
        truth = norms(layer, x)
        for bound in trace_forms(layer.linearize(x)[1]):
            assert_sound(bound, truth)
        single, rounded = layer.to(torch.float32), x.float()
        truth = norms(single, rounded)
        for bound in trace_forms(single.linearize(rounded)[1]):
            assert_sound(bound, truth)


@pytest.mark.slow
def test_sound_on_adversarial_inputs():
    for name, layer, x in adversarial():
        truth = norms(layer, x)
        forms = trace_forms(layer.linearize(x)[1])
        for bound in forms:
            assert_sound(bound, truth)
        if name == "no values":
            assert float(forms.best) == 0
        for tokens, constant in zip(x, truth, strict=True):
            yudin = yudin_bound(layer, tokens).value
            assert yudin is None or yudin * (1 + SLACK) >= float(constant)


@given(layers())
def test_sound_on_any_layer(problem: LayerProblem):
    operator = problem.layer.linearize(problem.x)[1]
    truth = norms(problem.layer, problem.x)
    for bound in trace_forms(operator):
        assert_sound(bound, truth)


@pytest.mark.slow
def test_tightness_on_random_single_heads():
    """Recorded geometric means of bound/L: D2 5.66, D3 1.92, the smallest of ours 1.32."""
    ratios: dict[str, list[float]] = {"D2": [], "D3": [], "D": []}
    for layer, x in single_heads(60, batch=4):
        truth = norms(layer, x)
        forms = trace_forms(layer.linearize(x)[1])
        for b in range(len(x)):
            d2 = yudin_bound(layer, x[b]).value
            assert d2 is not None
            assert d2 * (1 + SLACK) >= float(truth[b])
            assert float(forms.best[b]) <= 1.001 * d2  # both may be ‖V‖‖P‖, of which D2 takes more power steps
            ratios["D2"].append(d2 / float(truth[b]))
        ratios["D"] += (forms.best / truth).tolist()
        ratios["D3"] += (forms.parts / truth).tolist()
    mean = {name: geometric_mean(torch.tensor(r)) for name, r in ratios.items()}
    assert mean["D"] <= 1.4, mean
    assert mean["D"] < mean["D3"] < mean["D2"], mean


def test_heads_are_not_simply_added():
    """Heads that write into different directions: the bound is the largest head's, not the sum."""
    d, heads = 8, 4
    w = gaussian(d, d, seed=0)
    layer = Attention(0 * w, w, torch.eye(d, dtype=torch.float64), None, heads=heads)
    x = gaussian(1, 6, d, seed=1)
    assert float(norms(layer, x)) == pytest.approx(1.0)
    assert float(trace_forms(layer.linearize(x)[1]).parts) > 3.9
    # keys still count in β, which is zero only up to the trace form; the value part alone is exact
    geometry = Geometry.of(layer)
    zero = torch.zeros(1, heads, dtype=torch.float64)
    value = geometry.coupled(torch.ones(1, heads, dtype=torch.float64), zero, zero, torch.float64)
    assert float(value) == pytest.approx(1.0, rel=0.03)


def test_bounds_do_not_depend_on_the_kernel():
    layer, x = real_layer(1)
    operator = layer.linearize(x)[1]
    kernel = operator.kernel.tiled()
    blocked = AttentionJacobian(operator.layer, Blocked(*kernel.inputs, kernel.scores))
    torch.testing.assert_close(operator_bound(blocked), operator_bound(operator), rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_composition_with_a_norm(norm):
    for case in range(0, 60, 2):
        layer, x = real_layer(case)
        composed = layer @ norm(gaussian(x.shape[-1], seed=case), eps=0.1)
        bound = operator_bound(composed.linearize(x)[1])
        assert bound is not None
        assert_sound(bound, norms(composed, x))


def test_other_operators():
    assert operator_bound(Matrix(torch.eye(2)[None])) is None


@pytest.mark.parametrize("kind", ["random", "causal", "sparse", "peaked"])
def test_perron_bound(kind):
    s = gaussian(40, 48, 48, seed=0) * (6.0 if kind == "peaked" else 1.0)
    if kind == "causal":
        s = s.masked_fill(torch.ones(48, 48).triu(1) > 0, -torch.inf)
    weights = s.softmax(-1)
    if kind == "sparse":  # empty rows and columns
        weights = weights * (gaussian(40, 48, 48, seed=1) > 1.5)
        weights[:, :, 7] = 0
    bound, _ = perron_bound(
        lambda w: (weights @ w[..., None])[..., 0], lambda z: (weights.mT @ z[..., None])[..., 0], weights.sum(1)
    )
    truth = torch.linalg.matrix_norm(weights, 2)
    assert_sound(bound, truth)
    if kind != "sparse":
        assert geometric_mean(bound / truth) < 1.01


def test_perron_bound_of_zero_and_of_any_start():
    zero = torch.zeros(1, 3, 3, dtype=torch.float64)
    assert float(perron_bound(lambda w: 0 * w, lambda z: 0 * z, zero[:, 0])[0]) == 0
    weights = gaussian(1, 5, 5, seed=3).abs()
    truth = torch.linalg.matrix_norm(weights, 2)
    for start in (torch.zeros(1, 5), torch.eye(5)[:1], torch.full((1, 5), 1e-30)):
        bound, _ = perron_bound(
            lambda w: (weights @ w[..., None])[..., 0], lambda z: (weights.mT @ z[..., None])[..., 0], start.double(), steps=2
        )
        assert_sound(bound, truth)


def test_eigenvalue_bound():
    for size in (3, 16, 17, 40):
        root = gaussian(size, size // 2 + 1, seed=size)
        s = root @ root.mT
        truth = float(torch.linalg.eigvalsh(s)[-1])
        assert truth <= largest_eigenvalue(s, 0.0) * (1 + SLACK)
        assert largest_eigenvalue(s, 0.0) <= 1.1 * truth
    assert largest_eigenvalue(torch.zeros(4, 4, dtype=torch.float64), 0.0) == 0


def test_rows():
    layer, x = next(single_heads(1))
    rows = point_bounds(layer, x[0])
    assert [r.id for r in rows] == ["D2", "D3", "D5", "D6", "D"]
    assert all(r.applies for r in rows)
    values = {r.id: r.value for r in rows if r.value is not None}
    assert values["D"] == min(values[i] for i in ("D3", "D5", "D6"))
    many, tokens = real_layer(1)
    yudin = point_bounds(many, tokens[0])[0]
    assert not yudin.applies
    assert yudin.reason == "proved for one head, the layer has 2"


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4), torch.zeros(3, 5), torch.full((3, 4), torch.nan)])
def test_bad_tokens(x):
    with pytest.raises(BadInputError):
        point_bounds(Attention.from_matrices(torch.eye(4), torch.eye(4)), x)


def test_softmax_derivative_is_at_most_the_concentration():
    """Proposition 4.10's `‖diag p − ppᵀ‖ ≤ p₍₁₎(1 − p₍₁₎ + p₍₂₎) ≤ ½`."""
    for logit in (0.1, 1.0, 5.0):
        p = (gaussian(500, 6, seed=0) * logit).softmax(-1)
        truth = torch.linalg.matrix_norm(torch.diag_embed(p) - p[:, :, None] * p[:, None], 2)
        top = p.topk(2, -1).values
        g = top[:, 0] * (1 - top[:, 0] + top[:, 1])
        assert_sound(g, truth)
        assert float(g.max()) <= 0.5 + SLACK


def test_bounds_of_an_input_that_cannot_be_measured():
    """Tokens far from the origin leave products no digits; rows stand without them."""
    layer = Attention.from_matrices(gaussian(3, 3, seed=0), torch.eye(3).double())
    x = gaussian(6, 3, seed=1) + 1e8
    with pytest.raises(BadInputError, match="carry no more digits"):
        hs.lipschitz(layer, x)
    found = hs.bounds(layer, x)
    assert found.measured is None
    assert len(found) == len(point_bounds(layer, x))
    assert "which is not measured: expected tol ≥" in found.where
