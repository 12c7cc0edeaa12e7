"""Layers of every kind: their Jacobian, constant and bounds, and what they refuse."""

import pytest
import torch

import howsmooth as hs
from checks import check_operator
from howsmooth.errors import HowSmoothError
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.maps import RMSNorm, Rotary
from howsmooth.search import configurations
from problems.kinds import KIND_NAMES, kinds, layer_of
from problems.layers import gaussian

BEYOND = [name for name in KIND_NAMES if name != "softmax"]


def jacobian(layer: hs.Attention, x: torch.Tensor) -> torch.Tensor:
    size = x[0].numel()
    rows = [torch.func.jacrev(lambda t: layer(t[None])[0])(item).reshape(-1, size) for item in x]
    return torch.stack(rows)


@pytest.mark.parametrize("name", KIND_NAMES)
def test_layers_are_autodiff(name):
    kind = kinds(4)[name]
    layer = layer_of(kind, heads=4, kv_heads=2, b_q=gaussian(8, seed=20))
    x = gaussian(2, 5, 8, seed=21)
    truth = jacobian(layer, x)
    value, op = layer.linearize(x)
    assert float((value - layer(x)).norm()) <= 1e-12 * float(value.norm())
    assert float((op.dense() - truth).norm()) <= 1e-12 * float(truth.norm())
    check_operator(op, truth, growth=50.0, scale=float(truth.norm()))


@pytest.mark.parametrize("name", KIND_NAMES)
def test_norms_phases_and_padding(name):
    kind = kinds(2)[name]
    width = 4 // kind.parts
    norm = RMSNorm(1 + 0.1 * gaussian(width, seed=5), eps=1e-6)
    angles = gaussian(1, 5, width // 2, seed=6)
    mask = torch.tensor([[True, True, True, True, False]])
    tied = isinstance(kind, L2) and kind.tied
    layer = layer_of(
        kind,
        q_norm=None if tied else norm,
        k_norm=None if tied else norm,
        rotary=Rotary(angles.cos(), angles.sin()),
        attention_mask=mask,
    )
    x = gaussian(1, 5, 8, seed=22)
    op = layer.linearize(x)[1]
    truth = jacobian(layer, x)
    assert float((op.dense() - truth).norm()) <= 1e-12 * float(truth.norm())
    other = x.clone()
    other[:, 4] = 7.0  # padding is no part of the input
    assert float((layer(other) - layer(x))[:, :4].norm()) <= 1e-13 * float(layer(x).norm())


@pytest.mark.parametrize("name", KIND_NAMES)
def test_the_constant_is_the_largest_singular_value(name):
    layer, x = layer_of(kinds(2)[name]), gaussian(9, 8, seed=23)
    truth = float(torch.linalg.matrix_norm(jacobian(layer, x[None])[0], 2))
    dense = hs.lipschitz(layer, x)
    assert dense.value == pytest.approx(truth, rel=1e-10)
    iterated = hs.lipschitz(layer, x, solver=hs.GolubKahan(), certify=0.02)
    assert iterated.lower <= truth * (1 + 1e-9) <= iterated.upper * (1 + 2e-9)
    assert iterated.upper <= 1.021 * iterated.lower
    short = hs.lipschitz(layer.to(torch.float32), x.float(), solver=hs.GolubKahan())
    assert short.value == pytest.approx(truth, rel=2e-3)


@pytest.mark.parametrize("name", BEYOND)
def test_theory_of_softmax_does_not_apply(name):
    layer, x = layer_of(kinds(2)[name]), gaussian(5, 8, seed=24)
    for rows in (hs.bounds(layer, x), hs.bounds(layer, n=5, radius=1.0)):
        assert len(rows)
        assert all(not row.applies and row.reason and "softmax" in row.reason for row in rows)
    mu = hs.Measure(x, torch.full((5,), 0.2, dtype=torch.float64))
    for ask in (
        lambda: hs.lipschitz(layer, x, within=0.1),
        lambda: hs.lipschitz(layer, mu),
        lambda: hs.splitting(layer, x),
        lambda: layer(mu),
        lambda: hs.lipschitz(layer, x, solver=hs.GolubKahan(rigorous=True)),
    )[: 4 if name == "sink" else 5]:  # the rounding of a sink is bounded
        with pytest.raises(HowSmoothError) as refusal:
            ask()
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["sink", "sigmoid", "l2", "cosine", "linear", "three iterations", "differential", "hard"])
def test_worst_cases(name):
    layer = layer_of(kinds(2)[name], d=4)
    found = hs.worst_case(layer, n=3, radius=1.0, steps=6, restarts=4)
    assert found.value >= found.began * (1 - 1e-9)
    assert found.value == pytest.approx(hs.lipschitz(layer, found.tokens).value, rel=1e-6)
    assert found.bound is None
    with pytest.raises(HowSmoothError, match="expected softmax attention for configurations"):
        configurations(layer, 3, 1.0)


def test_settings_of_a_layer():
    sink = torch.tensor([0.5, -1.0], dtype=torch.float64)
    layer = layer_of(Softmax(sink))
    assert repr(layer) == "Attention(8 → 8, 2 heads of 4, Softmax(sink=2 numbers), float64)"
    assert layer.to(torch.float32).kind == Softmax(sink.float())
    assert layer.head(1).kind == Softmax(sink[1:])
    x = gaussian(4, 8, seed=3)
    assert float((sum(layer.head(i)(x) for i in (0, 1)) - layer(x)).norm()) <= 1e-12
    for kind in (Differential(0.5), Sigmoid(), L2(tied=True), Cosine(), Hard(2)):
        other = layer_of(kind)
        assert float((sum(other.head(i)(x) for i in (0, 1)) - other(x)).norm()) <= 1e-12
    assert layer_of(Cosine()).scale == 2.0
    assert layer_of(Linear()).scale == 1.0
    assert layer_of(Differential(0.1)).scale == pytest.approx(2**-0.5)
    tied = layer_of(L2(tied=True))
    assert tied.w_k is tied.w_q


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: layer_of(Softmax(torch.zeros(3))), "expected a sink of 2 numbers, one per head, got 3"),
        (lambda: layer_of("sigmoid"), "expected a kind of attention, got 'sigmoid'"),
        (lambda: layer_of(Sigmoid), "expected a kind of attention, got Sigmoid; pass one of howsmooth.kinds"),
        (lambda: layer_of(Sinkhorn(), causal=True), "without a causal mask"),
        (lambda: layer_of(Linear(), scale=0.5), "expected no scale for Linear attention, got 0.5"),
        (lambda: layer_of(Linear(), softcap=2.0), "without a soft-cap"),
        (lambda: layer_of(Differential(0.5), d=6, heads=2), "expected heads whose width is even"),
        (
            lambda: hs.Attention(torch.eye(4), 2 * torch.eye(4), torch.eye(4), kind=L2(tied=True)),
            "expected w_k and b_k like w_q and b_q",
        ),
    ],
)
def test_bad_settings_of_a_layer(make, said):
    with pytest.raises(HowSmoothError, match=said) as refusal:
        make()
    assert "\n" not in str(refusal.value)
