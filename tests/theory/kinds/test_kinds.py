"""Bounds of every kind of attention: sound on cases made to break them, within 4 of what inputs attain."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.kernels.kinds import L2, Cosine, Differential, Hard, Kind, Linear, Sigmoid, Sinkhorn, Softmax
from howsmooth.maps import Attention
from howsmooth.theory.bound import Bound
from howsmooth.theory.constants import constants
from howsmooth.theory.kinds.clusters import best_clusters
from howsmooth.theory.kinds.published import inverse_phi
from howsmooth.theory.kinds.tied import moved_at_most, received_at_most
from problems.kind_cases import KINDS, KindCase, KindTally, draw, examine, fuzz, largest_singular_values

F64 = torch.float64
ONE, EYE = torch.ones(1, 1, dtype=F64), torch.eye(2, dtype=F64)
SWAP = EYE.flip(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_no_bound_is_refuted(name: str):
    """Some 4 800 layers at inputs; `python -m benchmarks kind_bounds` looks at 20 000 of every kind."""
    tally = fuzz(name, range(12))
    assert tally.wrong == []
    assert tally.layers >= 9
    assert tally.upper >= 25
    assert tally.infinite < 0.1 * tally.upper


def layer(kind: Kind, q: Tensor, k: Tensor | None, v: Tensor, **options) -> Attention:
    return Attention(q, k, v, kind=kind, **options)


# a layer, a number of tokens, a radius, the upper row, and how far above what clusters attain it may lie
TIGHT = {
    "sigmoid, all equal": (layer(Sigmoid(), EYE, EYE, EYE, scale=1.0), 64, 1.8, "S2", 1.001),
    "sigmoid, other signs": (layer(Sigmoid(), -EYE, EYE, EYE, scale=1.0), 64, 1.8, "S2", 2.1),
    "sigmoid, published": (layer(Sigmoid(), EYE, EYE, EYE, scale=1.0), 64, 1.8, "S1", 1.001),
    "sigmoid, past log n": (layer(Sigmoid(), SWAP, EYE, EYE, scale=1.0), 64, 30.0, "S2", 1.01),
    "tied L2": (layer(L2(tied=True), ONE, None, ONE, scale=1.0), 1001, 8.0, "T2", 1.7),
    "tied L2, many": (layer(L2(tied=True), ONE, None, ONE, scale=1.0), 10**9 + 1, 20.0, "T2", 1.42),
    "free L2": (layer(L2(), -EYE, EYE, EYE, scale=1.0), 8, 0.5, "G1", 4.0),
    "cosine, values too": (layer(Cosine(), ONE, ONE, ONE, scale=0.5), 9, 1.0, "G1", 4.0),
    "cosine, values free": (layer(Cosine(values=False), ONE, ONE, ONE, scale=1.0), 99, 1.0, "G1", 4.0),
    "linear, one key": (layer(Linear(), 0 * ONE, ONE, ONE), 64, 4.0, "G1", 4.0),
    "products, relu": (layer(Linear("relu", normalized=False), EYE, EYE, EYE), 10, 3.0, "U1", 1.001),
    "products, elu": (layer(Linear(normalized=False), ONE, ONE, ONE), 10, 3.0, "U1", 1.001),
    "Sinkhorn's limit": (layer(Sinkhorn(None), SWAP, EYE, EYE, scale=1.0), 10, 3.0, "N1", 1.06),
    "hard, top 1": (layer(Hard(), EYE, EYE, EYE), 64, 1.0, "H1", 1.001),
    "hard, top 3": (layer(Hard(3), EYE, EYE, EYE), 64, 1.0, "H1", 1.001),
    "differential": (
        layer(Differential(0.5), torch.cat([-EYE, 0 * EYE]), torch.cat([EYE, EYE]), EYE, scale=1.0),
        16,
        1.0,
        "F1",
        3.0,
    ),
    "softmax with a light sink": (layer(Softmax(torch.full((1,), -20.0)), -EYE, EYE, EYE, scale=1.0), 16, 1.0, "B12", 2.5),
}


@pytest.mark.parametrize("name", TIGHT)
def test_upper_and_attained_lower_bounds_are_near(name: str):
    attn, n, radius, id, most = TIGHT[name]
    table = hs.bounds(attn, n=n, radius=radius)
    upper, lower = table.by_id(id), table.by_id("C1")
    assert upper.log_value is not None
    assert lower.log_value is not None
    assert upper.log_value >= lower.log_value - 1e-8
    assert math.exp(upper.log_value - lower.log_value) <= most
    if n <= 128:  # what the row says is attained, on tokens, by the kernels
        _, points, counts = best_clusters(attn, n, radius)
        tokens = points.repeat_interleave(counts.long(), 0)
        assert float(tokens.norm(dim=-1).max()) <= radius
        reached = float(largest_singular_values(attn, tokens[None]))
        assert lower.value == pytest.approx(reached, rel=1e-6)


def shifted(by: float):
    """Bounds made that much smaller (upper) or larger (lower)."""

    def alter(rows: list[Bound]) -> list[Bound]:
        return [
            b if b.log_value is None else dataclasses.replace(b, log_value=b.log_value + (-by if b.side == "upper" else by))
            for b in rows
        ]

    return alter


@pytest.mark.parametrize("name", [k for k in TIGHT if "L2" not in k and "cosine" not in k and "linear" not in k])
def test_a_bound_half_as_large_is_caught(name: str):
    attn, n, radius, id, most = TIGHT[name]
    _, points, counts = best_clusters(attn, n, radius)
    x = points.repeat_interleave(counts.long(), 0)[None].expand(3, -1, -1)
    case = KindCase(attn, x, radius, name)
    right, wrong = KindTally(), KindTally()
    examine(case, right, lower=True)
    examine(case, wrong, alter=shifted(math.log(2 * max(1.0, most / 1.3))), lower=True)
    assert right.wrong == []
    assert any(w.startswith(f"{id} ") for w in wrong.wrong)
    assert any(w.startswith("C1 ") for w in wrong.wrong)


@pytest.mark.parametrize("name", KINDS)
def test_the_fuzz_catches_bounds_half_as_large(name: str):
    tally = KindTally()
    for seed in range(12):
        examine(draw(name, seed), tally, alter=shifted(math.log(2)))
    assert tally.wrong
    assert any(w.startswith("D7 ") for w in tally.wrong)


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_softmax_say_why_they_do_not_apply(name: str):
    attn = draw(name, 3).layer
    table = hs.bounds(attn, n=5, radius=1.0)
    published = table.by_id("B1")
    assert published.reason is not None
    if name == "softmax with a sink":
        assert "sink" in published.reason
        assert table.by_id("B7").applies
    else:
        assert not any(b.applies for b in table if b.id.startswith("B"))
        assert all(b.reason and "softmax" in b.reason for b in table if b.id.startswith("B"))
    assert table.upper is not None or "relu" in repr(attn.kind)
    assert "inf" not in str(table.to_dict()["bounds"])


@pytest.mark.parametrize("name", KINDS)
def test_what_overflows_is_infinite_and_zero_radius_is_fine(name: str):
    attn = next(a for a in (draw(name, seed).layer for seed in range(9)) if max(constants(a).v) > 0.1)
    for radius in (0.0, 1e-300, 1e80, 9e149):
        for row in hs.bounds(attn, n=6, radius=radius):
            if row.value is not None:
                assert row.value >= 0
                assert not math.isnan(row.value)
                if radius > 1 and row.side == "upper" and row.id in ("G1", "S2", "U1", "F1", "N1", "N2"):
                    assert row.value > 1e-3


def test_tied_l2_across_its_values():
    """8.4.3: values along a direction that queries do not see: twice ρ√c, nearly, as T1 allows."""
    n, t = 4001, 1 + inverse_phi(4000)
    attn = layer(L2(tied=True), torch.tensor([[1.0, 0.0]], dtype=F64), None, torch.tensor([[0.0, 1.0]], dtype=F64), scale=1.0)
    z, far = math.sqrt(t), 50.0
    x = torch.tensor([[0.0, 0.0], [z, far], [-z, -far]], dtype=F64)
    weights = torch.tensor([1.0, (n - 1) / 2, (n - 1) / 2], dtype=F64) / n
    radius = math.hypot(z, far)
    L = hs.lipschitz(attn, hs.Measure(x, weights)).value
    row = hs.bounds(attn, n=n, radius=radius).by_id("T1")
    assert row.value is not None
    assert 2 * far * (t - 1) / math.sqrt(t) <= L * (1 + 1e-9) <= row.value <= 2.2 * L
    assert hs.bounds(attn, n=n, radius=radius).by_id("T2").reason is not None


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_columns_of_tied_l2_are_bounded_in_each_dimension(rank: int):
    """Lemma 8.4.1, on points that ascent moves to make a column large."""
    for power, most in ((0, received_at_most(rank)), (1, moved_at_most(rank))):
        z = torch.randn(16, 24, rank, generator=torch.Generator().manual_seed(rank), dtype=F64).mul(1.5).requires_grad_()
        steps, best = torch.optim.Adam([z], lr=0.1), 0.0
        for _ in range(60):
            t = (z[:, :, None] - z[:, None]).square().sum(-1)
            column = ((-t).softmax(-1) * t**power)[:, :, 0].sum(-1)
            best = max(best, float(column.detach().max()))
            steps.zero_grad()
            column.sum().neg().backward()
            steps.step()
        assert 0.2 * math.exp(most) < best < math.exp(most)


def test_sinkhorn_limit_has_no_root_of_n():
    attn = layer(Sinkhorn(None), -EYE, EYE, EYE, scale=1.0)
    table = [hs.bounds(attn, n=n, radius=2.0) for n in (4, 4096)]
    assert table[0].by_id("N1").value == table[1].by_id("N1").value
    plain = hs.bounds(Attention(-EYE, EYE, EYE, scale=1.0), n=4096, radius=2.0).upper
    assert plain is not None
    assert plain.value is not None
    assert plain.value > 20 * (table[1].by_id("N1").value or math.inf)


def test_published_rows_beside_ours():
    at = hs.bounds(layer(Sigmoid(), EYE, EYE, EYE), torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=F64))
    assert [b.id for b in at if b.applies] == ["S1", "D7", "D"]
    cosine = hs.bounds(layer(Cosine(), EYE, EYE, EYE), n=16, radius=1.0)
    assert (cosine.by_id("G1").value or math.inf) < (cosine.by_id("Q1").value or 0.0)
    tied = hs.bounds(layer(L2(tied=True), EYE, None, EYE), n=1024, radius=1.0)
    assert (tied.by_id("T2").value or math.inf) < 0.1 * (tied.by_id("K2").value or 0.0)
    free = hs.bounds(layer(Cosine(values=False), EYE, EYE, EYE), n=16, radius=1.0).by_id("Q1").reason
    assert free is not None
    assert "unit length" in free
    relu = hs.bounds(layer(Linear("relu"), EYE, EYE, EYE), n=16, radius=1.0)
    assert relu.upper is None
    assert "jump" in (relu.by_id("G1").reason or "")


def test_a_sink_changes_what_a_value_bias_does():
    """Row sums move beside a sink, so a value bias counts: the bound grows with it, and has to."""
    sizes, measured = [], []
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.5], [0.3, 0.2]]], dtype=F64)
    for b in (0.0, 100.0):
        attn = layer(Softmax(torch.zeros(1)), EYE, EYE, EYE, b_v=torch.tensor([b, 0.0], dtype=F64))
        sizes.append(hs.bounds(attn, n=3, radius=1.2).by_id("B7").value or 0.0)
        measured.append(float(largest_singular_values(attn, x)))
    assert sizes[1] > measured[1] > 5 * measured[0]
    assert constants(attn).value_shift == pytest.approx((100.0,))
    assert sizes[0] < measured[1]
