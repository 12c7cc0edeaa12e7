"""The local Wasserstein-2 constant against Jacobians of duplicated sequences, closed forms and transport itself."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.kernels import dispatch
from howsmooth.paper.meanfield import two_diracs
from howsmooth.theory.blocks import block_norms
from problems.layers import gaussian
from problems.measures import KINDS, layer, make, norm, random_measure, weighted_jacobian

UNMASKED = [k for k in KINDS if k not in ("causal", "rms norm")]
SHAPES = [(n, d) for n in (1, 2, 3, 4) for d in (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNMASKED)
def test_theorem_against_duplicated_sequences(kind):
    """Token i written 2k_i times, by autodiff, against masses k_i: 8 shapes × 125 inputs × 5 kinds = 5 000 cases."""
    paid = 0
    for case, (n, d) in enumerate(SHAPES):
        f = make(kind, 1000 + 10 * case, d)
        x = gaussian(125, n, d, seed=case) * torch.linspace(0.2, 3, 125).double()[:, None, None]
        counts = torch.randint(1, 3, (n,), generator=torch.Generator().manual_seed(case))
        mu = hs.Measure(x[0], counts.double() / counts.sum())
        operator = f.on(mu).linearize(x)[1]
        root = mu.mass.sqrt()
        dense = operator.dense().unflatten(2, (n, d)).unflatten(1, (n, -1)) * root[:, None, None, None] / root[:, None]
        moved = torch.linalg.matrix_norm(dense.flatten(3).flatten(1, 2), 2)
        split = block_norms(operator).lower.amax(-1)
        doubled = x[:, torch.repeat_interleave(torch.arange(n), 2 * counts)]
        whole = torch.func.vmap(torch.func.jacrev(lambda z, f=f: f(z)))(doubled)
        assert isinstance(whole, Tensor)
        truth = torch.linalg.matrix_norm(whole.flatten(3).flatten(1, 2), 2)
        assert float((torch.maximum(moved, split) / truth - 1).abs().max()) < 1e-8
        paid += int((split > moved * (1 + 1e-9)).sum())
    assert paid > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies", [2, 3, 8])
def test_more_copies_add_nothing(kind, copies):
    """2, 3 or 8 copies of every atom, moved one by one: all give the constant of the theorem."""
    for seed in range(4):
        f, mu = make(kind, 100 * seed), random_measure(3, seed)
        value = hs.lipschitz(f, mu).value
        assert norm(weighted_jacobian(f, mu.split(parts=copies))) == pytest.approx(value, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_splitting_and_merging_change_nothing(kind):
    f, mu = make(kind, 0), random_measure(4, 0)
    value = hs.lipschitz(f, mu).value
    for atom, parts in itertools.product((None, 0, 3), (2, 3)):
        longer = mu.split(atom, parts)
        assert hs.lipschitz(f, longer).value == pytest.approx(value, rel=1e-10)
        assert hs.lipschitz(f, longer.merge()).value == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("share", [0.5, 0.2, 0.03])
def test_unequal_halves_do_as_much(share):
    """A part `w` of the atom moves by `u/w`, the rest by `−u/(1−w)`: to first order the gain is the same."""
    attn = hs.Attention.from_matrices(-torch.eye(1).double(), torch.eye(1).double())
    mu = hs.Measure(torch.tensor([[0.0], [4.0]]).double(), torch.tensor([15 / 16, 1 / 16]))
    value = hs.lipschitz(attn, mu).value
    for epsilon in (1e-3, 1e-4):
        move = epsilon * torch.tensor([[1 - share], [-share]], dtype=torch.float64)
        nu = hs.Measure(
            torch.cat([mu.points[:1] + move, mu.points[1:]]),
            torch.cat([mu.mass[:1] * torch.tensor([share, 1 - share], dtype=torch.float64), mu.mass[1:]]),
        )
        ratio = hs.wasserstein(attn(mu), attn(nu)).upper / hs.wasserstein(mu, nu).upper
        assert ratio == pytest.approx(value, rel=5 * epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [-2.0, -1.0, 0.3, 1.5])
def test_two_diracs_in_closed_form(alpha):
    attn = hs.Attention.from_matrices(torch.full((1, 1), alpha, dtype=torch.float64), torch.ones(1, 1).double())
    random = torch.Generator().manual_seed(0)
    for _ in range(60):
        x, y = (3 * torch.randn(2, generator=random, dtype=torch.float64)).unbind()
        odds = 4 * torch.randn((), generator=random, dtype=torch.float64)
        moved, split = two_diracs(alpha, x, y, odds)
        mu = hs.Measure(torch.stack([x, y])[:, None], torch.softmax(torch.stack([odds, 0 * odds]), 0))
        est = hs.lipschitz(attn, mu)
        assert est.value == pytest.approx(max(float(moved), float(split.max())), rel=1e-10)
        assert est.split == (float(split.max()) > float(moved))
        answer = hs.splitting(attn, mu)
        assert answer.moved.value == pytest.approx(float(moved), rel=1e-10)
        gap = y - x
        p, q = torch.sigmoid(alpha * x * gap - odds), torch.sigmoid(odds - alpha * y * gap)  # x attends to y, y to x
        blocks = [float(abs(alpha) * gap**2 * t * (1 - t)) for t in (p, q)]
        assert answer.norms.tolist() == pytest.approx(blocks, rel=1e-8, abs=1e-12)
        assert float(split) == pytest.approx(max(blocks), rel=1e-12)


@pytest.mark.parametrize("radius", [2.0, 4.0, 8.0])
def test_the_gain_grows_without_bound(radius):
    """`A = −1`, mass `1/R²` at R, the rest at 0: the gain is `(R² − 1)^{3/2}/R²` up to `e^{−R²}` (Proposition 5.9)."""
    attn = hs.Attention.from_matrices(-torch.eye(1).double(), torch.eye(1).double())
    mu = hs.Measure(torch.tensor([[0.0], [radius]]).double(), torch.tensor([1 - radius**-2, radius**-2]).double())
    s = hs.splitting(attn, mu)
    assert s.gain == pytest.approx((radius**2 - 1) ** 1.5 / radius**2, rel=2 * radius**2 * math.exp(-(radius**2)) + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_solvers_agree(kind):
    f, mu = make(kind, 0), random_measure(30, 0)
    dense = hs.lipschitz(f, mu, solver=hs.DenseSVD())
    assert (dense.status, dense.confidence) == ("dense", 1.0)
    assert dense.value == pytest.approx(norm(weighted_jacobian(f, mu.split())), rel=1e-9)
    steps = hs.lipschitz(f, mu, solver=hs.GolubKahan(), certify=0.01)
    assert steps.status == "certified"
    assert steps.lower <= dense.value * (1 + 1e-12) <= steps.upper * (1 + 1e-11)
    assert steps.confidence == pytest.approx(1 - 1e-6)


@pytest.mark.parametrize("split", [False, True])
def test_direction_attains_the_value(split):
    attn = hs.Attention.from_matrices(-torch.eye(1).double(), torch.eye(1).double())
    masses = torch.tensor([15 / 16, 1 / 16]).double() if split else torch.tensor([0.5, 0.5]).double()
    mu = hs.Measure(torch.tensor([[0.0], [4.0 if split else 1.0]]).double(), masses)
    est = hs.lipschitz(attn, mu)
    assert est.split == split
    assert est.to_dict()["split"] == split
    assert float(mu.mass @ est.direction.square().sum(-1)) == pytest.approx(1)
    if split:
        assert torch.nonzero(est.direction[:, 0]).tolist() == [[0]]
    else:
        on = attn.on(mu)
        image = torch.func.jvp(lambda x: on.value(x[None])[0], (mu.points,), (est.direction,))[1]
        assert float(mu.mass @ image.square().sum(-1)) ** 0.5 == pytest.approx(est.value)


@pytest.mark.parametrize("causal", [False, True])
def test_equal_masses_are_at_least_the_tokens(causal):
    f, x = layer(3, causal=causal), gaussian(8, 3, seed=1)
    tokens, measure = hs.lipschitz(f, x), hs.lipschitz(f, hs.Measure.from_tokens(x, causal=causal))
    s = hs.splitting(f, x)
    assert s.moved.value == pytest.approx(tokens.value, rel=1e-10)
    assert measure.value == pytest.approx(max(s.moved.value, s.split.value), rel=1e-10)
    assert measure.value >= tokens.value * (1 - 1e-12)


def test_single_precision_is_measured_in_double():
    f, mu = layer(3), random_measure(40, 0)
    est = hs.lipschitz(f, mu.to(torch.float32))
    assert est.precision == "float64"
    assert est.value == pytest.approx(hs.lipschitz(f, mu).value, rel=1e-3)


@pytest.mark.parametrize("least", [1e-12, 1e-60, 1e-300])
def test_tiny_masses(least):
    mu = hs.Measure(gaussian(3, 3, seed=0), torch.tensor([least, 0.5, 0.5], dtype=torch.float64))
    est = hs.lipschitz(layer(3), mu)
    assert math.isfinite(est.upper)
    # an atom of no mass moves alone as if it had been split off
    alone = hs.splitting(layer(3), mu).norms[0]
    assert est.value >= float(alone) * (1 - 1e-5)


def test_scaling_the_output_scales_the_constant():
    f, mu = layer(3), random_measure(5, 0)
    assert f.w_o is not None
    louder = hs.Attention(f.w_q, f.w_k, f.w_v, 7 * f.w_o, b_q=f.b_q, b_k=f.b_k)
    assert hs.lipschitz(louder, mu).value == pytest.approx(7 * hs.lipschitz(f, mu).value, rel=1e-10)


def test_a_mean_of_everything():
    attn = hs.Attention.from_matrices(torch.zeros(3, 3), torch.eye(3))
    assert hs.lipschitz(attn, random_measure(5, 0)).value == pytest.approx(1)


def test_refusals():
    mu = random_measure(4, 0)
    for question in (
        lambda: hs.lipschitz(torch.sin, mu),
        lambda: hs.lipschitz_batch(layer(0), mu),  # pyright: ignore[reportArgumentType]
        lambda: hs.lipschitz(layer(0, causal=True), hs.Measure(mu.points)),
        lambda: hs.lipschitz(layer(0), mu, tol=-1.0),
    ):
        with pytest.raises(BadInputError, match=r"^expected [^\n]* got "):
            question()


def peak(n: int, monkeypatch) -> int:
    from itertools import accumulate

    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setitem(dispatch.KEPT_BYTES, "cpu", 0)  # as at sizes whose weights are not kept
    f, mu = layer(0, d=8), random_measure(n, 0, d=8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        f(mu)
        hs.lipschitz(f, mu, tol=0.1, solver=hs.GolubKahan(max_steps=3))
    assert run.profiler is not None
    assert run.profiler.kineto_results is not None
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return max(accumulate(e.nbytes() for e in events))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_memory_is_linear(monkeypatch):
    """Four times the atoms take less than five times the memory, and far less than n × n numbers."""
    small, large = peak(1024, monkeypatch), peak(4096, monkeypatch)
    assert large < 5 * small
    assert large < 4096**2 * 8
