"""Bounds of kinds of attention with rotary phases, biases and norms, against constants worked out here, entry by entry."""

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.kernels.kinds import L2, Cosine, Linear, Sigmoid
from howsmooth.maps import Attention, RMSNorm, Rotary
from howsmooth.theory.kinds import tied
from howsmooth.theory.kinds.published import inverse_phi
from problems.kind_hostile import HOSTILE, UNDERFLOWING, fuzz_hostile

F64 = torch.float64
EYE = torch.eye(2, dtype=F64)


def angles(*values: float, size: float = 1.0) -> Rotary:
    """One plane, turned by these angles and made `size` times as long."""
    t = torch.tensor(values, dtype=F64)[:, None]
    return Rotary(size * t.cos(), size * t.sin())


def turn(z: Tensor, angle: Tensor) -> Tensor:
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([c * z[:, :1] - s * z[:, 1:], c * z[:, 1:] + s * z[:, :1]], -1)


def own_constant(f, x: Tensor) -> float:
    J = torch.autograd.functional.jacobian(f, x)
    return float(torch.linalg.matrix_norm(J.reshape(-1, x.numel()), ord=2))


def test_tied_l2_with_phases_has_no_constant_free_of_the_radius():
    """Tokens that phases turn onto each other have values far apart: the constant grows with the radius."""
    where = torch.arange(4, dtype=F64)
    attn = Attention(EYE, None, EYE, scale=1.0, rotary=angles(0.0, 1.0, 2.0, 3.0), kind=L2(tied=True))
    for far in (9.0, 99.0):
        z = torch.tensor([[far, 0.0], [far, 0.7], [far, -0.7], [far, 0.7]], dtype=F64)
        x = turn(z, -where)

        def plain(x: Tensor) -> Tensor:
            z = turn(x, where)
            return (-(z[:, None] - z).square().sum(-1)).softmax(-1) @ x

        L, radius = own_constant(plain, x), float(x.norm(dim=-1).max())
        assert 0.7 * far < L < far
        table = hs.bounds(attn, n=4, radius=radius)
        for row in table:
            assert row.side == "lower" or row.value is None or row.value >= L, row.id
        for id in ("K2", "T2"):
            assert "phases" in (table.by_id(id).reason or "")
        assert table.by_id("T1").applies
        assert table.by_id("T1m").applies


def test_tied_l2_with_a_bias_that_phases_turn():
    """Two clusters that only the phases hold apart: the first output moves with its query by `2√τ w √t c/(1 + c)`."""
    n, w, far = 10**6 + 1, 0.6, 1e4
    t = 1 + inverse_phi(n - 1)
    where = torch.tensor([0.0, 1.0, -1.0], dtype=F64) * (math.sqrt(t) - w) / far
    x, counts = torch.tensor([[0.0], [1.0], [-1.0]], dtype=F64), torch.tensor([1.0, (n - 1) / 2, (n - 1) / 2], dtype=F64)

    def first(own: Tensor) -> Tensor:
        tokens = torch.cat([own[None], x[1:]])
        z = turn(torch.cat([torch.full_like(tokens, far), w * tokens], -1), where)
        return (counts.log() - (z[0] - z).square().sum(-1)).softmax(-1) @ tokens

    own = abs(float(torch.autograd.functional.jacobian(first, x[0])))
    weight, bias = torch.tensor([[0.0], [w]], dtype=F64), torch.tensor([far, 0.0], dtype=F64)
    one, rotary = torch.ones(1, 1, dtype=F64), angles(*where.tolist())
    attn = Attention(weight, None, one, b_q=bias, scale=1.0, rotary=rotary, kind=L2(tied=True))
    for id in ("T1", "T1m"):
        assert (hs.bounds(attn, n=n, radius=1.0).by_id(id).value or math.inf) > own > 3.7


def test_tied_l2_without_a_bias_counts_the_dimensions_of_the_head():
    """Phases spread tokens of one dimension over the head: what a column receives is that of two dimensions."""
    w = torch.tensor([[1.0], [0.0]], dtype=F64)
    rows = {}
    for name, rotary in (("turned", angles(0.0)), ("plain", None)):
        attn = Attention(w, None, torch.ones(1, 1, dtype=F64), scale=1.0, rotary=rotary, kind=L2(tied=True))
        rows[name] = hs.bounds(attn, n=10**9, radius=1e-9)  # what is left of the bound is √C
    two = Attention(EYE, None, EYE, scale=1.0, kind=L2(tied=True))
    wide = hs.bounds(two, n=10**9, radius=1e-9).by_id("T1m").value
    assert rows["turned"].by_id("T1m").value == pytest.approx(wide, rel=1e-6)
    assert (rows["plain"].by_id("T1m").value or math.inf) < 0.8 * (wide or 0.0)
    assert rows["plain"].by_id("T2").applies


@pytest.mark.parametrize("kind", [L2(tied=True), L2(), Cosine(), Cosine(values=False), Sigmoid(), Linear()], ids=repr)
def test_points_that_align_after_turning(kind):
    """Far tokens whose turned vectors lie side by side: no upper row is below the dense constant, at a point or in the ball."""
    where, g = torch.tensor([0.0, 40.0, -7.0, 2.0, 3.1], dtype=F64), torch.Generator().manual_seed(0)
    rotary = angles(*where.tolist())
    for far in (0.3, 3.0, 30.0):
        for _ in range(10):
            b = None if torch.rand((), generator=g) < 0.5 else torch.randn(2, generator=g, dtype=F64) * far
            shift = torch.zeros(2, dtype=F64) if b is None else b
            near = torch.randn(5, 2, generator=g, dtype=F64) * 0.6 + torch.tensor([far, 0.0], dtype=F64)
            x = turn(near, -where) - shift
            w_k = None if getattr(kind, "tied", False) else EYE
            attn = Attention(EYE, w_k, EYE, b_q=b, b_k=b, rotary=rotary, kind=kind)
            L = float(torch.linalg.matrix_norm(attn.linearize(x[None])[1].dense(), ord=2))
            table = hs.bounds(attn, n=5, radius=float(x.norm(dim=-1).max()) * (1 + 1e-12))
            for row in [*table, *hs.bounds(attn, x)]:
                assert row.side == "lower" or row.value is None or row.value >= L * (1 - 1e-8), (row.id, L)


def test_phases_that_shrink_make_cosines_steeper():
    """Tables need not be exact: where they shorten the plane of a bias, what lies beside the plane is all the steeper."""
    one, b = torch.ones(1, 1, dtype=F64), torch.tensor([3.0, 0.0, 0.0], dtype=F64)
    w = torch.tensor([[0.0], [0.0], [1.0]], dtype=F64)
    kind = Cosine(epsilon=1e-4, values=False)
    attn = Attention(w, w, one, b_q=b, b_k=b, scale=1.0, rotary=angles(0.0, 0.0, size=1e-2), kind=kind)
    x = torch.tensor([[0.0], [1.0]], dtype=F64)

    def plain(x: Tensor) -> Tensor:
        k = x @ w.T + b * 1e-2
        k = k / (k.square().sum(-1, keepdim=True) + 1e-4).sqrt()
        return (k @ k.T).softmax(-1) @ x

    rows = [b for b in hs.bounds(attn, n=2, radius=1.0) if b.value is not None]
    assert rows
    assert all(row.value >= own_constant(plain, x) > 4 for row in rows if row.value is not None)


def test_sigmoid_counts_a_bias_of_keys_beside_normalised_queries():
    """Rows of sigmoid do not sum to one, so what all keys share moves them; a norm on queries alone does not change that."""
    small, b = 1e-3, torch.tensor([50.0], dtype=F64)
    one = torch.ones(1, 1, dtype=F64)
    attn = Attention(
        one, small * one, one, b_k=b, scale=1.0, q_norm=RMSNorm(torch.ones(1, dtype=F64), eps=1e4), kind=Sigmoid(0.0)
    )
    x = torch.tensor([[1.0], [-0.5], [1.0]], dtype=F64)

    def plain(x: Tensor) -> Tensor:
        q = x / (x.square() + 1e4).sqrt()
        return (q @ (small * x + b).T).sigmoid() @ x

    row = hs.bounds(attn, n=3, radius=1.0).by_id("S2").value
    assert row is not None
    assert row >= own_constant(plain, x)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_bound_is_refuted_by_hostile_layers(name: str):
    """`python -m benchmarks kind_bounds` looks at 20 000 of each."""
    tally = fuzz_hostile(name, range(8))
    assert tally.wrong == []
    assert tally.layers >= (4 if "Sinkhorn" in name or name == UNDERFLOWING else 8)
    assert tally.upper > tally.infinite + 10


def test_hostile_layers_refute_rows_that_phases_break(monkeypatch):
    monkeypatch.setattr(tied, "_turned", lambda layer: None)
    assert fuzz_hostile("tied L2, turned", range(1000, 1010)).wrong
